"""Signals that wait: a step on device and host is whole or not begun, also for whoever saves after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_POSTPONED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""What people and schedulers stop a training with, or ask it for a checkpoint."""


class _Postponed:
    """Handlers put aside, and the signals that came meanwhile."""

    def __init__(self) -> None:
        self.handlers = {number: signal.getsignal(number) for number in _POSTPONED}
        self.arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in self.arrived:
            # Asked a second time: whoever waits for a host that hangs gets out, if with a step in pieces.
            self.arrived.remove(number)
            self.hand_over(number, frame)
        self.arrived.append(number)

    def hand_over_all(self) -> None:
        if self.arrived:
            try:
                self.hand_over(self.arrived.pop(0))
            finally:  # Ctrl-C raises, and the others are heard all the same
                self.hand_over_all()

    def hand_over(self, number: int, frame: FrameType | None = None) -> None:
        handler = self.handlers[number]
        if callable(handler):
            handler(number, frame)


_active: _Postponed | None = None


@contextmanager
def postponed() -> Iterator[None]:
    """Handlers of Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 run after the block, in the order of arrival.

    Only those that are Python functions: a signal that ends the process still ends it at once. One that comes a second time
    does not wait. If the block raises, that error is the one that is shown: a Ctrl-C that waited is dropped. In a thread
    that is not the main one, and within another such block, this does nothing: Python runs handlers in the main thread.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _active = waiting = _Postponed()
    try:
        for number, handler in waiting.handlers.items():
            if callable(handler):
                signal.signal(number, waiting)
        try:
            yield
        except BaseException:
            waiting.arrived = [number for number in waiting.arrived if number != signal.SIGINT]
            raise
    finally:
        _active = None
        for number, handler in waiting.handlers.items():
            if callable(handler):
                signal.signal(number, handler)
        waiting.hand_over_all()
