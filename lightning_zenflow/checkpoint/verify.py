"""`verify`: what a path that is to be loaded turns out to be, and what to do if it is no whole checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.manifest import (
    MANIFEST,
    TAG,
    Manifest,
    StrPath,
    find_problem,
    has_parts,
    is_remote,
    read_manifest,
    removing_path,
    staging_path,
    whole_since_secs,
)


def verify(path: StrPath) -> Manifest | None:
    """Checks a checkpoint before it is loaded: that all its files are there, with their sizes. Contents are not read.

    Args:
        path: A directory; a link to one is followed.

    Returns:
        The manifest of a whole checkpoint; `None` for one of plain DeepSpeed, which says nothing about its files.

    Raises:
        CheckpointError: `path` is absent, no checkpoint directory, incomplete, damaged, or of a newer format. The message
            says which, and names whole checkpoints beside it.
    """
    directory = Path(path)
    _check_kind(directory, path)
    manifest = read_manifest(directory)
    if manifest is None:
        _check_plain(directory)
        return None
    if problem := find_problem(directory, manifest):
        raise CheckpointError(
            f"`ckpt_path` must be a whole checkpoint, got '{path}': {problem}. Copy it again from where it came from, or"
            f" use another checkpoint.{_beside(directory)}"
        )
    return manifest


def _check_kind(directory: Path, path: StrPath) -> None:
    """Refuses what is no directory under a checkpoint's own name."""
    rule = "`ckpt_path` must be a directory that `Trainer.save_checkpoint` or `ModelCheckpoint` wrote,"
    if is_remote(path):
        raise CheckpointError(f"{rule} got '{path}', an address. Copy it to a local disk and pass that path.")
    try:
        mode = directory.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        link = f"is a link to '{os.readlink(directory)}', which" if directory.is_symlink() else ""
        raise CheckpointError(
            f"{rule} got '{path}', which {link + ' ' if link else ''}does not exist.{_beside(directory) or ' Check the path.'}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{rule} got '{path}', which cannot be read: {error.strerror}. Check its permissions."
        ) from error
    if not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{rule} got '{path}', which is a file. `fit` resumes from directories; a checkpoint in a single file holds no"
            " state of this optimizer: take its weights with `load_from_checkpoint`, or set the strategy's"
            " `load_full_weights` under ZeRO-3."
        )
    if re.fullmatch(r"\.(saving|removing)-[0-9a-f]{12}", _absolute(directory).name):
        whole = (
            "All its files are there: rename it to use it."
            if whole_since_secs(directory)
            else "Use another checkpoint."
        )
        raise CheckpointError(
            f"`ckpt_path` must be a finished checkpoint, got '{path}', which an interrupted save or removal left behind."
            f" {whole}{_beside(directory)}"
        )


def _check_plain(directory: Path) -> None:
    """Refuses a directory without manifest, unless it is a checkpoint of plain DeepSpeed."""
    try:
        if any(True for _ in (directory / TAG).glob("zenflow_rank_*")):
            raise CheckpointError(
                f"`ckpt_path` must be a whole checkpoint, got '{directory}': '{MANIFEST}', which is written last, is missing."
                f" The save or a copy of it was interrupted; use another checkpoint.{_beside(directory)}"
            )
        if _has_tag(directory):
            return
        found = sorted(entry.name for entry in directory.iterdir())
        folders = [folder for folder in map(directory.joinpath, found) if _has_tag(folder) or whole_since_secs(folder)]
    except OSError as error:
        raise CheckpointError(
            f"`ckpt_path` must be a directory that can be read, got '{directory}': {error.strerror}. Check its permissions."
        ) from error
    if has_parts(directory):
        hint = f"This is the inside of a checkpoint: pass '{_absolute(directory).parent}'."
    elif len(folders) == 1:
        hint = f"Did you mean '{folders[0]}'?"
    else:
        hint = f"Pass one of the checkpoints in it.{_named(folders)}" if folders else "Check the path."
    listed = ", ".join(f"'{name}'" for name in found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    raise CheckpointError(
        f"`ckpt_path` must be a checkpoint directory, which holds a file 'latest' and the folder named in it, '{TAG}', got"
        f" '{directory}', which holds {listed or 'nothing'}. {hint}"
    )


def _has_tag(directory: Path) -> bool:
    """Whether DeepSpeed would find its way: a pointer file with the name of a folder beside it."""
    for pointer in ("latest", "latest_universal"):
        file = directory / pointer
        tag = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
        if tag and (directory / tag).is_dir():
            return True
    return False


def _beside(directory: Path) -> str:
    """A sentence with the whole checkpoints beside `directory`; empty if there are none."""
    here = _absolute(directory)
    return _named([staging_path(here), removing_path(here), *here.parent.glob("*.ckpt")])


def _named(directories: Iterable[Path]) -> str:
    """A sentence with the newest three of `directories` that are whole; empty if none is."""
    since = {directory: saved for directory in directories if (saved := whole_since_secs(directory)) is not None}
    newest = sorted(since, key=lambda directory: since[directory], reverse=True)[:3]
    names = [
        f"'{path}'" + (" (of an interrupted save of this name: rename it to use it)" if path.name[0] == "." else "")
        for path in newest
    ]
    return f" Whole checkpoints there, newest first: {', '.join(names)}." if names else ""


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
