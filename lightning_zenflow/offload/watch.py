"""Tells the trainer that its worker has died while the trainer is busy with something else, such as a slow data loader."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable

from lightning_zenflow.offload.descriptors import off_standard_streams

NOTICE_SECS = 1.0
"""How long the trainer has to notice by itself, in its next exchange with the worker, before it is interrupted."""

_SIGNAL = signal.SIGRTMAX - 5  # one that nobody uses

_watches: set[DeathWatch] = set()
"""Those at work."""


def _interrupt(*_: object) -> None:
    """The handler of all watches. No method of one: Lightning sets it again after `stop`, when it restores what it found."""
    for watch in tuple(_watches):
        error = watch.error()
        if error is not None:
            raise error from None


class DeathWatch:
    """A thread that sleeps until the worker ends, then interrupts the main thread with an exception.

    Only what runs in the main thread can be interrupted: elsewhere, and without a pidfd, nothing is watched, and the
    death shows in the next exchange.

    Args:
        pidfd: Of the worker; -1 for none.
        error: Makes the exception, or `None` if there is nothing to tell any more. Called in the main thread.
    """

    def __init__(self, pidfd: int, error: Callable[[], Exception | None]) -> None:
        self._make_error = error
        self._has_seen_end = False
        self._wake_fd = -1
        self._owner_pid = os.getpid()
        usable = pidfd >= 0 and threading.current_thread() is threading.main_thread()
        if not usable or signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, _interrupt):
            return
        signal.signal(_SIGNAL, _interrupt)
        _watches.add(self)
        sleep_fd, self._wake_fd = map(off_standard_streams, os.pipe())
        self._thread = threading.Thread(target=self._watch, args=(pidfd, sleep_fd), name="zenflow-watch", daemon=True)
        self._thread.start()

    def error(self) -> Exception | None:
        """What to interrupt the main thread with, if anything."""
        return self._make_error() if self._has_seen_end else None

    def _watch(self, pidfd: int, sleep_fd: int) -> None:
        ends = select.poll()
        ends.register(pidfd, select.POLLIN)
        ends.register(sleep_fd, 0)  # reports only that `stop` has closed the other end
        stopped = select.poll()
        stopped.register(sleep_fd, 0)
        # No timeout: the worker ends or `stop` is called, and as a daemon this thread holds up nobody's exit.
        if all(fd != sleep_fd for fd, _ in ends.poll()) and not stopped.poll(1e3 * NOTICE_SECS):
            self._has_seen_end = True
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        os.close(sleep_fd)

    def stop(self) -> None:
        """Ends the watch. Idempotent; a forked child only drops its copy."""
        wake_fd, self._wake_fd = self._wake_fd, -1
        _watches.discard(self)
        if wake_fd < 0:
            return
        os.close(wake_fd)
        if os.getpid() != self._owner_pid:
            return
        self._thread.join(NOTICE_SECS)  # it wakes at once; its descriptors must not be reused before
        if not _watches:
            with contextlib.suppress(
                ValueError
            ):  # dropped by another thread: the handler stays and has nothing to tell
                signal.signal(_SIGNAL, signal.SIG_DFL)
