"""Plain types, which PyTorch loads with `weights_only`: numbers of NumPy become Python's, other objects are refused by name.

Schedulers, configs and arguments may leave anything in an optimizer's groups; whoever reads the checkpoint must not have to
run code for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Kept as they are, in these very types: a number of an enum is pickled as one of its class."""

_BASES: tuple[type, ...] = (int, float, complex, str, bytes)


def plain(value: Any, name: str) -> Any:
    """`value` in tensors and plain types alone.

    Args:
        value: Anything; mappings become dicts.
        name: What to call it in the error.

    Raises:
        TypeError: It holds something else; the message says where.
    """
    return _converted(value, name, _refuse)


def plain_numbers(value: Any) -> Any:
    """The same without a refusal: other objects stay, and containers of a class of their own with all they hold."""
    return _converted(value, "", lambda kept, name: kept)


def _converted(value: Any, name: str, other: Callable[[Any, str], Any]) -> Any:
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return _converted(value.tolist(), name, other)
    if isinstance(value, np.generic):
        number = value.item()
        # What Python has no type for, as `longdouble`, gives itself.
        return float(number) if isinstance(number, np.floating) else _converted(number, name, other)
    if type(value) in (list, tuple, set):
        parts = (_converted(part, f"{name}[{index}]", other) for index, part in enumerate(value))
        return type(value)(parts)
    if type(value) is dict:
        return {
            _converted(key, f"a key of {name}", other): _converted(part, f"{name}[{key!r}]", other)
            for key, part in value.items()
        }
    return other(value, name)


def _refuse(value: Any, name: str) -> Any:
    """Of a class that only adds to a plain type, that type; anything else is an error."""
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    if isinstance(value, (list, tuple)):
        return plain((list if isinstance(value, list) else tuple)(value), name)
    if isinstance(value, Mapping):
        return plain(dict(value), name)
    raise TypeError(
        f"`{name}` must be a number, a text, a tensor, or a list or mapping of such, to be saved, got {value!r} of"
        f" {type(value).__module__}.{type(value).__qualname__}. Put a plain value in its place."
    )
