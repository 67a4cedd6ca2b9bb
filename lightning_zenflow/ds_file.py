"""DeepSpeed's config from where it is given: a mapping, a JSON file, or the environment variable that names one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lightning_zenflow.shown import shown

_EXAMPLE = '{"zero_optimization": {"stage": 2}}'


def read_config(config: Any, variable: str) -> Mapping[str, Any] | None:
    """The config as it stands; `None` if there is none.

    Args:
        config: A mapping or a path. Goes before the variable.
        variable: Name of the environment variable that may hold a path.

    Raises:
        TypeError: It is neither.
        ValueError: The file cannot be read, or holds something else than one JSON object. The message names it.
    """
    if config is None and variable in os.environ:
        return _read(os.environ[variable], variable)
    if config is None or isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(
            f"`config` must be a mapping or the path of a JSON file, got {shown(config)}. Write, for example,"
            f" config={_EXAMPLE}."
        )
    return _read(os.fspath(config), "config")


def _read(name: str, source: str) -> Mapping[str, Any]:
    def refuse(what: str) -> NoReturn:
        raise ValueError(
            f"`{source}` must be the path of a JSON file with a DeepSpeed config, got {shown(name)}, {what}. Write, for"
            f" example, {_EXAMPLE} into it."
        )

    try:
        path = Path(name)
        if not path.exists():
            refuse("which is not there")
        if not path.is_file():
            refuse("which is no file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"which cannot be read: {getattr(error, 'strerror', None) or error}")
    if not text.strip():
        refuse("which is empty")
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        refuse(f"which is no JSON: {error or type(error).__name__}")
    if not isinstance(config, dict):
        refuse(f"which holds {shown(config)} instead of an object")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice, JSON readers keep the last value and say nothing."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} is there twice")
    return dict(pairs)
