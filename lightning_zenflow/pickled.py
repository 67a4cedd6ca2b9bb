"""Copies of a module while DeepSpeed has it, by pickle or `copy.deepcopy`: the module alone, as it is without an engine.

DeepSpeed hangs functions, process groups and its own tensors on module and parameters, which cannot be pickled, and which a
copy must not call. A copy of the engine, which is `trainer.model`, is the module as well: an engine is bound to its process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
"""Where a module keeps its hooks, by key."""

_REDUCE, _DEEPCOPY = "__reduce_ex__", "__deepcopy__"


class Copies:
    """Has pickle and deep copies leave out what DeepSpeed has added. `end` takes back what is changed for it.

    Pickle and `copy` look for their methods at the object itself first, and only then at its class.

    Args:
        engine: DeepSpeed's, just built.
        own_hooks: Keys of the hooks that the module had before.
        own_attributes: Parameters, and the names of the attributes that they had before.
    """

    def __init__(
        self, engine: Any, own_hooks: Iterable[int], own_attributes: Iterable[tuple[nn.Parameter, set[str]]]
    ) -> None:
        module: nn.Module = engine.module
        self._changed: list[tuple[Any, str]] = []
        foreign_hooks = _hook_keys(module) - set(own_hooks)
        self._give(engine, _REDUCE, lambda protocol: (_same, (module,)))
        self._give(module, _REDUCE, lambda protocol: _reduced_module(module, protocol, foreign_hooks))
        for name, part in module.named_modules():
            if any(hasattr(param, "ds_id") for param in part.parameters()):
                self._give(part, _REDUCE, partial(_refuse_module, name or "the module"))
        names = {param: name for name, param in module.named_parameters()}
        for param, own in own_attributes:
            name, foreign = names.get(param, "a parameter"), vars(param).keys() - own
            self._give(param, _REDUCE, _parameter_reducer(param, name, foreign))
            if hasattr(param, "ds_id"):
                self._give(param, _DEEPCOPY, _parameter_copier(param, name))

    def _give(self, holder: Any, name: str, method: Callable[..., Any]) -> None:
        vars(holder)[name] = method
        self._changed.append((holder, name))

    def end(self) -> None:
        """Idempotent."""
        for holder, name in self._changed:
            vars(holder).pop(name, None)
        self._changed.clear()


def _hook_keys(module: nn.Module) -> set[int]:
    return {key for name in HOOKS for key in getattr(module, name)}


def _same(module: nn.Module) -> nn.Module:
    """What a pickled engine is loaded as."""
    return module


def _reduced_module(module: nn.Module, protocol: Any, foreign_hooks: set[int]) -> tuple[Any, ...]:
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    made, arguments, state, *rest = reduced
    if isinstance(state, Mapping):
        state = {name: value for name, value in state.items() if name != _REDUCE}
        for name in HOOKS:
            if name in state:
                hooks = ((key, hook) for key, hook in state[name].items() if key not in foreign_hooks)
                state[name] = OrderedDict(hooks)
    return made, arguments, state, *rest


def _refuse_module(name: str, protocol: Any) -> tuple[Any, ...]:
    """Raises: each part of a module that ZeRO-3 has cut has hooks of DeepSpeed's, and weights elsewhere.

    Raises:
        RuntimeError: It names the part.
    """
    raise RuntimeError(
        f"`{name}` must have all of its weights to be copied or pickled, got a module that ZeRO-3 has cut over the ranks. Use"
        " `trainer.save_checkpoint`, or copy its parameters within `deepspeed.zero.GatheredParameters`."
    )


def _parameter_reducer(param: Any, name: str, foreign: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    def reduced(protocol: Any) -> tuple[Any, ...]:
        _refuse_cut(param, name)
        # Of its own: it is a part of a buffer here, and pickle would write all of that for each parameter.
        weights = param.detach().clone(memory_format=torch.preserve_format)
        # One that was cut before the engine came has had all of DeepSpeed's attributes by then.
        kept = vars(param).keys() - {*foreign, _REDUCE, _DEEPCOPY} if not hasattr(param, "ds_id") else set()
        state = {key: value for key, value in vars(param).items() if key in kept}
        no_hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (weights, param.requires_grad, no_hooks)
        if not state:
            return torch._utils._rebuild_parameter, arguments
        return torch._utils._rebuild_parameter_with_state, (*arguments, state)

    return reduced


def _parameter_copier(param: Any, name: str) -> Callable[[dict[int, Any]], Any]:
    def copied(memo: dict[int, Any]) -> Any:
        _refuse_cut(param, name)
        return type(param).__deepcopy__(param, memo)

    return copied


def _refuse_cut(param: Any, name: str) -> None:
    """Raises if a parameter's weights are elsewhere.

    Raises:
        RuntimeError: It names the parameter.
    """
    if getattr(param, "ds_numel", param.numel()) != param.numel():
        raise RuntimeError(
            f"`{name}` must be whole to be copied or pickled, got one that ZeRO-3 has cut over the ranks. Use"
            " `trainer.save_checkpoint`, or copy within `deepspeed.zero.GatheredParameters`."
        )
