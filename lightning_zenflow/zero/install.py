"""Putting our ZeRO optimizer in the place of DeepSpeed's while an engine is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_zenflow.zero.stage12 import RunSettings, ZenFlowZeroOptimizer


@contextmanager
def installed(settings: RunSettings) -> Iterator[None]:
    """Within this context `deepspeed.initialize` builds `ZenFlowZeroOptimizer` for stages 1 and 2.

    The engine looks the class up in its module's globals; they are restored in any case.
    """
    import deepspeed.runtime.engine as engine
    from deepspeed.runtime.zero import utils

    from lightning_zenflow.optimizer import ZenFlowAdamW

    original = engine.DeepSpeedZeroOptimizer
    engine.DeepSpeedZeroOptimizer = partial(ZenFlowZeroOptimizer, settings=settings)
    # Otherwise DeepSpeed warns of an untested optimizer at every start.
    utils.ZERO_SUPPORTED_OPTIMIZERS.append(ZenFlowAdamW)
    try:
        yield
    finally:
        engine.DeepSpeedZeroOptimizer = original
        utils.ZERO_SUPPORTED_OPTIMIZERS.remove(ZenFlowAdamW)


@contextmanager
def without_compiling() -> Iterator[None]:
    """Within this context DeepSpeed joins a process group without building its shared-memory collectives.

    On CPU it would compile them at start wherever it finds a compiler, and print about it; gloo does without.
    """
    # Not `import ... as`: that would find the name `torch` which deepspeed.comm has imported.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    original = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        yield
    finally:
        backend.build_shm_op = original
