"""Signals of a training with several ranks, seen from one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lightning_zenflow import shared_hold
from lightning_zenflow.shared_hold import SharedHold
from lightning_zenflow.signals import ASKING

SIGUSR1, SIGUSR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that handlers of their own have got."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: found.append(number)) for number in ASKING}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def hold(heard: list[int]) -> Iterator[SharedHold]:
    made = SharedHold()
    made.hold()
    yield made
    made.release()


def test_a_signal_waits_for_all_ranks_and_is_heard_once_however_often_it_came(
    hold: SharedHold, heard: list[int]
) -> None:
    for _ in range(3):
        signal.raise_signal(SIGUSR1)
    hold.end_batch()
    assert heard == [] and hold.has(SIGUSR1) and not hold.has(SIGUSR2)
    hold.hear([SIGUSR1])
    assert heard == [SIGUSR1] and not hold.has(SIGUSR1)


def test_what_another_rank_got_is_heard_here_and_not_once_more_when_it_comes(
    hold: SharedHold, heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold.hear([SIGUSR1])
    signal.raise_signal(SIGUSR1)
    assert heard == [SIGUSR1] and not hold.has(SIGUSR1)
    signal.raise_signal(SIGUSR1)
    assert hold.has(SIGUSR1), "the next one is another one"
    monkeypatch.setattr(shared_hold, "LATE_SECS", 0.0)
    hold.hear([SIGUSR2])
    signal.raise_signal(SIGUSR2)
    assert hold.has(SIGUSR2), "and so is one that comes much later"


def test_one_that_comes_late_while_the_handler_saves_is_the_same_one(heard: list[int]) -> None:
    def saves(number: int, frame: object) -> None:
        heard.append(number)
        signal.raise_signal(number)

    signal.signal(SIGUSR1, saves)
    hold = SharedHold()
    hold.hold()
    hold.hear([SIGUSR1])
    assert heard == [SIGUSR1] and not hold.has(SIGUSR1)
    signal.raise_signal(SIGUSR1)
    assert hold.has(SIGUSR1)
    hold.forget(SIGUSR1)
    hold.release()


def test_ctrl_c_waits_for_the_end_of_the_batch_alone(hold: SharedHold) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hold.end_batch()
    assert isinstance(signal.getsignal(SIGUSR1), SharedHold)


def test_afterwards_handlers_are_the_ones_before_and_what_waited_is_heard(hold: SharedHold, heard: list[int]) -> None:
    signal.raise_signal(SIGUSR2)
    hold.release()
    assert heard == [SIGUSR2]
    signal.raise_signal(SIGUSR1)
    assert heard == [SIGUSR2, SIGUSR1]


def test_a_forked_child_hears_at_once(hold: SharedHold) -> None:
    signal.signal(SIGUSR1, lambda number, frame: os._exit(7))
    hold.hold()
    child = os.fork()
    if child == 0:
        signal.raise_signal(SIGUSR1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_arrivals_are_told_at_once_with_their_handler(heard: list[int]) -> None:
    told: list[int] = []

    def tell(number: int, handler: object) -> None:
        assert callable(handler)
        told.append(number)

    hold = SharedHold(tell)
    hold.hold()
    signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM] and heard == []
    hold.release()
