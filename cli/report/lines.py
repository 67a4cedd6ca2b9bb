"""Turns one line of a record into a typed value, and says in words what is wrong with a line that cannot be one."""

from __future__ import annotations

from reprlib import Repr
from sys import intern
from typing import Any

from .record import FORMAT, LANES, Decision, RecordError, Span, Step

_MOST = 1e12
"""Above any number of seconds. Bounds what the sums and the microseconds of the report have to bear."""

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def kind_of(line: Any) -> str:
    """The kind of a line.

    Raises:
        ValueError: It has none. All functions here raise it where a field is not what it must be.
    """
    if not isinstance(line, dict):
        raise ValueError(f"`line` must be a JSON object, got {_short.repr(line)}")
    return str(_field(line, "kind", isinstance(line.get("kind"), str), "a string"))


def read_header(line: dict[str, Any]) -> dict[str, Any]:
    """Checks a line of kind `run`.

    Raises:
        RecordError: The format is another one.
    """
    if line.get("format") != FORMAT:
        raise RecordError(
            f"`format` must be {FORMAT} for this version of lightning-zenflow, got {_short.repr(line.get('format'))}."
            " Make the report with the version that wrote the record."
        )
    _whole(line, "rank")
    _whole(line, "world_size", least=1)
    if line.get("stall_budget") is not None:
        _number(line, "stall_budget")
    for key in ("settings", "versions"):
        _field(line, key, isinstance(line.get(key), dict), "a mapping")
    return line


def read_step(line: dict[str, Any], before: int) -> Step:
    """Reads a line of kind `step`; `before` is the number of the step before it, or 0."""
    step = _whole(line, "step", least=1)
    _field(line, "step", step > before, f"above the step before it, {before}")
    norm = line.get("grad_norm")  # NaN and infinity are welcome: a run that ends so needs its report most
    _field(line, "grad_norm", isinstance(norm, (int, float)), "a number")
    _field(line, "spans", isinstance(line.get("spans"), list), "a list")
    update_interval, select_interval = _intervals(line)
    return Step(
        step=step,
        begin_secs=_number(line, "begin_secs", -_MOST),
        step_secs=_number(line, "step_secs"),
        update_stall_secs=_number(line, "update_stall_secs"),
        select_stall_secs=_number(line, "select_stall_secs"),
        worker_accumulate_secs=_number(line, "worker_accumulate_secs"),
        worker_update_secs=_number(line, "worker_update_secs"),
        to_host_bytes=_whole(line, "to_host_bytes"),
        to_device_bytes=_whole(line, "to_device_bytes"),
        skipped_steps=_whole(line, "skipped_steps"),
        update_interval=update_interval,
        select_interval=select_interval,
        reselected=_field(line, "reselected", isinstance(line.get("reselected"), bool), "true or false"),
        grad_norm=float(line["grad_norm"]),
        spans=tuple(map(_read_span, line["spans"])),
    )


def read_decision(line: dict[str, Any], changes: int) -> Decision:
    """Reads a line of kind `decision`; `changes` is how many decisions before it changed an interval."""
    update_interval, select_interval = _intervals(line)
    _field(line, "previous", isinstance(line.get("previous"), dict), "a mapping")
    kept = _intervals(line["previous"]) == (update_interval, select_interval)
    window = line.get("window")
    return Decision(
        number=None if kept else changes + 1,
        step=_whole(line, "step"),
        update_interval=update_interval,
        select_interval=select_interval,
        reason=_field(line, "reason", isinstance(line.get("reason"), str), "a string"),
        window=window if isinstance(window, dict) else {},
    )


def _intervals(line: dict[str, Any]) -> tuple[int, int | None]:
    nothing_selected = "select_interval" in line and line["select_interval"] is None
    return (
        _whole(line, "update_interval", least=1),
        None if nothing_selected else _whole(line, "select_interval", least=1),
    )


def _read_span(span: Any) -> Span:
    if isinstance(span, list) and len(span) == 4:
        lane, name, start, secs = span
        # Work of before the run, such as the end of an earlier `fit`, starts before 0.
        if lane in LANES and isinstance(name, str) and _is_number(start, -_MOST) and _is_number(secs):
            return Span(intern(lane), intern(name), float(start), float(secs))  # the same few names at every step
    raise ValueError(f"`spans` must hold lists of lane, name, start and seconds, got {_short.repr(span)}")


def _field(line: dict[str, Any], key: str, holds: bool, rule: str) -> Any:
    """The field `key`, or an error that says what it must be."""
    if not holds:
        raise ValueError(f"`{key}` must be {rule}, got {_short.repr(line[key]) if key in line else 'nothing'}")
    return line[key]


def _is_number(value: Any, least: float = 0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST  # NaN is not


def _number(line: dict[str, Any], key: str, least: float = 0) -> float:
    rule = "a finite number" if least < 0 else "a finite number of 0 or more"
    return float(_field(line, key, _is_number(line.get(key), least), rule))


def _whole(line: dict[str, Any], key: str, least: int = 0) -> int:
    value = line.get(key)
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= 2**53
    return int(_field(line, key, whole, f"a whole number of {least} or more"))
