"""What `export` takes from a checkpoint, and how it becomes one file that is whole or not there."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_zenflow.checkpoint.disk import make_folders, sync
from lightning_zenflow.checkpoint.reader import StoredCheckpoint

CHUNK_NUMEL = 2**24
"""Elements of a master that are read at once to see which of them became infinite."""

_OF_THE_TRAINER = frozenset(
    ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "zenflow_tuner"),
)
"""What only a resumed `fit` can use."""

_HYPER_PARAMETERS = frozenset(
    key
    for owner in (LightningModule, LightningDataModule)
    for key in (owner.CHECKPOINT_HYPER_PARAMS_KEY, owner.CHECKPOINT_HYPER_PARAMS_TYPE)
)
"""What `load_from_checkpoint` builds the module from."""


@dataclass
class Weights:
    """The weights of a checkpoint in one dtype.

    Attributes:
        tensors: By name, in the order of the module; tied names have the same tensor.
        tied: Names that come again, and the name under which their tensor came first.
        others: What modules store by `get_extra_state`, where it is no tensor.
        infinite: How many finite values became infinite in the dtype, by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)

    @property
    def once(self) -> dict[str, Tensor]:
        """Each tensor under one name alone."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.tied}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.once.values())


def collect(stored: StoredCheckpoint, dtype: torch.dtype, advance: Callable[[int], None]) -> Weights:
    """Reads the weights; the largest part of the memory that an export takes.

    Args:
        stored: The checkpoint.
        dtype: Of everything that is floating-point.
        advance: Is told the bytes of each tensor once it is there.
    """
    found = Weights()
    first: dict[str, str] = {}
    for name, tensor in stored.state_dict(dtype):
        own = own_name(name)
        partner = name if name in stored.shapes else stored.shared.get(name, name)
        if partner in first:
            found.tied[own] = first[partner]
            found.tensors[own] = found.tensors[first[partner]]
            continue
        first[partner] = own
        # `torch.save` writes the whole storage of a view.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        found.tensors[own] = tensor.clone() if is_view else tensor
        if infinite := _became_infinite(stored, name, tensor, dtype):
            found.infinite[own] = infinite
        advance(tensor.nbytes)
    for name, value in stored.module.items():
        if not isinstance(value, Tensor):
            found.others[own_name(name)] = value
    return found


def own_name(name: str) -> str:
    """The module's name of a tensor: before Lightning 2.1, the strategy saved its wrapper around the module."""
    return name.removeprefix("_forward_module.")


def _became_infinite(stored: StoredCheckpoint, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Number of infinite elements of `tensor` that are finite in the checkpoint."""
    if tensor.dtype != dtype or not tensor.numel():
        return 0
    if all(extreme.isfinite() for extreme in tensor.aminmax()):  # without a mask as large as the parameter
        return 0
    buffer, count = stored.buffers.get(name), 0
    for start in range(0, tensor.numel(), CHUNK_NUMEL):
        chunk = tensor.reshape(-1)[start : start + CHUNK_NUMEL]
        if buffer is None:
            source = stored.read(name, "fp32", start, chunk.numel())
        else:
            source = buffer.reshape(-1)[start : start + CHUNK_NUMEL]
        count += int((chunk.isinf() & source.isfinite()).sum())
    return count


@dataclass(frozen=True)
class ClientState:
    """What Lightning and the user stored beside the weights.

    Attributes:
        kept: For the file.
        left_out: Keys of what needs code to be built.
        unsafe: Keys of `kept` which need it as well, but without which the module could not be built.
    """

    kept: dict[str, Any]
    left_out: list[str]
    unsafe: list[str]


def client_state(stored: StoredCheckpoint) -> ClientState:
    """What of the client state belongs beside the weights in a file for `load_from_checkpoint`."""
    # It reads the version to see what to migrate. Plain DeepSpeed does not store one.
    kept: dict[str, Any] = {"pytorch-lightning_version": _lightning_version()}
    left_out, unsafe = [], []
    for key, value in stored.client_state.items():
        if key in _OF_THE_TRAINER:
            continue
        if not (plain := is_plain(value)) and key not in _HYPER_PARAMETERS:
            left_out.append(str(key))
            continue
        kept[key] = value
        if not plain:
            unsafe.append(str(key))
    return ClientState(kept, left_out, unsafe)


def is_plain(value: Any) -> bool:
    """Whether `torch.load(weights_only=True)` would build `value`."""
    memory = io.BytesIO()
    try:
        # Tensors may be large, and are plain.
        torch.save(apply_to_collection(value, Tensor, lambda tensor: tensor.new_empty(0)), memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except Exception:  # pickling an object of the user runs the user's code
        return False
    return True


def _lightning_version() -> str:
    import lightning.pytorch

    return str(lightning.pytorch.__version__)


def write_torch(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file for `torch.load`.

    Raises:
        OSError: It cannot be written.
    """
    with open(path, "xb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # The writer of torch says that its position is wrong, after what made it so.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
                cause = cause.__context__
            raise cause or error from None


def write_safetensors(path: Path, weights: Weights, metadata: Mapping[str, str]) -> None:
    """Writes a file of safetensors: tensors once, tied names in the metadata as `"tied:NAME": "FIRST"`.

    Raises:
        OSError: It cannot be written.
        ValueError: safetensors has no such dtype or layout; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in weights.once.items():
        address = tensor.untyped_storage().data_ptr()
        # Buffers may share memory without being called tied.
        tensors[name] = tensor.clone() if tensor.numel() and address in storages else tensor.contiguous()
        storages.add(address)
    tied = {f"tied:{name}": first for name, first in weights.tied.items()}
    try:
        save_file(tensors, path, metadata={"format": "pt", **metadata, **tied})
    except SafetensorError as error:
        if code := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        raise ValueError(f"{error}.") from error
    except KeyError as error:  # its table of dtypes
        name = next((name for name, tensor in tensors.items() if tensor.dtype == error.args[0]), "?")
        raise ValueError(f"`{name}` is {error.args[0]}, which safetensors does not have.") from error


@contextlib.contextmanager
def replacing(out: Path, *, force: bool) -> Iterator[Path]:
    """A path to write to, which takes the place of `out` after the block: as a whole, durably, or not at all.

    It lies in a hidden folder beside `out`, of which nothing is left; nor of the folders that were made for `out` if the
    block fails.

    Raises:
        OSError: A step fails; `FileExistsError` if `out` came into being meanwhile and `force` is not given.
    """
    made = [folder for folder in out.absolute().parents if not folder.exists()]
    staging = out.absolute().parent / f".exporting-{secrets.token_hex(6)}"
    try:
        make_folders(staging)
        written = staging / f"weights{out.suffix}"
        yield written
        # safetensors writes for its owner alone, whatever the umask says.
        (staging / "new").touch()
        shutil.copymode(staging / "new", written)
        sync(written)
        if not force and os.path.lexists(out):
            raise FileExistsError(f"'{out}' has come into being meanwhile. Give `--force` to replace it.")
        os.replace(written, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if empty
        raise
    shutil.rmtree(staging, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is in its place
        sync(out.absolute().parent)
