"""What ZeRO-3 leaves on a module, and its way back to modules whose parameters are cut but belong to no engine."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param, is_zero_param
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

# The first two hold the engine's hooks, and DeepSpeed would call those of a run before in the next one.
_OF_MODULES = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
    "ds_recompute_parameters",
    "ds_inflight_param_registry",
    "ds_id",
    "_original_parameters",
)


def release_cut(module: nn.Module, *, wait: bool) -> None:
    """Takes a run's state off a module whose parameters are cut. They stay cut, and what they need for it stays there.

    Args:
        module: After its engine has been destroyed.
        wait: Whether to wait for parameters that are on their way; a rank that fails must not wait for others.
    """
    params = [param for param in module.parameters() if is_zero_param(param)]
    if not params:
        return
    registry = getattr(module, "ds_inflight_param_registry", {})
    for param in params:
        handle = registry.pop(param, None)
        if handle is not None and wait:
            handle.wait()
        _cut(param)
    modules = list(module.modules())
    for part in modules:
        if isinstance(part._parameters, parameter_offload.ZeROOrderedDict):
            # Its own gathers what is read in a forward, for which there is no engine any more.
            part._parameters = dict(part._parameters.items())
        for name in _OF_MODULES:
            vars(part).pop(name, None)
    ours = set(map(id, modules))
    stack: list[Any] = parameter_offload.FWD_MODULE_STACK
    stack[:] = [part for part in stack if id(part) not in ours]
    _forget_modules()


def _forget_modules() -> None:
    """Clears the cache of a method, which would keep every module that has ever trained."""
    method: Any = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in method.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _cut(param: Any) -> None:
    """Frees a parameter's gathered values, which an exception within a forward leaves there."""
    param.ds_active_sub_modules.clear()
    if param.ds_status is ZeroParamStatus.AVAILABLE:
        param.partition()
    elif param.ds_status is ZeroParamStatus.INFLIGHT:
        free_param(param)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    param.ds_persist = False  # the next engine may have other limits
    vars(param).pop("_z3_optimizer", None)
