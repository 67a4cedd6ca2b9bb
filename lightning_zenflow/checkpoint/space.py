"""What a person must know when a disk is full: which disk, what is needed, and what is free."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch

_FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: BaseException) -> OSError | None:
    """The refusal of a full disk, or of a quota, among an error and those that led to it: the first of them."""
    first, seen = None, set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, OSError) and found.errno in _FULL:
            first = found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return first


def explained(error: OSError, staging: Path, needed_nbytes: int) -> str:
    """Words for `full_disk`.

    Args:
        error: The refusal.
        staging: The directory that was being written, and will be deleted.
        needed_nbytes: What this rank had to write, as far as it is known.
    """
    folder = _nearest(staging.absolute().parent)
    what = "its quota" if error.errno == errno.EDQUOT else "the disk"
    free_nbytes = shutil.disk_usage(folder).free + _written_nbytes(staging)
    return (
        f"{what} of '{_mount_of(folder)}' is full ({error.strerror}: '{error.filename or staging}'). This rank's files need"
        f" {_size(needed_nbytes)}, and {_size(free_nbytes)} are free once this attempt is deleted. Make room, keep fewer"
        " checkpoints (`save_top_k`), or save to another disk."
    )


def stored_nbytes(content: Any) -> int:
    """About what `torch.save` writes for `content`: the memory of its tensors, each once."""
    storages: dict[int, int] = {}
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
    return sum(storages.values())


def _nearest(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next(above for above in (folder, *folder.parents) if above.exists())


def _mount_of(folder: Path) -> Path:
    """Where the disk of a folder is mounted."""
    folder = folder.resolve()
    return next((above for above in (folder, *folder.parents) if os.path.ismount(above)), Path("/"))


def _written_nbytes(folder: Path) -> int:
    """What is allocated for the files below a folder."""
    blocks = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                blocks += os.lstat(os.path.join(root, name)).st_blocks
            except OSError:  # of another rank, which has failed as well
                continue
    return 512 * blocks


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
