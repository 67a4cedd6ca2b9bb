"""DeepSpeed's config as DeepSpeed itself reads it: tried out when the strategy is made, and its errors said in words."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from lightning_zenflow.ds_blocks import refuse_scheduler
from lightning_zenflow.shown import shown

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_READ_LATER = {"sequence_parallel_size", "allgather_size", *_BATCH_KEYS}
"""Keys that DeepSpeed reads under other circumstances."""

_CHECKED_BLOCKS = ("activation_checkpointing", "checkpoint", "data_types", "flops_profiler", "optimizer", "scheduler")
"""Blocks of which it silently ignores keys that it does not know; others refuse them, or hold what is free."""

_CHANGED_NAMES = {"cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory"}


def refuse_values(config: Mapping[str, Any]) -> None:
    """Refuses keys that DeepSpeed does not know, and values that it does not take.

    Args:
        config: In the shape that `ds_shape` asks for, without the `"zenflow"` block.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The message names key, value and what DeepSpeed says.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    if "scheduler" in config:
        refuse_scheduler(config["scheduler"])
    trial = copy.deepcopy({name: value for name, value in config.items() if name not in _BATCH_KEYS})
    zero = trial.get("zero_optimization", {})
    for name in _CHANGED_NAMES & zero.keys():
        if not isinstance(zero.pop(name), bool):
            raise TypeError(
                f"`zero_optimization.{name}` must be true or false, got {shown(config['zero_optimization'][name])}. Use"
                " `offload_optimizer` or `offload_param` instead."
            )
    read = _Read({**trial, "train_micro_batch_size_per_gpu": 1})
    try:
        DeepSpeedConfig(read)
    except Exception as error:
        _refuse(error, trial)
    _refuse_numbers(trial)
    _refuse_unread(read, trial)


class _Read(dict[str, Any]):
    """A config that knows which of its keys were asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({name: _Read(part) if isinstance(part, dict) else part for name, part in config.items()})
        self.asked: set[str] = set()

    def __copy__(self) -> _Read:
        return self

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:  # so that Python asks for the values when it unpacks this
        return iter(list(super().keys()))


def _refuse_unread(read: _Read, config: Mapping[str, Any], place: str = "") -> None:
    """Raises for a key that was not asked for."""
    for name in config:
        if name not in read.asked | _READ_LATER and not name.startswith("_"):  # comments do
            _refuse_key(place, name, sorted(read.asked | set(_BATCH_KEYS) if not place else read.asked))
    for name in _CHECKED_BLOCKS if not place else ():
        part = dict.get(read, name)
        if isinstance(part, _Read):
            _refuse_unread(part, config[name], name)


def _refuse_key(place: str, name: str, known: list[str]) -> NoReturn:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean `{close[0]}`?" if close else "Remove it, or begin its name with `_` if it is a comment."
    raise ValueError(f"`{place or 'config'}` has no key `{name}`: DeepSpeed would ignore it. {hint}")


# -- what DeepSpeed says -----------------------------------------------------------------------------------------------


def _refuse(error: Exception, config: Mapping[str, Any]) -> NoReturn:
    """Raises what DeepSpeed has raised, as our own error."""
    block = _guilty(config)
    problems = getattr(error, "errors", None)
    if not callable(problems):
        name, value = block or "config", shown(config[block]) if block else "this one"
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(
            f"`{name}` must be what DeepSpeed takes, got {value}: {reason}. Change or remove it."
        ) from error
    first, model = problems()[0], str(getattr(error, "title", ""))
    names = [str(part) for part in first["loc"]]
    place = [*([block] if block else []), *names]
    if first["type"] == "extra_forbidden":
        _refuse_key(".".join(place[:-1]), place[-1], _fields(model, names[:-1]))
    kind = TypeError if first["type"].endswith(("_type", "_parsing")) else ValueError
    raise kind(
        f"`{'.'.join(place)}` must be what DeepSpeed takes, got {shown(first['input'])}: {' '.join(first['msg'].split())}."
        " Change or remove it."
    ) from error


def _guilty(config: Mapping[str, Any]) -> str | None:
    """The key that DeepSpeed refuses by itself, if there is one."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for name, value in config.items():
        try:
            DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, name: copy.deepcopy(value)})
        except Exception:
            return name
    return None


def _fields(model: str, path: list[str]) -> list[str]:
    """Names that one of DeepSpeed's models knows, or a part of it."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    kinds = {kind.__name__: kind for kind in DeepSpeedConfigModel.__subclasses__()}
    fields: Any = getattr(kinds.get(model), "model_fields", {})
    for name in path:
        inner = [kind for kind in kinds.values() if name in fields and kind.__name__ in str(fields[name].annotation)]
        fields = getattr(inner[0], "model_fields", {}) if inner else {}
    return [alias for name, field in fields.items() for alias in (field.alias, name) if alias]


def _refuse_numbers(config: Mapping[str, Any]) -> None:
    """Raises for true or false where DeepSpeed would read 1 or 0."""
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for block, model in (("zero_optimization", DeepSpeedZeroConfig), ("fp16", DeepSpeedFP16Config)):
        for name, field in model.model_fields.items():
            for known in (name, field.alias):
                value = config.get(block, {}).get(known)
                if isinstance(value, bool) and field.annotation in (int, float):
                    raise TypeError(
                        f"`{block}.{known}` must be a number, got {value}. Write the number, or remove the key."
                    )
