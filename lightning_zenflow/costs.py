"""What a step will cost in seconds, from a model's size and a machine's rates.

Symbols: `N` trainable parameters, `R` ranks, `n = N / R` elements of a rank's shard, `s` of them selected, `T` tokens per
rank and step, `A` micro-batches, `w` bytes of a weight, `U` the update interval. All of it under ZeRO-2, which gives
each rank the host work and the traffic of its own shard. Pure arithmetic, without torch; checked against measured runs by
`tests/integration/test_estimate_against_runs.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_zenflow.rates import Rates
from lightning_zenflow.tuner.options import TunerOptions
from lightning_zenflow.tuner.update_rule import BEST_TOLERANCE_RATIO

TUNER = TunerOptions()
"""What the auto-tuner keeps to, so that an estimate recommends the intervals that it would settle on."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of a model.

    Attributes:
        numel: Trainable parameters of the model, `N`.
        selected_numel: Those that live on the device, over all ranks: selected columns and all vectors.
        tokens: Tokens per device and optimizer step, over all micro-batches, `T`.
        ranks: Devices, `R`.
        wire_bytes: Bytes of a weight or gradient element, `w`: 2, or 4 in fp32.
        micro_batches: Accumulated micro-batches of a step, `A`.
        checkpointing: Whether backward computes the forward pass again.
        largest_numel: Elements of the largest parameter.

    Raises:
        ValueError: A number is out of range.
    """

    numel: int
    selected_numel: int
    tokens: int
    ranks: int = 1
    wire_bytes: int = 2
    micro_batches: int = 1
    checkpointing: bool = False
    largest_numel: int = 0

    def __post_init__(self) -> None:
        for name in ("numel", "tokens", "ranks", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}. Count again.")
        if not 0 <= self.selected_numel <= self.numel:
            raise ValueError(
                f"`selected_numel` must be from 0 to `numel` {self.numel}, got {self.selected_numel}. Count again."
            )
        if self.wire_bytes not in (2, 4):
            raise ValueError(f"`wire_bytes` must be 2 or 4, got {self.wire_bytes}. Use bf16, fp16 or fp32.")

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, `n`."""
        return -(-self.numel // self.ranks)

    @property
    def selected_shard_numel(self) -> int:
        """Selected elements of one rank's shard, `s`."""
        return -(-self.selected_numel // self.ranks)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where the time of one step goes, in seconds; `step_secs` is the sum of the first five.

    Attributes:
        compute_secs: Forward and backward.
        link_secs: Copies between host and device that nothing hides.
        optimizer_secs: Optimizer on the device.
        exchange_secs: Communication between devices that nothing hides.
        stall_secs: The device waits for the host.
        host_secs: The host is busy; beside the device with ZenFlow, with ZeRO-Offload it is the stall.
        link_busy_secs: Copies between host and device, hidden or not.
    """

    compute_secs: float
    link_secs: float = 0.0
    optimizer_secs: float = 0.0
    exchange_secs: float = 0.0
    stall_secs: float = 0.0
    host_secs: float = 0.0
    link_busy_secs: float = 0.0

    @property
    def step_secs(self) -> float:
        """The whole step."""
        return self.compute_secs + self.link_secs + self.optimizer_secs + self.exchange_secs + self.stall_secs

    @property
    def limit(self) -> str:
        """What a faster one of would help most: compute, link, optimizer, exchange or host.

        The host if it is busy throughout the step, else what takes most of it.
        """
        parts = {
            "compute": self.compute_secs,
            "link": self.link_secs,
            "optimizer": self.optimizer_secs,
            "exchange": self.exchange_secs,
            "host": self.host_secs if self.host_secs >= 0.999 * self.step_secs else self.stall_secs,
        }
        return max(parts, key=lambda name: parts[name])


def compute_secs(work: Work, rates: Rates, *, beside_host: bool = False) -> float:
    """Forward and backward: `6 N T` operations (2 forward, 4 backward; 8 if backward computes the forward pass again).

    With few tokens reading the weights takes longer: they are read in each pass of each micro-batch, and a gradient is
    written. The operations of attention itself, which grow with the square of the sequence, are not counted.

    Args:
        work: The step.
        rates: The machine.
        beside_host: Whether the background process is at work meanwhile.
    """
    passes = 4 if work.checkpointing else 3
    flops = 2 * passes * work.numel * work.tokens
    traffic_bytes = passes * work.wire_bytes * work.numel * work.micro_batches
    achieved_flops = rates.beside_flops if beside_host else rates.compute_flops
    return max(flops / achieved_flops, traffic_bytes / rates.device_bandwidth)


def backward_secs(work: Work, rates: Rates) -> float:
    """The backward pass of the last micro-batch, during which gradients leave the device."""
    ratio = 3 / 4 if work.checkpointing else 2 / 3
    return ratio * compute_secs(work, rates) / work.micro_batches


def _between_devices_secs(work: Work, rates: Rates, numel: float) -> float:
    """A collective over `numel` elements in which each device receives all but its own part."""
    return work.wire_bytes * numel * (work.ranks - 1) / work.ranks / rates.interconnect_bandwidth


def _not_hidden_secs(work: Work, rates: Rates, down_secs: float) -> tuple[float, float]:
    """What of the gradients' way to the host, and of their reduction, takes longer than the backward pass beside it."""
    hidden = backward_secs(work, rates)
    reduce_secs = max(0.0, _between_devices_secs(work, rates, work.numel) - hidden) * work.micro_batches
    link_secs = max(0.0, down_secs - hidden) if rates.link_overlaps else down_secs
    return link_secs, max(0.0, reduce_secs - link_secs)  # the two run beside each other


def zenflow(work: Work, rates: Rates, update_interval: int) -> Step:
    """A step of ZenFlow with overlap, between two re-selections.

    The host has the step for `accumulate + update / U` of its shard; the device waits if that takes longer.
    """
    down = work.shard_numel * rates.down_secs
    link, reduce = _not_hidden_secs(work, rates, down)
    block = work.shard_numel / update_interval
    up = block * rates.up_secs
    exchanged = work.numel / update_interval + work.selected_numel
    busy = Step(
        compute_secs=compute_secs(work, rates, beside_host=True),
        link_secs=link + up,
        optimizer_secs=work.selected_shard_numel * (rates.device_adamw_secs + rates.write_secs),
        exchange_secs=reduce + _between_devices_secs(work, rates, exchanged),
    )
    host = work.shard_numel * rates.accumulate_secs + block * rates.update_secs
    return Step(
        compute_secs=busy.compute_secs,
        link_secs=busy.link_secs,
        optimizer_secs=busy.optimizer_secs,
        exchange_secs=busy.exchange_secs,
        stall_secs=max(0.0, host - busy.step_secs),
        host_secs=host,
        link_busy_secs=down + up,
    )


def zero_offload(work: Work, rates: Rates) -> Step:
    """A step of DeepSpeed's ZeRO-Offload: the device waits while the host updates the whole shard, then takes it back."""
    down, up = work.shard_numel * rates.offload_down_secs, work.shard_numel * rates.up_secs
    link, reduce = _not_hidden_secs(work, rates, down)
    host = work.shard_numel * rates.offload_step_secs
    return Step(
        compute_secs=compute_secs(work, rates),
        link_secs=link + up,
        exchange_secs=reduce + _between_devices_secs(work, rates, work.numel),
        stall_secs=host,
        host_secs=host,
        link_busy_secs=down + up,
    )


def on_device(work: Work, rates: Rates) -> Step:
    """A step of AdamW with all state on the device (ZeRO-2 over the ranks)."""
    reduce = _not_hidden_secs(work, rates, 0.0)[1]
    return Step(
        compute_secs=compute_secs(work, rates),
        optimizer_secs=work.shard_numel * rates.device_adamw_secs,
        exchange_secs=reduce + _between_devices_secs(work, rates, work.numel),
    )


def smallest_update_interval(work: Work, rates: Rates) -> int:
    """The smallest `U` for which the host keeps up, or comes as close as it can.

    Updates are then as fresh as the hardware allows. Where the host never keeps up, a larger `U` than the one returned
    would make the step less than 2 % shorter.
    """
    most = TUNER.max_update_interval
    steps = {interval: zenflow(work, rates, interval) for interval in range(1, most + 1)}
    for interval, step in steps.items():
        if step.stall_secs == 0:
            return interval
    limit = (1 + BEST_TOLERANCE_RATIO) * steps[most].step_secs
    return next(interval for interval, step in steps.items() if step.step_secs <= limit)


def barrier_secs(work: Work, rates: Rates, update_interval: int) -> float:
    """One re-selection: all blocks are updated and sent to the device, the selected columns' state goes home and back.

    Blocks travel while the next one is updated, so that only the last one's way is added.
    """
    settle = work.shard_numel * max(rates.update_secs, rates.up_secs)
    last = work.shard_numel / update_interval * min(rates.update_secs, rates.up_secs)
    moved = work.selected_shard_numel * rates.move_secs
    return settle + last + moved + _between_devices_secs(work, rates, work.numel)


def smallest_select_interval(work: Work, rates: Rates, update_interval: int) -> int:
    """The smallest `S` for which re-selections stay within their half of the stall budget."""
    allowed_secs = TUNER.share * zenflow(work, rates, update_interval).step_secs
    needed = math.ceil(barrier_secs(work, rates, update_interval) / allowed_secs)
    return min(TUNER.max_select_interval, max(TUNER.min_select_interval, needed))
