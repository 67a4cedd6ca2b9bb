"""What two ranks say to each other in a step, counted where PyTorch calls its backend: nobody talks past that."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zenflow import traffic
from lightning_zenflow.work import Work
from tests.conftest import RunRanks
from tests.counted_steps import SELECT_INTERVAL, UPDATE_INTERVAL

RANKS = 2
SCALAR_BYTES = 4
ONE_BUCKET = {"reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000}
SIZES: tuple[dict[str, int], ...] = ({}, {"rows": 1024}, {"layers": 4})
TALL = {"rows": 4096, "cols": 64, "layers": 1, "bias": False}
RUNS: dict[str, dict[str, Any]] = {
    **{f"usual {number}": {**size, **ONE_BUCKET} for number, size in enumerate(SIZES)},
    "small buckets": {},
    "the device moves": {"interim_step": True, **ONE_BUCKET},
    "selecting": {"steps": SELECT_INTERVAL + 1, **ONE_BUCKET},
    **{
        f"tall, selecting, {precision}": {
            "steps": SELECT_INTERVAL + 1,
            "precision": precision,
            **TALL,
            **ONE_BUCKET,
        }
        for precision in ("bf16", "fp32")
    },
}
_found: list[dict[str, Any]] = []


@pytest.fixture
def runs(run_ranks: RunRanks) -> dict[str, Any]:
    """What the first of two ranks found in each run; both must have found the same. Counted once for all tests."""
    if not _found:
        first, second = run_ranks("tests.counted_steps:collectives", RANKS, runs=list(RUNS.values()))
        assert [run["calls"] for run in first] == [run["calls"] for run in second]
        _found.append(dict(zip(RUNS, first, strict=True)))
    return _found[0]


def received(calls: list[tuple[str, int]]) -> float:
    """Bytes that reach a rank: all but its own part; an all-reduce sums the parts up, and then gathers them."""
    times = {"allreduce_": 2, "_allgather_base_": 1}
    return sum(times[name] * nbytes for name, nbytes in calls) * (RANKS - 1) / RANKS


def padded(numel: int, parts: int) -> int:
    return -(-numel // parts) * parts


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_step_reduces_gradients_once_sums_the_norm_and_gathers_only_what_changed(
    runs: dict[str, Any], number: int
) -> None:
    run = runs[f"usual {number}"]
    gradients_bytes = 2 * padded(run["numel"], RANKS)
    # Of each rank a block, and the selected elements, which are as many on both here.
    block_numel = -(-(run["numel"] // RANKS) // UPDATE_INTERVAL)
    changed_bytes = 2 * RANKS * (block_numel + run["selected_numel"])
    assert run["calls"] == [
        ("allreduce_", gradients_bytes),
        ("allreduce_", SCALAR_BYTES),
        ("_allgather_base_", changed_bytes),
    ]


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_the_exchange_is_what_the_estimate_says(runs: dict[str, Any], number: int) -> None:
    run = runs[f"usual {number}"]
    selected_numel = RANKS * run["selected_numel"]
    work = Work(numel=run["numel"], selected_numel=selected_numel, tokens=2, ranks=RANKS, interim_step=False)
    estimated_bytes = traffic.zenflow(work, UPDATE_INTERVAL).from_ranks_bytes
    assert received(run["calls"]) == pytest.approx(estimated_bytes, rel=1e-4)  # the norm is not in it
    # Far less than all weights, which ZeRO gathers at every step.
    assert run["calls"][-1][1] < 0.4 * 2 * run["numel"]


def test_where_the_device_moves_deferred_weights_all_are_gathered(runs: dict[str, Any]) -> None:
    usual, moving = runs["usual 0"], runs["the device moves"]
    gathered = ("_allgather_base_", 2 * padded(usual["numel"], RANKS))
    # The sums of squares of all parameters go with the norm, in the same collective.
    assert moving["calls"] == [usual["calls"][0], ("allreduce_", SCALAR_BYTES * 4), gathered]
    work = Work(numel=usual["numel"], selected_numel=RANKS * usual["selected_numel"], tokens=2, ranks=RANKS)
    estimated_bytes = traffic.zenflow(work, UPDATE_INTERVAL).from_ranks_bytes
    assert received([moving["calls"][0], gathered]) == pytest.approx(estimated_bytes, rel=1e-4)


def test_buckets_cut_the_reduction_and_add_nothing_to_it(runs: dict[str, Any]) -> None:
    few, many = runs["usual 0"]["calls"], runs["small buckets"]["calls"]
    assert many[-2:] == few[-2:]
    assert sum(nbytes for _, nbytes in many[:-2]) == few[0][1]
    assert len(many) == 4 + 2  # a matrix does not fit into a bucket, a vector does


def test_a_selection_adds_the_scores_and_gathers_all_weights_after_its_barrier(runs: dict[str, Any]) -> None:
    usual, selecting = runs["usual 0"], runs["selecting"]
    columns = 2 * 512
    assert selecting["calls"] == [
        *usual["calls"][:2],
        ("allreduce_", 4 * columns),
        ("_allgather_base_", 2 * padded(usual["numel"], RANKS)),
    ]
    work = Work(numel=usual["numel"], selected_numel=0, tokens=2, ranks=RANKS, columns=columns)
    assert traffic.score_bytes(work) == received(selecting["calls"][2:3])
    assert traffic.select_bytes(work) == received(selecting["calls"][2:])


@pytest.mark.parametrize(("precision", "wire_bytes"), [("bf16", 2), ("fp32", 4)])
def test_one_score_is_sent_for_each_column_of_4096_gradients(
    runs: dict[str, Any], precision: str, wire_bytes: int
) -> None:
    run = runs[f"tall, selecting, {precision}"]
    gradients, _, scores, gathered = run["calls"]
    # Both are summed in this step, and counted there: in numbers the ratio is that of rows, and what is sent is fp32.
    assert scores == ("allreduce_", 4 * TALL["cols"])
    assert gradients == ("allreduce_", wire_bytes * TALL["rows"] * TALL["cols"])
    assert (gradients[1] / wire_bytes) / (scores[1] / 4) == 4096
    # In bytes a 16-bit gradient has half of that. As they are received, an all-gather takes half of an all-reduce.
    assert gradients[1] / scores[1] == {2: 2048, 4: 4096}[wire_bytes]
    all_gather = ("_allgather_base_", gradients[1])
    assert received([all_gather]) / received([scores]) == {2: 1024, 4: 2048}[wire_bytes]
    assert gathered == all_gather  # of the weights, which are as many
