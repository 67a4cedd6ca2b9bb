"""Shapes of all parameters of a Hugging Face model, from the fields of its config.json."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Shape = tuple[int, ...]

MOST = 10**8
"""For a size: fifty times the largest vocabulary."""

MOST_LAYERS = 10**4

_REMEDY = "Mend the config, or give the number of parameters instead, such as 7B."


def shapes_of(config: Any, title: str) -> tuple[str, list[Shape]]:
    """The family of a model, and the shapes of its parameters.

    Args:
        config: What config.json holds.
        title: What to call it in messages.

    Raises:
        ValueError: The family is not known, a field is missing, or it is no whole number in a sane range.
    """
    family = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"`model_type` must be one of {', '.join(FAMILIES)}, got {reprlib.repr(family)}. Give the number of parameters"
            " instead, such as 7B, or a class path."
        )
    try:
        return family, FAMILIES[family](config)
    except KeyError as error:
        raise ValueError(
            f"`model` must have all fields of a {family} config, got {title} without {error}. {_REMEDY}"
        ) from error


def _whole(config: Mapping[str, Any], name: str, most: int = MOST, default: int | None = None) -> int:
    """The size in the field `name`; `default`, if there is one, where the field is missing or null."""
    value = config.get(name) if default is not None else config[name]
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"`{name}` must be a whole number from 1 to {most}, got {reprlib.repr(value)}. {_REMEDY}")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be true or false, got {reprlib.repr(value)}. {_REMEDY}")
    return value


def _head_width(config: Mapping[str, Any], width: int, heads: int) -> int:
    if config.get("head_dim") is None and width % heads:
        raise ValueError(f"`num_attention_heads` must divide `hidden_size` {width}, got {heads}. {_REMEDY}")
    return _whole(config, "head_dim", default=width // heads)


def _llama(config: Mapping[str, Any], qkv_bias: bool = False) -> list[Shape]:
    """Llama, Mistral and, with biases, Qwen2: grouped-query attention, gated MLP, RMSNorm."""
    width, inner, vocab = (_whole(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, attention_bias = _whole(config, "num_attention_heads"), _flag(config, "attention_bias")
    head_width = _head_width(config, width, heads)
    queries, keys = heads * head_width, _whole(config, "num_key_value_heads", heads, default=heads) * head_width
    layer: list[Shape] = [(queries, width), (keys, width), (keys, width), (width, queries)]
    layer += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    if qkv_bias or attention_bias:
        layer += [(queries,), (keys,), (keys,)]
    if attention_bias and not qkv_bias:
        layer += [(width,)]
    if _flag(config, "mlp_bias"):
        layer += [(inner,), (inner,), (width,)]
    ends: list[Shape] = [(vocab, width), (width,)]
    if not _flag(config, "tie_word_embeddings"):
        ends += [(vocab, width)]
    return ends + layer * _whole(config, "num_hidden_layers", MOST_LAYERS)


def _gpt2(config: Mapping[str, Any]) -> list[Shape]:
    """GPT-2: learned positions, LayerNorm, biases everywhere; the head is the embedding."""
    width, vocab, positions = (_whole(config, name) for name in ("n_embd", "vocab_size", "n_positions"))
    inner = _whole(config, "n_inner", default=4 * width)
    norm: list[Shape] = [(width,), (width,)]
    layer = [*norm, *norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width, inner), (inner,), (inner, width), (width,)]
    ends: list[Shape] = [(vocab, width), (positions, width), *norm]
    if not _flag(config, "tie_word_embeddings", default=True):
        ends += [(vocab, width)]
    return ends + layer * _whole(config, "n_layer", MOST_LAYERS)


def _bert(config: Mapping[str, Any]) -> list[Shape]:
    """BERT with its pooler, without a head for a task."""
    width, inner = _whole(config, "hidden_size"), _whole(config, "intermediate_size")
    norm: list[Shape] = [(width,), (width,)]
    square: list[Shape] = [(width, width), (width,)]
    layer = [*square * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    tables = ("vocab_size", "max_position_embeddings", "type_vocab_size")
    ends: list[Shape] = [(_whole(config, name), width) for name in tables]
    return [*ends, *norm, *square] + layer * _whole(config, "num_hidden_layers", MOST_LAYERS)


FAMILIES: dict[str, Callable[[Mapping[str, Any]], list[Shape]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda config: _llama(config, qkv_bias=True),
    "gpt2": _gpt2,
    "bert": _bert,
}
"""Shapes of all parameters by `model_type`."""
