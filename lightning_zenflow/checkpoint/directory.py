"""How a checkpoint directory comes to its name whole, or not at all.

All ranks write into a staging directory beside the target; `commit` makes that durable and then moves it in one step. A
process may be killed, the disk may fill up and the power may fail at any point: the target's name holds the old checkpoint
or the new one, never a part of one. One process calls these functions, and no two jobs save under one name at once.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_zenflow.checkpoint.disk import delete, exchange, exists, make_folders, sync
from lightning_zenflow.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    TAG,
    Manifest,
    StrPath,
    has_parts,
    is_remote,
    removing_path,
    staging_path,
)
from lightning_zenflow.checkpoint.verify import verify

__all__ = ["TAG", "Manifest", "begin", "commit", "discard", "remove", "removing_path", "staging_path", "sync", "verify"]

_log = logging.getLogger(__name__)


def begin(target: StrPath) -> Path:
    """Makes the empty staging directory of `target`, and the folders above it.

    What a killed save or removal of this very name left behind is deleted, other names are left alone.

    Args:
        target: Where the checkpoint will be. A checkpoint or a file of that name is replaced by `commit`.

    Returns:
        The staging directory, on the file system of `target`.

    Raises:
        ValueError: `target` is the address of remote storage, or has no name.
        FileExistsError: `target` holds more than a checkpoint, which replacing it would delete.
        NotADirectoryError: A folder above `target` is a file.
        OSError: The directory cannot be made there.
    """
    target = _local(target)
    with _explained(target):
        nearest = next(folder for folder in target.parents if folder.exists())
        reachable = nearest.is_dir()
        replaceable = reachable and _is_replaceable(target)
    if not reachable:
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"`filepath` must lie in a folder, got '{target}', but '{nearest}' is a file. Choose another folder, or move that"
            " file away.",
        )
    if not replaceable:
        raise FileExistsError(
            errno.EEXIST,
            f"`filepath` must be free or a checkpoint that may be replaced, got '{target}', which is or holds something else."
            " Choose another name, or move it away.",
        )
    staging = staging_path(target)
    with _explained(target):
        make_folders(target.parent)
        delete(staging)
        # Without a target, this may be the last whole checkpoint of this name: `commit` deletes it, once there is another.
        if exists(target):
            delete(removing_path(target))
        staging.mkdir()
    return staging


def commit(staging: Path, target: StrPath, facts: Mapping[str, Any]) -> None:
    """Makes the files in `staging` durable, lists them in the manifest, and moves the directory to `target`.

    What was there before is deleted afterwards; if that fails, a warning is logged. Where the file system cannot swap two
    names (NFS, Lustre), a kill just between two renames leaves no `target`: the old checkpoint is then found under
    `removing_path`, and the new one under `staging_path`.

    Args:
        staging: What `begin` returned, with the files of all ranks that share this file system. On a network file system,
            ranks of other machines have called `sync` for theirs.
        target: As given to `begin`. If it is a link, the link is replaced and what it points to stays.
        facts: Plain values (what JSON holds) for the manifest.

    Raises:
        TypeError: `facts` hold something else.
        FileNotFoundError: There is no checkpoint in `staging`.
        OSError: The disk is full or broken. `target` is as it was, unless only its move could not be made durable.
    """
    from lightning_zenflow.version import __version__

    target = _local(target)
    if not (staging / TAG).is_dir():
        raise FileNotFoundError(errno.ENOENT, f"`staging` must hold a folder '{TAG}', got none", os.fspath(staging))
    folders = [Path(root) for root, _, _ in os.walk(staging)]
    files = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    sizes = {path.relative_to(staging).as_posix(): path.stat().st_size for path in files}
    sizes.pop(MANIFEST, None)
    content = {"format": FORMAT, "version": __version__, "facts": dict(facts), "files": sizes}
    try:
        text = json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`facts` must hold numbers, strings, lists and mappings, got {error}. Convert it.") from None
    # One after the other: four threads took as long (4 files of 250 MB, 0.4 s), the disk being the limit.
    for name in sizes:
        sync(staging / name)
    # Only now, so that a manifest on the disk means that the rest is there too, whatever the power does.
    (staging / MANIFEST).write_bytes(text.encode())
    sync(staging / MANIFEST)
    for folder in reversed(folders):
        sync(folder)
    _move(staging, target)
    # Before anything is deleted, or a power failure could bring back the old name with half of the old files.
    sync(target.parent)
    _clean_up(staging)
    _clean_up(removing_path(target))


def discard(staging: Path) -> None:
    """Deletes a staging directory after a failure; never raises, since it runs while another error is on its way."""
    try:
        delete(staging)
    except Exception as error:
        _log.debug("'%s' could not be deleted: %s", staging, error)


def remove(target: StrPath) -> None:
    """Deletes a checkpoint: a directory, a file, or a link (what it points to stays), if it is there.

    Also what a killed removal of this very name left behind.

    Its name is gone first; if the rest cannot be deleted then, a warning is logged.

    Raises:
        ValueError: `target` is the address of remote storage, or has no name.
        OSError: It cannot be taken away.
    """
    target = _local(target)
    aside = removing_path(target)
    if not target.is_dir():
        target.unlink(missing_ok=True)
        _clean_up(aside)  # of a removal that was killed: a resumed run removes again, but never saves under that name
        return
    # A link to a directory goes the same way; neither rename nor delete follow it.
    delete(aside)
    os.rename(target, aside)
    sync(target.parent)
    _clean_up(aside)


def _local(target: StrPath) -> Path:
    """`target` as a path with a name."""
    if is_remote(target):
        raise ValueError(
            f"`filepath` must be a path on this machine, got '{target}'. Remote storage is not supported: save to a local or"
            " mounted folder and copy the directory from there."
        )
    path = Path(target)
    if path.name in ("", ".."):
        raise ValueError(f"`filepath` must end in the checkpoint's name, got '{target}'. Write 'folder/name.ckpt'.")
    return path


def _is_replaceable(target: Path) -> bool:
    """Whether `target` is absent, a file, a link, a checkpoint, or folders without a file."""
    if target.is_symlink() or target.is_file() or not exists(target):
        return True
    if not target.is_dir():
        return False
    # Somebody's experiment may have a checkpoint in its very folder: it has other folders beside the tag.
    others = [entry.name for entry in target.iterdir() if entry.is_dir() and entry.name != TAG]
    return (has_parts(target / TAG) and not others) or not any(files for _, _, files in os.walk(target, onerror=_raise))


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"`filepath` must be where a directory can be written, got '{target}': {error.strerror}"
            f" ('{error.filename}'). Choose another folder, or see to this one.",
        ) from error


def _move(staging: Path, target: Path) -> None:
    """Moves `staging` to `target`; what was there has the name of `staging` or `removing_path(target)` afterwards."""
    if not exists(target):
        os.rename(staging, target)
        return
    if exchange(staging, target):
        return
    aside = removing_path(target)
    delete(aside)
    os.rename(target, aside)
    try:
        os.rename(staging, target)
    except BaseException:
        os.rename(aside, target)
        raise


def _clean_up(path: Path) -> None:
    """Deletes what a move left. The checkpoint is safe by now, so that a failure must not end the training."""
    try:
        delete(path)
    except OSError as error:
        _log.warning(
            "'%s' could not be deleted and takes up space: %s. The next save of its name tries again.", path, error
        )
