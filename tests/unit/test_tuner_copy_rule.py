"""What copying costs and the bound on `update_interval` that follows from it, each part by itself."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from lightning_zenflow.stats import Span, Timeline
from lightning_zenflow.tuner import Window
from lightning_zenflow.tuner.copy_rule import MOST_INTERVAL, lowest_interval, smallest_interval
from lightning_zenflow.tuner.host_history import HostHistory
from lightning_zenflow.tuner.host_model import HostModel
from tests.tuned import copying_window

SHARE = 0.025

# -- what is measured --------------------------------------------------------------------------------------------------


def test_only_the_spans_of_a_step_count_for_it() -> None:
    timeline = Timeline()
    timeline.spans = [
        Span("device", "copy block", 1.0, 0.25),
        Span("device", "copy block", 3.0, 0.5),
        Span("device", "launch", 3.5, 8.0),
        Span("host", "copy block", 4.0, 16.0),
        Span("device", "copy block", 5.0, 1.0),
    ]
    assert timeline.total_secs("copy block") == 1.75
    assert timeline.total_secs("copy block", since_secs=3.0) == 1.5


# -- the model and the bound -------------------------------------------------------------------------------------------


def test_the_model_spreads_the_copy_over_the_interval_and_gives_the_host_that_time() -> None:
    model = HostModel(device_secs=0.1, accumulate_secs=0.05, adam_secs=0.4, whole_copy_secs=0.04)
    assert [model.device_step_secs(interval) for interval in (1, 4, 8)] == pytest.approx([0.14, 0.11, 0.105])
    assert [model.copy_ratio(interval) for interval in (1, 4)] == pytest.approx([0.04 / 0.14, 0.01 / 0.11])
    assert [model.stall_secs(interval) for interval in (4, 8)] == pytest.approx([0.04, 0.0])
    assert [model.step_secs(interval) for interval in (4, 8)] == pytest.approx([0.15, 0.105])
    serial = dataclasses.replace(model, overlap=False)
    assert serial.step_secs(4) == pytest.approx(0.11 + 0.15)


def test_the_history_tells_the_copy_of_all_blocks_and_the_device_without_it() -> None:
    history = HostHistory()
    for copy_secs in (0.004, 0.006, 0.005):
        history.note(Window(16, 0.1 + copy_secs, 0.0, None, 0.01, 0.02, copy_secs=copy_secs), SHARE)
    model = history.model(4, overlap=True)
    assert (model.whole_copy_secs, model.device_secs) == pytest.approx((0.02, 0.1))
    # Over ranks the shortest step meets the longest copy.
    history.clear()
    history.note(Window(16, 0.1, 0.0, None, 0.01, 0.02, copy_secs=0.3), SHARE)
    odd = history.model(4, overlap=True)
    assert odd.device_secs == 0.0 and odd.device_step_secs(4) == pytest.approx(0.1)
    assert smallest_interval(odd, SHARE) == MOST_INTERVAL


@pytest.mark.parametrize("share", [0.01, 0.025, 0.2])
@pytest.mark.parametrize("whole_copy_secs", [0.0, 0.0005, 0.0026, 0.01, 0.0199, 0.05])
def test_the_bound_is_the_smallest_interval_whose_copy_keeps_to_its_share(share: float, whole_copy_secs: float) -> None:
    model = HostModel(0.1, 0.0, 0.0, whole_copy_secs=whole_copy_secs)
    by_trying = next(n for n in itertools.count(1) if whole_copy_secs / n <= share * (0.1 + whole_copy_secs / n))
    assert smallest_interval(model, share) == by_trying


def history_of(windows: int, update_interval: int, whole_copy_secs: float) -> tuple[HostModel, HostHistory]:
    history = HostHistory()
    for _ in range(windows):
        history.note(copying_window(update_interval, whole_copy_secs), SHARE)
    return history.model(update_interval, overlap=True), history


@pytest.mark.parametrize(
    ("current", "within", "windows", "expected"),
    [
        (1, 1.4, 3, 1),  # one step off, and less than 1.5 times the share
        (1, 1.6, 3, 2),
        (1, 1.6, 2, 1),  # not sure
        (4, 4.9, 3, 4),
        (4, 5.2, 3, 6),  # two steps off
        (4, 5.2, 8, 4),  # which no longer counts for one that has proven itself
        (4, 6.3, 8, 7),
        (8, 5.3, 3, 6),  # 6 takes 0.88 of the share: clearly allowed
        (8, 5.5, 3, 7),  # 6 takes 0.92 of it
        (8, 5.5, 8, 8),  # 7 takes 0.79 of it
        (8, 5.1, 8, 7),  # and now 0.73
    ],
)
def test_an_interval_is_left_if_it_is_clearly_too_small_and_shrinks_if_that_is_clearly_allowed(
    current: int, within: float, windows: int, expected: int
) -> None:
    # At an interval of `within` a copy takes its share exactly.
    whole = within * SHARE * 0.1 / (1 - SHARE)
    model, history = history_of(windows, current, whole)
    assert lowest_interval(model, history, current, SHARE) == expected
