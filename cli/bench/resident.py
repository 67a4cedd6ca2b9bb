"""Memory that a process and its descendants really take, memory that they share counted once."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import psutil

COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""What is summed: own pages and shared memory. Not `Pss_File`, pages of libraries: their share falls when an unrelated process
maps the same ones, by tens of MB, and no parameter needs them."""


def resident_bytes() -> int:
    """Proportional set size of this process and all its descendants, in bytes, without what only lies ready to be used again.

    Pages that belong to files, such as libraries, are not counted. glibc is told here to keep freed memory
    (`settings.KEEP_MEMORY`), which is no need of the mode: it is given back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(_own_bytes(member.pid) for member in family)


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(COUNTED))
