"""jsonargparse's messages about ZenFlow's settings, said as `ZenFlowConfig` says them: in one line, with a remedy."""

from __future__ import annotations

import re
from dataclasses import fields

from lightning_zenflow import ZenFlowConfig

_NESTED = r"NestedArg\(key='zenflow\.(\w+)', val='(.*)'\)"
_NESTED_UNDER_NAME = re.compile(rf"import path string: (zenflow\w*)\b.*{_NESTED}", re.DOTALL)
_SETTING = re.compile(r"\bzenflow\.(\w+)")
_VALUE = re.compile(rf"(?:Got|Given) value: (?:{_NESTED}|(.*))")


def in_our_words(message: str) -> str:
    """Translates `message` if it is about a setting of ZenFlow; any other comes back as it is."""
    nested = _NESTED_UNDER_NAME.search(message)
    if nested:
        name, setting, value = nested.groups()
        return (
            f"`--trainer.strategy.zenflow.{setting}` must follow a class path, got `--trainer.strategy {name}`."
            f" Write `--zenflow.{setting} {value}`, or `--trainer.strategy lightning_zenflow.ZenFlowStrategy`."
        )
    setting, given = _SETTING.search(message), _VALUE.search(message)
    if setting and (given or setting[1] not in {field.name for field in fields(ZenFlowConfig)}):
        try:
            ZenFlowConfig.from_mapping({setting[1]: given and (given[2] or given[3])})
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
    return message
