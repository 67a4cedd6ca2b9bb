"""How the ranks agree on their initial weights, for parameters of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def any_layout() -> Iterator[None]:
    """Within this context DeepSpeed takes parameters without dimensions, or with strides of their own.

    It broadcasts the bytes of each parameter as it lies in memory, which PyTorch refuses for a scalar such as CLIP's
    temperature and for `channels_last` weights. Under ZeRO-3 the parameters of modules that are made here are cut at once.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init

    originals = DeepSpeedEngine._broadcast_model, Init._zero_init_param
    DeepSpeedEngine._broadcast_model, Init._zero_init_param = _broadcast_model, _cut_param
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model, Init._zero_init_param = originals


def _cut_param(cutter: Any, param: Any) -> None:
    """Cuts a parameter into parts of the ranks, with the weights of the first one. Whole again, it is contiguous."""
    param.data = param.data.contiguous()
    cutter._convert_to_deepspeed_param(param)
    send_from_first(param, cutter.get_partition_dp_group(param))
    param.partition()


def send_from_first(param: Any, group: Any) -> None:
    """Has all ranks of a group take over the first one's values of a contiguous parameter."""
    from deepspeed import comm as dist

    source = 0 if group == dist.get_world_group() else dist.get_global_rank(group, 0)
    # As bytes, since not every backend sends 16-bit floats.
    dist.broadcast(param.data.view(-1).view(torch.uint8), source, group)


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
