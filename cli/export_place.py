"""Where an export goes: refused before anything is read, where it could only fail later or would harm something."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from jsonargparse import Namespace

from lightning_zenflow.checkpoint.manifest import is_remote

from .console import size

TORCH_SUFFIXES, SAFETENSORS = (".ckpt", ".pt", ".pth", ".bin"), ".safetensors"


class Refused(RuntimeError):
    """The export cannot be done; the message says what to do."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def check_arguments(options: Namespace) -> None:
    """Refuses paths that are none, addresses, and formats that are not known."""
    for name in ("checkpoint", "out"):
        if not options[name]:  # as of a shell variable that is not set; a path would be the current folder
            raise Refused(f"`{name.upper()}` must be a path, got an empty one. Write . for the current folder.", 2)
    if is_remote(options.out):
        raise Refused(f"`OUT` must be a local path, got '{options.out}', an address. Write to a disk, then copy.", 2)
    if Path(options.out).suffix.lower() not in (*TORCH_SUFFIXES, SAFETENSORS):
        raise Refused(
            f"`OUT` must end with {', '.join(TORCH_SUFFIXES)} or {SAFETENSORS}, got '{options.out}'. Choose .ckpt for"
            " `load_from_checkpoint`, or .safetensors for the weights alone.",
            2,
        )


def check_place(out: Path, checkpoint: Path, force: bool) -> None:
    """Refuses what would fail only after all has been read, and what would destroy the checkpoint itself."""
    if out.is_dir():
        raise Refused(f"`OUT` must be a file, got '{out}', which is a directory. Name a file, maybe in it.", 1)
    if checkpoint.is_dir() and checkpoint.resolve() in out.resolve().parents:
        raise Refused(f"`OUT` must lie outside of CHECKPOINT, got '{out}'. Write it beside '{checkpoint}'.", 1)
    if os.path.lexists(out) and not force:
        raise Refused(f"`OUT` must not exist, got '{out}'. Give `--force` to replace it, or another name.", 1)
    above = _existing(out)
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"'{above}' is no directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"nothing may be made in '{above}'")


def check_room(out: Path, nbytes: int) -> None:
    """Refuses what the disk has no room for."""
    found = os.statvfs(_existing(out))
    # Some network file systems do not tell: they have no blocks at all.
    if found.f_blocks and found.f_bavail * found.f_frsize < nbytes:
        raise unwritten(out, OSError(errno.ENOSPC, f"it takes {size(nbytes)}"))


def _existing(out: Path) -> Path:
    """The folder of `out`, or the first above it that is there."""
    return next(above for above in out.absolute().parents if os.path.lexists(above))


def unwritten(out: Path, error: OSError) -> Refused:
    """What to say of a file that could not be written."""
    room = ""
    with contextlib.suppress(OSError):
        found = os.statvfs(_existing(out))
        room = f" ({size(found.f_bavail * found.f_frsize)} are free there)"
    return Refused(
        f"`OUT` must be a path that can be written, got '{out}': {error.strerror or error}{room}. Nothing was changed;"
        " choose another path or make room.",
        1,
    )
