"""A checkpoint in one file, with the whole `state_dict`: what Lightning's other strategies and `export` write."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import __version__ as lightning_version
from torch import Tensor, nn

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.loading import load_dict


def load_whole_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint of Lightning in one file, its tensors mapped from it so that only what is used is read.

    Without schedulers, as `export` and `save_weights_only` write it, it says nothing of where training stood: what it does
    say is left out then, so that training begins anew with its weights.

    Args:
        path: The file.
        weights_only: As for `loading.load`; this file may hold objects of the user.

    Raises:
        CheckpointError: It is cut off, has types that may not be built, or no `state_dict`.
    """
    checkpoint = load_dict(path, weights_only, holds_user_objects=True)
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(
            f"`ckpt_path` must be a file of Lightning, with the weights under 'state_dict', got '{path}' with"
            f" {', '.join(map(repr, list(checkpoint)[:4])) or 'nothing'}. Of a file that `export --bare` wrote, or another"
            " bare state dict, call `load_state_dict` before `fit`."
        )
    checkpoint.setdefault("pytorch-lightning_version", lightning_version)
    if "lr_schedulers" not in checkpoint:
        checkpoint.pop("loops", None)
        checkpoint["lr_schedulers"] = []
    return checkpoint


@dataclass(frozen=True)
class WholeWeights:
    """The weights of a `state_dict`, read in parts as those of a checkpoint directory are.

    Attributes:
        module: The `state_dict`.
    """

    module: Mapping[str, Any]
    _stored_names: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], module: nn.Module) -> WholeWeights:
        """The weights that `state_dict` has for a module's parameters.

        Raises:
            CheckpointError: It has something else than a tensor for a parameter.
        """
        names: dict[int, list[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        stored = {}
        for tied in names.values():
            # The last one, as where PyTorch loads one name after the other.
            last = next((name for name in reversed(tied) if name in state_dict), None)
            if last is not None:
                stored.update(dict.fromkeys(tied, last))
        for name in set(stored.values()):
            if not isinstance(state_dict[name], Tensor):
                raise CheckpointError(
                    f"`{name}` must be a tensor in the checkpoint, got a {type(state_dict[name]).__name__}. Is the file of"
                    " another model?"
                )
        return cls(state_dict, stored)

    @property
    def names(self) -> Set[str]:
        """Parameters whose weights are there, a tied one by each of its names."""
        return self._stored_names.keys()

    def __contains__(self, name: str) -> bool:
        """Whether the file has something under this very name."""
        return name in self.module

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter's weights."""
        return tuple(self._tensor(name).shape)

    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor:
        """A slice of a parameter's weights, as a new tensor: flat, fp32, on the CPU; zeros for a moment.

        Args:
            name: The parameter.
            kind: `"fp32"` for the weights; or a moment of Adam.
            start: First element in the flattened parameter.
            numel: Elements to read; all that follow if `None`.
        """
        flat = self._tensor(name).detach().reshape(-1)
        part = flat[start:] if numel is None else flat[start : start + numel]
        read = part.float() if kind == "fp32" else part.new_zeros(part.shape).float()
        return read.clone() if read.data_ptr() == part.data_ptr() else read

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.module[self._stored_names[name]]
        return tensor
