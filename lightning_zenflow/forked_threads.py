"""Whether PyTorch's threads still work in a process that was forked and not started anew.

A fork copies one thread only. If the parent had computed with several before, the child waits at its first computation with
several for threads that do not exist, for ever and without a word.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

ANSWER_SECS = 5.0
"""How long the trial may take, which takes milliseconds where it ends at all."""

_FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC


def threads_are_lost() -> bool:
    """Whether this process would hang as soon as PyTorch computes with several threads."""
    return torch.get_num_threads() > 1 and _was_forked() and not _a_child_computes()


def _was_forked() -> bool:
    """Whether this process runs the program of the one that it was forked from."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _FORKED_WITHOUT_EXEC)


def _a_child_computes() -> bool:
    """A trial in a child, which inherits what this process has, and may hang in its place."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1 << 20).add_(1)  # large enough for several threads
        finally:
            os._exit(0)
    deadline = time.monotonic() + ANSWER_SECS
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
