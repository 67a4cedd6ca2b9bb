"""The files of a checkpoint in DeepSpeed's layout: their names and what is in them. Collectives only where it says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from torch import Tensor

from lightning_zenflow.checkpoint.directory import TAG
from lightning_zenflow.checkpoint.plain import plain, plain_numbers
from lightning_zenflow.checkpoint.widened import Widening
from lightning_zenflow.checkpoint.writer import SteadyWriter
from lightning_zenflow.zero.stored import StoresState


def state_name(rank: int) -> str:
    """Name of the file with `ShardState` of a rank."""
    return f"zenflow_rank_{rank:04}.pt"


def rank_files(
    engine: Any, zero: StoresState, *, weights_only: bool, with_partial_step: bool, widening: Widening
) -> dict[str, Any]:
    """What every rank writes, by file name: its masters and moments, and what only ZenFlow knows.

    With `weights_only` the masters alone. The tensors are views that are valid until the next step, and stand-ins of
    `widening` where the host keeps moments in 16 bit.
    """
    optimizer = zero.state_dict(widening)
    if weights_only:
        widening.forget()
        optimizer[zero.optimizer_key] = {**optimizer[zero.optimizer_key], "state": {}}
    config = plain(engine.config, "ds_config")
    states = {"optimizer_state_dict": optimizer, "ds_config": config, "ds_version": _version()}
    files: dict[str, Any] = {Path(engine._get_zero_ckpt_name("", TAG)).name: states}
    if not weights_only:
        own = zero.own_state(with_partial_step=with_partial_step)
        files[state_name(own.layout.rank)] = plain(own.to_plain(), "ShardState")
    return files


def model_file(engine: Any, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> dict[str, Any]:
    """What goes beside the optimizer, by file name: the model's state, and that of the Trainer. Every rank must call it.

    Under ZeRO-1 and 2 the first rank writes everything, and the others nothing. Under ZeRO-3 each rank writes its own file,
    which holds buffers and this rank's part of frozen parameters.

    Args:
        engine: DeepSpeed's.
        client_state: What Lightning stores.
        exclude_frozen: Leaves parameters out that are not trained.
    """
    zero = engine.optimizer if isinstance(engine.optimizer, StoresState) else None
    if zero is not None:
        module = zero.module_state(engine, exclude_frozen=exclude_frozen)
        name = Path(engine._get_ckpt_name("", TAG)).name
    else:
        module = _module_without_optimizer(engine, exclude_frozen)
        name = "mp_rank_00_model_states.pt"  # as of ZeRO-1 and 2, since the weights are whole
    if module is None:
        return {}
    has_frozen = zero is not None and engine.zero_optimization_partition_gradients() and not exclude_frozen
    with _seen_by(engine, zero):
        state = engine._common_checkpoint_state(module, zero is not None, has_frozen)
    # Without it, DeepSpeed's converter to universal checkpoints asks for a flag.
    state[UNIVERSAL_CHECKPOINT_INFO] = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    # Lightning's part may hold any object; numbers of NumPy in its schedulers are no reason not to read it safely.
    known = {key: plain_numbers(client_state[key]) for key in ("lr_schedulers", "loops") if key in client_state}
    return {name: {**state, "ds_config": plain(engine.config, "ds_config"), **client_state, **known}}


@contextmanager
def _seen_by(engine: Any, optimizer: StoresState | None) -> Iterator[None]:
    """Within this context the engine has this optimizer, or none.

    What stands in its place under ZeRO-3 in `validate`, `test` and `predict` has no state, which DeepSpeed would ask for.
    """
    own, engine.optimizer = engine.optimizer, optimizer
    try:
        yield
    finally:
        engine.optimizer = own


def _module_without_optimizer(engine: Any, exclude_frozen: bool) -> dict[str, Any] | None:
    """Whole weights on the first rank, in `validate`, `test` and `predict`."""
    if engine.zero_optimization_partition_weights():
        return _gathered(engine, exclude_frozen)
    if engine.global_rank > 0:
        return None
    module: dict[str, Any] = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
    return module


def _gathered(engine: Any, exclude_frozen: bool) -> dict[str, Any] | None:
    """The same where parameters are cut: the device has one of them whole at a time, and the first rank's host all.

    DeepSpeed's own way leaves out what modules store by `get_extra_state`.
    """
    module: dict[str, Any] = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
    whole: dict[int, Tensor] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        if name not in module:
            continue
        if id(param) not in whole:
            # One that is whole already stays so: the forward under way may need it.
            is_cut = param.ds_status != ZeroParamStatus.AVAILABLE
            with GatheredParameters([param], enabled=is_cut):
                whole[id(param)] = param.detach().to("cpu", copy=True) if engine.global_rank == 0 else torch.empty(0)
        module[name] = whole[id(param)]  # tied names have one tensor, by which they are known when it is read
    return module if engine.global_rank == 0 else None


def _version() -> str:
    import deepspeed

    return str(deepspeed.__version__)


def write(path: Path, content: Any, widening: Widening | None = None) -> None:
    """Writes one file with `torch.save`; it is on the disk afterwards.

    Without checksums, which nobody reads and which would take longer than writing: `torch.load` does not compare them.

    Raises:
        OSError: The disk is full or broken; it carries the file's name.
    """
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(False)
    writer = SteadyWriter(path, widening)
    try:
        with writer:
            torch.save(content, cast(IO[bytes], writer))
    except Exception as error:
        if writer.error is None or error is writer.error:
            raise
        raise writer.error from None
    finally:
        set_crc32_options(before)
