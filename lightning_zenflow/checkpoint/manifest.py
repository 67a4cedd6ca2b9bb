"""The manifest of a checkpoint directory: what makes it whole, and the names around it.

`zenflow.json` is written after every other file and lists them with their sizes. A directory that has it and all that it
lists is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zenflow.checkpoint.errors import CheckpointError

FORMAT = 1
"""Of the manifest; a newer one is refused."""

TAG = "checkpoint"
"""The folder inside a checkpoint directory: the tag that Lightning gives DeepSpeed."""

MANIFEST = f"{TAG}/zenflow.json"

PARTS = ("*_states.pt", "zenflow_rank_*.pt", "zenflow.json")
"""What lies in the tag folder and nowhere else; DeepSpeed writes the first."""

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        facts: What its writer noted, as it comes back from JSON (tuples are lists).
        files: Size in bytes of every file but the manifest, by its path inside the directory, with `/`.
        version: The version of lightning-zenflow that wrote it.
    """

    facts: Mapping[str, Any]
    files: Mapping[str, int]
    version: str


def staging_path(target: Path) -> Path:
    """Where a checkpoint is written before it moves to `target`.

    Lightning finds checkpoints by looking for a part of their name, so this one has nothing of the target's.
    """
    return _sibling(target, "saving")


def removing_path(target: Path) -> Path:
    """Where a checkpoint is deleted after it left `target`; likewise."""
    return _sibling(target, "removing")


def _sibling(target: Path, purpose: str) -> Path:
    return target.parent / f".{purpose}-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}"


def is_remote(path: StrPath) -> bool:
    """Whether `path` is an address, also after `Path` made `s3:/x` of `s3://x`."""
    text = os.fspath(path)
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)", text)
    return "://" in text or (scheme is not None and not os.path.isdir(scheme.group()))


def has_parts(folder: Path) -> bool:
    """Whether `folder` holds files of a checkpoint's tag folder."""
    return any(True for pattern in PARTS for _ in folder.glob(pattern))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest; `None` if there is none.

    Raises:
        CheckpointError: It is damaged, or newer than this version.
    """
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"'{file}' must be a file that can be read, got: {error.strerror}. Check its permissions and the disk."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"'{file}' must be JSON, got {error}. The checkpoint is damaged: use another.") from error
    written = content.get("format") if isinstance(content, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise CheckpointError(
            f"`format` of '{file}' must be at most {FORMAT}, got {written}, written by lightning-zenflow"
            f" {content.get('version')}. Install that version or a newer one."
        )
    if written == FORMAT and all(isinstance(content.get(key), dict) for key in ("facts", "files")):
        return Manifest(facts=content["facts"], files=content["files"], version=str(content.get("version")))
    raise CheckpointError(
        f"'{file}' must hold `format`, `facts` and `files`, got something else. The checkpoint is damaged: use another."
    )


def find_problem(directory: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of `directory`, as the end of a sentence."""
    problems = []
    for name, size_bytes in manifest.files.items():
        try:
            status = (directory / name).stat()
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            problems.append(f"its file '{name}' is missing" if missing else f"its file '{name}': {error.strerror}")
        else:
            if status.st_size != size_bytes or not stat.S_ISREG(status.st_mode):
                problems.append(f"its file '{name}' has {status.st_size} bytes and was saved with {size_bytes}")
    if not problems:
        return None
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def whole_since_secs(directory: Path) -> float | None:
    """When a whole checkpoint with a manifest was saved, in seconds since the epoch; `None` if it is none."""
    try:
        manifest = read_manifest(directory)
        if manifest is None or find_problem(directory, manifest):
            return None
        return (directory / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError):
        return None
