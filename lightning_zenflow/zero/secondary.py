"""The ranks that keep copies of parameters among themselves (hpZ), in a process that trains more than once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils import groups

_GROUP = "_ZERO_PARAM_INTRA_PARALLEL_GROUP"


@contextmanager
def group_of_copies(ranks: int) -> Iterator[None]:
    """Within this context DeepSpeed finds the group of ranks that a run's `zero_hpz_partition_size` asks for.

    It makes one group a process, whoever asks first: refuses to make it again for the next module that is cut, and would
    use it in later runs that ask for another one, or for none. Every rank must enter it.

    Args:
        ranks: Of a group; 1 for no copies.
    """
    module: Any = groups
    group, wanted = getattr(module, _GROUP), min(ranks, dist.get_world_size())
    if group is not None and (ranks == 1 or dist.get_world_size(group=group) != wanted):
        setattr(module, _GROUP, None)
    original = module._create_zero_param_parallel_group
    if ranks > 1 and getattr(module, _GROUP) is None:
        original(ranks)
    module._create_zero_param_parallel_group = lambda size: None
    try:
        yield
    finally:
        module._create_zero_param_parallel_group = original
