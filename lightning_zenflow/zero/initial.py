"""Initial values for parameters that are cut as soon as their layer is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zenflow.zero.broadcast import send_from_first


@contextmanager
def gathering_inits() -> Iterator[None]:
    """Within this context `torch.nn.init` fills a parameter that ZeRO-3 has cut: gathers it, and cuts it again.

    It would see an empty tensor, and leave the values that the layer has given it. Random values are those of the first rank.
    """
    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    originals = {name: getattr(nn.init, name) for name in names}
    for name, original in originals.items():
        setattr(nn.init, name, _gathering(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def _gathering(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if getattr(tensor, "ds_status", None) is not ZeroParamStatus.NOT_AVAILABLE:
            return init(tensor, *args, **kwargs)
        # Not DeepSpeed's `GatheredParameters`, which cannot send a parameter without dimensions.
        tensor.all_gather()
        try:
            init(tensor, *args, **kwargs)
            send_from_first(tensor, tensor.ds_process_group)
        finally:
            tensor.partition(has_been_updated=True)
        return tensor

    return wrapped
