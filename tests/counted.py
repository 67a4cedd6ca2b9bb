"""Kernels and the bytes they touch, counted where PyTorch dispatches them: numbers that no busy machine can change.

An operand counts with the memory behind it, read or written; what a kernel touches twice counts once. Views are no kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FILLS = ("copy_", "zero_", "fill_")
"""In-place kernels that do not read what they overwrite."""


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel saw it."""

    address: int
    numel: int
    nbytes: int
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True)
class Kernel:
    """One kernel: its name without overload, such as `copy_`, and what it touched.

    `made` is memory that is new; what is only allocated is not written.
    """

    name: str
    namespace: str
    read: tuple[Operand, ...]
    written: tuple[Operand, ...]
    made: tuple[Operand, ...]

    @property
    def read_bytes(self) -> int:
        return sum(operand.nbytes for operand in self.read)

    @property
    def written_bytes(self) -> int:
        return sum(operand.nbytes for operand in self.written)

    @property
    def nbytes(self) -> int:
        return self.read_bytes + self.written_bytes


class Counting(TorchDispatchMode):
    """Records every kernel that this thread dispatches within the context, backward included.

    Attributes:
        kernels: In the order of their calls.
        dispatched: Calls of the dispatcher, views included: each costs a microsecond or two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.dispatched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        self.dispatched += 1
        results = _tensors(result)
        made = [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in before]
        kernel = _kernel(func, args, kwargs, made)
        if kernel.written or kernel.made or kernel.namespace != "aten" or kernel.name == "_local_scalar_dense":
            self.kernels.append(kernel)
        return result

    def clear(self) -> None:
        """Forgets what was counted."""
        self.kernels.clear()
        self.dispatched = 0

    def named(self, *names: str) -> list[Kernel]:
        """The kernels of these names."""
        return [kernel for kernel in self.kernels if kernel.name in names]

    @property
    def nbytes(self) -> int:
        """All bytes read and written."""
        return sum(kernel.nbytes for kernel in self.kernels if kernel.namespace == "aten")

    @property
    def collectives(self) -> list[Kernel]:
        """Calls between ranks, of whatever library."""
        return [kernel for kernel in self.kernels if kernel.namespace == "c10d"]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _kernel(func: Any, args: Any, kwargs: Any, made: Iterable[Tensor]) -> Kernel:
    namespace, _, name = func._schema.name.partition("::")
    read, written = [], [] if "empty" in name else list(made)
    given = [(argument, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    for argument, value in given:
        tensors = _tensors(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_adam") and argument.name == "grads":
            is_written = False  # only with a scaler, which is not given
        if is_written:
            written += tensors
        if not is_written or not (name in _FILLS or argument.name == "out"):
            read += tensors
    if name == "gather":  # reads of its source, and scatter_ writes of its target, what it moves
        read = [tensor if tensor is not args[0] else written[-1] for tensor in read]
    if name == "scatter_":
        read, written = [args[2], args[3]], [args[3]]
    if not (written or "empty" in name) or (name in ("detach", "alias", "lift_fresh")):
        read = read if namespace != "aten" or name == "_local_scalar_dense" else []
        written = []
    return Kernel(name, namespace, _operands(read), _operands(written), _operands(made))


def _operands(tensors: Iterable[Tensor]) -> tuple[Operand, ...]:
    found = {}
    for tensor in tensors:
        numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        operand = Operand(tensor.data_ptr(), numel, numel * tensor.itemsize, tensor.dtype)
        found[operand.address, operand.nbytes] = operand
    return tuple(found.values())


def swept_bytes(
    kernels: Iterable[Kernel], regions: Mapping[str, Tensor], side: Callable[[Kernel], tuple[Operand, ...]]
) -> dict[str, int]:
    """Bytes of each region that are read, or written, once for each time that work comes back to them.

    Kernels that touch the same elements one after the other find them in cache; kernels that come back after others were
    touched do not, and count again.

    Args:
        kernels: In their order.
        regions: Memory by name; what lies elsewhere is scratch and does not count.
        side: `lambda kernel: kernel.read`, or `written`.
    """
    swept = dict.fromkeys(regions, 0)
    last: dict[str, tuple[int, int]] = {}
    for kernel in kernels:
        for operand in side(kernel):
            for name, tensor in regions.items():
                begin = tensor.data_ptr()
                if begin <= operand.address and operand.stop <= begin + tensor.nbytes:
                    if last.get(name) != (operand.address, operand.stop):
                        swept[name] += operand.nbytes
                    last[name] = (operand.address, operand.stop)
    return swept
