"""The memory that trainer and background process share: one `memfd` mapping, cut into page-aligned regions.

Not in /dev/shm, whose usual 64 MB in containers end in a bus error. The kernel zero-fills it on first touch, so moments
and accumulators need no initialisation, and it is returned when the last mapping goes, however the processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import mmap
import os
import resource
import weakref
from typing import Any

import torch

from lightning_zenflow.offload.descriptors import off_standard_streams
from lightning_zenflow.offload.layout import ArenaLayout

__all__ = ["Arena", "ArenaLayout"]

_log = logging.getLogger(__name__)


class Arena:
    """The mapped memory, as tensors on the CPU.

    Attributes:
        layout: The layout.
        slot: The gradient of a step, `[numel]`, wire dtype.
        outboxes: Two outbox halves, `[block_numel]`, wire dtype; a block fills its half from the start.
        master: fp32 `[numel]`.
        exp_avg: `[numel]`, `moments_dtype` of the layout.
        exp_avg_sq: `[numel]`, the same.
        accumulator: Sums of gradients, fp32 `[lanes * block_numel]`; a lane begins with what it was left with.
    """

    def __init__(self, fd: int, layout: ArenaLayout) -> None:
        """Maps `fd`, which this object owns from now on. Use `create` or `open`."""
        self.layout = layout
        self._fd = fd
        self._pinned_by: Any = None
        try:
            mapping = mmap.mmap(fd, layout.nbytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise _refused("mmap", layout, error) from error
        self._map: mmap.mmap | None = mapping
        self.slot = self._view("slot")
        self.outboxes = (self._view("outbox0"), self._view("outbox1"))
        self.master = self._view("master")
        self.exp_avg = self._view("exp_avg")
        self.exp_avg_sq = self._view("exp_avg_sq")
        self.accumulator = self._view("accumulator")

    def _view(self, name: str) -> torch.Tensor:
        return self.view(name, 0, self.layout.regions[name].numel)

    def lane(self, lane: int, numel: int) -> torch.Tensor:
        """The first `numel` elements of a lane of the accumulator, with a storage of their own."""
        start = lane * self.layout.block_numel
        return self.view("accumulator", start, start + numel)

    def view(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements `start` to `stop` of a region, with a storage of their own: `torch.save` writes them alone."""
        region = self.layout.regions[name]
        if start == stop:
            return torch.empty(0, dtype=region.dtype)
        offset = region.offset_bytes + start * region.dtype.itemsize
        return torch.frombuffer(self._map, dtype=region.dtype, count=stop - start, offset=offset)

    def rebuild(self, blocks: int) -> None:
        """Both sides, each for itself: makes outbox halves and lanes fit this number of blocks. What they hold is lost.

        A pinned exchange region is pinned anew at its new size. Nobody may use an outbox half meanwhile.
        """
        layout = dataclasses.replace(self.layout, blocks=blocks)
        runtime = self._pinned_by
        self.unpin()
        self.layout = layout
        self.outboxes = (self._view("outbox0"), self._view("outbox1"))
        self.accumulator = self._view("accumulator")
        if runtime is not None:
            self.pin(runtime)

    def trim(self) -> None:
        """Trainer: gives back what outbox halves and lanes no longer use.

        The trainer alone: the worker comes to a rebuild later, and would take pages that the trainer has pinned since.
        """
        self._give_back(self.layout.exchange_nbytes, self.layout.regions["master"].offset_bytes)
        self._give_back(self.layout.regions["accumulator"].offset_bytes, self.layout.nbytes)

    def keep_state(self) -> None:
        """Trainer, once the worker has ended: unpins, and gives back everything but masters and moments.

        Slot, outbox halves and accumulator read as zeros afterwards.
        """
        self.unpin()
        self._give_back(0, self.layout.regions["master"].offset_bytes)
        self._give_back(self.layout.regions["accumulator"].offset_bytes, self.layout.nbytes)

    def _give_back(self, start_bytes: int, stop_bytes: int) -> None:
        if start_bytes < stop_bytes:
            assert self._map is not None
            with contextlib.suppress(OSError):  # where the system does not take it back, it is only memory
                self._map.madvise(mmap.MADV_REMOVE, start_bytes, stop_bytes - start_bytes)

    @classmethod
    def create(cls, layout: ArenaLayout) -> Arena:
        """Trainer: makes and maps new memory, all zero.

        Raises:
            MemoryError: The system refuses; the message names the need, the limit and the remedy.
        """
        try:
            fd = off_standard_streams(_memfd("lightning-zenflow"))
        except OSError as error:
            raise _refused("memfd_create", layout, error) from error
        try:
            os.ftruncate(fd, layout.nbytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise _refused("ftruncate", layout, error) from error
        return cls(fd, layout)

    @classmethod
    def open(cls, fd: int, layout: ArenaLayout) -> Arena:
        """Worker: maps the trainer's memory from the inherited descriptor `fd`.

        Raises:
            MemoryError: The system refuses the mapping.
        """
        return cls(fd, layout)

    @property
    def fd(self) -> int:
        """Descriptor to hand to the worker."""
        return self._fd

    def pin(self, cudart: Any = None) -> bool:
        """Trainer: page-locks the exchange region, exactly once and at its exact size, for copies without staging.

        A refusal is warned of once, and training goes on unpinned (copies are then slower and block).

        Args:
            cudart: Has `cudaHostRegister` and `cudaHostUnregister`; PyTorch's CUDA runtime if left out.

        Returns:
            Whether the region is pinned.
        """
        if self._pinned_by is not None:
            return True
        nbytes = self.layout.exchange_nbytes
        try:
            runtime = torch.cuda.cudart() if cudart is None else cudart
            status = int(runtime.cudaHostRegister(self.slot.data_ptr(), nbytes, 0))
            reason = f"cudaHostRegister returned {status}"
        except (RuntimeError, AssertionError, AttributeError) as error:
            status, reason = -1, str(error)
        if status == 0:
            self._pinned_by = runtime
            return True
        if cudart is None:
            _forget_cuda_error()
        _log.warning(
            "Could not page-lock %s of host memory (%s). Training goes on with slower copies.", _size(nbytes), reason
        )
        return False

    def unpin(self) -> None:
        """Trainer: ends `pin`. Copies that are still under way must have finished."""
        runtime, self._pinned_by = self._pinned_by, None
        if runtime is None:
            return
        try:
            runtime.cudaHostUnregister(self.slot.data_ptr())
        except RuntimeError as error:  # a broken CUDA context cannot be mended here, and must not hide the first error
            _log.debug("cudaHostUnregister: %s", error)

    def close(self) -> None:
        """Unpins, unmaps and returns the memory. Idempotent; the tensors are empty afterwards.

        While somebody else still holds a view, the mapping stays valid and goes with the last of them.
        """
        if self._map is None:
            return
        self.unpin()  # before unmapping: the driver must not keep a lock on pages that are gone
        self.outboxes = (torch.empty(0), torch.empty(0))
        self.slot = self.master = self.exp_avg = self.exp_avg_sq = self.accumulator = torch.empty(0)
        mapping, self._map = weakref.ref(self._map), None
        if mapping() is None:
            self.free()
        os.close(self._fd)

    def free(self) -> None:
        """Returns the pages at once, even if forked children of the trainer still map them; touching them is fatal."""
        os.ftruncate(self._fd, 0)


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _memfd(name: str) -> int:
    """`os.memfd_create`, also for a Python that was built on an older system than the one it runs on."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError("this system has no memfd_create (Linux 3.17 with glibc 2.27, or newer)")
    close_on_exec = 1
    fd = int(libc.memfd_create(name.encode(), close_on_exec))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


_LIMITS = {
    "memfd_create": ("RLIMIT_NOFILE", "ulimit -n"),
    "ftruncate": ("RLIMIT_FSIZE", "ulimit -f"),
    "mmap": ("RLIMIT_AS", "ulimit -v"),
}


def _refused(call: str, layout: ArenaLayout, error: Exception) -> MemoryError:
    name, command = _LIMITS[call]
    soft = resource.getrlimit(getattr(resource, name))[0]
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft) if call == "memfd_create" else _size(soft)
    return MemoryError(
        f"The host state needs {_size(layout.nbytes)} of address space for {layout.numel:,} parameters, but {call} was"
        f" refused: {error} ({name}: {limit}). Raise the limit (`{command}`), or use more ranks: each then holds less."
    )


def _forget_cuda_error() -> None:
    """A refused call stays behind as CUDA's last error: one launch takes the blame here, so that no other does."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")
