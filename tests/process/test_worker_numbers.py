"""What the worker computes, against the formulas of DESIGN section 2.2 written out in float64."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload import worker
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Accumulate, Restore, Start, Update
from lightning_zenflow.schedule import block_range
from tests.process.helpers import HYPER, patch_worker, running

NUMEL, BLOCKS = 1003, 4
GROUP_ENDS = (100, 100, 600, NUMEL)  # one group is empty; the last block but one crosses a group's end
HYPERS = (
    Hyper(0.0, 0.9, 0.999, 1e-8, 0.1),
    Hyper(0.0, 0.5, 0.5, 1.0, 0.5),
    Hyper(0.0, 0.8, 0.95, 1e-6, 0.0),
    Hyper(0.0, 0.9, 0.99, 1e-8, 0.2, decoupled=False),
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CHUNK_NUMEL", 64)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena.create(ArenaLayout(NUMEL, request.param, BLOCKS))
    torch.manual_seed(0)
    arena.master.normal_()
    yield arena
    arena.close()


def adamw(arena: Arena, lr_scale: str = "linear", threads: int = 1) -> worker.HostAdamW:
    return worker.HostAdamW(arena, Start(arena.layout, GROUP_ENDS, None, lr_scale), threads, lambda: None)


class Expected:
    """The state in float64, element by element, with no chunks and no blocks."""

    def __init__(self, master: Tensor) -> None:
        self.weight = master.double()
        self.m, self.v, self.acc = (torch.zeros_like(self.weight) for _ in range(3))

    def update(self, first: int, last: int, steps: int, lr_sums: list[float], scale: str, clock: int) -> None:
        start = 0
        for hyper, lr_sum, end in zip(HYPERS, lr_sums, GROUP_ENDS, strict=True):
            here = slice(max(start, first), max(start, first, min(end, last)))
            lr = lr_sum / {"linear": 1, "sqrt": math.sqrt(steps), "none": steps}[scale]
            grad = self.acc[here] / steps
            if hyper.decoupled:
                self.weight[here] *= 1 - lr * hyper.weight_decay
            else:
                grad = grad + hyper.weight_decay * self.weight[here]
            beta1, beta2 = hyper.beta1**steps, hyper.beta2**steps
            self.m[here] = beta1 * self.m[here] + (1 - beta1) * grad
            self.v[here] = beta2 * self.v[here] + (1 - beta2) * grad * grad
            root = (self.v[here] / (1 - hyper.beta2**clock)).sqrt() + hyper.eps
            self.weight[here] -= lr * self.m[here] / (1 - hyper.beta1**clock) / root
            start = end
        self.acc[first:last] = 0


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("look_ahead", [0.0, 0.625])
@pytest.mark.parametrize("lr_scale", ["linear", "sqrt", "none"])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_follow_the_formulas(arena: Arena, look_ahead: float, lr_scale: str, threads: int) -> None:
    host, expected = adamw(arena, lr_scale, threads), Expected(arena.master)
    held, lr_sums = [0] * BLOCKS, [[0.0] * len(HYPERS) for _ in range(BLOCKS)]
    for clock in range(1, 12):
        slot, scale, lrs = clock % 2, 0.5 + clock / 10, tuple(0.01 * clock + 0.001 * group for group in range(4))
        arena.slots[slot].normal_()
        host.accumulate(Accumulate(slot, scale, lrs))
        expected.acc += scale * arena.slots[slot].double()
        held = [steps + 1 for steps in held]
        lr_sums = [[total + lr for total, lr in zip(sums, lrs, strict=True)] for sums in lr_sums]
        assert torch.allclose(arena.accumulator.double(), expected.acc, rtol=1e-5, atol=1e-6)
        block = clock % BLOCKS
        first, last = block_range(NUMEL, BLOCKS, block)
        before = arena.master.clone()
        assert host.update(Update(block, slot, clock, look_ahead, HYPERS)) == held[block]
        expected.update(first, last, held[block], lr_sums[block], lr_scale, clock)
        held[block], lr_sums[block] = 0, [0.0] * len(HYPERS)
        for actual, wanted in (
            (arena.master, expected.weight),
            (arena.exp_avg, expected.m),
            (arena.exp_avg_sq, expected.v),
        ):
            assert torch.allclose(actual.double(), wanted, rtol=1e-4, atol=1e-6)
        assert arena.accumulator[first:last].eq(0).all()
        after = arena.master[first:last]
        visible = torch.add(after, after - before[first:last], alpha=look_ahead).to(arena.layout.wire_dtype)
        assert torch.equal(arena.outboxes[slot][: last - first], visible)


def test_a_block_that_holds_nothing_is_shown_and_not_updated(arena: Arena) -> None:
    host, before = adamw(arena), arena.master.clone()
    assert host.update(Update(1, 0, 7, 0.625, HYPERS)) == 0
    assert torch.equal(arena.master, before) and not arena.exp_avg.any()
    first, last = block_range(NUMEL, BLOCKS, 1)
    assert torch.equal(arena.outboxes[0][: last - first], before[first:last].to(arena.layout.wire_dtype))


@pytest.mark.usefixtures("small_chunks")
def test_the_number_of_threads_changes_no_bit(arena: Arena) -> None:
    results = []
    start = arena.master.clone()
    for threads in (1, 2, 5):
        torch.manual_seed(1)
        arena.master.copy_(start)
        for state in (arena.exp_avg, arena.exp_avg_sq, arena.accumulator):
            state.zero_()
        host = adamw(arena, threads=threads)
        for clock in range(1, 9):
            arena.slots[0].normal_()
            host.accumulate(Accumulate(0, 0.3, (0.01,) * 4))
            host.update(Update(clock % BLOCKS, 0, clock, 0.5, HYPERS))
        results.append(torch.cat([arena.master, arena.exp_avg, arena.exp_avg_sq, arena.accumulator]).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_more_blocks_than_elements_leave_the_last_ones_empty() -> None:
    arena = Arena.create(ArenaLayout(3, torch.float32, 5))
    host = worker.HostAdamW(arena, Start(arena.layout, (3,), None, "linear"), 1, lambda: None)
    arena.slots[0].fill_(1)
    host.accumulate(Accumulate(0, 1.0, (0.1,)))
    assert [host.update(Update(block, 0, 1, 0.5, (HYPER,))) for block in range(5)] == [1] * 5
    assert torch.allclose(arena.master, torch.full((3,), -0.1))
    arena.close()


def test_an_exception_ends_the_pass_of_all_threads_and_is_raised(arena: Arena) -> None:
    host = adamw(arena, threads=3)
    started = []

    def work(piece: worker.Piece, scratch: Tensor) -> None:
        started.append(piece)
        if threading.current_thread() is threading.main_thread():
            raise ValueError("broken piece")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="broken piece"):
        host._sweep([(0, 1, 0)] * 1000, work)
    assert len(started) < 100
    _end_threads(host)


def _end_threads(host: worker.HostAdamW) -> None:
    """Does what the end of the worker does; the exception's traceback keeps the threads' owner alive here."""
    assert host._pool is not None
    host._pool.shutdown()


def test_an_exception_in_another_thread_is_raised_too(arena: Arena) -> None:
    host = adamw(arena, threads=3)

    def work(piece: worker.Piece, scratch: Tensor) -> None:
        time.sleep(0.001)
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("broken piece")

    with pytest.raises(ValueError, match="broken piece"):
        host._sweep([(0, 1, 0)] * 100, work)
    _end_threads(host)


def test_restored_counts_continue_as_if_never_stopped(arena: Arena) -> None:
    host = adamw(arena)
    arena.slots[0].normal_()
    for _ in range(3):
        host.accumulate(Accumulate(0, 1.0, (0.1, 0.2, 0.3, 0.4)))
    held, lr_sums = tuple(host.ledger.held), tuple(map(tuple, host.ledger.lr_sums))
    copies = [arena.master.clone(), arena.accumulator.clone()]
    host.update(Update(2, 0, 3, 0.5, HYPERS))
    expected = arena.master.clone()
    arena.master.copy_(copies[0])
    arena.accumulator.copy_(copies[1])
    for moment in (arena.exp_avg, arena.exp_avg_sq):
        moment.zero_()
    resumed = adamw(arena)
    resumed.ledger.restore(Restore(held, lr_sums))
    assert resumed.update(Update(2, 0, 3, 0.5, HYPERS)) == 3
    assert torch.equal(arena.master, expected)


DELAYS = """
import random, time
from lightning_zenflow.offload import worker
chosen, real = random.Random(5), worker._handle
def late(command, adamw, lifeline):
    time.sleep(chosen.random() * 0.02)
    real(command, adamw, lifeline)
    time.sleep(chosen.random() * 0.02)
