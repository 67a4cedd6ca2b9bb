"""A rehearsal: steps of ZenFlow in miniature on this machine, with the real background process, each part timed.

Host and device are measured while both are at work, since they share memory bandwidth, and caches where the CPU is the
device: what each reaches alone would promise too much. About 3 seconds and 300 MB.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.gradients import GradientInbox
from lightning_zenflow.interim import InterimStep
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Accumulated, Gradient
from lightning_zenflow.rates import Rates
from lightning_zenflow.schedule import Schedule, block_range
from lightning_zenflow.selected import HostState, SelectedState
from lightning_zenflow.selection import selected_count
from lightning_zenflow.shards import ParamSpec, Segment, ShardTable
from lightning_zenflow.transfer import Transfers
from lightning_zenflow.weights import ShardWeights

from .measure import LinearStack, accelerator, device, device_flops, on_cores
from .passes import HYPER, offload_passes

BLOCKS = 4
LAYERS = 3
"""All that fits: 12.6 M parameters on a CPU, which take 264 MB of host state."""
WARM_UP_STEPS, STEPS = 4, 12
TIMEOUT_SECS = 60.0


@dataclass(frozen=True)
class Parts:
    """Medians of the parts of a step, in seconds; the attributes are those of `Rates`, here for all elements concerned."""

    compute: float
    down: float
    up: float
    accumulate: float
    update: float
    device_adamw: float
    write: float
    interim: float
    move: float


class Stage:
    """A small model whose gradients go to a real background process, as in training on a single rank."""

    def __init__(self, dtype: torch.dtype, topk_ratio: float, host_cores: Collection[int]) -> None:
        self.model = LinearStack(dtype, device(), LAYERS)
        params, specs, numel = list(self.model.parameters()), [], 0
        for number, param in enumerate(params):
            specs.append(ParamSpec(str(number), tuple(param.shape), 0, numel))
            numel += param.numel()
        table = ShardTable.build(specs, [numel], 0)
        self.client = HostClient.start(
            ArenaLayout(numel, dtype, BLOCKS),
            [numel],
            cores=list(host_cores),
            lr_scale="linear",
            timeout_secs=TIMEOUT_SECS,
            pin=accelerator().device_name() == "cuda",
        )
        arena = self.client.arena
        self._host_state = HostState(arena.master, arena.exp_avg, arena.exp_avg_sq)
        self._columns = {n: _spread(spec.cols, topk_ratio) for n, spec in enumerate(specs)}
        self.selected = SelectedState(table, dtype, device())
        self.selected.fetch(self._host_state, self._columns)
        self._transfers = Transfers()
        self._inbox = GradientInbox(table, self.selected, self._transfers, device(), arena.slot, self.client.wait_slot)
        self._flat = torch.cat([param.detach().view(-1) for param in params])
        self._weights = ShardWeights(table, [self._flat])
        self._interim = InterimStep(table, self._weights, self._transfers, device())
        self._interim.observe(
            torch.ones(len(specs), device=device()), 1.0
        )  # it moves nothing before it has seen something
        self._schedule = Schedule(BLOCKS, None, interim=True)
        self._secs: dict[str, list[float]] = defaultdict(list)
        self._received_secs = self._moved_secs = 0.0
        for param, segment in zip(params, table.segments, strict=True):
            param.register_post_accumulate_grad_hook(self._receiver(segment))

    def close(self) -> None:
        """Ends the background process and gives its memory back."""
        del self._inbox, self._host_state
        self.client.close()

    def _receiver(self, segment: Segment) -> Callable[[Tensor], None]:
        def receive(param: Tensor) -> None:
            begin = self._now()
            assert param.grad is not None
            self._inbox.receive(segment, param.grad.view(-1))
            received = self._now()
            self._interim.move(segment, segment.start, segment.stop, param.grad.view(-1))
            param.grad = None
            self._received_secs += received - begin
            self._moved_secs += self._now() - received

        return receive

    @staticmethod
    def _now() -> float:
        accelerator().synchronize()  # else the launch would be timed
        return time.perf_counter()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._secs[name].append(self._now() - begin)

    def step(self, x: Tensor, number: int) -> None:
        """Step `number` (from 1): the calls of `ShardOptimizer`, in its order."""
        client, plan = self.client, self._schedule.plan(number)
        assert plan.block is not None
        self._inbox.open(selecting=False)
        self._interim.open(plan)
        self._interim.begin((HYPER,), 1.0)
        self._received_secs = self._moved_secs = 0.0
        begin = self._now()
        self.model(x).backward()
        self._secs["compute"].append(self._now() - begin - self._received_secs - self._moved_secs)
        self._secs["interim"].append(self._moved_secs)
        begin = self._now()
        self._inbox.finish().item()
        self._secs["down"].append(self._now() - begin + self._received_secs)
        gradient = Gradient(1.0, (HYPER.lr,))
        client.update(plan.block, number % 2, number, plan.look_ahead, (HYPER,), gradient, others=True)
        with self._timed("device_adamw"):
            self.selected.update((HYPER,), 1.0, number)
        while client.outstanding > plan.lag:
            done = client.collect()
            start, stop = block_range(self._flat.numel(), BLOCKS, done.block)
            with self._timed("up"):
                for offset, weights in self._weights.ranges(start, stop):
                    source = client.arena.outboxes[done.half][offset : offset + weights.numel()]
                    self._transfers.to_device(weights, source, buffer=done.half)
            self._transfers.wait_to_device(done.half)
        with self._timed("write"):
            self.selected.write(self._weights.view)
        for answer in client.take_answers():
            self._secs["accumulate" if isinstance(answer, Accumulated) else "update"].append(answer.secs)

    def move(self) -> None:
        """What a re-selection moves, without its settling."""
        self.client.drain()  # nobody else may write to the host's state
        with self._timed("move"):
            self.selected.send_home(self._host_state, 1)
            self.selected.fetch(self._host_state, self._columns)

    def parts(self) -> Parts:
        """Medians, without the first steps."""
        return Parts(**{name: statistics.median(secs[WARM_UP_STEPS:] or secs) for name, secs in self._secs.items()})


def _spread(cols: int, topk_ratio: float) -> Tensor:
    """As many columns as would be selected, evenly spread."""
    count = selected_count(topk_ratio, cols)
    return torch.arange(count) * cols // max(1, count)


def rehearse(
    tokens: int, dtype: torch.dtype, topk_ratio: float, trainer_cores: Collection[int], host_cores: Collection[int]
) -> Rates:
    """Measures all rates of a rank on this machine.

    Args:
        tokens: Tokens of a micro-batch.
        dtype: Of weights and gradients.
        topk_ratio: Share of the columns that are selected.
        trainer_cores: Cores of the training process.
        host_cores: Cores of the background process.
    """
    alone = device_flops(tokens, dtype, trainer_cores)
    offload = offload_passes(dtype, trainer_cores)
    stage = Stage(dtype, topk_ratio, host_cores)
    try:
        with on_cores(trainer_cores):
            x = torch.randn(alone.tokens, stage.model.width, device=device(), dtype=dtype)
            for number in range(1, WARM_UP_STEPS + STEPS + 1):
                stage.step(x, number)
            stage.move()
        numel, chosen = stage.model.numel, max(1, stage.selected.layout.numel)
        block, parts = -(-numel // BLOCKS), stage.parts()
    finally:
        stage.close()
    return Rates(
        compute_flops=alone.flops,
        beside_flops=6 * numel * alone.tokens / parts.compute,
        down_secs=parts.down / numel,
        up_secs=parts.up / block,
        accumulate_secs=parts.accumulate / (numel - block),
        update_secs=parts.update / block,
        device_adamw_secs=parts.device_adamw / chosen,
        write_secs=parts.write / chosen,
        interim_secs=parts.interim / numel,
        move_secs=parts.move / chosen,
        offload_down_secs=offload.down_secs,
        offload_step_secs=offload.step_secs,
        link_overlaps=not accelerator().is_synchronized_device(),
    )
