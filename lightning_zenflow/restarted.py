"""`torchrun --max-restarts` on one machine: ranks that are started again find each other, and not the ones before them.

The agent's store outlives the ranks, and PyTorch 2.13 takes it for a new one in every attempt: gloo would read from it the
addresses of ranks that have ended, and wait for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.distributed import PrefixStore, Store


@contextmanager
def store_of_this_attempt() -> Iterator[None]:
    """Whoever starts a process group in the block meets the ranks of this attempt alone.

    On one machine: of several, each counts the attempts in its own way.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if attempt == "0" or not is_shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        yield
        return
    module: Any = import_module("torch.distributed.rendezvous")  # `torch.distributed` has a function of this name
    create = module._create_c10d_store

    def create_own(*args: Any, **kwargs: Any) -> Store:
        return PrefixStore(f"lightning_zenflow/attempt {attempt}", create(*args, **kwargs))

    module._create_c10d_store = create_own
    try:
        yield
    finally:
        module._create_c10d_store = create
