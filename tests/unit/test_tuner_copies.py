"""The auto-tuner where copying a finished block into the weights takes time: small intervals are no longer free."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from lightning_zenflow.tuner import Controller, Intervals, TunerOptions
from tests.machines import Machine
from tests.tuned import (
    NOISE,
    SETTLED_AFTER_WINDOWS,
    START,
    Tuned,
    best,
    copying_window,
    cost,
    host,
    random_machines,
    update_changes,
)


def copying(machine: Machine, copy_secs: float, **changes: Any) -> Machine:
    return dataclasses.replace(machine, copy_secs=copy_secs, **changes)


def test_a_synthetic_machine_copies_one_block_a_step_and_all_of_them_in_a_barrier() -> None:
    machine = copying(Machine(device_secs=0.1, accumulate_secs=0.02, adam_secs=0.8), 0.04)
    calm, late = cost(machine, 16), cost(machine, 4)
    assert calm.step_secs == pytest.approx(0.1025)
    assert calm.copy_ratio == pytest.approx(0.0025 / 0.1025)
    assert late.step_secs == pytest.approx(0.22), "the host takes as long, and the copy hides in the wait"
    assert late.copy_ratio == pytest.approx(0.01 / 0.11)
    free = cost(dataclasses.replace(machine, copy_secs=0.0), 16)
    # What the host still has to do has shrunk by the time of one copy.
    assert calm.barrier_secs - free.barrier_secs == pytest.approx(0.04, abs=0.0026)


# -- it finds the best intervals and keeps them ------------------------------------------------------------------------

STARTS = [START, Intervals(16, 64), Intervals(1, 16)]
COPIES = [0.0, 0.001, 0.0025, 0.005, 0.0101, 0.015, 0.02]  # of a device that computes for 0.1 s


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["quiet", "noisy"])
@pytest.mark.parametrize("copy_secs", COPIES)
@pytest.mark.parametrize("host_ratio", [0.1, 0.7, 2.5, 4.0, 20.0])
def test_with_copies_it_settles_within_one_step_of_the_best_and_stays(
    host_ratio: float, copy_secs: float, noise: dict[str, Any]
) -> None:
    machine = copying(host(host_ratio), copy_secs, **noise)
    for start in STARTS:
        tuned = Tuned(machine, start)
        tuned.windows(SETTLED_AFTER_WINDOWS)
        assert not update_changes(tuned.windows(50)), start
        tuned.assert_near_the_best()


def test_with_copies_on_any_noisy_machine_it_ends_near_the_best_and_late_changes_are_rare() -> None:
    draw, late, off = random.Random(7), 0, 0
    for number, machine in enumerate(random_machines(40, seed=3)):
        machine = copying(machine, draw.uniform(0, 0.02))
        tuned = Tuned(machine, seed=number)
        tuned.windows(SETTLED_AFTER_WINDOWS)
        late += bool(update_changes(tuned.windows(50)))
        distance = abs(tuned.update_interval - best(machine))
        assert distance <= 2, machine
        off += distance > max(1, round(best(machine) / 8))
    assert late <= 4 and off <= 2


def test_a_quick_host_no_longer_draws_the_interval_to_one() -> None:
    quick = host(0.3)
    free, slow = Tuned(quick), Tuned(copying(quick, 0.01))
    free.windows(10)
    decisions = slow.windows(10)
    assert (free.update_interval, slow.update_interval, best(slow.run.machine)) == (1, 4, 4)
    assert not any(one.intervals.update_interval < 4 for one in decisions)


@pytest.mark.parametrize("noise", [{}, NOISE], ids=["quiet", "noisy"])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.02), (0.02, 0.0), (0.004, 0.012)])
def test_when_copies_become_slower_or_faster_it_follows_within_ten_windows(
    before: float, after: float, noise: dict[str, Any]
) -> None:
    tuned = Tuned(copying(host(0.5), before, **noise))
    tuned.windows(20)
    tuned.run.machine = copying(tuned.run.machine, after)
    tuned.windows(SETTLED_AFTER_WINDOWS)
    assert not update_changes(tuned.windows(50))
    assert abs(tuned.update_interval - best(tuned.run.machine)) <= 1


def test_what_grows_for_its_stall_grows_at_once_to_where_copies_fit() -> None:
    machine = copying(host(2.0), 0.02)
    assert (best(host(2.0)), best(machine)) == (3, 8)
    tuned = Tuned(machine, Intervals(1, None))
    changed = [one.intervals.update_interval for one in tuned.windows(20) if one.changed]
    assert changed == [8]


def test_slower_copies_are_a_changed_machine_and_not_averaged_with_the_windows_before() -> None:
    tuned = Tuned(copying(host(0.5), 0.0))
    tuned.windows(20)
    tuned.run.machine = copying(host(0.5), 0.02)
    assert update_changes(tuned.windows(3)) == [3]
    assert tuned.update_interval == 8


def test_where_the_host_cannot_keep_up_copies_cost_nothing_and_do_not_move_the_interval() -> None:
    machine = Machine(device_secs=0.1, accumulate_secs=0.2, adam_secs=0.01)
    free, slow = Tuned(machine), Tuned(copying(machine, 0.02))
    assert cost(machine, 3).step_secs == pytest.approx(cost(slow.run.machine, 3).step_secs)
    for tuned in (free, slow):
        tuned.windows(30)
        assert tuned.update_interval == best(tuned.run.machine) == 3


def test_the_largest_allowed_interval_wins_over_copies() -> None:
    machine = copying(host(0.1), 0.02)
    assert best(machine) == 8
    for options, highest in (
        (TunerOptions(max_update_interval=3), 3),
        (TunerOptions(auto_ratio=0.9975, memory_steps=1000), 8),  # 5 / 0.5 - 1 = 9, and 8 with 10 % more mass
        (TunerOptions(auto_ratio=0.999, memory_steps=1000), 2),  # 2 / 0.5 - 1 = 3, and 2 with 10 % more mass
    ):
        decisions = Tuned(machine, Intervals(1, 8), options=options).windows(20)
        assert max(one.intervals.update_interval for one in decisions) == highest
        assert decisions[-1].intervals.update_interval == highest


# -- reasons and state -------------------------------------------------------------------------------------------------


def test_reasons_tell_what_copying_costs() -> None:
    controller = Controller(TunerOptions(), Intervals(2, None))

    def reason(whole_copy_secs: float) -> str:
        window = copying_window(controller.intervals.update_interval, whole_copy_secs, 0.018)
        return controller.decide(window).reason

    measured = (
        "update stall 0.0 % of 18.9 ms; copying 1/2 of the weights takes 900 µs of 18.9 ms a step (4.8 %, budget 2.5 %)"
    )
    for _ in range(2):
        assert reason(0.0018) == f"kept: {measured}, to be judged after 3 windows. Nothing is selected."
    assert reason(0.0018) == (
        "update_interval 2 -> 4: copying 1/2 of the weights takes 900 µs of 18.9 ms a step (4.8 %, budget 2.5 %);"
        " update stall 0.0 % of 18.9 ms."
    )
    assert reason(0.0018) == (
        "kept: update stall 0.0 % of 18.4 ms; with 3, copying 1/3 of the weights would take 600 µs of 18.6 ms a step (3.2 %,"
        " budget 2.5 %). Nothing is selected."
    )
    one = Controller(TunerOptions(), Intervals(1, None))
    reasons = [one.decide(copying_window(1, 0.0006, 0.018)).reason for _ in range(4)]
    # 1.3 times its share is no reason to leave.
    assert "copying all weights takes 600 µs of 18.6 ms a step (3.2 %, budget 2.5 %). Nothing" in reasons[-1]
    free = Controller(TunerOptions(), Intervals(1, None))
    assert "copying" not in free.decide(copying_window(1, 0.0)).reason


def test_state_from_before_copies_were_measured_can_be_read() -> None:
    tuned = Tuned(copying(host(0.5), 0.01))
    tuned.windows(5)
    state = tuned.controller.state_dict()
    assert state["update"]["history"][0]["copy_secs"] > 0
    for window in state["update"]["history"]:
        del window["copy_secs"]
    old = Controller(TunerOptions(), START)
    old.load_state_dict(state)
    assert old.intervals == tuned.controller.intervals
    assert old.state_dict()["update"]["history"][0]["copy_secs"] == 0.0
