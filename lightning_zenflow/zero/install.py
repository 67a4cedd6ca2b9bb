"""Putting our ZeRO optimizer in the place of DeepSpeed's while an engine is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_zenflow.zero.stage12 import RunSettings, ZenFlowZeroOptimizer


@contextmanager
def installed(settings: RunSettings) -> Iterator[None]:
    """Within this context `deepspeed.initialize` builds `ZenFlowZeroOptimizer` for stages 1 and 2.

    The engine looks the class up in its module's globals; they are restored in any case.
    """
    import deepspeed.runtime.engine as engine

    original, is_supported = engine.DeepSpeedZeroOptimizer, engine.is_zero_supported_optimizer
    built: list[ZenFlowZeroOptimizer] = []

    def build(*args: Any, **kwargs: Any) -> ZenFlowZeroOptimizer:
        built.append(ZenFlowZeroOptimizer(*args, settings=settings, **kwargs))
        return built[-1]

    engine.DeepSpeedZeroOptimizer = build
    # DeepSpeed would warn of an untested optimizer, after an import that takes seconds only to see that it is no Muon.
    engine.is_zero_supported_optimizer = lambda optimizer: True
    try:
        yield
    except BaseException:
        for optimizer in built:  # the engine failed after its optimizer had started the background process
            optimizer.destroy()
        raise
    finally:
        engine.DeepSpeedZeroOptimizer, engine.is_zero_supported_optimizer = original, is_supported


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
