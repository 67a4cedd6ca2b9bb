"""Background processes that start at once: forked from the test, which has imported PyTorch already.

A worker that starts as it does for users takes over a second, nearly all of it for that import. What runs afterwards is the
real worker, in a process of its own, with the memory and the socket that it would have had.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightning_zenflow.offload import child, process

FORKED: set[int] = set()
"""Process ids of all workers forked here, for tests that count them."""


class ForkedWorker:
    """Stands for `subprocess.Popen` of a worker, and forks it from this process, which has imported PyTorch already."""

    def __init__(self, command: Sequence[str], *, pass_fds: Collection[int], **settings: Any) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: this process has threads
            gc.disable()  # what Python runs in the child before it returns may collect what threads of this process own
            self.pid = os.fork()
        if self.pid == 0:
            self._serve([int(number) for number in command[4:7]], set(pass_fds))
        gc.enable()
        FORKED.add(self.pid)

    @staticmethod
    def _serve(numbers: Sequence[int], kept: set[int]) -> None:
        code = 1
        try:
            os.setsid()
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in kept:
                    with suppress(OSError):  # the one that lists them
                        os.close(int(name))
            child.main(*numbers)
            code = 0
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


_PROGRAM = process.BOOTSTRAP


def _start(command: Sequence[str], **settings: Any) -> Any:
    """Forks a worker, unless a test has changed its program, to slow it down for example."""
    return (ForkedWorker if command[3] == _PROGRAM else subprocess.Popen)(command, **settings)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Within this context background processes start at once."""
    shim = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch.object(process, "subprocess", shim):
        yield
