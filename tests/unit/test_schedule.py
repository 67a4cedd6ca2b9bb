"""When things happen: `Schedule` and `block_range`."""

import pytest

from lightning_zenflow.schedule import Schedule, block_range


def test_warm_up_steps_update_everything_at_once_and_select_nothing():
    schedule = Schedule(update_interval=4, select_interval=2, warm_up_steps=3)
    for step in (1, 2, 3):
        plan = schedule.plan(step)
        assert (plan.step, plan.block, plan.lag, plan.look_ahead, plan.reselect) == (step, None, 0, 0.0, False)
    assert schedule.plan(4).block is not None


def test_without_warm_up_the_first_step_is_already_cut_into_blocks():
    assert Schedule(update_interval=4, select_interval=2).plan(1).block == 1


@pytest.mark.parametrize(("warm_up_steps", "expected"), [(0, [1, 6, 11, 16]), (3, [4, 9, 14, 19])])
def test_columns_are_selected_at_the_first_step_after_warm_up_and_then_every_interval(warm_up_steps, expected):
    schedule = Schedule(update_interval=4, select_interval=5, warm_up_steps=warm_up_steps)
    assert [step for step in range(1, 21) if schedule.plan(step).reselect] == expected


def test_without_a_select_interval_nothing_is_ever_selected():
    schedule = Schedule(update_interval=4, select_interval=None, warm_up_steps=2)
    assert not any(schedule.plan(step).reselect for step in range(1, 100))


def test_a_select_interval_of_one_selects_at_every_step():
    schedule = Schedule(update_interval=2, select_interval=1)
    assert all(schedule.plan(step).reselect for step in range(1, 10))


@pytest.mark.parametrize("warm_up_steps", [0, 5])
def test_the_block_of_a_step_is_the_step_modulo_the_update_interval(warm_up_steps):
    schedule = Schedule(update_interval=3, select_interval=None, warm_up_steps=warm_up_steps)
    # Counted from step 1 and not from the end of warm-up: the one clock.
    assert [schedule.plan(step).block for step in range(6, 13)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_block_lags_one_step_with_overlap_and_none_without():
    assert Schedule(4, None, overlap=True).plan(7).lag == 1
    assert Schedule(4, None, overlap=False).plan(7).lag == 0


@pytest.mark.parametrize(
    ("update_interval", "overlap", "expected"),
    [(1, False, 0.0), (1, True, 1.0), (2, False, 0.25), (2, True, 0.75), (4, False, 0.375), (4, True, 0.625)],
)
def test_look_ahead_is_the_middle_of_the_time_a_block_is_visible(update_interval, overlap, expected):
    assert Schedule(update_interval, None, overlap=overlap).plan(9).look_ahead == expected


def test_the_device_moves_for_as_long_as_an_update_is_late_but_neither_in_warm_up_nor_at_a_selection():
    schedule = Schedule(4, 10, warm_up_steps=2, interim=True)
    assert [schedule.plan(step).delay_steps for step in (1, 2, 3, 4, 13)] == [0, 0, 2.5, 2.5, 2.5]
    assert [schedule.plan(step).interim for step in (1, 2, 3, 4, 13, 14)] == [False, False, False, True, False, True]
    assert not Schedule(1, None, overlap=False, interim=True).plan(9).interim  # nothing is late
    assert Schedule(4, None).plan(9).delay_steps == 0


def test_look_ahead_can_be_switched_off():
    assert Schedule(4, None, look_ahead=False).plan(9).look_ahead == 0.0


def selections(schedule, first, last):
    return [step for step in range(first, last) if schedule.plan(step).reselect]


def test_after_a_change_the_next_selection_counts_from_the_last_one():
    schedule = Schedule(4, 10, warm_up_steps=2)
    assert selections(schedule, 1, 14) == [3, 13]
    longer = schedule.changed(15, 4, 12)
    assert selections(longer, 16, 60) == [25, 37, 49]
    shorter = longer.changed(26, 2, 5)
    assert selections(shorter, 27, 42) == [30, 35, 40]
    assert [shorter.plan(step).block for step in (30, 31, 32)] == [0, 1, 0]


def test_a_selection_that_is_overdue_by_the_new_interval_comes_at_the_next_step():
    schedule = Schedule(4, 50).changed(30, 4, 8)
    assert selections(schedule, 31, 50) == [31, 39, 47]


def test_a_change_at_the_step_of_a_selection_does_not_repeat_it():
    assert selections(Schedule(4, 10).changed(11, 4, 3), 12, 20) == [14, 17]


def test_a_change_before_the_first_selection_leaves_it_where_it_was():
    schedule = Schedule(4, 10, warm_up_steps=6)
    for clock in (0, 3, 6):
        assert selections(schedule.changed(clock, 2, 4), 1, 16) == [7, 11, 15]


def test_a_change_to_the_same_intervals_changes_nothing():
    schedule = Schedule(4, 10, warm_up_steps=3)
    for clock in range(40):
        same = schedule.changed(clock, 4, 10)
        assert [same.plan(step) for step in range(clock + 1, 90)] == [
            schedule.plan(step) for step in range(clock + 1, 90)
        ]


@pytest.mark.parametrize(("before", "now"), [(None, 4), (4, None)])
def test_a_change_does_not_switch_selection_on_or_off(before, now):
    with pytest.raises(ValueError, match=r"`select_interval` must stay .*, got .*`topk_ratio`"):
        Schedule(4, before).changed(5, 4, now)


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 7, 8, 9, 100, 101])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
def test_blocks_cover_every_element_exactly_once_and_in_order(numel, blocks):
    ranges = [block_range(numel, blocks, block) for block in range(blocks)]
    assert [element for start, stop in ranges for element in range(start, stop)] == list(range(numel))


def test_blocks_are_equal_but_for_the_end():
    assert [block_range(10, 4, block) for block in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_with_fewer_elements_than_blocks_the_last_blocks_are_empty():
    assert [block_range(2, 4, block) for block in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
