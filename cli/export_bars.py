"""Progress of an export: what was read, and what was written."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from .console import console


class Bars:
    """Progress over bytes, on a terminal alone."""

    def __init__(self) -> None:
        out = console()
        shown = sys.stdout.isatty() and not out.is_dumb_terminal
        name, amount = TextColumn("{task.description}"), DownloadColumn(binary_units=True)
        self._progress = _Watching(
            name, BarColumn(), amount, TimeRemainingColumn(), console=out, transient=True, disable=not shown
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def reading(self, nbytes: int) -> Any:
        """A function to tell of bytes that were read, of at least `nbytes`."""
        task, done = self._progress.add_task("reading", total=nbytes), 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            self._progress.update(task, completed=done, total=max(nbytes, done))

        return advance

    def writing(self, folder: Path, nbytes: int) -> None:
        """From now on the files in `folder` grow, to `nbytes` together."""
        self._progress.watch(self._progress.add_task("writing", total=nbytes), folder)


class _Watching(Progress):
    """Looks at the files being written whenever it is drawn: neither writer tells how far it is."""

    watched: tuple[Any, Path] | None = None

    def watch(self, task: Any, folder: Path) -> None:
        self.watched = (task, folder)

    def get_renderables(self) -> Any:
        if self.watched is not None:
            task, folder = self.watched
            with contextlib.suppress(OSError):
                self.update(task, completed=sum(file.stat().st_size for file in folder.iterdir()))
        return super().get_renderables()
