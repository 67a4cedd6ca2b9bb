"""The record of a run: one JSON object per line, for `lightning-zenflow report` and for `AutoTuner(replay=...)`.

Lines of kind `run` (what was run, once per `fit`), `step` (figures and spans of a step) and `decision` (of the auto-tuner).
Times are seconds since the start of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

FORMAT = 1

Change = tuple[int, int, "int | None"]
"""Step after which the intervals changed (0: they began so), update interval, selection interval."""


class Record:
    """Appends to a file, a whole line at a time: what a killed run leaves behind can be read.

    Args:
        path: The file; its folder is made if it is not there.

    Raises:
        OSError: It cannot be opened for writing.
        ValueError: It is no path.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        torn = _is_torn(path)  # a run was killed in the middle of a line
        # Unbuffered: what a full disk refuses must not come up again when the file is closed.
        self._file: FileIO = path.open("ab", buffering=0)
        if torn:
            self._file.write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Writes a line; after a failure, which is warned of once, nothing more. Never stops a training."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as error:
            warnings.warn(f"The record {str(self.path)!r} ends here: {error}. Training goes on.", stacklevel=2)
            self.close()

    def close(self) -> None:
        """Safe to call again; never raises."""
        with contextlib.suppress(OSError):
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the file has content that does not end with a newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_changes(path: Path) -> list[Change]:
    """The intervals of the last run in a record, and where they changed.

    Raises:
        ValueError: The file is not there, or holds no run.
    """
    changes: list[Change] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")[
            :-1
        ]  # behind the last newline is a torn line, or nothing
        for entry in filter(None, map(_entry, lines)):
            if entry.get("kind") == "run":
                changes = [(0, entry["update_interval"], entry["select_interval"])]
            elif entry.get("kind") == "decision" and entry["changed"]:
                changes.append((entry["step"], entry["update_interval"], entry["select_interval"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`replay` must be the record of a run, got {str(path)!r}: {error}. Make one with StallMonitor(record=True)."
        ) from error
    if not changes:
        raise ValueError(
            f"`replay` must be the record of a run, got {str(path)!r} without one. See StallMonitor(record=True)."
        )
    return changes


def _entry(line: str) -> dict[str, Any] | None:
    """A line of a record; `None` for what a killed run has left of one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
