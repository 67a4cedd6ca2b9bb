"""Models and callbacks that ZenFlow cannot train correctly with, refused in words before training starts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, LearningRateFinder, ModelPruning, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

_REMEDY = "Use another strategy for this model."


def refuse_unsupported(model: nn.Module) -> None:
    """Raises if the model is cut over devices by something other than ZeRO, or has gradients ZeRO cannot flatten.

    Raises:
        NotImplementedError: The message names the module or parameter and the reason.
    """
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from torch.distributed.tensor import DTensor

    for name, module in model.named_modules():
        if isinstance(module, PipelineModule):
            raise NotImplementedError(f"Pipeline parallel module `{name}` is not supported by ZenFlow. {_REMEDY}")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise NotImplementedError(
                f"`{name}.sparse` must be False with ZenFlow, got True: ZeRO cannot flatten sparse gradients. Leave it out."
            )
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if is_moe_param(param):
            raise NotImplementedError(
                f"Expert parameter `{name}` (mixture of experts) is not supported by ZenFlow. {_REMEDY}"
            )
        if isinstance(param, DTensor) or is_model_parallel_parameter(param):
            raise NotImplementedError(f"Tensor parallel parameter `{name}` is not supported by ZenFlow. {_REMEDY}")
        if param.is_complex():
            raise NotImplementedError(f"Complex parameter `{name}` is not supported by ZenFlow. {_REMEDY}")


def refuse_for_stage(model: LightningModule, ranks: int, *, is_stage_3: bool) -> None:
    """Raises if the module, as it is before an engine is built, does not fit the ZeRO stage.

    Raises:
        NotImplementedError: Stage 3 cannot gather a parameter; the message names it.
        ValueError: A parameter is cut, or a copy of one, where it must not be; the message names it.
    """
    if not is_stage_3:
        _refuse_cut(model)
        return
    _refuse_compiled(model)
    _refuse_deep_copies(model)
    if ranks > 1:
        _refuse_empty(model)


def _refuse_empty(model: nn.Module) -> None:
    """Raises if a parameter has no elements, which DeepSpeed fails to gather from several ranks under ZeRO-3.

    Raises:
        NotImplementedError: The message names the parameter.
    """
    for name, param in model.named_parameters():
        if getattr(param, "ds_numel", param.numel()) == 0:
            shape = list(getattr(param, "ds_shape", param.shape))
            raise NotImplementedError(
                f"`{name}` must have elements with ZeRO stage 3 on several ranks, got shape {shape}: DeepSpeed cannot gather"
                " it. Leave it out."
            )


def _refuse_compiled(model: nn.Module) -> None:
    """Raises if a submodule was replaced by a compiled one, whose parameters ZeRO-3 cannot gather.

    Raises:
        NotImplementedError: The message names the module.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise NotImplementedError(
                f"`{name}` must not be wrapped by `torch.compile` with ZeRO stage 3. Compile it in place, with"
                f" `self.{name}.compile()`."
            )


def _refuse_deep_copies(model: LightningModule) -> None:
    """Raises if a layer was copied while its parameters were cut already, as `nn.TransformerEncoder` does.

    Raises:
        ValueError: The message names the parameter.
    """
    if not is_overridden("configure_model", model, LightningModule):
        return  # nothing was cut yet
    for name, param in model.named_parameters():
        if not hasattr(param, "ds_id") and tuple(param.shape) == (0,):
            raise ValueError(
                f"`{name}` must be made in `configure_model` itself with ZeRO stage 3, got an empty deep copy of a parameter"
                " that was cut before. Make each layer anew instead of copying it, as `nn.TransformerEncoder` does, or make"
                " it in `__init__`."
            )


def _refuse_cut(model: nn.Module) -> None:
    """Raises if parameters are cut from an earlier run under ZeRO-3, of which other stages would see nothing.

    Raises:
        ValueError: The message names a parameter.
    """
    for name, param in model.named_parameters():
        if hasattr(param, "ds_id"):
            raise ValueError(
                f"`{name}` must be whole for ZeRO stages 1 and 2, got one that an earlier run under ZeRO-3 has cut. Make the"
                " module anew (`load_from_checkpoint`), or use `zenflow_stage_3`."
            )


def refuse_callbacks(trainer: Any, *, is_stage_3: bool) -> None:
    """Raises if a callback of the Trainer needs what is not supported.

    Raises:
        ValueError: The message names the callback and the reason.
    """
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, LearningRateFinder):
            raise ValueError(
                f"`{name}` must be left out with ZenFlow: it makes a scheduler of PyTorch for the optimizer, which"
                " takes none of ZeRO's. Run it with another strategy."
            )
        if isinstance(callback, BaseFinetuning):  # Lightning refuses it too, but only once it has frozen the module
            raise ValueError(
                f"`{name}` must be left out with ZenFlow: ZeRO has no place for parameters that were frozen when it started."
                " Train the parts in a `fit` each, or use another strategy."
            )
        if is_stage_3 and isinstance(callback, (WeightAveraging, ModelPruning)):
            raise ValueError(
                f"`{name}` must be left out with ZeRO stage 3: it works on whole weights, of which each rank has a part. Use"
                " `zenflow`, which is stage 2, or remove the callback."
            )
        if isinstance(callback, ModelPruning):
            _refuse_pruning(callback, trainer)


def _refuse_pruning(callback: ModelPruning, trainer: Any) -> None:
    """Raises if weights would be replaced, or saved, while they are pruned.

    Raises:
        ValueError: The message names the argument.
    """
    name = type(callback).__name__
    if callback._use_lottery_ticket_hypothesis:
        raise ValueError(
            f"`use_lottery_ticket_hypothesis` must be False for `{name}` with ZenFlow, got"
            f" {callback._use_lottery_ticket_hypothesis!r}: it puts first weights back, and the fp32 masters would stay as they"
            " are. Set it to False."
        )
    saving = next((other for other in trainer.callbacks if isinstance(other, Checkpoint)), None)
    if saving is not None:
        raise ValueError(
            f"`{type(saving).__name__}` must be left out beside `{name}` with ZenFlow: what is saved while weights are pruned"
            " cannot be loaded. Set `enable_checkpointing` to False, and save after `fit`."
        )


def is_pruned(module: nn.Module) -> bool:
    """Whether weights of the module are masked now, by PyTorch's own pruning."""
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return any(isinstance(hook, BasePruningMethod) for hook in hooks)
