"""Signals of a training with several ranks: they wait until all ranks hear them at the same batch.

A handler that saves needs all ranks. A signal never reaches them at the same moment: one would save after this batch and
another after the next one, and each would wait for the other for ever.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from lightning_zenflow.signals import Hold, run_all

LATE_SECS = 10.0
"""A signal that comes so soon after other ranks' was heard is the same one: schedulers send it to all of them."""


class SharedHold(Hold):
    """Handlers put aside for the whole training: what asks waits for `hear`, which all ranks call at the same batch.

    Ctrl-C waits for the end of the batch alone, as with one rank. What comes twice before it is heard is heard once.

    Args:
        on_arrival: Called at once with each signal that will wait, and its handler.
    """

    def __init__(self, on_arrival: Callable[[int, Any], None] = lambda number, handler: None) -> None:
        super().__init__()
        self._on_arrival = on_arrival
        self._late_until: dict[int, float] = {}  # by signal that other ranks have got before this one
        self._process_id = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            super().__call__(number, frame)
        elif os.getpid() != self._process_id:
            self._handlers[number](number, frame)  # a forked child hears nothing at batches
        elif time.monotonic() >= self._late_until.pop(number, 0.0):
            if number not in self._arrived:
                self._arrived.append(number)
            self._on_arrival(number, self._handlers[number])

    def has(self, number: int) -> bool:
        """Whether this signal has come and waits."""
        return number in self._arrived

    def end_batch(self) -> None:
        """Ctrl-C is heard now."""
        self.release([signal.SIGINT])

    def hear(self, numbers: Collection[int]) -> None:
        """Runs the handlers of signals that have come to this rank or to others. Every rank must call it with the same ones."""
        late = [number for number in numbers if number not in self._arrived]
        self._late_until |= dict.fromkeys(late, math.inf)  # a handler that saves may take minutes
        for number in numbers:
            self.forget(number)
        try:
            run_all([(self._handlers[number], number) for number in numbers if number in self._handlers])
        finally:
            deadline = time.monotonic() + LATE_SECS
            self._late_until |= {number: deadline for number in late if number in self._late_until}
