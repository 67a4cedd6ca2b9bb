"""First code of the background process. Imports no PyTorch itself, so that a failing import of it is reported too."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

from lightning_zenflow.offload.protocol import Failure

MAX_TRACEBACK_CHARS = 16_000
"""Longer tracebacks lose their beginning: a report must fit into the socket buffer of a trainer that is not reading."""


def main(connection_fd: int, memory_fd: int, trainer_fd: int) -> None:
    """Runs the worker on the descriptors it inherited; `trainer_fd` is -1 where the system has no pidfd."""
    set_signals()
    connection = Connection(connection_fd)
    with failures_reported(connection):
        with ends_with_trainer(connection_fd, trainer_fd):  # importing PyTorch takes seconds
            from lightning_zenflow.offload import worker
        worker.serve(connection, memory_fd, trainer_fd)


def set_signals() -> None:
    """Dies of SIGTERM and SIGINT whatever the trainer has made of them; survives what schedulers send to whole jobs."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started us may have blocked some


@contextlib.contextmanager
def ends_with_trainer(connection_fd: int, trainer_fd: int) -> Iterator[None]:
    """Within this context the process ends at once when the trainer ends or hangs up, whatever it is doing."""
    sleep_fd, wake_fd = os.pipe()
    ends = select.poll()
    ends.register(connection_fd, 0)  # no events: reports a hang-up only
    ends.register(sleep_fd, 0)
    if trainer_fd >= 0:
        ends.register(trainer_fd, select.POLLIN)

    def watch() -> None:
        if all(fd != sleep_fd for fd, _ in ends.poll()):  # no timeout: one of them comes
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(wake_fd)
        thread.join()  # it wakes at once
        os.close(sleep_fd)


@contextlib.contextmanager
def failures_reported(connection: Connection) -> Iterator[None]:
    """Any exception inside goes to the trainer as a `Failure`; the process then exits with code 1."""
    try:
        yield
    except Exception as error:
        failure = Failure(f"{type(error).__name__}: {error}", traceback.format_exc()[-MAX_TRACEBACK_CHARS:])
        with contextlib.suppress(OSError):  # the trainer is gone: nobody is left to be told
            connection.send(failure)
        sys.exit(1)
