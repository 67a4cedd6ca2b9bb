"""jsonargparse's messages about what is ours, said as the package says them: in one line, with a remedy."""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import fields
from typing import Any

from lightning_zenflow import AutoTuner, StallMonitor, ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.arguments import known_arguments

_NESTED = r"NestedArg\(key='zenflow\.(\w+)', val='(.*)'\)"
_NESTED_UNDER_NAME = re.compile(rf"import path string: (zenflow\w*)\b.*{_NESTED}", re.DOTALL)
_SETTING = re.compile(r"\bzenflow\.(\w+)")
_UNKNOWN_SETTING = re.compile(r"(?:Group|Key|Option) '(?:[\w.]*\.)?zenflow' does not accept option '(.*?)'", re.DOTALL)
_OF_SETTING = re.compile(r'Parser key "(?:[\w.]*\.)?zenflow\.(\w+)"(?: argument)?:\s+(.*)', re.DOTALL)
_VALUE = re.compile(rf"(?:Got|Given) value: (?:{_NESTED}|(.*))")
_SECTION = re.compile(r"Unable to load config [\"'](.*?)[\"']", re.DOTALL)

_CLASSES: dict[str, Any] = {kind.__name__: kind for kind in (AutoTuner, StallMonitor, ZenFlowStrategy)}
_OF_CLASS = re.compile(
    rf"Problem with given class_path 'lightning_zenflow\.(?:\w+\.)*({'|'.join(_CLASSES)})':(.*?)(?:- Problem with|\Z)",
    re.DOTALL,
)
_NOT_ACCEPTED = re.compile(r"(?:Option|Key|Group) '([\w.]+)' is not (?:accepted|expected)")
_EXPECTED = re.compile(r"Parser key \"(?:init_args\.)?(\w+)\":\s+(.*)", re.DOTALL)
_GIVEN = re.compile(r"(?:Got|Given) value: (.*)")
_MISSPELLED = re.compile(r"(?:class_path|import path string)[: ]+'?(?:lightning_zenflow\.)(\w+)'?")


def in_our_words(message: str) -> str:
    """Translates `message` if it is about something of ZenFlow's; any other comes back as it is."""
    nested = _NESTED_UNDER_NAME.search(message)
    if nested:
        name, setting, value = nested.groups()
        return (
            f"`--trainer.strategy.zenflow.{setting}` must follow a class path, got `--trainer.strategy {name}`."
            f" Write `--zenflow.{setting} {value}`, or `--trainer.strategy lightning_zenflow.ZenFlowStrategy`."
        )
    return _about_setting(message) or _about_section(message) or _about_class(message) or message


def _about_setting(message: str) -> str | None:
    """A field of `ZenFlowConfig`."""
    unknown = _UNKNOWN_SETTING.search(message)
    if unknown:
        return _refused({unknown[1].partition(".")[0]: None})
    setting, given = _SETTING.search(message), _VALUE.search(message)
    if setting and (given or setting[1] not in {field.name for field in fields(ZenFlowConfig)}):
        refused = _refused({setting[1]: given and (given[2] or given[3])})
        if refused:
            return refused
    unread = _OF_SETTING.search(message)  # not even a value, such as a number of too many digits
    if unread:
        return f"`{unread[1]}` must be a value that can be read: {' '.join(unread[2].split())}. Change it."
    return None


def _refused(settings: dict[str, Any]) -> str | None:
    """What `ZenFlowConfig` says of settings that it does not take."""
    try:
        ZenFlowConfig.from_mapping(settings)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def _about_section(message: str) -> str | None:
    """The section `zenflow` as a whole."""
    given = _SECTION.search(message) or _GIVEN.search(message)
    if not message.startswith('Parser key "zenflow":'):
        return None
    what = f", got {given[1]!r}" if given else f": {' '.join(message.split()[3:]).rstrip('.')}"
    return f"`zenflow` must be a mapping of settings{what}. Write `zenflow: {{...}}`."


def _about_class(message: str) -> str | None:
    """An argument of a callback of ours, or of the strategy; jsonargparse lists what it has tried, over many lines."""
    problem = _OF_CLASS.search(message)
    if problem is None:
        wrong = _MISSPELLED.search(message)
        close = difflib.get_close_matches(wrong[1], _CLASSES, n=1, cutoff=0.7) if wrong else []
        if wrong is None or wrong[1] in _CLASSES or not close:
            return None
        return f"`lightning_zenflow` has no class `{wrong[1]}`. Did you mean `lightning_zenflow.{close[0]}`?"
    name, said = problem.groups()
    known = known_arguments(_CLASSES[name])
    unknown = _NOT_ACCEPTED.search(said)
    argument = unknown[1].rpartition(".")[2] if unknown else ""
    if unknown and argument not in known:
        close = difflib.get_close_matches(argument, known, n=1)
        hint = f"Did you mean `{close[0]}`?" if close else f"Known arguments: {', '.join(known)}."
        return f"`{name}` has no argument `{argument}`. {hint}"
    wrong_value = _EXPECTED.search(said)
    if wrong_value is None or wrong_value[1] not in known:
        return None
    annotation = known[wrong_value[1]]
    shown = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    given = _GIVEN.search(wrong_value[2])
    return (
        f"`{wrong_value[1]}` of `{name}` must be of type {shown}, got {given[1]!r}. Change it."
        if given
        else f"`{wrong_value[1]}` of `{name}` must be of type {shown}. Change it."
    )
