"""Descriptors that are nobody's standard streams, also in programs that were started without any, such as daemons."""

from __future__ import annotations

import fcntl
import os

_STANDARD_STREAMS = 3


def off_standard_streams(fd: int) -> int:
    """`fd`, moved above 2 if it is not there yet; -1 stays -1.

    The system gives a new file the lowest free number. Where 0 to 2 are free, ours would get them, and with them all that
    is meant for the terminal, in this process and in those that it starts.
    """
    if not 0 <= fd < _STANDARD_STREAMS:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD_STREAMS)
    os.close(fd)
    return moved
