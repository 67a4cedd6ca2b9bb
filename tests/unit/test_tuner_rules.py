"""The parts of the auto-tuner, each by itself: host model, gradient rule, ladder of intervals, options, wording."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from lightning_zenflow.tuner import Intervals, TunerOptions
from lightning_zenflow.tuner.gradient_rule import GradientRule, gradient_bound
from lightning_zenflow.tuner.host_model import HostModel
from lightning_zenflow.wording import in_words, percent

# -- the model of the host ---------------------------------------------------------------------------------------------


def test_the_host_needs_the_whole_gradient_and_one_block() -> None:
    model = HostModel(device_secs=0.14, accumulate_secs=0.06, adam_secs=0.6)
    assert [model.need_secs(interval) for interval in (1, 4, 10)] == pytest.approx([0.66, 0.21, 0.12])
    assert [model.step_secs(interval) for interval in (1, 4, 10)] == pytest.approx([0.66, 0.21, 0.14])
    serial = HostModel(device_secs=0.14, accumulate_secs=0.06, adam_secs=0.6, overlap=False)
    assert [serial.step_secs(interval) for interval in (1, 4, 10)] == pytest.approx([0.80, 0.35, 0.26])


@pytest.mark.parametrize("adam_secs", [0.2, 0.4, 0.48, 0.56, 1.0])
def test_with_jitter_the_expected_stall_is_the_mean_of_what_the_host_is_late(adam_secs: float) -> None:
    draw = random.Random(2)
    model = HostModel(0.1, 0.02, adam_secs, device_jitter_secs=0.01, host_jitter_ratio=0.1)
    need = 0.02 + adam_secs / 6
    late = [max(0.0, draw.gauss(need, 0.1 * need) - draw.gauss(0.1, 0.01)) for _ in range(100_000)]
    assert model.stall_secs(6) == pytest.approx(statistics.fmean(late), abs=2e-4)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stall_secs", [0.002, 0.03, 0.05, 0.8])
def test_a_corrected_model_explains_the_measured_stall(overlap: bool, stall_secs: float) -> None:
    model = HostModel(0.1, 0.02, 0.2, device_jitter_secs=0.01, host_jitter_ratio=0.1, overlap=overlap)
    explained = max(stall_secs, 0.0 if overlap else 0.25 * 0.07)  # busy times are not scaled down further
    assert model.corrected(4, stall_secs).stall_secs(4) == pytest.approx(explained, rel=1e-3)


def test_a_longer_stall_than_expected_is_a_delay_and_a_shorter_one_scales_the_busy_times() -> None:
    model = HostModel(device_secs=0.1, accumulate_secs=0.1, adam_secs=0.4)
    slower, quicker = model.corrected(4, 0.15), model.corrected(4, 0.05)
    assert [slower.need_secs(interval) for interval in (4, 8)] == pytest.approx([0.25, 0.20])
    assert [quicker.need_secs(interval) for interval in (4, 8)] == pytest.approx([0.15, 0.1125])


def test_the_fastest_interval_is_the_smallest_that_is_about_as_good_as_the_largest() -> None:
    model = HostModel(device_secs=0.1, accumulate_secs=0.3, adam_secs=2.0)
    steps = {interval: max(0.1, 0.3 + 2.0 / interval) for interval in range(1, 17)}
    for tolerance in (0.0, 0.02, 0.1):
        best = min(interval for interval, step in steps.items() if step <= (1 + tolerance) * steps[16] + 1e-12)
        assert model.fastest(1, 16, tolerance) == best


# -- the gradient rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto_ratio", "memory_steps", "mass", "expected"),
    [
        (0.99, 1000, 0.9, 21),
        (0.99, 1000, 0.5, 39),
        (0.99, 1000, 1.0, 19),
        (0.999, 1000, 0.5, 3),
        (0.99, 100, 0.9, 1),
        (0.99, 100, 0.4, 4),
        (1.0, 1000, 0.9, 1),
        (1.0, 1000, 0.0, 10**9),
        (0.99, 1000, 0.0, 10**9),
    ],
)
def test_the_gradient_rule_bounds_the_mass_that_waits(
    auto_ratio: float, memory_steps: float, mass: float, expected: int
) -> None:
    bound = gradient_bound(auto_ratio, memory_steps, mass)
    assert bound == expected
    if 1 < bound < 10**9:  # from its sentence, instead of its formula
        assert mass * (bound + 1) / 2 <= (1 - auto_ratio) * memory_steps + 1e-9 < mass * (bound + 2) / 2


def test_an_unknown_mass_bounds_nothing() -> None:
    rule = GradientRule(TunerOptions())
    assert rule.bound(4) == 10**9
    for absent in (None, -0.5, 1.5, float("nan")):
        rule.note(absent)
    assert rule.bound(4) == 10**9


def test_an_interval_at_the_bound_stays_while_the_mass_is_noisy_and_grows_when_it_is_sure() -> None:
    rule = GradientRule(TunerOptions(auto_ratio=0.999))  # a mass of 0.285 gives 6.02
    for _ in range(5):
        rule.note(0.285)
    assert (rule.bound(6), rule.bound(5)) == (6, 5)
    for _ in range(5):
        rule.note(0.25)  # 7
    assert (rule.bound(6), rule.bound(5)) == (6, 6)


def test_one_odd_mass_does_not_move_the_bound() -> None:
    rule = GradientRule(TunerOptions(auto_ratio=0.999))
    for mass in (0.25, 0.25, 0.25, 0.25, 0.9):
        rule.note(mass)
    assert rule.bound(7) == gradient_bound(0.999, 1000, 0.25) == 7


# -- the ladder --------------------------------------------------------------------------------------------------------


def ladder(lowest: int, highest: int, unit_steps: int) -> list[int]:
    options = TunerOptions(min_select_interval=lowest, max_select_interval=highest, select_unit_steps=unit_steps)
    return options.select_intervals()


def test_the_ladder_rises_by_a_third_to_a_half_within_its_bounds() -> None:
    assert ladder(1, 70, 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert ladder(5, 24, 1) == [6, 8, 12, 16, 24]


def test_with_epochs_the_ladder_holds_whole_epochs() -> None:
    assert ladder(1, 450, 100) == [100, 200, 300, 400]
    assert ladder(150, 450, 100) == [200, 300, 400]


@pytest.mark.parametrize(
    ("lowest", "highest", "unit", "expected"), [(1, 50, 100, 100), (150, 190, 100, 200), (5, 5, 1, 5)]
)
def test_where_no_rung_lies_within_the_bounds_the_next_multiple_is_all(
    lowest: int, highest: int, unit: int, expected: int
) -> None:
    assert ladder(lowest, highest, unit) == [expected]


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stall_budget": 0}, "`stall_budget` must be above 0 and below 1, got 0. 0.05 is five percent."),
        ({"stall_budget": 1.0}, "`stall_budget` must be above 0 and below 1, got 1.0"),
        ({"stall_budget": float("nan")}, "`stall_budget` must be above 0 and below 1, got nan"),
        ({"auto_ratio": 1.01}, "`auto_ratio` must be a number from 0 to 1, got 1.01"),
        (
            {"memory_steps": 0.5},
            r"`memory_steps` must be a number of steps from 1 to 1e9, got 0.5. It is 1 / \(1 - beta2\)",
        ),
        ({"memory_steps": float("inf")}, "`memory_steps` must be a number of steps from 1 to 1e9, got inf"),
        ({"min_update_interval": 0}, "`min_update_interval` must be a whole number of steps, 1 or more, got 0"),
        ({"select_unit_steps": 0}, "`select_unit_steps` must be a whole number of steps, 1 or more, got 0"),
        ({"min_update_interval": 17}, r"`max_update_interval` must be at least `min_update_interval` \(17\), got 16"),
        (
            {"max_select_interval": 3, "min_select_interval": 4},
            r"`max_select_interval` must be at least .* \(4\), got 3",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_rule_and_a_remedy(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TunerOptions(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": 1}, "`overlap` must be true or false, got 1"),
        ({"tune_update": None}, "`tune_update` must be true or false, got None"),
        ({"stall_budget": "5 %"}, "`stall_budget` must be a number, got '5 %'"),
        ({"auto_ratio": True}, "`auto_ratio` must be a number, got True"),
        ({"max_update_interval": 4.0}, r"`max_update_interval` must be a whole number of steps, 1 or more, got 4\.0"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TunerOptions(**changes)  # type: ignore[arg-type]


def test_the_budget_is_shared_equally_by_both_stalls() -> None:
    assert TunerOptions(stall_budget=0.08).share == 0.04
    assert Intervals(4, None) == Intervals(update_interval=4, select_interval=None)


# -- wording -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secs", "expected"),
    [
        (0.0, "0 s"),
        (0.0000123, "12.3 µs"),
        (0.0009996, "1.00 ms"),
        (0.0014, "1.40 ms"),
        (0.009996, "10.0 ms"),
        (0.1567, "157 ms"),
        (0.9996, "1.00 s"),
        (3.216, "3.22 s"),
        (119.4, "119 s"),
        (119.6, "2 min 0 s"),
        (725, "12 min 5 s"),
        (7260, "2 h 1 min"),
        (1e7, "2,777 h 46 min"),
        (math.inf, "inf s"),
    ],
)
def test_times_read_as_people_write_them(secs: float, expected: str) -> None:
    assert in_words(secs) == expected


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, "0.0 %"), (0.0214, "2.1 %"), (0.0996, "10 %"), (0.312, "31 %")])
def test_shares_read_as_people_write_them(ratio: float, expected: str) -> None:
    assert percent(ratio) == expected
