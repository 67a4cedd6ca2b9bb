"""Writing large files at the pace of the disk, without filling the page cache with them.

A checkpoint is as large as the host state that training needs the memory for. Written as usual, it takes as much again until
the system has it on the disk, and new pages are what writing then waits for.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_zenflow.checkpoint.disk import sync_descriptor
from lightning_zenflow.checkpoint.widened import Widening

CHUNK_NBYTES = 64 << 20
"""So much is written while as much before it goes to the disk."""


class SteadyWriter(io.RawIOBase):
    """A new file, durable once it is closed. For `torch.save`.

    Args:
        path: Of the file.
        widening: Tensors that are written as something else than their memory holds.

    Attributes:
        error: The first refusal of the disk. `torch.save` goes on writing after it, and fails in words of its own.

    Raises:
        OSError: The disk is full or broken; it carries the file's name.
    """

    def __init__(self, path: Path, widening: Widening | None = None) -> None:
        self._path, self._widening = path, widening or Widening()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._pool = ThreadPoolExecutor(1, "zenflow-sync")
        self._syncing: Future[None] | None = None
        self._unsynced_nbytes = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self.error is not None:
            raise self.error  # a whole file is not what this will be
        whole = memoryview(data).cast("B")
        try:
            for part in self._widening.parts(whole):
                self._write(part)
        except OSError as error:
            self.error = error
            raise
        return len(whole)

    def _write(self, rest: memoryview) -> None:
        while rest:
            part = rest[: CHUNK_NBYTES - self._unsynced_nbytes]
            try:
                written = os.write(self._descriptor, part)
            except OSError as error:
                error.filename = os.fspath(self._path)
                raise
            rest = rest[written:]
            self._unsynced_nbytes += written
            if self._unsynced_nbytes >= CHUNK_NBYTES:
                self._start_sync()

    def _start_sync(self) -> None:
        self._wait()  # at most two chunks are ever on their way to the disk
        self._unsynced_nbytes = 0
        self._syncing = self._pool.submit(sync_descriptor, self._descriptor, self._path)

    def _wait(self) -> None:
        """Afterwards all that was written before the last `_start_sync` is durable; its failure is raised here.

        As long as the disk takes, like any write.
        """
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.result()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._start_sync()
            self._wait()
        finally:
            self._pool.shutdown()
            os.close(self._descriptor)
            super().close()
