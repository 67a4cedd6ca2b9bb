"""Which cores the background process runs on. Only the worker is ever bound; the trainer keeps its own affinity."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterable


def worker_cores(available: Collection[int], reserved_ratio: float, local_rank: int, local_ranks: int) -> list[int]:
    """Cores of the worker of `local_rank`.

    The lowest `ceil(reserved_ratio * n)` of the n cores stay with PyTorch; the others are split evenly and without
    overlap over the workers. Each worker gets at least one core, shared if there are too few.

    Args:
        available: Cores that all ranks of this machine may use together: `os.sched_getaffinity(0)` if none is bound.
        reserved_ratio: Share left to PyTorch, from 0 to 1.
        local_rank: Number of this rank on this machine, from 0.
        local_ranks: Ranks on this machine. 1 if the launcher has bound every rank to cores of its own.

    Raises:
        ValueError: `available` is empty, or `local_rank` is not below `local_ranks`.
    """
    if not available:
        raise ValueError("`available` must hold at least one core, got none. Pass `os.sched_getaffinity(0)`.")
    if not 0 <= local_rank < local_ranks:
        raise ValueError(
            f"`local_rank` must be from 0 to {local_ranks - 1}, got {local_rank}. Check the launcher's environment."
        )
    cores = sorted(available)
    # Rounded first: 0.07 * 100 is a hair above 7, and the reserve must not grow by a core for that.
    reserved = math.ceil(round(reserved_ratio * len(cores), 9))
    free = cores[reserved:] or cores[-1:]
    if len(free) < local_ranks:
        return [free[local_rank % len(free)]]
    first, last = (len(free) * rank // local_ranks for rank in (local_rank, local_rank + 1))
    return free[first:last]


def bind(cores: Iterable[int], *, insist: bool = True) -> list[int]:
    """Worker: binds the calling thread, and all threads it starts later, to `cores`, and returns those that are refused.

    Asks the kernel rather than `os.sched_getaffinity`, which may be narrower than what is allowed.

    Args:
        cores: The cores.
        insist: Whether refused cores are an error. If not, the thread runs on the others, or where it ran before.

    Raises:
        ValueError: The kernel refuses some of the cores; the message names them.
    """
    wanted = set(cores)
    try:
        os.sched_setaffinity(0, wanted)
        refused = wanted - os.sched_getaffinity(0)  # the kernel drops cores outside the cpuset without a word
    except (OSError, OverflowError, ValueError):
        refused = wanted
    if refused and insist:
        raise ValueError(
            f"`worker_cores` must be cores that this process may use, got {sorted(wanted)}, of which {sorted(refused)}"
            f" are refused. Choose from {_allowed()}."
        )
    return sorted(refused)


def _allowed() -> list[int]:
    """All cores of this process's cpuset; the caller, which is about to give up, ends up bound to them."""
    with contextlib.suppress(OSError):  # then the present affinity is all that is known
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))
