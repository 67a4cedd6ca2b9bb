"""The auto-tuner is not fooled: pauses, damage and noise change nothing, and bounds hold whatever is measured."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.tuner import Controller, Decision, Intervals, Observation, TunerOptions, Window, WindowCollector
from tests.machines import Machine
from tests.tuned import START, Tuned, host, update_changes

# -- it is not fooled --------------------------------------------------------------------------------------------------


def disturbed(machine: Machine, disturb: dict[int, dict[str, Any]], windows: int = 30) -> list[Decision]:
    """Decisions where some steps are changed on their way to the tuner."""
    tuned = Tuned(machine)
    observe = tuned.run.observe

    def observe_disturbed() -> Observation:
        seen = observe()
        return dataclasses.replace(seen, **disturb.get(tuned.run.step, {}))

    tuned.run.observe = observe_disturbed  # type: ignore[method-assign]
    return tuned.windows(windows)


THREE_HOURS = 10_800.0


@pytest.mark.parametrize("seen_as", ["update_stall_secs", "device", "update_secs", "select_stall_secs"])
@pytest.mark.parametrize("step", [3, 9, 15, 17, 33, 150])
def test_a_laptop_that_sleeps_for_three_hours_changes_nothing(step: int, seen_as: str) -> None:
    slept = {"step_secs": THREE_HOURS} | ({} if seen_as == "device" else {seen_as: THREE_HOURS - 0.2})
    machine = host(3.0)
    expected, decisions = disturbed(machine, {}), disturbed(machine, {step: slept})
    assert decisions[-1].intervals == expected[-1].intervals
    assert update_changes(decisions) == update_changes(expected)
    assert len([one for one in decisions if one.changed]) <= 1 + len([one for one in expected if one.changed])


def test_a_stall_that_no_interval_cures_is_not_chased_for_ever() -> None:
    controller = Controller(TunerOptions(), Intervals(4, None))
    decisions = []
    for _ in range(200):
        interval = controller.intervals.update_interval
        decisions.append(controller.decide(Window(16, 0.1, 0.004, None, 0.01, 0.02 / interval)))
    assert len(update_changes(decisions)) <= 12 and max(update_changes(decisions)) <= 50


def test_an_interval_that_stalled_is_not_tried_again_although_all_others_suggest_that_it_fits() -> None:
    controller = Controller(TunerOptions(), Intervals(4, None))
    decisions = []
    for _ in range(100):
        interval = controller.intervals.update_interval
        # Up to 13 the host is late as its busy times say, by which 16 would be late by 1.2 %; it is by more.
        late = 0.095 + 0.1 / interval - 0.1 if interval <= 13 else 0.0036
        decisions.append(controller.decide(Window(16, 0.1, late, None, 0.095, 0.1 / interval)))
    assert [one.intervals.update_interval for one in decisions if one.changed] == [14, 16, 13]


def test_slow_first_steps_and_pauses_for_evaluation_change_nothing() -> None:
    machine = host(3.0)
    slow_start = {1: {"step_secs": 40.0, "update_stall_secs": 20.0}, 2: {"step_secs": 9.0, "update_stall_secs": 8.0}}
    evaluations = {step: {"step_secs": 60.0} for step in range(40, 2000, 40)}
    expected, decisions = disturbed(machine, {}), disturbed(machine, slow_start | evaluations)
    assert [one.intervals for one in decisions] == [one.intervals for one in expected]


@pytest.mark.parametrize("damage", [0.0, math.nan, math.inf, -1.0])
def test_windows_without_usable_times_change_nothing_and_say_so(damage: float) -> None:
    controller = Controller(TunerOptions(), START)
    empty = Window.of([Observation(damage, damage, damage, damage, damage)] * 8)
    raw = Window(8, damage, damage, damage, damage, damage)
    for window in (empty, raw, Window.from_numbers(raw.to_numbers())):
        decision = controller.decide(window)
        assert not decision.changed and decision.window is window
        assert decision.reason == "kept: no usable times in this window. No re-selection measured yet."


def test_a_host_that_reports_no_busy_time_is_left_alone() -> None:
    controller = Controller(TunerOptions(), START)
    decisions = [controller.decide(Window(16, 0.1, 0.3, None, 0.0, 0.0)) for _ in range(5)]
    assert not any(one.changed for one in decisions)
    assert "the host reports no work" in decisions[-1].reason


# -- whatever comes ----------------------------------------------------------------------------------------------------

anything = (
    st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 10) | st.sampled_from([0.0, 1e-300, 1e6, 1e300])
)
maybe = st.none() | anything
windows = st.builds(
    Window,
    steps=st.integers(-1, 40),
    device_secs=anything,
    update_stall_secs=anything,
    select_stall_secs=maybe,
    accumulate_secs=anything,
    update_secs=anything,
    device_jitter_secs=anything,
    host_jitter_secs=anything,
    disagreement=maybe,
    deferred_mass_ratio=maybe,
    copy_secs=anything,
)
plausible = st.floats(0, 3)
plausible_windows = st.builds(
    Window,
    steps=st.integers(1, 40),
    device_secs=st.floats(1e-4, 3),
    update_stall_secs=plausible,
    select_stall_secs=st.none() | plausible,
    accumulate_secs=plausible,
    update_secs=plausible,
    device_jitter_secs=plausible,
    host_jitter_secs=plausible,
    disagreement=st.none() | st.floats(0, 1),
    deferred_mass_ratio=st.none() | st.floats(0, 1),
    copy_secs=plausible,
)


@st.composite
def options(draw: st.DrawFn) -> TunerOptions:
    update, select = (sorted(draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))) for _ in range(2))
    return TunerOptions(
        stall_budget=draw(st.floats(1e-6, 0.99)),
        overlap=draw(st.booleans()),
        auto_ratio=draw(st.floats(0, 1)),
        memory_steps=draw(st.floats(1, 1e9)),
        min_update_interval=update[0],
        max_update_interval=update[1],
        min_select_interval=select[0],
        max_select_interval=20 * select[1],
        select_unit_steps=draw(st.integers(1, 100)),
    )


observations_of_anything = st.builds(
    Observation, anything, anything, anything, anything, anything, maybe, maybe, anything
)
intervals = st.builds(Intervals, st.integers(1, 50), st.none() | st.integers(1, 2000))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(options(), intervals, st.lists(windows | plausible_windows, max_size=12))
def test_whatever_is_measured_bounds_hold_and_nothing_raises(
    chosen: TunerOptions, start: Intervals, shown: list[Window]
) -> None:
    controller = Controller(chosen, start)
    for window in shown:
        decision = controller.decide(Window.from_numbers(window.to_numbers()) if window.steps % 2 else window)
        update, select = decision.intervals.update_interval, decision.intervals.select_interval
        assert chosen.min_update_interval <= update <= chosen.max_update_interval
        assert (select is None) == (start.select_interval is None)
        if select is not None:
            unit = chosen.select_unit_steps
            highest = max(chosen.max_select_interval, unit * -(-chosen.min_select_interval // unit))
            assert select % unit == 0 and chosen.min_select_interval <= select <= highest
        assert decision.changed == (decision.intervals != decision.previous)
        assert decision.changed != decision.reason.startswith("kept: ") and decision.reason.endswith(".")
        assert 8 <= controller.window_steps <= max(16, update)
        json.dumps(controller.state_dict(), allow_nan=False)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(observations_of_anything, max_size=40))
def test_whatever_is_observed_windows_can_be_shown(observations: list[Observation]) -> None:
    collector, controller = WindowCollector(8), Controller(TunerOptions(), START)
    closed = [window for seen in observations if (window := collector.add(seen)) is not None]
    assert len(closed) == max(0, len(observations) - 2) // 8
    for window in closed:
        assert not any(math.isnan(number) for number in window.to_numbers())
        agreed = Window.from_numbers(window.to_numbers())
        assert agreed == (window if window.is_usable else dataclasses.replace(window, steps=0, device_secs=0.0))
        controller.decide(window)
