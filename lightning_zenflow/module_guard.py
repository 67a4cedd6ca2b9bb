"""What ZeRO does to the user's module, and how it is undone."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_zenflow.pickled import HOOKS, Copies


class ModuleGuard:
    """Remembers the module as it was before DeepSpeed took it over.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        self._own_attributes = [(param, set(vars(param))) for param in module.parameters()]
        self._module = module
        self._own_hooks = {key for name in HOOKS for key in getattr(module, name)}
        self._copies: Copies | None = None

    def let_copy(self, engine: Any) -> None:
        """Has the module be pickled and copied without what DeepSpeed has added, until `release`.

        Args:
            engine: DeepSpeed's, just built.
        """
        self._copies = Copies(engine, self._own_hooks, self._own_attributes)

    def refuse_unfrozen(self) -> None:
        """Raises if a parameter was unfrozen since.

        Raises:
            RuntimeError: The message names it.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"`{name}.requires_grad` must stay False during `fit`, got True: ZeRO has no place for parameters that"
                    " were frozen when it started, so they would not be trained. Set it before `fit`."
                )

    def release(self, engine: Any, *, wait: bool = True) -> None:
        """Removes from the module what DeepSpeed leaves there, which would keep the engine and its buffers alive.

        Under ZeRO-3 parameters stay cut, with what they need for it.

        Args:
            engine: DeepSpeed's.
            wait: Whether the other ranks are still there, so that what is on its way from them can be waited for.
        """
        from lightning_zenflow.zero.release import release_cut

        if self._copies is not None:
            self._copies.end()
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()
        release_cut(engine.module, wait=wait)
        self._drop_attributes()

    def abandon(self) -> None:
        """The same where DeepSpeed failed to build its engine, whose hooks nobody else can reach."""
        from lightning_zenflow.zero.release import release_cut

        for hooks in (self._module._forward_pre_hooks, self._module._forward_hooks):
            for key in hooks.keys() - self._own_hooks:
                del hooks[key]
        release_cut(self._module, wait=False)
        self._drop_attributes()

    def _drop_attributes(self) -> None:
        for param, own in self._own_attributes:
            if not hasattr(param, "ds_id"):
                for name in vars(param).keys() - own:
                    delattr(param, name)
        self._own_attributes.clear()
