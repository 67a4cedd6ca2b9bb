"""Loading the files of a checkpoint: mapped instead of read, and without running code from them."""

from __future__ import annotations

import pickle
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError

_ZIP_MAGIC = b"PK\x03\x04"
_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")


def load(path: Path, weights_only: bool | None, *, holds_user_objects: bool = False) -> Any:
    """What is in `path`, on the CPU, its tensors mapped from the file so that only what is used is read.

    Args:
        path: A file that `torch.save` wrote; in torch's old format it is read as a whole.
        weights_only: `True` and `None` build only tensors, plain values and DeepSpeed's own harmless types; `False`
            builds whatever the file asks for, which can run code.
        holds_user_objects: With `None`, a file with other types is loaded as with `False`.

    Raises:
        CheckpointError: The file is absent or cut off, or has types that may not or cannot be built.
    """
    try:
        loaded = _load(path, safe=weights_only is not False)
    except pickle.UnpicklingError as error:
        types = _unsafe_types(path, error) if weights_only is not False else []
        if weights_only is None and holds_user_objects:
            # Without types it is damaged, or has plain values that torch's safe loader does not know.
            loaded = _load_trusted(path, types)
        elif types:
            raise CheckpointError(
                f"`{path.name}` in '{path.parent}' must hold only tensors and plain values, got objects of"
                f" {', '.join(types)}. If you trust who wrote the file, load it with `weights_only=False`, or allow the"
                " types with `torch.serialization.add_safe_globals`."
            ) from error
        else:
            raise _unreadable(path, error) from error
    except Exception as error:  # a damaged file can make the unpickler fail in any way
        raise _unreadable(path, error) from error
    return loaded


def load_dict(path: Path, weights_only: bool | None, *, holds_user_objects: bool = False) -> dict[str, Any]:
    """As `load`, for files that must hold a dict."""
    loaded = load(path, weights_only, holds_user_objects=holds_user_objects)
    if not isinstance(loaded, dict):
        raise _unreadable(path, TypeError(f"it holds a {type(loaded).__name__}"))
    return loaded


def load_tensor(path: Path, weights_only: bool | None) -> Tensor:
    """The tensor of a parameter's file in a universal checkpoint: bare under ZeRO-3, else in a dict."""
    loaded = load(path, weights_only)
    tensor = loaded.get("param") if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, Tensor):
        raise _unreadable(path, TypeError("it holds no tensor"))
    return tensor


def _load(path: Path, *, safe: bool) -> Any:
    with path.open("rb") as file:
        # torch maps only its zip format; DeepSpeed's fast writers use the old one.
        mmap = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    with _allowing_deepspeed_types():
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=safe)


def _load_trusted(path: Path, types: list[str]) -> Any:
    try:
        return _load(path, safe=False)
    except Exception as error:  # building a user's object runs the user's code
        if not types:
            raise _unreadable(path, error) from error
        raise CheckpointError(
            f"`{path.name}` in '{path.parent}' must hold objects that can be built here, got {', '.join(types)} and"
            f" {type(error).__name__}: {error}. Run where the code that trained can be imported."
        ) from error


def _unsafe_types(path: Path, error: Exception) -> list[str]:
    try:
        with _allowing_deepspeed_types():
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # torch's old format, or a damaged file
        return _UNSAFE_GLOBAL.findall(str(error))[:1]


def _allowing_deepspeed_types() -> AbstractContextManager[None]:
    # Imported here: `import lightning_zenflow` is fast and works without an accelerator's toolchain.
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    types = {DynamicLossScaler, LossScaler, SubparamShape, ZeroStageEnum, fragment_address}
    # On leaving, torch takes away what the user had allowed before as well.
    return torch.serialization.safe_globals(list(types.difference(torch.serialization.get_safe_globals())))


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    got = f"{path.stat().st_size} bytes that cannot be read" if path.is_file() else "none"
    reason = str(error).strip().split("\n")[0][:200]
    return CheckpointError(
        f"`{path.name}` in '{path.parent}' must be a whole file of a DeepSpeed checkpoint, got {got}"
        f" ({type(error).__name__}: {reason}). Saving or copying was cut off: copy it again or take another checkpoint."
    )
