"""What `directory.py` asks of the file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""What systems, network file systems and sandboxes answer that cannot swap two names."""

_NO_SYNC = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that have nothing to make durable."""


def sync(path: Path) -> None:
    """Makes a file, or the names in a directory, durable, and lets the system forget a file's content.

    A checkpoint would otherwise stay in the page cache, in place of what training needs the host's memory for. On a network
    file system this only reaches what its own machine wrote.

    Raises:
        OSError: The disk is full or broken; it carries the file's name.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int, path: Path) -> None:
    """The same for an open file; `path` is for the error."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            error.filename = os.fspath(path)
            raise
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def make_folders(folder: Path) -> None:
    """Makes `folder` and those above it, durably.

    Raises:
        OSError: It cannot be made.
    """
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)


def exists(path: Path) -> bool:
    """Whether there is anything of this name, a dangling link included.

    Raises:
        OSError: This cannot be told; `os.path.lexists` would say no.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, whatever they name (Linux, renameat2(2)).

    Returns:
        `False`, with nothing changed, where the system or the file system cannot do that.

    Raises:
        OSError: It can, and failed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux, or an old C library
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(one), None, os.fspath(other))


def delete(path: Path) -> None:
    """Deletes a directory with all that is in it, a file, or a link alone; nothing if it is absent.

    Raises:
        OSError: Something in it cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
