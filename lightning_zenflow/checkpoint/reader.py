"""Reading a checkpoint by the names of its parameters, whatever wrote it and over however many ranks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.checkpoint.errors import CheckpointError
from lightning_zenflow.checkpoint.facts import stage_of
from lightning_zenflow.checkpoint.files import CheckpointFiles
from lightning_zenflow.checkpoint.layouts import KINDS, Layout, missing_kind
from lightning_zenflow.checkpoint.model_file import ModelFile
from lightning_zenflow.checkpoint.optimizer_files import layout_of, optimizer_states


@dataclass(frozen=True, eq=False)
class StoredCheckpoint:
    """A checkpoint of DeepSpeed, of ZeRO stage 1, 2 or 3, or DeepSpeed's universal one.

    Its tensors are mapped from the files: what is not read takes no memory. The files must not be written to while it is
    in use; replacing the directory by another is fine.

    Attributes:
        stage: ZeRO stage it was written under.
        world_size: Number of ranks that wrote it.
        step: Steps that Adam has done, the largest of all groups; `None` without moments.
        has_moments: Whether every trained parameter has both of Adam's moments.
        groups: Names of the trained parameters of each group of the optimizer, in stored order; one group where an engine
            saved that had no optimizer.
        shapes: Shapes of the trained parameters, in the order of `groups`.
        shared: Tied names, and the name under which their parameter is stored.
        frozen: Parameters that are not trained, in the model's dtype; empty if they were excluded from the save.
        buffers: Persistent buffers.
        module: The module's `state_dict` as stored: weights as the model uses them, buffers, and what modules store by
            `get_extra_state`. Under ZeRO-3, where weights are not stored, without all trained and frozen ones.
        client_state: What Lightning and the user put into the file.
        counters: DeepSpeed's `global_steps`, `global_samples` and `skipped_steps`.
        param_groups: Settings of each group (`lr`, `betas`, ...); empty dicts where the file has none.
        loss_scaler: Numbers of the fp16 loss scaler; `None` for a scale that is always 1.
        written_by: Version of DeepSpeed.
        config: DeepSpeed's config of the run; empty if it is not stored.
    """

    stage: int
    world_size: int
    step: int | None
    has_moments: bool
    groups: list[list[str]]
    shapes: dict[str, tuple[int, ...]]
    shared: dict[str, str]
    frozen: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    module: dict[str, Any]
    client_state: dict[str, Any]
    counters: dict[str, int]
    param_groups: list[dict[str, Any]]
    loss_scaler: dict[str, Any] | None
    written_by: str | None
    config: dict[str, Any]
    _layout: Layout = field(repr=False)
    _order: list[str] = field(repr=False)

    @classmethod
    def open(cls, path: Path, *, weights_only: bool | None = None) -> StoredCheckpoint:
        """Opens the checkpoint at `path`: its directory, or the folder inside it that holds the files.

        Where an ordinary and a universal checkpoint lie in one directory, the ordinary one is opened; pass the folder of
        the other.

        Args:
            path: A local directory.
            weights_only: With `None`, only the model's file may hold objects of the user, and the code in them runs when
                it does. With `True` it may not, with `False` any file may.

        Raises:
            CheckpointError: There is none, a part is missing or unreadable, it is not of ZeRO, or holds types that
                `weights_only` forbids.
        """
        files = CheckpointFiles.find(Path(path))
        stored = optimizer_states(files, weights_only)
        model = ModelFile.load(files, stage_of(stored[0]) if stored else None, weights_only)
        layout, facts = layout_of(files, model, stored, weights_only)
        names = {name: shape for group in model.groups for name, shape in group.items()}
        return cls(
            stage=facts.stage,
            world_size=facts.world_size,
            step=facts.step,
            has_moments=layout.has_moments,
            groups=facts.groups,
            shapes={name: names[name] for group in facts.groups for name in group},
            shared=model.shared,
            frozen=model.frozen,
            buffers=model.buffers,
            module=model.module,
            client_state=model.client_state,
            counters=model.counters,
            param_groups=facts.param_groups,
            loss_scaler=facts.loss_scaler,
            written_by=model.written_by,
            config=model.config,
            _layout=layout,
            _order=model.order,
        )

    def __contains__(self, name: str) -> bool:
        """Whether there is a parameter, trained or frozen, of this name."""
        stored = self._partner(name)
        return stored in self.shapes or stored in self.frozen

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter.

        Raises:
            CheckpointError: It is not stored.
        """
        stored = self._stored_name(name)
        return self.shapes[stored] if stored in self.shapes else tuple(self.frozen[stored].shape)

    @torch.no_grad()  # DeepSpeed stores masters that ask for gradients: what is filled with them would grow a history
    def read(self, name: str, kind: str, start: int = 0, numel: int | None = None) -> Tensor:
        """A slice of a parameter's master or moment, as a new tensor: flat, fp32, on the CPU.

        Args:
            name: The parameter; a tied one goes by any of its names.
            kind: `"fp32"` for the master weight, or the model's weight where there is no master; or a moment of Adam.
            start: First element in the flattened parameter.
            numel: Elements to read; all that follow if `None`.

        Raises:
            CheckpointError: The parameter or its moments are not stored.
            ValueError: `kind` is another, or the slice is not within the parameter.
        """
        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}. Choose one of them.")
        stored = self._stored_name(name)
        frozen = self.frozen[stored] if stored not in self.shapes else None
        total = math.prod(self.shapes[stored]) if frozen is None else frozen.numel()
        numel = total - start if numel is None else numel
        if not 0 <= start <= start + numel <= total:
            raise ValueError(
                f"`start` and `numel` must be within the {total} elements of `{name}`, got {start} and {numel}. Read a"
                " slice of them."
            )
        out = torch.empty(numel)
        if frozen is None:
            self._layout.copy(stored, kind, start, out)
        elif kind == "fp32":
            out.copy_(frozen.reshape(-1).narrow(0, start, numel))
        else:
            raise missing_kind(name, kind)
        return out

    def state_dict(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in the order of the module's `state_dict`, one parameter in memory at a time.

        Masters where there are any, else the model's weights; frozen weights and buffers. Tied names yield the same tensor
        object. What modules store by `get_extra_state` comes as it is, if it is a tensor; else it is in `module` alone.

        Args:
            dtype: Of everything that is floating-point.
        """
        tied: dict[str, Tensor] = {}
        partners = set(self.shared.values())
        # Every name once: a parameter that the module's file leaves out comes last.
        for name in dict.fromkeys((*self._order, *self.shapes, *self.frozen, *self.shared)):
            stored = self._partner(name)
            if stored in tied:
                yield name, tied[stored]
            elif (tensor := self._whole(stored, dtype)) is not None:
                if stored in partners:
                    tied[stored] = tensor
                yield name, tensor

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor | None:
        if name in self.shapes:
            return self.read(name, "fp32").view(self.shapes[name]).to(dtype)
        tensor = self.buffers[name] if name in self.buffers else self.frozen.get(name)
        if tensor is None:
            other = self.module.get(name)
            return other if isinstance(other, Tensor) else None
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _partner(self, name: str) -> str:
        return name if name in self.shapes else self.shared.get(name, name)

    def _stored_name(self, name: str) -> str:
        stored = self._partner(name)
        if stored in self.shapes or stored in self.frozen:
            return stored
        known = [*self.shapes, *self.frozen, *self.shared]
        close = difflib.get_close_matches(name, known, n=1)
        raise CheckpointError(
            f"`name` must be a parameter that the checkpoint holds, got {name!r}."
            f" {f'The closest of its {len(known)} names is {close[0]!r}' if close else f'It holds {len(known)} others'}:"
            " the model must be built as it was when it was saved."
        )
