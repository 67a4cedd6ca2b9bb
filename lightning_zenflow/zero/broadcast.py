"""How the ranks agree on their initial weights, for parameters of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def any_layout() -> Iterator[None]:
    """Within this context DeepSpeed's engine takes parameters without dimensions, or with strides of their own.

    It broadcasts the bytes of each parameter as it lies in memory, which PyTorch refuses for a scalar such as CLIP's
    temperature and for `channels_last` weights.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = _broadcast_model
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = original


def _broadcast_model(engine: Any) -> None:
    """The weights of the first rank, for all ranks. Models cut over devices in other ways were refused before."""
    from deepspeed import comm as dist
    from deepspeed.utils import groups

    if engine.dist_backend is None:
        return
    for param in engine.module.parameters():
        flat = param.data.contiguous().view(-1)
        # As bytes, since not every backend sends 16-bit floats.
        dist.broadcast(flat.view(torch.uint8), groups._get_broadcast_src_rank(), group=engine.seq_data_parallel_group)
        param.data.copy_(flat.view(param.shape))
