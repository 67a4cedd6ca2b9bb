from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lightning_zenflow.signals import postponed


@pytest.fixture
def arrived() -> Iterator[list[int]]:
    """Signals in the order in which a handler of their own has seen them."""
    seen: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_handlers_run_after_the_block_in_order_of_arrival(arrived: list[int]) -> None:
    with postponed():
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
            send(number)
        assert arrived == []
    assert arrived == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM]


def test_handlers_are_the_same_again_afterwards(arrived: list[int]) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals() if number < 32}
    with postponed(), postponed():
        pass
    with pytest.raises(ValueError, match="within"), postponed():
        raise ValueError("within")
    assert {number: signal.getsignal(number) for number in before} == before
    send(signal.SIGUSR1)
    assert arrived == [signal.SIGUSR1]


def interrupted(times: int, done: list[str]) -> None:
    with postponed():
        for step in ("first", "second")[:times]:
            send(signal.SIGINT)
            done.append(step)


def test_ctrl_c_lets_the_block_finish() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(1, done)
    assert done == ["first"]


def test_a_second_ctrl_c_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, done)
    assert done == ["first"]


def test_any_signal_that_comes_twice_does_not_wait(arrived: list[int]) -> None:
    with postponed():
        send(signal.SIGTERM)
        assert arrived == []
        send(signal.SIGTERM)
        assert arrived == [signal.SIGTERM]
    assert arrived == [signal.SIGTERM, signal.SIGTERM]


def test_ctrl_c_does_not_hide_the_signals_behind_it(arrived: list[int]) -> None:
    def both() -> None:
        with postponed():
            send(signal.SIGINT)
            send(signal.SIGUSR1)

    with pytest.raises(KeyboardInterrupt):
        both()
    assert arrived == [signal.SIGUSR1]


def test_an_inner_block_ends_without_running_handlers(arrived: list[int]) -> None:
    with postponed():
        with postponed():
            send(signal.SIGUSR1)
        assert arrived == []
    assert arrived == [signal.SIGUSR1]


def failing() -> None:
    with postponed():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        raise ValueError("first")


def test_the_error_of_the_block_is_the_one_that_is_shown(arrived: list[int]) -> None:
    with pytest.raises(ValueError, match="first") as caught:
        failing()
    assert caught.value.__context__ is None
    assert arrived == [signal.SIGTERM], "whoever asks the program to end is still heard"


def test_a_signal_without_a_python_handler_keeps_its_own() -> None:
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    with postponed():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_another_thread_may_use_it_too(arrived: list[int]) -> None:
    def work() -> None:
        with postponed():
            done.append(signal.getsignal(signal.SIGUSR1))

    before, done = signal.getsignal(signal.SIGUSR1), list[object]()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert done == [before]
