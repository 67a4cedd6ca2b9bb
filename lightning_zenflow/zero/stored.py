"""What goes into a checkpoint and comes out of it, whatever the ZeRO stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.checkpoint.plain import plain, plain_numbers
from lightning_zenflow.checkpoint.widened import Widening
from lightning_zenflow.optimizer import ZenFlowAdamW
from lightning_zenflow.schedule import Schedule
from lightning_zenflow.selected import HostState
from lightning_zenflow.shard_optimizer import ShardOptimizer
from lightning_zenflow.shard_state import ShardState, StoredLayout
from lightning_zenflow.shards import Segment, ShardTable
from lightning_zenflow.signals import postponed

_log = logging.getLogger(__name__)

# What optimizers of PyTorch and DeepSpeed look for in their groups, in case this run's optimizer had no need of it.
_GROUP_DEFAULTS: dict[str, Any] = {
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

# What the optimizer's class and arguments say, and no checkpoint: Adam's does not make an Adam of an AdamW.
_OPTIMIZERS_OWN = {"params", "decoupled_weight_decay", *_GROUP_DEFAULTS}


class StoresState:
    """The part of a ZeRO adapter that saves and restores. Attributes are those of the adapter and of DeepSpeed's optimizer.

    Attributes:
        stored_clip_norm: The run's limit of the gradient norm. Plain DeepSpeed goes on with the limit of a checkpoint.
        optimizer_key: Under which DeepSpeed stores the state of the optimizer inside its own.
    """

    optimizer_key = "base_optimizer_state"

    stored_clip_norm: float = 0.0
    shard: ShardOptimizer
    optimizer: ZenFlowAdamW
    _layout: StoredLayout
    dtype: torch.dtype
    loss_scaler: Any
    elastic_checkpoint: bool
    _tables: list[ShardTable]
    _rank: int
    _world_size: int
    _device: torch.device
    settings: Any
    dp_process_group: Any
    param_names: Mapping[Any, str]
    _is_retired = False
    _partial_step: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None

    # -- saving -----------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Makes the host's masters and moments complete, and the worker idle. Training goes on as if nothing had happened."""
        if not self._is_retired:
            with postponed():
                self.shard.complete_host_state()

    def state_dict(self, widening: Widening | None = None) -> dict[str, Any]:
        """This rank's state in DeepSpeed's own layout, for its tools and a plain `DeepSpeedStrategy`.

        The tensors are views that are valid until the next step. Moments that the host keeps in 16 bit are copies in fp32,
        or stand-ins of `widening`.
        """
        self.complete()
        self.elastic_checkpoint = False  # one layout for all: an elastic run reads it as well
        self.optimizer.state.clear()
        for partition, part in self.fp32_partitions():
            self.optimizer.state[partition] = self._moments(part, widening)
        try:
            state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        finally:
            self.optimizer.state.clear()
        if "clip_grad" in state:
            state["clip_grad"] = self.stored_clip_norm
        groups = state[self.optimizer_key]["param_groups"]
        state[self.optimizer_key]["param_groups"] = [
            plain({**_GROUP_DEFAULTS, **group}, f"param_groups[{index}]") for index, group in enumerate(groups)
        ]
        vars(self.loss_scaler).update(plain_numbers(vars(self.loss_scaler)))  # it is stored as it is
        return state

    def fp32_partitions(self) -> Iterator[tuple[Tensor, slice]]:
        """DeepSpeed's fp32 partitions, which are views of the arena, and their places in the shard."""
        raise NotImplementedError

    def _moments(self, part: slice, widening: Widening | None) -> dict[str, Any]:
        arena, clock = self.shard.host.arena, self.shard.clock
        # PyTorch counts steps in a tensor, DeepSpeed's optimizers in an integer.
        step = clock if self.optimizer.counts_in_integers else torch.tensor(float(clock))
        moments = arena.exp_avg[part], arena.exp_avg_sq[part]
        if arena.layout.moments_dtype != torch.float32:  # exact, and what every reader of DeepSpeed's files expects
            widen = torch.Tensor.float if widening is None else widening.stand_in
            moments = widen(moments[0]), widen(moments[1])
        return {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    @property
    def layout(self) -> StoredLayout:
        """How the parameters are cut over the ranks."""
        return self._layout

    def own_state(self, *, with_partial_step: bool) -> ShardState:
        """What DeepSpeed's layout has no place for; after `state_dict`, which waits for the worker.

        Args:
            with_partial_step: Whether the micro-batches of a step that is not complete yet are part of it.
        """
        state = self.shard.state(self.layout, self.settings.config.deferred_lr_scale)
        state = replace(state, configured=self.settings.configured)
        if not with_partial_step:
            return state
        # After a resume in the middle of a step, until its next micro-batch begins, they are still what was loaded.
        partial, received = self._partial_step or (self.partial_step(), self.received())
        return replace(state, partial=partial, received=received)

    def module_state(self, engine: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """The module's state as this rank writes it; `None` if it is not for this rank to write. Every rank must call it."""
        raise NotImplementedError

    def retire(self) -> None:
        """After the last step: ends the background process and keeps what a checkpoint needs, until `free`."""
        if self._is_retired:
            return  # Lightning may tear down again, when what follows `fit` fails
        try:
            self.shard.retire()
        except RuntimeError as error:  # training is over: a background process that failed now is no reason to lose it
            _log.warning("The optimizer state cannot be saved any more: %s", error)
            self.shard.close()
        self._is_retired = True

    @property
    def is_freed(self) -> bool:
        """Whether masters and moments are gone."""
        return not self.shard.host.arena.master.numel()

    def adopt_weights(self) -> None:
        """After the last step: where a callback or the user has replaced weights since, the masters follow.

        Averaged weights, for example, are then what a checkpoint holds.
        """
        master = self.shard.host.arena.master
        for segment, weights in self.own_weights():
            part = master[segment.start : segment.stop]
            changed = part.to(weights.dtype) != weights
            part[changed] = weights[changed].to(part.dtype)

    def own_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        """This rank's part of each parameter of the module as it is now, flat on the CPU."""
        raise NotImplementedError

    def partial_step(self) -> dict[str, Tensor]:
        """Sums of the micro-batches of a step that is not complete, by parameter name."""
        raise NotImplementedError

    def received(self) -> dict[str, Tensor]:
        """This rank's part of gradients that wait for a step which manual optimization has not asked for yet, by name."""
        raise NotImplementedError

    # -- loading ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: `ZenFlowStrategy.load_checkpoint` restores, by parameter name and from any layout."""
        raise NotImplementedError("ZenFlow restores through `trainer.fit(ckpt_path=...)`.")

    def schedule(self) -> Schedule:
        """As the run begins."""
        raise NotImplementedError

    def own_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of this rank's part of each master, by name; the worker must be idle."""
        for segment in self._tables[self._rank].segments:
            yield segment.spec.name, self.shard.host.arena.master[segment.start : segment.stop].clone()

    @torch.no_grad()  # whatever `fill` reads from, the state keeps no history of it
    def load_masters(self, fill: Callable[[HostState, ShardTable], None]) -> None:
        """Has this rank's masters and moments filled; the worker must be idle."""
        self.shard.host.reset()
        arena = self.shard.host.arena
        fill(HostState(arena.master, arena.exp_avg, arena.exp_avg_sq), self._tables[self._rank])

    def load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes over learning rates and the like of a checkpoint, as every optimizer does.

        Raises:
            ValueError: There is another number of groups.
        """
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise ValueError(
                f"The optimizer must have as many parameter groups as in the checkpoint, {len(saved)}, got {len(groups)}."
                " Return the same groups from `configure_optimizers`."
            )
        for group, stored in zip(groups, saved, strict=True):
            known = (group.keys() | {"initial_lr"}) - _OPTIMIZERS_OWN
            group.update({name: value for name, value in stored.items() if name in known})

    def load_loss_scaler(self, saved: Mapping[str, Any] | None) -> None:
        """Goes on with the scale of a dynamic loss scaler."""
        if saved and self.loss_scaler.dynamic and saved.get("dynamic"):
            vars(self.loss_scaler).update(
                {name: value for name, value in saved.items() if name in vars(self.loss_scaler)}
            )

    def gather_weights(self) -> None:
        """Sends the weights of this rank to the others, and takes theirs."""
        raise NotImplementedError

    def begin_batch(self) -> None:
        """Before each micro-batch: after a resume in the middle of a step, its first micro-batches are put back.

        Not earlier, since Lightning clears gradients when training starts.
        """
        saved, self._partial_step = self._partial_step, None
        if saved:
            self.put_partial_step(*saved)

    def load_partial_step(self, state: ShardState) -> None:
        """Goes on with the micro-batches of a step that was not complete."""
        self._partial_step = state.partial, state.received

    def put_partial_step(self, saved: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Sets what `partial_step` and `received` have returned."""
        raise NotImplementedError
