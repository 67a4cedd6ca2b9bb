"""Windows of observations: what counts in them, what does not, and how ranks agree on one."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from lightning_zenflow.tuner.windows import Observation, Window, WindowCollector

THREE_HOURS = 10_800.0


def steps(count: int, **changes: float) -> list[Observation]:
    usual = {"step_secs": 0.2, "update_stall_secs": 0.01, "accumulate_secs": 0.03, "update_secs": 0.05}
    return [Observation(**{**usual, **changes}) for _ in range(count)]


def reselection(**changes: float | None) -> Observation:
    usual = {"step_secs": 0.7, "select_stall_secs": 0.4, "accumulate_secs": 0.03, "update_secs": 0.05}
    return Observation(**{**usual, "agreement": 0.9, "deferred_mass_ratio": 0.5, **changes})  # type: ignore[arg-type]


def test_a_window_of_equal_steps_is_what_each_of_them_is() -> None:
    window = Window.of(steps(8))
    assert window.steps == 8
    assert (window.accumulate_secs, window.update_secs) == pytest.approx((0.03, 0.05))
    assert (window.device_secs, window.update_stall_secs) == pytest.approx((0.19, 0.01))
    assert (window.device_jitter_secs, window.host_jitter_secs) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert (window.select_stall_secs, window.disagreement, window.deferred_mass_ratio) == (None, None, None)


def test_a_stall_that_returns_counts_with_its_mean_and_a_single_one_does_not() -> None:
    calm, late = steps(1, step_secs=0.1, update_stall_secs=0.0), steps(1, step_secs=0.2, update_stall_secs=0.1)
    assert Window.of((calm * 3 + late) * 4).update_stall_secs == pytest.approx(0.025)
    assert Window.of((calm * 7 + late) * 2).update_stall_secs == pytest.approx(0.0125)
    assert Window.of(calm * 15 + late).update_stall_secs == 0.0


@pytest.mark.parametrize(
    "pause",
    [
        {"step_secs": THREE_HOURS},
        {"step_secs": THREE_HOURS, "update_stall_secs": THREE_HOURS - 0.1},
        {"step_secs": THREE_HOURS, "accumulate_secs": THREE_HOURS - 0.1, "update_secs": THREE_HOURS},
        {"step_secs": 0.9, "update_stall_secs": 0.8},
    ],
)
def test_a_laptop_that_sleeps_and_a_garbage_collection_change_nothing(pause: dict[str, float]) -> None:
    undisturbed, odd = steps(7), steps(1, **pause)
    window = Window.of([*undisturbed, *odd])
    assert window.device_secs == pytest.approx(0.19)
    assert window.update_stall_secs == pytest.approx(0.01)
    assert (window.accumulate_secs, window.update_secs) == pytest.approx((0.03, 0.05))


def test_reselections_do_not_distort_the_devices_time_nor_the_update_stall() -> None:
    window = Window.of([*steps(5), *[reselection()] * 3])
    assert window.device_secs == pytest.approx(0.19)
    assert window.update_stall_secs == pytest.approx(0.01)
    assert window.select_stall_secs == pytest.approx(0.4)
    assert (window.disagreement, window.deferred_mass_ratio) == pytest.approx((0.1, 0.5))


def test_a_copy_is_part_of_the_devices_time_and_its_usual_one_counts() -> None:
    paused = steps(1, step_secs=9.0, copy_secs=8.8)
    window = Window.of([*steps(3, copy_secs=0.02), *paused, *steps(4, copy_secs=0.04), *[reselection()] * 3])
    assert window.copy_secs == pytest.approx(0.035)  # the middle half: once 0.02, three times 0.04
    assert window.device_secs == pytest.approx(0.19)
    assert Window.of(steps(8)).copy_secs == 0.0


def test_one_reselection_that_took_three_hours_is_not_what_they_cost() -> None:
    slept = reselection(step_secs=THREE_HOURS, select_stall_secs=THREE_HOURS - 0.3)
    assert Window.of([*steps(6), slept, reselection()]).select_stall_secs == 0.4


def test_where_every_step_selects_there_is_still_a_device_time() -> None:
    window = Window.of([reselection()] * 8)
    assert (window.device_secs, window.select_stall_secs) == pytest.approx((0.3, 0.4))


def test_the_first_selection_tells_the_gradient_mass_but_no_cost() -> None:
    first = reselection(agreement=None, deferred_mass_ratio=0.8)
    window = Window.of([first, *steps(7)])
    assert (window.select_stall_secs, window.disagreement, window.deferred_mass_ratio) == (None, None, 0.8)


@pytest.mark.parametrize("damage", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize(
    "name", ["step_secs", "update_stall_secs", "select_stall_secs", "accumulate_secs", "update_secs", "copy_secs"]
)
def test_observations_no_clock_can_have_made_are_left_out(name: str, damage: float) -> None:
    damaged = steps(3, **{name: damage})
    window = Window.of([*steps(5), *damaged])
    assert window == Window.of(steps(5))
    assert window.is_usable
    assert not Window.of([*steps(2), *damaged]).is_usable, "most of it is damaged"


def test_a_window_of_zeros_or_of_nothing_is_not_usable() -> None:
    zeros = Observation(step_secs=0.0)
    assert not Window.of([zeros] * 8).is_usable
    assert not Window.of([]).is_usable


def test_jitter_is_the_standard_deviation_of_noise() -> None:
    draw = random.Random(1)
    noisy = [
        Observation(step_secs=draw.gauss(1.0, 0.05), accumulate_secs=draw.gauss(0.5, 0.03), update_secs=0.1)
        for _ in range(2000)
    ]
    window = Window.of([*noisy, *steps(40, step_secs=90.0, accumulate_secs=90.0)])
    assert window.device_jitter_secs == pytest.approx(0.05, rel=0.08)
    assert window.host_jitter_secs == pytest.approx(0.03, rel=0.08)
    assert window.device_secs == pytest.approx(statistics.fmean(seen.step_secs for seen in noisy), rel=0.01)


# -- ranks -------------------------------------------------------------------------------------------------------------

FULL = Window(8, 0.19, 0.01, 0.4, 0.03, 0.05, 0.002, 0.003, 0.1, 0.5)
BARE = Window(8, 0.15, 0.05, None, 0.07, 0.02, 0.004, 0.001)


def over_ranks(*windows: Window) -> Window:
    return Window.from_numbers([max(numbers) for numbers in zip(*[one.to_numbers() for one in windows], strict=True)])


@pytest.mark.parametrize("window", [FULL, BARE, Window.of([]), Window.of(steps(9))])
def test_numbers_give_the_same_window_back(window: Window) -> None:
    assert Window.from_numbers(window.to_numbers()) == window


def test_over_ranks_the_device_is_the_fastest_and_all_else_the_slowest() -> None:
    expected = Window(8, 0.15, 0.05, 0.4, 0.07, 0.05, 0.004, 0.003, 0.1, 0.5)
    assert over_ranks(FULL, BARE) == expected == over_ranks(BARE, FULL)


def test_over_ranks_the_longest_copy_counts_and_damage_to_it_makes_the_window_unusable() -> None:
    short, long = replace(FULL, copy_secs=0.004), replace(BARE, copy_secs=0.02)
    assert over_ranks(short, long).copy_secs == over_ranks(long, short).copy_secs == 0.02
    assert Window.from_numbers(short.to_numbers()) == short
    for damage in (math.nan, math.inf, -1.0):
        assert not over_ranks(short, replace(FULL, copy_secs=damage)).is_usable


def test_what_no_rank_has_stays_absent() -> None:
    both = over_ranks(BARE, BARE)
    assert (both.select_stall_secs, both.disagreement, both.deferred_mass_ratio) == (None, None, None)


def test_where_one_rank_has_nothing_usable_no_rank_has() -> None:
    assert not over_ranks(FULL, Window.of([])).is_usable
    for damage in (math.nan, math.inf, 0.0, -1.0):
        assert not over_ranks(FULL, Window(8, damage, 0.0, None, 0.0, 0.0)).is_usable


def test_numbers_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`numbers` must be 11 numbers, got 3\. Pass what"):
        Window.from_numbers([1.0, 2.0, 3.0])


# -- which observations count ------------------------------------------------------------------------------------------


def closed_at(collector: WindowCollector, observations: list[Observation]) -> dict[int, Window]:
    windows = {number: collector.add(seen) for number, seen in enumerate(observations, start=1)}
    return {number: window for number, window in windows.items() if window is not None}


def test_the_first_two_steps_of_a_run_do_not_count() -> None:
    slow_start = steps(2, step_secs=40.0)
    windows = closed_at(WindowCollector(8), [*slow_start, *steps(24)])
    assert list(windows) == [10, 18, 26]
    assert all(window == Window.of(steps(8)) for window in windows.values())


def test_windows_close_at_the_same_step_whatever_they_hold() -> None:
    damaged = [Observation(step_secs=math.nan), Observation(step_secs=0.0), *steps(1), reselection()] * 10
    assert list(closed_at(WindowCollector(8), damaged)) == list(closed_at(WindowCollector(8), steps(40)))


def test_after_a_restart_what_was_collected_and_the_steps_to_skip_do_not_count() -> None:
    collector = WindowCollector(8, skip_steps=0)
    assert closed_at(collector, steps(7, step_secs=9.0)) == {}
    collector.restart(4)
    windows = closed_at(collector, [*steps(4, step_secs=9.0), *steps(8)])
    assert windows == {12: Window.of(steps(8))}


def test_the_next_window_may_have_another_length() -> None:
    collector = WindowCollector(8, skip_steps=0)
    assert list(closed_at(collector, steps(8))) == [8]
    collector.window_steps = 16
    assert list(closed_at(collector, steps(40))) == [16, 32]


def test_of_a_skipped_step_the_selection_counts_but_not_its_times() -> None:
    first = reselection(step_secs=30.0, select_stall_secs=20.0, agreement=None, deferred_mass_ratio=0.75)
    again = reselection(step_secs=30.0, select_stall_secs=20.0, agreement=0.6, deferred_mass_ratio=0.25)
    window = closed_at(WindowCollector(8), [first, again, *steps(8)])[10]
    assert (window.deferred_mass_ratio, window.disagreement) == pytest.approx((0.5, 0.4))
    assert window.select_stall_secs is None
    assert window.device_secs == pytest.approx(0.19)
    assert closed_at(WindowCollector(8), [first, *steps(17)])[10].deferred_mass_ratio == 0.75
