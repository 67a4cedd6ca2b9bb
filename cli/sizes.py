"""How large a model is: from a number, from a class on the meta device, or from a Hugging Face config.json."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zenflow.selection import selected_count

Shape = tuple[int, ...]

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
        ValueError: It is none of these, or a config of an unknown family. The message says what is known.
    """
    if model.endswith(".json") or Path(model).is_file():
        return from_config(Path(model))
    count = _COUNT.fullmatch(model.replace("_", "").replace(",", ""))
    if count:
        numel = round(float(count[1]) * _SUFFIXES[count[2].upper()])
        if numel < 1:
            raise ValueError(f"`model` must have at least one parameter, got {model}. Write a number such as 7B.")
        return Size(f"{numel:,} parameters", numel)
    return from_class(model, arguments or {})


def from_class(path: str, arguments: Mapping[str, Any]) -> Size:
    """Builds the class at the dotted `path` and counts what it trains.

    On the meta device, so that nothing is allocated; on the CPU if its code needs real tensors.

    Raises:
        ValueError: There is no such class, it is no module, or it cannot be built.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "builtins"), name)
    except Exception as error:  # the user's module may raise anything
        raise ValueError(
            f"`model` must be a number such as 7B, a config.json or a class path, got {path!r} ({error}). Stand where the"
            " class can be imported from."
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(
            f"`model` must be a LightningModule or nn.Module, got {path!r}. Give the path of such a class."
        )
    try:
        try:
            with torch.device("meta"):
                built = found(**arguments)
        except Exception:  # anything, from whatever the class does with its tensors
            built = found(**arguments)
    except Exception as error:
        raise ValueError(
            f"`model` {path} must be buildable, got {type(error).__name__}: {error}. Give its arguments with --model-args."
        ) from error
    size = Size.of(path, (tuple(param.shape) for param in built.parameters() if param.requires_grad))
    if size.numel == 0:
        raise ValueError(f"`model` must have trainable parameters, got none in {path}. Are they made in `setup`?")
    return size


def from_config(path: Path) -> Size:
    """Counts the parameters of a Hugging Face model from its config.json, without building it.

    Raises:
        ValueError: The file is missing or no config, a field is missing, or the family is not known.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"`model` must be a readable config.json, got {path} ({error}). Check the path.") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in FAMILIES:
        raise ValueError(
            f"`model_type` must be one of {', '.join(FAMILIES)}, got {family!r}. Give the number of parameters instead, such"
            " as 7B, or a class path."
        )
    try:
        shapes = FAMILIES[family](config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"`model` must have all fields of a {family} config, got {path} without {error}.") from error
    return Size.of(f"{path.name} ({family})", shapes)


def _llama(config: Mapping[str, Any], qkv_bias: bool = False) -> list[Shape]:
    """Llama, Mistral and, with biases, Qwen2: grouped-query attention, gated MLP, RMSNorm."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_width = config.get("head_dim") or width // heads
    queries, keys = heads * head_width, (config.get("num_key_value_heads") or heads) * head_width
    layer: list[Shape] = [(queries, width), (keys, width), (keys, width), (width, queries)]
    layer += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    if qkv_bias or config.get("attention_bias"):
        layer += [(queries,), (keys,), (keys,)]
    if config.get("attention_bias") and not qkv_bias:
        layer += [(width,)]
    if config.get("mlp_bias"):
        layer += [(inner,), (inner,), (width,)]
    ends: list[Shape] = [(vocab, width), (width,)]
    if not config.get("tie_word_embeddings", False):
        ends += [(vocab, width)]
    return ends + layer * config["num_hidden_layers"]


def _gpt2(config: Mapping[str, Any]) -> list[Shape]:
    """GPT-2: learned positions, LayerNorm, biases everywhere; the head is the embedding."""
    width, vocab = config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * width
    norm: list[Shape] = [(width,), (width,)]
    layer = [*norm, *norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width, inner), (inner,), (inner, width), (width,)]
    ends: list[Shape] = [(vocab, width), (config["n_positions"], width), *norm]
    if not config.get("tie_word_embeddings", True):
        ends += [(vocab, width)]
    return ends + layer * config["n_layer"]


def _bert(config: Mapping[str, Any]) -> list[Shape]:
    """BERT with its pooler, without a head for a task."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    norm: list[Shape] = [(width,), (width,)]
    square: list[Shape] = [(width, width), (width,)]
    layer = [*square * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    ends: list[Shape] = [(config[name], width) for name in ("vocab_size", "max_position_embeddings", "type_vocab_size")]
    return [*ends, *norm, *square] + layer * config["num_hidden_layers"]


FAMILIES: dict[str, Callable[[Mapping[str, Any]], list[Shape]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda config: _llama(config, qkv_bias=True),
    "gpt2": _gpt2,
    "bert": _bert,
}
"""Shapes of all parameters by `model_type`."""