worker._handle = late
"""


@pytest.mark.timeout(60)
def test_through_the_process_the_numbers_are_the_same_and_delays_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [_train()]
    patch_worker(monkeypatch, DELAYS)
    results.append(_train())
    assert torch.equal(results[0], results[1])
    arena = Arena.create(ArenaLayout(NUMEL, torch.bfloat16, BLOCKS))
    host = adamw(arena)
    torch.manual_seed(2)
    arena.master.normal_()
    for clock in range(1, 10):
        arena.slots[clock % 2].normal_()
        host.accumulate(Accumulate(clock % 2, 0.7, (0.01,) * 4))
        host.update(Update(clock % BLOCKS, clock % 2, clock, 0.625, HYPERS))
    assert torch.equal(results[0][:NUMEL], arena.master)
    arena.close()


def _train() -> Tensor:
    """Nine steps with lag 1, collecting each update one step late; the final state."""
    seen, groups = [], [dataclasses.replace(hyper, lr=9.0) for hyper in HYPERS]  # `lr` is not to be used
    with running(NUMEL, GROUP_ENDS, blocks=BLOCKS) as client:
        torch.manual_seed(2)
        client.arena.master.normal_()
        for clock in range(1, 10):
            client.wait_slot(clock % 2)
            client.arena.slots[clock % 2].normal_()
            client.accumulate(clock % 2, 0.7, (0.01,) * 4)
            if client.outstanding:
                done = client.collect()
                seen.append(client.arena.outboxes[done.half].clone())
                assert done == client.take_answers()[-1]
                assert (done.block, done.half) == ((clock - 1) % BLOCKS, (clock - 1) % 2)
            client.update(clock % BLOCKS, clock % 2, clock, 0.625, groups)
        client.drain()
        assert client.outstanding == 1 and client.ledger.held == [1, 0, 3, 2]
        now = time.perf_counter()
        assert all(0 < answer.secs < 10 and now - 60 < answer.begin_secs < now for answer in client.take_answers())
        state = torch.cat([client.arena.master, client.arena.exp_avg, client.arena.accumulator])
        return torch.cat([state, *[outbox.float() for outbox in seen]])
