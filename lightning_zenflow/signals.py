"""Signals that wait: a step on device and host is whole or not begun, also for whoever saves after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

POSTPONED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""What people and schedulers stop a training with, or ask it for a checkpoint."""

ASKING = tuple(number for number in POSTPONED if number != signal.SIGINT)
"""Those that nobody waits for at a terminal."""


class Hold:
    """Handlers put aside, and the signals that came meanwhile.

    Only handlers that are Python functions: a signal that ends the process still ends it at once. Only in the main thread,
    where Python runs handlers. What another hold has put aside already stays with that one.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[int] = []

    def hold(self, numbers: Collection[int] = POSTPONED) -> None:
        """From now on these signals wait as well, until `release`. One that comes a second time does not."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, Hold):
                self._handlers[number] = handler
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in self._arrived:
            # Asked a second time: whoever waits for a host that hangs gets out, if with a step in pieces.
            self._arrived.remove(number)
            self._handlers[number](number, frame)
        self._arrived.append(number)

    def forget(self, number: int) -> None:
        """Drops a signal that has come."""
        self._arrived = [other for other in self._arrived if other != number]

    def end_batch(self) -> None:
        """What came during a batch is heard now."""
        self.release()

    def release(self, numbers: Collection[int] | None = None) -> None:
        """Puts handlers back, all if none are named, and runs those of the signals that have come, in order. Idempotent."""
        released = {each: handler for each, handler in self._handlers.items() if numbers is None or each in numbers}
        for number, handler in released.items():
            if signal.getsignal(number) is self:  # else somebody has set one of their own meanwhile
                signal.signal(number, handler)
        self._handlers = {number: handler for number, handler in self._handlers.items() if number not in released}
        arrived = [number for number in self._arrived if number in released]
        self._arrived = [number for number in self._arrived if number not in released]
        run_all([(released[number], number) for number in arrived])


def run_all(calls: list[tuple[Callable[[int, FrameType | None], Any], int]]) -> None:
    """Calls handlers in order, each with its signal, also if one raises."""
    if calls:
        (handler, number), *others = calls
        try:
            handler(number, None)
        finally:  # Ctrl-C raises, and the others are heard all the same
            run_all(others)


@contextmanager
def postponed() -> Iterator[None]:
    """Handlers of Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 run after the block, in the order of arrival.

    As `Hold` says. If the block raises, that error is the one that is shown: a Ctrl-C that waited is dropped.
    """
    waiting = Hold()
    try:
        waiting.hold()
        try:
            yield
        except BaseException:
            waiting.forget(signal.SIGINT)
            raise
    finally:
        waiting.release()
