"""Which cores the worker gets, and that nobody else's cores change."""

from __future__ import annotations

import os

import pytest

from lightning_zenflow.offload.affinity import worker_cores
from lightning_zenflow.offload.client import WorkerDied
from tests.process.helpers import running


@pytest.mark.parametrize(
    ("available", "ratio", "ranks", "expected"),
    [
        (range(8), 0.5, 1, [[4, 5, 6, 7]]),
        (range(8), 0.5, 2, [[4, 5], [6, 7]]),
        (range(8), 0.3, 2, [[3, 4], [5, 6, 7]]),
        ({9, 3, 7, 5}, 0.5, 1, [[7, 9]]),
        (range(2), 0.5, 1, [[1]]),
        (range(2), 0.5, 2, [[1], [1]]),
        (range(8), 1.0, 2, [[7], [7]]),
        (range(4), 0.0, 2, [[0, 1], [2, 3]]),
        (range(4), 0.5, 3, [[2], [3], [2]]),
        ({0}, 0.5, 1, [[0]]),
        (range(100), 0.07, 1, [list(range(7, 100))]),
    ],
)
def test_the_lowest_cores_stay_with_the_trainer_and_workers_split_the_rest(
    available: set[int], ratio: float, ranks: int, expected: list[list[int]]
) -> None:
    assert [worker_cores(available, ratio, rank, ranks) for rank in range(ranks)] == expected


def test_no_cores_and_a_wrong_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="`available` must hold at least one core"):
        worker_cores(set(), 0.5, 0, 1)
    with pytest.raises(ValueError, match="`local_rank` must be from 0 to 1, got 2"):
        worker_cores({0, 1}, 0.5, 2, 2)


@pytest.mark.timeout(60)
def test_only_the_worker_is_bound() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with running(cores=[core]) as client:
        threads = [int(thread) for thread in os.listdir(f"/proc/{client.pid}/task")]
        assert os.sched_getaffinity(client.pid) == {core}
        assert client.pid in threads
        assert os.sched_getaffinity(0) == before


@pytest.mark.timeout(60)
def test_a_narrow_trainer_does_not_narrow_its_worker() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    try:
        os.sched_setaffinity(0, {min(before)})
        with running(cores=[max(before)]) as client:
            assert os.sched_getaffinity(client.pid) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("core", [1023, 2**40])
def test_refused_cores_are_named(core: int) -> None:
    usable = min(os.sched_getaffinity(0))
    message = rf"`worker_cores` must be cores that this process may use, got \[{usable}, {core}\], of which .*{core}\]"
    with pytest.raises(WorkerDied, match=message), running(cores=[usable, core]):
        pass
