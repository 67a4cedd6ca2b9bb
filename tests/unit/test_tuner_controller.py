"""What the auto-tuner's controller promises besides good intervals: bounds, both intervals apart, ranks, state, reasons."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lightning_zenflow.tuner import Controller, Decision, Intervals, TunerOptions, Window, WindowCollector
from tests.machines import Run
from tests.tuned import NOISE, SETTLED_AFTER_WINDOWS, START, Tuned, best, best_select_interval, host

# -- bounds ------------------------------------------------------------------------------------------------------------


def test_the_gradient_rule_bounds_the_interval_and_an_unknown_mass_does_not() -> None:
    machine = host(20.0)
    for mass, bound, surely in ((0.9, 3, 3), (0.5, 7, 6), (0.3, 12, 11)):  # 4 / mass - 1, and with 10 % more mass
        options = TunerOptions(auto_ratio=0.998)
        bounded = dataclasses.replace(machine, mass_ratio=mass)
        assert {
            one.intervals.update_interval for one in Tuned(bounded, Intervals(16, 8), options=options).windows(9)
        } == {bound}
        grown = Tuned(bounded, Intervals(1, 8), options=options).windows(9)
        assert {one.intervals.update_interval for one in grown} == {surely}
    unknown = Tuned(machine, Intervals(4, None), options=TunerOptions(auto_ratio=0.998))
    assert unknown.windows(10)[-1].intervals == Intervals(best(machine), None)


def test_more_waiting_gradient_shortens_the_interval_at_once_and_the_reason_says_why() -> None:
    tuned = Tuned(host(20.0), options=TunerOptions(auto_ratio=0.998, memory_steps=1000))
    tuned.windows(20)
    assert tuned.update_interval == 6
    tuned.run.machine = dataclasses.replace(tuned.run.machine, mass_ratio=0.8)
    decisions = tuned.windows(200)
    assert tuned.update_interval == 4
    reasons = [one.reason for one in decisions if one.intervals.update_interval < one.previous.update_interval]
    assert all("of the gradient's squared norm waits on the host" in reason for reason in reasons)
    assert "99.8 % of what AdamW remembers" in reasons[-1]


def test_bounds_from_the_user_hold_from_the_first_decision_on() -> None:
    options = TunerOptions(min_update_interval=2, max_update_interval=3, min_select_interval=10, max_select_interval=40)
    decisions = Tuned(host(20.0), Intervals(8, 100), options=options).windows(20)
    assert {one.intervals.update_interval for one in decisions} == {3}
    assert all(12 <= (one.intervals.select_interval or 0) <= 32 for one in decisions)
    assert "update_interval 8 -> 3: allowed are 2 to 3" in decisions[0].reason
    assert "select_interval 100 -> 32: allowed are 12 to 32 steps" in decisions[0].reason
    assert Tuned(host(0.1), Intervals(8, 100), options=options).windows(60)[-1].intervals == Intervals(2, 32)


def test_fixed_intervals_are_left_alone_and_the_other_one_is_tuned() -> None:
    machine = host(6.0)
    only_select = Tuned(machine, options=TunerOptions(tune_update=False)).windows(20)
    assert {one.intervals.update_interval for one in only_select} == {4} and only_select[
        -1
    ].intervals.select_interval != 16
    only_update = Tuned(machine, options=TunerOptions(tune_select=False)).windows(20)
    assert {one.intervals.select_interval for one in only_update} == {16}
    assert abs(only_update[-1].intervals.update_interval - best(machine)) <= 1
    nothing_selected = Tuned(machine, Intervals(4, None)).windows(20)
    assert nothing_selected[-1].intervals == Intervals(only_update[-1].intervals.update_interval, None)
    assert nothing_selected[-1].reason.endswith("Nothing is selected.")


def test_an_interval_below_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="`update_interval` must be at least 1 step, got 0"):
        Controller(TunerOptions(), Intervals(0, 64))
    with pytest.raises(ValueError, match="`select_interval` must be at least 1 step, got -1"):
        Controller(TunerOptions(), Intervals(4, -1))


# -- select_interval ---------------------------------------------------------------------------------------------------


def test_without_a_measured_reselection_the_interval_stays_and_the_reason_says_so() -> None:
    decisions = Tuned(host(0.7), Intervals(1, 4000)).windows(30)
    assert {one.intervals.select_interval for one in decisions} == {4000}
    assert decisions[-1].reason.endswith("No re-selection measured yet.")


def test_an_interval_that_costs_too_much_is_left_in_one_decision_and_one_that_is_too_long_in_bounded_ones() -> None:
    machine = dataclasses.replace(host(0.7), transfer_secs=5.6)
    first = [one for one in Tuned(machine, Intervals(1, 8)).windows(10) if one.changed]
    assert [one.intervals.select_interval for one in first] == [3072] and best_select_interval(machine, 1) == 3072
    cheap = dataclasses.replace(host(0.1), transfer_secs=0.0)
    decisions = Tuned(cheap, Intervals(1, 64)).windows(40)
    held = [one.intervals.select_interval or 0 for one in decisions]
    assert all(before <= 4 * after for before, after in zip([64, *held], held, strict=False))
    assert held[-1] == best_select_interval(cheap, 1) == 4


def test_with_a_faster_host_the_interval_becomes_short_long_before_the_next_reselection() -> None:
    tuned = Tuned(host(20.0))
    tuned.windows(20)
    assert tuned.select_interval >= 256
    faster = tuned.run.machine = dataclasses.replace(host(2.0), transfer_secs=0.0)
    decisions = tuned.windows(SETTLED_AFTER_WINDOWS)
    assert sum(one.window.select_stall_secs is not None for one in decisions) <= 1
    assert tuned.select_interval <= 2 * best_select_interval(faster, tuned.update_interval)


def test_an_interval_is_shortened_after_three_measured_costs_and_not_before() -> None:
    controller = Controller(TunerOptions(), Intervals(1, 16))

    def after(select_stall_secs: float | None) -> int | None:
        return controller.decide(Window(16, 0.1, 0.0, select_stall_secs, 0.01, 0.01)).intervals.select_interval

    assert [after(0.2), after(0.1), after(None), after(0.1), after(0.1)] == [96, 96, 96, 64, 64]


def test_while_selections_agree_the_interval_becomes_up_to_four_times_longer_and_when_they_drift_short_again() -> None:
    tuned = Tuned(dataclasses.replace(host(0.3), transfer_secs=0.0))
    tuned.windows(20)
    short = tuned.select_interval
    tuned.run.machine = dataclasses.replace(tuned.run.machine, agreement=0.97)
    longer = [one for one in tuned.windows(150) if one.changed]
    assert tuned.select_interval == 4 * short
    ratios = [(one.intervals.select_interval or 0) / (one.previous.select_interval or 1) for one in longer]
    assert all(1 < ratio <= 1.5 for ratio in ratios)
    assert "the last re-selection kept 97 % of the columns" in longer[0].reason
    tuned.run.machine = dataclasses.replace(tuned.run.machine, agreement=0.6)
    (back,) = [one for one in tuned.windows(60) if one.changed]
    assert back.intervals.select_interval == short and "kept 60 % of the columns" in back.reason


def test_a_length_at_which_selections_drift_is_not_tried_again_before_they_are_steadier() -> None:
    tuned = Tuned(dataclasses.replace(host(0.3), transfer_secs=0.0))
    tuned.windows(20)
    short = tuned.select_interval

    def train(windows: int, agreement_when_longer: float, agreement: float) -> list[int]:
        held = []
        for _ in range(windows):
            is_long = tuned.select_interval > 2 * short
            kept = agreement_when_longer if is_long else agreement
            tuned.run.machine = dataclasses.replace(tuned.run.machine, agreement=kept)
            held += [one.intervals.select_interval or 0 for one in tuned.windows(1) if one.changed]
        return held

    held = train(400, agreement_when_longer=0.7, agreement=0.92)
    assert max(held) > 2 * short and held.count(max(held)) == 1 and held[-1] <= 2 * short
    assert max(train(100, agreement_when_longer=0.98, agreement=0.98)) == 4 * short


def test_epochs_stay_whole() -> None:
    options = TunerOptions(select_unit_steps=37)
    machine = host(0.7)
    decisions = Tuned(machine, Intervals(4, 37), options=options).windows(60)
    assert all((one.intervals.select_interval or 1) % 37 == 0 for one in decisions)
    best_select = best_select_interval(machine, 1)
    assert decisions[-1].intervals.select_interval in (37 * -(-best_select // 37), 37 * (1 + -(-best_select // 37)))
    # Another length of the epoch after a resume.
    moved = Tuned(machine, Intervals(4, 100), options=options).windows(1)[0]
    assert moved.intervals.select_interval == 111 and "multiples of 37" in moved.reason
    # An epoch longer than the bound is still the shortest there is.
    long_epochs = TunerOptions(select_unit_steps=10_000)
    assert Tuned(machine, Intervals(4, 10_000), options=long_epochs).windows(3)[-1].intervals.select_interval == 10_000


# -- ranks, windows, state ---------------------------------------------------------------------------------------------


def test_two_ranks_of_different_speed_hold_the_same_intervals_and_suit_the_slower_host() -> None:
    slow, fast = host(6.0, **NOISE), host(1.0, **NOISE)
    runs = [Run(slow, START, seed=1), Run(fast, START, seed=2)]
    controllers = [Controller(TunerOptions(), START) for _ in runs]
    collectors = [WindowCollector(one.window_steps) for one in controllers]
    decided = 0
    while decided < 40:
        seen = [run.observe() for run in runs]
        # The fast rank waits for the slow one in collectives, and that looks like computing there.
        longest = max(one.step_secs for one in seen)
        seen = [dataclasses.replace(one, step_secs=longest) for one in seen]
        windows = [collector.add(one) for collector, one in zip(collectors, seen, strict=True)]
        assert (windows[0] is None) == (windows[1] is None)
        if windows[0] is None or windows[1] is None:
            continue
        numbers = [max(pair) for pair in zip(windows[0].to_numbers(), windows[1].to_numbers(), strict=True)]
        first, second = (controller.decide(Window.from_numbers(numbers)) for controller in controllers)
        decided += 1
        assert first == second and first.skip_steps == second.skip_steps
        for run, controller, collector in zip(runs, controllers, collectors, strict=True):
            run.use(first.intervals)
            collector.restart(first.skip_steps)
            collector.window_steps = controller.window_steps
    # The device is the slower of two noisy ones, so there is more time than on the slow rank alone.
    assert best(slow) - 2 <= controllers[0].intervals.update_interval <= best(slow) + 1


def test_restored_in_the_middle_it_decides_as_if_it_had_never_stopped() -> None:
    tuned = Tuned(host(6.0, **NOISE), seed=4)
    copies: list[Controller] = []
    for windows in range(40):
        if windows == 15:
            tuned.run.machine = host(2.0, hidden_secs=0.01, **NOISE)
        state = tuned.controller.state_dict()
        assert json.loads(json.dumps(state, allow_nan=False)) == state, "plain types only"
        copy = Controller(TunerOptions(), Intervals(1, 1))
        copy.load_state_dict(json.loads(json.dumps(state)))
        assert copy.state_dict() == state
        copies.append(copy)
        (decision,) = tuned.windows(1)
        for restored in copies:
            assert restored.decide(decision.window) == decision
            assert restored.window_steps == tuned.controller.window_steps
    assert tuned.controller.intervals != START


def test_restored_where_nothing_was_enough_it_needs_to_be_as_sure_as_before() -> None:
    def show(controller: Controller, device_secs: float) -> int:
        interval = controller.intervals.update_interval
        late = 0.09 + 0.2 / interval - device_secs
        controller.decide(Window(16, device_secs, late, None, 0.09, 0.2 / interval, device_jitter_secs=1e-4))
        return controller.intervals.update_interval

    controller, copy = (Controller(TunerOptions(), Intervals(4, None)) for _ in range(2))
    assert show(controller, 0.095) == 14
    copy.load_state_dict(controller.state_dict())
    # Now 16 would stall for 2.2 %: enough for a first guess, not for a second one.
    assert [show(one, 0.1002) for one in (controller, copy) for _ in range(9)] == [14] * 18
    fresh = Controller(TunerOptions(), Intervals(14, None))
    assert [show(fresh, 0.1002) for _ in range(3)][-1] == 16


def test_state_of_another_version_is_refused() -> None:
    controller = Controller(TunerOptions(), START)
    with pytest.raises(ValueError, match=r"`format` of the tuner's state must be 1, got 2\. Resume with the version"):
        controller.load_state_dict({**controller.state_dict(), "format": 2})
    with pytest.raises(ValueError, match="must be 1, got None"):
        controller.load_state_dict({})


def test_state_survives_other_options_and_the_next_decision_keeps_the_new_bounds() -> None:
    tuned = Tuned(host(6.0))
    tuned.windows(20)
    controller = Controller(TunerOptions(max_update_interval=5, max_select_interval=100, select_unit_steps=25), START)
    controller.load_state_dict(tuned.controller.state_dict())
    decision = controller.decide(tuned.windows(1)[0].window)
    assert decision.previous == tuned.controller.intervals
    assert decision.intervals == Intervals(5, 100)


@pytest.mark.parametrize(
    ("update_interval", "first", "later"), [(1, 8, 16), (4, 8, 16), (7, 14, 16), (16, 16, 16), (40, 40, 40)]
)
def test_a_window_is_long_enough_to_see_each_block(update_interval: int, first: int, later: int) -> None:
    options = TunerOptions(min_update_interval=update_interval, max_update_interval=update_interval)
    controller = Controller(options, Intervals(update_interval, 64))
    assert controller.window_steps == first
    controller.decide(Window(8, 0.1, 0.0, None, 0.01, 0.01))
    assert controller.window_steps == later


def test_after_a_change_of_blocks_as_many_steps_are_skipped_and_after_others_none() -> None:
    window = Window(8, 0.1, 0.0, None, 0.0, 0.0)

    def skipped(before: Intervals, after: Intervals) -> int:
        return Decision(after, before, "", window).skip_steps

    assert skipped(Intervals(4, 64), Intervals(6, 64)) == 6
    assert skipped(Intervals(4, 64), Intervals(40, 64)) == 16
    assert skipped(Intervals(4, 64), Intervals(4, 96)) == skipped(Intervals(4, 64), Intervals(4, 64)) == 0


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_an_interval_that_stalled_is_tried_again_only_when_the_host_is_clearly_faster() -> None:
    for faster, expected in ((1.0, 5), (0.88, 5), (0.8, 3)):
        controller = Controller(TunerOptions(), Intervals(4, None))
        for _ in range(3):  # the host needs 101 ms, so that 4 stalls a little more than allowed
            decision = controller.decide(Window(16, 0.1, 0.003, None, 0.05, 0.053))
        assert decision.intervals.update_interval == 5
        for _ in range(5):
            decision = controller.decide(Window(16, 0.1, 0.0, None, 0.05 * faster, 0.0424 * faster))
        assert decision.intervals.update_interval == expected, faster


def test_where_the_host_cannot_keep_up_small_changes_of_the_machine_do_not_move_the_interval() -> None:
    def fastest_within_two_percent(adam_secs: float) -> int:
        steps = {interval: 0.3 + adam_secs / interval for interval in range(1, 17)}
        return min(interval for interval, step in steps.items() if step <= 1.02 * steps[16])

    assert [fastest_within_two_percent(adam_secs) for adam_secs in (0.77, 0.79, 1.2)] == [14, 15, 15]
    controller = Controller(TunerOptions(), Intervals(4, None))
    for adam_secs, expected in ((0.77, 14), (0.79, 14), (1.2, 15)):
        for _ in range(30):
            busy = 0.3 + adam_secs / (interval := controller.intervals.update_interval)
            controller.decide(Window(16, 0.1, busy - 0.1, None, 0.3, adam_secs / interval))
        assert controller.intervals.update_interval == expected


# -- reasons -----------------------------------------------------------------------------------------------------------


def test_reasons_tell_what_was_measured() -> None:
    controller = Controller(TunerOptions(), START)
    slow_host = Window(8, 0.14, 0.07, None, 0.06, 0.15)
    assert controller.decide(slow_host).reason == (
        "update_interval 4 -> 8: the host needs 210 ms a step (accumulate 60.0 ms, AdamW 600 ms / 4) while the device computes"
        " for 140 ms; update stall 33 % of 210 ms."
    )
    reselected = Window(16, 0.14, 0.0, 0.7, 0.06, 0.075, disagreement=0.2)
    assert controller.decide(reselected).reason == (
        "select_interval 16 -> 256: re-selections cost 31 % of the step time; a re-selection of 700 ms every 256 steps of"
        " 140 ms costs 2.0 % (budget 2.5 %)."
    )
    assert controller.decide(Window(16, 0.14, 0.0, None, 0.06, 0.075)).reason == (
        "kept: update stall 0.0 % of 140 ms; with 7, the host needs 146 ms a step (accumulate 60.0 ms, AdamW 600 ms / 7) while"
        " the device computes for 140 ms. A re-selection of 700 ms every 256 steps of 140 ms costs 2.0 % (budget 2.5 %)."
    )


def test_the_reason_says_when_no_interval_is_enough_and_when_the_host_is_slower_than_its_busy_times() -> None:
    too_slow = Controller(TunerOptions(), START).decide(Window(8, 0.1, 0.7, None, 0.3, 0.5))
    assert "update_interval 4 -> 15: the host needs 800 ms a step" in too_slow.reason
    assert "no interval up to 16 is enough, and with 15 the step is within 2 % of the fastest" in too_slow.reason
    hidden = Controller(TunerOptions(), START)
    reasons = [hidden.decide(Window(8, 0.1, 0.05, None, 0.02, 0.05)).reason for _ in range(3)]
    assert (
        "to be judged after 3 windows" in reasons[0] and ", and 80.0 ms that its busy times do not show" in reasons[2]
    )
