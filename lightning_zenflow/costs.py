"""What a step will cost in seconds, from a model's size and a machine's rates.

Symbols: `N` trainable parameters, `R` ranks, `n = N / R` elements of a rank's shard, `s` of them selected, `T` tokens per
rank and step, `A` micro-batches, `w` bytes of a weight, `U` the update interval. All of it under ZeRO-2 or ZeRO-3, which
give each rank the host work and the traffic of its own shard; what ZeRO-3 adds is in `traffic`. Pure arithmetic, without
torch; checked against measured runs by `tests/integration/test_estimate_against_runs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zenflow import traffic
from lightning_zenflow.rates import ACCUMULATOR_BYTES, CACHE_LINE_BYTES, MASTER_BYTES, Rates, accumulate_bytes
from lightning_zenflow.work import Work


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where the time of one step goes, in seconds; `step_secs` is the sum of the first five.

    Attributes:
        compute_secs: Forward and backward.
        link_secs: Copies between host and device, and into weights in host memory, that nothing hides.
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


def between_devices_secs(work: Work, rates: Rates, numel: float) -> float:
    """A collective over `numel` elements."""
    return work.wire_bytes * traffic.received(work, numel) / rates.interconnect_bandwidth


def _fetched_secs(work: Work, rates: Rates, numel: float) -> float:
    """The way of a rank's part of `numel` weights from host memory; where the CPU computes they are there already."""
    is_far = work.offload_parameters and rates.link_overlaps
    return numel / work.ranks * rates.up_secs if is_far else 0.0


def _not_hidden_secs(work: Work, rates: Rates, down_secs: float) -> tuple[float, float]:
    """What takes longer than the passes beside it: on the link, and between devices.

    Beside forward weights are fetched and gathered for it; beside backward as well, while gradients are reduced and, in the
    last micro-batch, on their way to the host.
    """
    backward = backward_secs(work, rates)
    forward = compute_secs(work, rates) / work.micro_batches - backward
    first, again = traffic.gathered_numel(work)
    up_first, up_again = (_fetched_secs(work, rates, numel) for numel in (first, again))
    between_first = between_devices_secs(work, rates, first)
    between_again = between_devices_secs(work, rates, again + traffic.reduced_numel(work))

    link_secs = work.micro_batches * max(0.0, up_first - forward)
    link_secs += (work.micro_batches - 1) * max(0.0, up_again - backward)
    link_secs += max(0.0, down_secs - backward, up_again - backward) if rates.link_overlaps else down_secs
    between_secs = work.micro_batches * (max(0.0, between_first - forward) + max(0.0, between_again - backward))
    return link_secs, max(0.0, between_secs - link_secs)  # the two run beside each other


def _host_secs(work: Work, rates: Rates, nbytes: float) -> float:
    """A pass over `nbytes` in host memory, an element."""
    return nbytes * rates.accumulate_secs / accumulate_bytes(work.wire_bytes)


def show_secs(work: Work, rates: Rates) -> float:
    """A master is read and what the device shall see of it written, an element, by the host."""
    return _host_secs(work, rates, MASTER_BYTES + work.wire_bytes)


def copy_secs(work: Work, rates: Rates) -> float:
    """An element of an updated block on its way into the weights: over the link, or within host memory if they are there."""
    within_host = work.offload_parameters and rates.link_overlaps
    return _host_secs(work, rates, 2 * work.wire_bytes) if within_host else rates.up_secs


def _write_secs(work: Work, rates: Rates) -> float:
    """A selected element on its way into the weights; apart from each other, they move a cache line each."""
    if not (work.offload_parameters and rates.link_overlaps):
        return rates.write_secs
    return rates.down_secs + _host_secs(work, rates, work.wire_bytes + CACHE_LINE_BYTES)


def zenflow(work: Work, rates: Rates, update_interval: int) -> Step:
    """A step of ZenFlow with overlap, between two re-selections.

    The host has the step for `accumulate * (1 - 1 / U) + update / U` of its shard; the device waits if that takes longer.
    """
    down = work.shard_numel * rates.down_secs
    link, reduce = _not_hidden_secs(work, rates, down)
    block = work.shard_numel / update_interval
    up = block * copy_secs(work, rates)
    interim = 0.0
    if work.moves_deferred:  # a block that arrives is moved again, by the gradient that lies with the host
        interim = (work.shard_numel + block) * rates.interim_secs
        up += block * rates.up_secs if rates.link_overlaps else 0.0
    exchanged = traffic.exchanged_numel(work, traffic.changed_numel(work, update_interval))
    busy = Step(
        compute_secs=compute_secs(work, rates, beside_host=True),
        link_secs=link + up,
        optimizer_secs=work.selected_shard_numel * (rates.device_adamw_secs + _write_secs(work, rates)) + interim,
        exchange_secs=reduce + between_devices_secs(work, rates, exchanged),
    )
    update_secs = rates.update_secs
    if update_interval == 1:  # nothing is accumulated, and nothing of that read
        update_secs = max(0.0, update_secs - _host_secs(work, rates, ACCUMULATOR_BYTES))
    host = (work.shard_numel - block) * rates.accumulate_secs + block * update_secs
    return Step(
        compute_secs=busy.compute_secs,
        link_secs=busy.link_secs,
        optimizer_secs=busy.optimizer_secs,
        exchange_secs=busy.exchange_secs,
        stall_secs=max(0.0, host - busy.step_secs),
        host_secs=host,
        link_busy_secs=_link_busy_secs(work, rates, down, 2 * block if work.moves_deferred else block),
    )


def zero_offload(work: Work, rates: Rates) -> Step:
    """A step of DeepSpeed's ZeRO-Offload: the device waits while the host updates the whole shard, then takes it back."""
    down, up = work.shard_numel * rates.offload_down_secs, work.shard_numel * copy_secs(work, rates)
    link, reduce = _not_hidden_secs(work, rates, down)
    host = work.shard_numel * rates.offload_step_secs
    exchanged = traffic.exchanged_numel(work, work.numel)
    return Step(
        compute_secs=compute_secs(work, rates),
        link_secs=link + up,
        exchange_secs=reduce + between_devices_secs(work, rates, exchanged),
        stall_secs=host,
        host_secs=host,
        link_busy_secs=_link_busy_secs(work, rates, down, work.shard_numel),
    )


def _link_busy_secs(work: Work, rates: Rates, down: float, block_numel: float) -> float:
    """All copies between host and device, hidden or not."""
    fetched = work.micro_batches * _fetched_secs(work, rates, sum(traffic.gathered_numel(work)))
    stays_on_host = work.offload_parameters and rates.link_overlaps
    return down + fetched + (0.0 if stays_on_host else block_numel * rates.up_secs)


def on_device(work: Work, rates: Rates) -> Step:
    """A step of AdamW with all state on the device; give it work without offloaded parameters."""
    reduce = _not_hidden_secs(work, rates, 0.0)[1]
    return Step(
        compute_secs=compute_secs(work, rates),
        optimizer_secs=work.shard_numel * rates.device_adamw_secs,
        exchange_secs=reduce + between_devices_secs(work, rates, traffic.exchanged_numel(work, work.numel)),
    )
