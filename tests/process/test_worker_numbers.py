"""What the worker computes, against the formulas of DESIGN section 2.2 written out in float64."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload import worker
from lightning_zenflow.offload.arena import Arena
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import (
    Accumulated,
    Advance,
    Gradient,
    Ledger,
    Read,
    Restore,
    Start,
    Update,
    Updated,
)
from lightning_zenflow.rounding import noise_at, rounded
from lightning_zenflow.schedule import block_range
from tests.process.helpers import HYPER, patch_worker, running

MOMENTS = (torch.float32, torch.bfloat16)
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
        scale, lrs = 1.0 if clock == 5 else 0.5 + clock / 10, tuple(0.01 * clock + 0.001 * group for group in range(4))
        arena.slot.normal_()
        gradient, block = Gradient(scale, lrs), clock % BLOCKS
        first, last = block_range(NUMEL, BLOCKS, block)
        expected.acc += scale * arena.slot.double()
        held = [steps + 1 for steps in held]
        lr_sums = [[total + lr for total, lr in zip(sums, lrs, strict=True)] for sums in lr_sums]
        before = arena.master.clone()
        answers = step(host, block, clock, look_ahead, gradient)
        assert steps_of(answers) == [held[block]]
        read_from = [answer.first for answer in answers if isinstance(answer, Read)]
        assert read_from == sorted(read_from, reverse=True) and read_from[-1] == (0 if block else last)
        expected.update(first, last, held[block], lr_sums[block], lr_scale, clock)
        held[block], lr_sums[block] = 0, [0.0] * len(HYPERS)
        for actual, wanted in (
            (arena.master, expected.weight),
            (arena.exp_avg, expected.m),
            (arena.exp_avg_sq, expected.v),
            (accumulated(arena, host.ledger), expected.acc),
        ):
            assert torch.allclose(actual.double(), wanted, rtol=1e-4, atol=1e-6)
        after = arena.master[first:last]
        visible = torch.add(after, after - before[first:last], alpha=look_ahead).to(arena.layout.wire_dtype)
        assert torch.equal(arena.outboxes[clock % 2][: last - first], visible)


def step(host: worker.HostAdamW, block: int, clock: int, look_ahead: float, gradient: Gradient) -> list[Any]:
    """A step with a gradient for all blocks; the answers."""
    answers: list[Any] = []
    host.update(Update(block, clock % 2, clock, look_ahead, HYPERS, gradient, others=True), answers.append)
    assert isinstance(answers[-1], Accumulated)
    return answers


def steps_of(answers: list[Any]) -> list[int]:
    """For how many steps each update stood."""
    return [answer.held_steps for answer in answers if isinstance(answer, Updated)]


def update(host: worker.HostAdamW, command: Update) -> int:
    """An update of a block alone; for how many steps it stood."""
    answers: list[Any] = []
    host.update(command, answers.append)
    (steps,) = steps_of(answers)
    return steps


def accumulated(arena: Arena, ledger: Ledger) -> Tensor:
    """What every element has accumulated, from the lanes."""
    sums = torch.zeros(NUMEL)
    for block, lane in ledger.lanes.items():
        first, last = block_range(NUMEL, BLOCKS, block)
        sums[first:last] = arena.lane(lane, last - first)
    return sums


def train(host: worker.HostAdamW, arena: Arena, steps: int, scale: float, look_ahead: float) -> None:
    for clock in range(1, steps):
        arena.slot.normal_()
        step(host, clock % BLOCKS, clock, look_ahead, Gradient(scale, (0.01,) * 4))


def test_blocks_that_are_updated_without_a_new_gradient_take_what_they_hold(arena: Arena) -> None:
    """A settle: every block once, with what it holds."""
    host, expected = adamw(arena), Expected(arena.master)
    gradients = []
    for clock in (1, 2, 3):
        arena.slot.normal_()
        gradients.append(arena.slot.double())
        step(host, 0, clock, 0.0, Gradient(0.5, (0.1,) * 4))
        first, last = block_range(NUMEL, BLOCKS, 0)
        expected.acc = 0.5 * gradients[-1]
        expected.update(first, last, 1, [0.1] * 4, "linear", clock)
    assert host.ledger.held == [0, 3, 3, 3] and sorted(host.ledger.lanes.values()) == [0, 1, 2]
    expected.acc = 0.5 * sum(gradients[1:], gradients[0])
    arena.slot.fill_(float("nan"))  # nobody reads it
    for block in range(BLOCKS):
        first, last = block_range(NUMEL, BLOCKS, block)
        assert update(host, Update(block, 0, 3, 0.0, HYPERS)) == (3 if block else 0)
        if block:
            expected.update(first, last, 3, [0.3] * 4, "linear", 3)
    assert torch.allclose(arena.master.double(), expected.weight, rtol=1e-4, atol=1e-6)
    assert host.ledger.held == [0] * BLOCKS and not host.ledger.lanes


def test_a_lane_is_overwritten_by_the_first_gradient_that_a_block_gets(arena: Arena) -> None:
    arena.accumulator.fill_(float("nan"))
    host = adamw(arena)
    train(host, arena, 12, 0.7, 0.5)
    assert torch.isfinite(arena.master).all() and torch.isfinite(accumulated(arena, host.ledger)).all()


def test_a_block_that_holds_nothing_is_shown_and_not_updated(arena: Arena) -> None:
    host, before = adamw(arena), arena.master.clone()
    assert update(host, Update(1, 0, 7, 0.625, HYPERS)) == 0
    assert torch.equal(arena.master, before) and not arena.exp_avg.any()
    first, last = block_range(NUMEL, BLOCKS, 1)
    assert torch.equal(arena.outboxes[0][: last - first], before[first:last].to(arena.layout.wire_dtype))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_number_of_threads_changes_no_bit(moments: torch.dtype) -> None:
    arena = Arena.create(ArenaLayout(NUMEL, torch.bfloat16, BLOCKS, moments))
    torch.manual_seed(0)
    start, results = arena.master.normal_().clone(), []
    for threads in (1, 2, 5):
        torch.manual_seed(1)
        arena.master.copy_(start)
        for state in (arena.exp_avg, arena.exp_avg_sq):
            state.zero_()
        host = adamw(arena, threads=threads)
        train(host, arena, 9, 0.3, 0.5)
        results.append(torch.cat([arena.master, arena.exp_avg, arena.exp_avg_sq, arena.accumulator]).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    arena.close()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("threads", [1, 3])
def test_moments_kept_in_bf16_are_those_that_arithmetic_in_fp32_gives_rounded_by_place_and_clock(threads: int) -> None:
    wide, narrow = (Arena.create(ArenaLayout(NUMEL, torch.bfloat16, BLOCKS, dtype)) for dtype in MOMENTS)
    torch.manual_seed(4)
    narrow.master.normal_()
    ours, theirs, places = adamw(narrow, threads=threads), adamw(wide), torch.arange(NUMEL)
    for clock in range(1, 14):
        narrow.slot.normal_()
        for name in ("slot", "master", "exp_avg", "exp_avg_sq"):  # the same arithmetic, from the same numbers
            getattr(wide, name).copy_(getattr(narrow, name))
        for host in (ours, theirs):
            step(host, clock % BLOCKS, clock, 0.625, Gradient(0.3, (0.01,) * 4))
        for moment, name in enumerate(("exp_avg", "exp_avg_sq")):
            expected = rounded(getattr(wide, name), noise_at(places, clock, moment))
            assert torch.equal(getattr(narrow, name), expected), (clock, name)
        assert torch.equal(narrow.master, wide.master)
        assert torch.equal(narrow.outboxes[clock % 2], wide.outboxes[clock % 2])
    assert narrow.exp_avg.dtype == torch.bfloat16 and (narrow.exp_avg_sq > 0).all()
    wide.close()
    narrow.close()


def test_more_blocks_than_elements_leave_the_last_ones_empty() -> None:
    arena = Arena.create(ArenaLayout(3, torch.float32, 5))
    host = worker.HostAdamW(arena, Start(arena.layout, (3,), None, "linear"), 1, lambda: None)
    arena.slot.fill_(1)
    gradient = Gradient(1.0, (0.1,))
    assert update(host, Update(4, 0, 1, 0.5, (HYPER,), gradient, others=True)) == 1
    assert [update(host, Update(block, 0, 1, 0.5, (HYPER,))) for block in range(4)] == [1] * 4
    assert torch.allclose(arena.master, torch.full((3,), -0.1))
    arena.close()


def test_a_block_beyond_two_to_the_31_elements_is_updated_as_one_at_the_start() -> None:
    """FAULTS 18: in memory of which only that block is ever touched."""
    results = []
    for numel, blocks in ((2_200_000_000, 1000), (2_200_000, 1)):
        arena = Arena.create(ArenaLayout(numel, torch.bfloat16, blocks))
        first, last = block_range(numel, blocks, blocks - 1)
        generator = torch.Generator().manual_seed(0)
        arena.master[first:last].normal_(generator=generator)
        arena.slot[first:last].normal_(generator=generator)
        host = worker.HostAdamW(arena, Start(arena.layout, (numel,), None, "linear"), 1, lambda: None)
        host.update(Update(blocks - 1, 0, 1, 0.5, (HYPER,), Gradient(0.5, (1e-3,))), lambda reply: None)
        state = [tensor[first:last].clone() for tensor in (arena.master, arena.exp_avg, arena.exp_avg_sq)]
        results.append([*state, arena.outboxes[0].clone()])
        arena.close()
    assert all(torch.equal(far, near) for far, near in zip(*results, strict=True))
    assert results[0][1].count_nonzero() > 2_000_000


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
    arena.slot.normal_()
    for clock in (1, 2, 3):
        step(host, 0, clock, 0.5, Gradient(1.0, (0.1, 0.2, 0.3, 0.4)))
    held, lr_sums = tuple(host.ledger.held), tuple(map(tuple, host.ledger.lr_sums))
    regions = (arena.master, arena.exp_avg, arena.exp_avg_sq)
    copies, sums = [region.clone() for region in regions], accumulated(arena, host.ledger)
    update(host, Update(2, 0, 3, 0.5, HYPERS))
    expected = arena.master.clone()
    for region, copy in zip(regions, copies, strict=True):
        region.copy_(copy)
    resumed = adamw(arena)
    resumed.ledger.restore(Restore(held, lr_sums))
    assert resumed.ledger.lanes == {1: 0, 2: 1, 3: 2}
    for block, lane in resumed.ledger.lanes.items():
        first, last = block_range(NUMEL, BLOCKS, block)
        arena.lane(lane, last - first).copy_(sums[first:last])
    assert update(resumed, Update(2, 0, 3, 0.5, HYPERS)) == 3
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
    train(host, arena, 10, 0.7, 0.625)
    assert torch.equal(results[0][:NUMEL], arena.master)
    arena.close()


def _train() -> Tensor:
    """Nine steps with lag 1, collecting each update one step late; the final state."""
    seen, groups = [], [dataclasses.replace(hyper, lr=9.0) for hyper in HYPERS]  # `lr` is not to be used
    with running(NUMEL, GROUP_ENDS, blocks=BLOCKS) as client:
        torch.manual_seed(2)
        client.arena.master.normal_()
        for clock in range(1, 10):
            for first in reversed(range(0, NUMEL, 59)):  # behind the worker, piece by piece
                client.wait_slot(first, min(NUMEL, first + 59))
            client.arena.slot.normal_()
            if client.outstanding:
                done = client.collect()
                seen.append(client.arena.outboxes[done.half].clone())
                assert done in client.take_answers()
                assert (done.block, done.half) == ((clock - 1) % BLOCKS, (clock - 1) % 2)
            gradient = Gradient(0.7, (0.01,) * 4)
            client.update(clock % BLOCKS, clock % 2, clock, 0.625, groups, gradient, others=True)
        client.drain()
        assert client.outstanding == 1 and client.ledger.held == [1, 0, 3, 2]
        now, answers = time.perf_counter(), client.take_answers()
        begins = [answer.begin_secs for answer in answers if isinstance(answer, Updated)]
        begins += [
            begin_secs for answer in answers if isinstance(answer, Accumulated) for begin_secs, _ in answer.spans
        ]
        assert begins and all(now - 60 < begin_secs < now for begin_secs in begins)
        assert all(0 < answer.secs < 10 for answer in answers)
        state = torch.cat([client.arena.master, client.arena.exp_avg, client.arena.accumulator])
        return torch.cat([state, *[outbox.float() for outbox in seen]])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("moments", MOMENTS)
def test_advancing_updates_all_masters_as_single_updates_would_and_leaves_the_outboxes_alone(
    small_chunks: None, threads: int, moments: torch.dtype
) -> None:
    arenas = [Arena.create(ArenaLayout(NUMEL, torch.bfloat16, BLOCKS, moments)) for _ in range(2)]
    hosts = [adamw(arena, threads=threads) for arena in arenas]
    for arena, host in zip(arenas, hosts, strict=True):
        torch.manual_seed(3)
        arena.master.normal_()
        train(host, arena, 6, 0.7, 0.625)
    held, outboxes = list(hosts[0].ledger.held), [outbox.clone() for outbox in arenas[0].outboxes]
    assert sorted(held) == [0, 1, 2, 3]
    answer = hosts[0].advance(Advance(6, HYPERS))
    for block in reversed(range(BLOCKS)):  # whatever the order: blocks know nothing of each other
        hosts[1].update(Update(block, 0, 6, 0.0, HYPERS), lambda reply: None)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(arenas[0], name), getattr(arenas[1], name))
    assert 0 < answer.secs < 10 and hosts[0].ledger.held == [0] * BLOCKS and not hosts[0].ledger.lanes
    for before, after in zip(outboxes, arenas[0].outboxes, strict=True):
        assert torch.equal(before, after)
    # What an update shows afterwards is the master itself, once rounded.
    replies: list[Any] = []
    hosts[0].update(Update(1, 1, 6, 0.0, HYPERS), replies.append)
    start, stop = block_range(NUMEL, BLOCKS, 1)
    assert torch.equal(arenas[0].outboxes[1][: stop - start], arenas[0].master[start:stop].bfloat16())
    assert [reply.held_steps for reply in replies] == [0]
    for arena in arenas:
        arena.close()
