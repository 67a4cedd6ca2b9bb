"""Saving a checkpoint: all ranks write beside its place, then it is moved there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_zenflow.checkpoint import directory
from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.space import explained, full_disk, stored_nbytes
from lightning_zenflow.checkpoint.widened import Widening
from lightning_zenflow.zero import files
from lightning_zenflow.zero.stored import StoresState

Agree = Callable[[bool], bool]
"""Whether something is true on all ranks; every rank calls it at the same point."""


class Saving:
    """One checkpoint on its way to the disk. A rank that fails tells the others, so that nobody waits for it.

    Args:
        target: Where the checkpoint belongs; the same on all ranks.
        rank: Of this process.
        agree: Between the ranks.
    """

    def __init__(self, target: Path, rank: int, agree: Agree) -> None:
        self._target, self._rank, self._agree = target, rank, agree
        self._staging = directory.staging_path(target)
        self._needed_nbytes: dict[str, int] = {}  # by file

    def run(
        self,
        engine: Any,
        client_state: Mapping[str, Any],
        *,
        weights_only: bool,
        with_partial_step: bool,
        exclude_frozen: bool,
    ) -> None:
        """Writes the checkpoint. Every rank must call it.

        Raises:
            CheckpointError: It could not be written, here or by another rank; what was at its place is still there.
        """
        zero = engine.optimizer if isinstance(engine.optimizer, StoresState) else None
        try:
            with self._step("make its directory"):
                if self._rank == 0:
                    (directory.begin(self._target) / directory.TAG).mkdir()
            with self._step("see its directory"):
                if not self._staging.is_dir():
                    raise FileNotFoundError(
                        f"{str(self._staging)!r}, which the first rank has made, is not there. Save to a disk that all machines"
                        " share."
                    )
            with self._step("write the state"):
                if zero is not None:
                    widening = Widening()
                    parts = files.rank_files(
                        engine,
                        zero,
                        weights_only=weights_only,
                        with_partial_step=with_partial_step,
                        widening=widening,
                    )
                    self._write(parts, widening)
                    if not widening.complete():  # PyTorch writes in another way: at the cost of memory instead
                        self._write(parts)
            with self._step("write the weights"):  # from the gathering on: what fails here is told to the other ranks
                self._write(files.model_file(engine, client_state, exclude_frozen=exclude_frozen))
                if self._rank == 0:
                    if zero is not None:
                        engine._copy_recovery_script(str(self._staging))
                    (self._staging / "latest").write_text(directory.TAG)
            facts = self._facts(zero, weights_only)
            with self._step("move it into place"):
                if self._rank == 0:
                    directory.commit(self._staging, self._target, facts)
        except BaseException:
            if self._rank == 0:
                directory.discard(self._staging)
            raise

    def _write(self, parts: Mapping[str, Any], widening: Widening | None = None) -> None:
        self._needed_nbytes |= {name: stored_nbytes(content) for name, content in parts.items()}
        for name, content in parts.items():
            files.write(self._staging / directory.TAG / name, content, widening)

    def _facts(self, zero: StoresState | None, weights_only: bool) -> dict[str, Any]:
        layout = zero.layout if zero is not None else None
        return {
            "world_size": layout.world_size if layout else 1,
            "step": zero.shard.clock if zero is not None else None,
            "weights_only": weights_only or zero is None,
        }

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """A part of the work that all ranks end together, also if one of them fails."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self._agree(error is None):
            return
        if error is None:
            raise CheckpointError(
                f"{str(self._target)!r} was not saved: another rank could not {what}. Its error says why. What was saved"
                " before is untouched."
            )
        full = full_disk(error)
        why = (
            f"{error} {self._free()}"
            if full is None
            else explained(full, self._staging, sum(self._needed_nbytes.values()))
        )
        raise CheckpointError(
            f"{str(self._target)!r} was not saved: rank {self._rank} could not {what}: {why} What was saved before is"
            " untouched."
        ) from error

    def _free(self) -> str:
        folder = self._target.absolute().parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free_nbytes = shutil.disk_usage(folder).free
        return f"(free there: {free_nbytes / 2**30:.2f} GiB)"
