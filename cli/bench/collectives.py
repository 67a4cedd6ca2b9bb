"""Counts what a rank receives from others, where PyTorch is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GATHERED = ("all_gather_into_tensor", "all_gather")
"""Fill their first argument, of which one part is the rank's own."""

SCATTERED = ("reduce_scatter_tensor", "reduce_scatter")
"""Take the sum of what lies in their second argument, and keep a part of it."""

SUMMED = ("all_reduce",)
"""A sum and then an all-gather, as every bandwidth-optimal algorithm does it."""

SENT = ("broadcast", "reduce")


class Received:
    """Bytes that this rank has received so far: all but its own part of what collectives fill or sum.

    Attributes:
        nbytes: The bytes. Half of a `broadcast` or `reduce` counts on two ranks, as who sends does not receive.
    """

    def __init__(self) -> None:
        self.nbytes = 0.0

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Counts one call of the collective `name`."""
        ranks = torch.distributed.get_world_size(kwargs.get("group"))
        place = 1 if name in SCATTERED else 0
        given = args[place] if len(args) > place else list(kwargs.values())[place]
        times = 2 if name in SUMMED else 1
        self.nbytes += times * _nbytes(given) * (ranks - 1) / ranks


def _nbytes(given: Any) -> int:
    return given.nbytes if isinstance(given, Tensor) else sum(_nbytes(part) for part in given)


@contextmanager
def counting() -> Iterator[Received]:
    """Counts within this context. Enter it before DeepSpeed is imported, which keeps some of the functions."""
    received = Received()
    names = (*GATHERED, *SCATTERED, *SUMMED, *SENT)
    originals = {name: getattr(torch.distributed, name) for name in names}
    for name, original in originals.items():
        setattr(torch.distributed, name, _counted(name, original, received))
    try:
        yield received
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)


def _counted(name: str, original: Callable[..., Any], received: Received) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        received.add(name, args, kwargs)
        return original(*args, **kwargs)

    return call
