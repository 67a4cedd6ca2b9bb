"""Models and callbacks that ZenFlow cannot train correctly with, refused in words before training starts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

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


def refuse_callbacks(trainer: Any) -> None:
    """Raises if a callback of the Trainer needs what is not supported.

    Raises:
        ValueError: The message names the callback and the reason.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, LearningRateFinder):
            raise ValueError(
                "`LearningRateFinder` must be left out with ZenFlow: it makes a scheduler of PyTorch for the optimizer, which"
                " takes none of ZeRO's. Run it with another strategy."
            )
