"""Putting our ZeRO optimizers in the place of DeepSpeed's while an engine is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_zenflow.zero.adapter import ZenFlowZero
from lightning_zenflow.zero.settings import RunSettings
from lightning_zenflow.zero.stage3 import ZenFlowZeroOptimizerStage3
from lightning_zenflow.zero.stage12 import ZenFlowZeroOptimizer


@contextmanager
def installed(settings: RunSettings) -> Iterator[None]:
    """Within this context `deepspeed.initialize` builds ZenFlow's optimizer for every ZeRO stage.

    The engine looks the classes up in the globals of modules; they are restored in any case.
    """
    import deepspeed.runtime.engine as engine
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401  (a subclass of what is replaced: made before)
    import deepspeed.runtime.zero.stage3 as stage3

    built: list[ZenFlowZero] = []

    def builder(kind: type[ZenFlowZero]) -> Callable[..., ZenFlowZero]:
        def build(*args: Any, **kwargs: Any) -> ZenFlowZero:
            built.append(kind(*args, settings=settings, **kwargs))
            return built[-1]

        return build

    replaced: tuple[tuple[Any, str, Any], ...] = (
        # DeepSpeed would warn of an untested optimizer, after an import that takes seconds only to see that it is no Muon.
        (engine, "is_zero_supported_optimizer", lambda optimizer: True),
        (engine, "DeepSpeedZeroOptimizer", builder(ZenFlowZeroOptimizer)),
        (stage3, "DeepSpeedZeroOptimizer_Stage3", builder(ZenFlowZeroOptimizerStage3)),
    )
    originals = [getattr(module, name) for module, name, _ in replaced]
    for module, name, ours in replaced:
        setattr(module, name, ours)
    try:
        yield
    except BaseException:
        for optimizer in built:  # the engine failed after its optimizer had started the background process
            optimizer.destroy()
        raise
    finally:
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


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
