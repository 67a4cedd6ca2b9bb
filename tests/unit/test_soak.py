"""The measures of a soak: what counts as growth, and what is drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.soak.flat import MIN_SAMPLES, Sample, grown, slope
from tests.soak.plan import EPOCH, Soak


def samples(value: Callable[[int], float], name: str = "bytes trainer", steps: int = 4000) -> list[Sample]:
    return [(step, {name: value(step)}) for step in range(1, steps, 20)]


def test_a_slope_is_that_of_the_line_whatever_a_few_points_say() -> None:
    points = [(float(x), 3.0 * x + 7) for x in range(40)]
    assert slope(points) == pytest.approx(3)
    points[5] = (5.0, 1e9)
    points[30] = (30.0, -1e9)
    assert slope(points) == pytest.approx(3)


def test_memory_that_grows_with_every_step_is_found_in_noise() -> None:
    noise = random.Random(0)
    found = grown(samples(lambda step: 3e8 + 25_000 * step + noise.gauss(0, 2e6)))
    assert len(found) == 1 and found[0].startswith("bytes trainer: +2.4")


@pytest.mark.parametrize(("leak", "faults"), [(0, 0), (50, 0), (300, 1), (5000, 1)])
def test_a_small_leak_is_told_from_an_allocator_that_takes_ever_less(leak: int, faults: int) -> None:
    """A leg of 2,500 batches, whose memory grows as was measured: by pages, in jumps, and less and less."""
    chance = random.Random(0)
    jumps = sorted(chance.uniform(0, 2500) for _ in range(6))

    def taken(step: int) -> float:
        pages = round((8e5 * (1 - math.exp(-step / 800)) + leak * step) / 4096)
        return 3.6e8 + 4096 * (pages + 30 * sum(jump < step for jump in jumps) + chance.choice([0, 0, 0, 1, 25]))

    assert len(grown(samples(taken, steps=2500))) == faults


@pytest.mark.parametrize("name", ["files worker", "threads trainer"])
def test_a_descriptor_or_thread_for_each_save_is_found(name: str) -> None:
    assert len(grown(samples(lambda step: 40 + step // 500, name))) == 1


def test_warming_up_jumps_and_noise_are_no_growth() -> None:
    noise = random.Random(0)
    assert grown(samples(lambda step: 3e8 + 5e7 * min(1, step / 1000) + noise.gauss(0, 2e6))) == []
    assert grown(samples(lambda step: 3e8 + 3e7 * (step % 700 < 30))) == []  # while it saves
    assert grown(samples(lambda step: 40 + noise.choice([0, 0, 1, 5]), "files trainer")) == []
    assert grown(samples(lambda step: 3e8 + 100 * step)) == []


def test_of_a_few_samples_nothing_is_said() -> None:
    assert grown(samples(lambda step: 1e5 * step)[: MIN_SAMPLES - 1]) == []


def test_what_is_drawn_is_the_same_in_every_process_and_its_course_in_the_quiet_run() -> None:
    one, again, quiet = Soak(seed=3), Soak(seed=3), Soak(seed=3, quiet=True)
    batches = range(1, 3000)
    for drawn in (Soak.overflows, Soak.intervals_after):
        expected = [drawn(one, batch) for batch in batches]
        assert expected == [drawn(again, batch) for batch in batches] == [drawn(quiet, batch) for batch in batches]
        assert len({str(each) for each in expected}) > 1
    assert [one.saves_after(batch) for batch in batches] == [again.saves_after(batch) for batch in batches]
    assert not any(quiet.saves_after(batch) for batch in batches)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_legs_end_with_a_save_and_not_with_an_epoch(accumulate: int) -> None:
    soak = Soak(steps=8 * EPOCH, legs=8, accumulate=accumulate)
    assert len(soak.ends) == 7 and soak.ends == sorted(set(soak.ends)) and soak.ends[-1] < soak.batches
    assert all(soak.saves_after(end) and end % EPOCH for end in soak.ends)
    changes = [batch for batch in range(1, soak.batches) if soak.intervals_after(batch) is not None]
    assert changes and all(batch % accumulate == 0 for batch in changes)  # between two steps
