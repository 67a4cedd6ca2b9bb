"""How large a model is: from a number, from a class on the meta device, or from a Hugging Face config.json."""

from __future__ import annotations

import importlib
import json
import math
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_zenflow.selection import selected_count

from .estimate_config import Shape, shapes_of

MOST_NUMEL = 10**15
"""A thousand times the largest models: whatever is above is a slip, and formulas in floats need not bear it."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBGT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Size:
    """The trainable parameters of a model.

    Attributes:
        title: What was counted, for people.
        numel: All elements.
        vector_numel: Elements of parameters with fewer than two dimensions, which always live on the device.
        largest_numel: Elements of the largest parameter; 0 if not known.
        shapes: Shapes of the matrices; empty if not known.
    """

    title: str
    numel: int
    vector_numel: int = 0
    largest_numel: int = 0
    shapes: tuple[Shape, ...] = ()

    @property
    def columns(self) -> int:
        """Columns of all matrices; 0 if not known."""
        return sum(math.prod(shape[1:]) for shape in self.shapes)

    @classmethod
    def of(cls, title: str, shapes: Iterable[Shape]) -> Size:
        """Counts the parameters of these shapes."""
        every = list(shapes)
        matrices = tuple(shape for shape in every if len(shape) >= 2)
        numels = [math.prod(shape) for shape in every]
        vector_numel = sum(numels) - sum(math.prod(shape) for shape in matrices)
        return cls(title, sum(numels), vector_numel, max(numels, default=0), matrices)

    def selected_numel(self, topk_ratio: float) -> int:
        """Elements that live on the device: the selected columns of every matrix, and all vectors."""
        if not self.shapes:
            return self.vector_numel + round(topk_ratio * (self.numel - self.vector_numel))
        return self.vector_numel + sum(
            shape[0] * selected_count(topk_ratio, math.prod(shape[1:])) for shape in self.shapes
        )


def size_of(model: str, arguments: Mapping[str, Any] | None = None) -> Size:
    """The size of `model`, whatever it is.

    Args:
        model: A number of parameters such as 7e9, 7B or 350M; the path of a config.json; or a class path.
        arguments: Arguments of the class.

    Raises:
        ValueError: It is none of these, a config of an unknown family, or out of range. The message says what is known.
    """
    if model.endswith(".json") or _is_file(model):
        return from_config(Path(model))
    count = _COUNT.fullmatch(model.replace("_", "").replace(",", ""))
    if count:
        numel = float(count[1]) * _SUFFIXES[count[2].upper()]  # infinite where it is beyond a float
        if not 1 <= numel <= MOST_NUMEL:
            raise ValueError(_out_of_range(reprlib.repr(model)))
        return Size(f"{round(numel):,} parameters", round(numel))
    return from_class(model, arguments or {})


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long for a path, or in a folder that may not be read
        return False


def _out_of_range(got: str) -> str:
    return f"`model` must have 1 to {MOST_NUMEL:.0e} parameters, got {got}. Write a number such as 7B."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def from_class(path: str, arguments: Mapping[str, Any]) -> Size:
    """Builds the class at the dotted `path` and counts what it trains.

    On the meta device, so that nothing is allocated; on the CPU if its code needs real tensors.

    Raises:
        ValueError: There is no such class, it is no module, or it cannot be built.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "builtins"), name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, and may be a script
        raise ValueError(
            f"`model` must be a number such as 7B, a config.json or a class path, got {path!r} ({_one_line(error)}). Stand"
            " where the class can be imported from."
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(
            f"`model` must be a LightningModule or nn.Module, got {path!r}. Give the path of such a class."
        )
    try:
        built = _built(found, arguments)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`model` {path} must be buildable, got {type(error).__name__}: {_one_line(error)}. Give its arguments with"
            " --model-args."
        ) from error
    trained = [(name, param) for name, param in built.named_parameters() if param.requires_grad]
    lazy = [name for name, param in trained if is_lazy(param)]
    if lazy:
        raise ValueError(
            f"`model` must have parameters whose shapes are known once it is built, got {path} with the lazy {lazy[0]!r}."
            " Use layers that are not lazy, or give the number of parameters instead, such as 7B."
        )
    size = Size.of(path, (tuple(param.shape) for _, param in trained))
    if size.numel == 0:
        raise ValueError(f"`model` must have trainable parameters, got none in {path}. Are they made in `setup`?")
    if size.numel > MOST_NUMEL:
        raise ValueError(_out_of_range(f"{size.numel} in {path}"))
    return size


def _built(module: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is built to be counted, and not used
        try:
            with torch.device("meta"):
                return _made(module, arguments)
        except Exception:  # anything, from whatever the class does with its tensors
            return _made(module, arguments)


def _made(module: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    made = module(**arguments)
    if isinstance(made, LightningModule):
        made.configure_model()  # where large models make their layers
    return made


def from_config(path: Path) -> Size:
    """Counts the parameters of a Hugging Face model from its config.json, without building it.

    Raises:
        ValueError: The file is missing or no config, a field is missing or out of range, or the family is not known.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`model` must be a readable config.json, got {path} ({_one_line(error)}). Check the path."
        ) from error
    family, shapes = shapes_of(config, str(path))
    size = Size.of(f"{path.name} ({family})", shapes)
    if size.numel > MOST_NUMEL:
        raise ValueError(_out_of_range(f"{size.numel} by the fields of {path}"))
    return size
