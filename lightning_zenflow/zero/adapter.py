"""What all ZeRO stages share: gradient slices of shards out of DeepSpeed, weight slices of shards back into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.layout import MOMENTS_DTYPES, ArenaLayout
from lightning_zenflow.schedule import Schedule
from lightning_zenflow.shard_optimizer import Outcome, ShardOptimizer
from lightning_zenflow.shard_state import StoredLayout
from lightning_zenflow.shards import Segment, ShardTable
from lightning_zenflow.signals import postponed
from lightning_zenflow.weights import ShardWeights
from lightning_zenflow.zero.settings import RunSettings
from lightning_zenflow.zero.stored import StoresState


class ZenFlowZero(StoresState):
    """The part of a ZeRO optimizer that is ZenFlow's, before DeepSpeed's class in the order of inheritance.

    DeepSpeed's optimizer runs with CPU offload on, which makes it hand over each reduced gradient during backward. Its own
    fp32 partitions become views of the arena, and its own step is replaced. A stage adds where gradients come from and
    where weights lie.

    Attributes:
        shard: This rank's shard at work.
        settings: Of the run.
    """

    settings: RunSettings
    overflow: bool
    clip_grad: float
    loss_scale: float
    _global_grad_norm: float
    _offloads_weights = False
    _params: list[Any]  # parameters, with what DeepSpeed adds to them
    _layout: StoredLayout

    def __init__(self, *args: Any, settings: RunSettings, **kwargs: Any) -> None:
        self.settings = settings
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self._remove_hooks()  # nobody else can reach them, and they would call this object when the module trains again
            raise

    def _remove_hooks(self) -> None:
        """Takes what DeepSpeed has hung on the module so far away from it."""
        for name in ("_grad_acc_hooks", "_leaf_module_hooks"):
            for hook in self.__dict__.get(name, ()):
                hook.remove()

    # -- what a stage adds ------------------------------------------------------------------------------------------

    def _read_layout(self) -> tuple[list[Any], StoredLayout]:
        """The trained parameters in shard order, and how DeepSpeed has cut them."""
        raise NotImplementedError

    def _weights_of_groups(self) -> list[Tensor]:
        """This rank's weights as the next forward reads them: for each group flat, in the model's dtype, padding included."""
        raise NotImplementedError

    def _before_step(self) -> None:
        """What DeepSpeed has to do before weights change; waits until its gradients are complete."""
        raise NotImplementedError

    def _release_weights(self) -> None:
        """Before weights change outside a step: waits until the device no longer reads what the CPU will write."""

    def _exchange(self, outcome: Outcome) -> None:
        """After a step of several ranks: brings to the others what changed here, if they hold it."""
        raise NotImplementedError

    def _wait_for_gradients(self) -> None:
        """Waits until the gradients that DeepSpeed has handed over are complete."""
        raise NotImplementedError

    # -- start and end ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Once DeepSpeed's weights are cut: moves the masters into the arena and starts the host."""
        self._rank = dist.get_rank(group=self.dp_process_group)
        self._world_size = dist.get_world_size(group=self.dp_process_group)
        self._device = torch.device(get_accelerator().current_device_name())
        # Sums of micro-batches, by parameter index.
        self._sums: dict[int, Tensor] = {}
        self._params, self._layout = self._read_layout()
        self._tables = [self._layout.table(rank) for rank in range(self._world_size)]
        table = self._tables[self._rank]
        self._indices = {id(param): index for index, param in enumerate(self._params)}
        self._segments = {id(self._params[segment.param]): segment for segment in table.segments}
        config = self.settings.config
        moments_dtype = MOMENTS_DTYPES[config.moments_dtype]
        layout = ArenaLayout(table.numel, self.dtype, config.update_interval_steps(), moments_dtype)
        client = HostClient.start(
            layout,
            table.group_ends,
            cores=self.settings.worker_cores or None,
            lr_scale=config.deferred_lr_scale,
            timeout_secs=config.worker_timeout_secs,
            pin=get_accelerator().device_name() == "cuda",
            local_ranks=self.settings.local_ranks,
            insist_on_cores=config.worker_cores is not None,
        )
        try:
            self._move_masters(client, table)
            self.shard = ShardOptimizer(
                self.optimizer.hypers,
                table,
                ShardWeights(table, self._weights_of_groups()),
                client,
                self.schedule(),
                topk_ratio=config.topk_ratio,
                wire_dtype=self.dtype,
                device=self._device,
                sum_over_ranks=self._sum_over_ranks,
            )
        except BaseException:
            client.close()
            raise

    def schedule(self) -> Schedule:
        """As the run begins. The device moves no weights that lie in host memory."""
        schedule = self.settings.schedule()
        return replace(schedule, interim=schedule.interim and not self._offloads_weights)

    def _move_masters(self, client: HostClient, table: ShardTable) -> None:
        """Has the masters begin in the arena, and DeepSpeed's fp32 partitions be views of it."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Ends the background process, unless its state is kept for a checkpoint, then lets DeepSpeed remove its hooks."""
        if not self._is_retired:
            self.free()
        super().destroy()  # type: ignore[misc]

    def free(self) -> None:
        """Ends the background process and gives all host memory back. Idempotent."""
        shard = self.__dict__.get("shard")
        if shard is not None:
            shard.close()
            for partition, _ in self.fp32_partitions():
                partition.data = torch.empty(0)  # the last views of the arena: its memory is returned with them

    # -- gradients --------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Called by DeepSpeed when a backward begins."""
        self.shard.has_whole_gradient = False
        super().enter_backward()  # type: ignore[misc]

    def exit_backward(self) -> None:
        """Called by DeepSpeed once the gradients of a backward are reduced."""
        super().exit_backward()  # type: ignore[misc]
        self.shard.has_whole_gradient = self.is_gradient_accumulation_boundary()  # type: ignore[attr-defined]

    def take_gradient(self, segment: Segment, grad: Tensor) -> None:
        """Takes this rank's part of a reduced gradient, flat, of the current micro-batch."""
        if self.is_gradient_accumulation_boundary():  # type: ignore[attr-defined]
            self._deliver(segment, grad)
        else:
            self._sum(segment).add_(grad)

    def _sum(self, segment: Segment) -> Tensor:
        if segment.param not in self._sums:
            self._sums[segment.param] = torch.zeros(segment.numel, dtype=torch.float32, device=self._device)
        return self._sums[segment.param]

    def _deliver(self, segment: Segment, grad: Tensor | None) -> None:
        """Hands the gradient of a step over, rounded to the model's dtype as the host will see it."""
        earlier = self._sums.pop(segment.param, None)
        if earlier is not None:
            grad = earlier if grad is None else earlier.add_(grad)
        assert grad is not None
        self.shard.receive(segment, grad.to(self.dtype), float(self.loss_scale))

    def _deliver_remaining(self) -> None:
        """Parameters that had a gradient in an earlier micro-batch of this step but not in the last one."""
        for segment in self._segments.values():
            if segment.param in self._sums:
                self._deliver(segment, None)

    def partial_step(self) -> dict[str, Tensor]:
        return {self._layout.params[index].name: total.cpu() for index, total in self._sums.items()}

    def received(self) -> dict[str, Tensor]:
        if not self.shard.inbox.has_gradients:
            return {}
        self._wait_for_gradients()
        # Completes the slot. Not `grad_norm`, which sums over ranks: one whose shard has no gradient yet would not be there.
        self.shard.inbox.finish()
        return {segment.spec.name: self.shard.inbox.read(segment) for segment in self._segments.values()}

    def put_partial_step(self, saved: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        for segment in self._segments.values():
            if segment.spec.name in received:
                self.shard.has_whole_gradient = True
                self.shard.receive(segment, received[segment.spec.name].to(self._device), is_stored=True)
        for index, spec in enumerate(self._layout.params):
            if spec.name in saved:
                self._put_sum(index, saved[spec.name])

    def _put_sum(self, index: int, stored: Tensor) -> None:
        """Sets what earlier micro-batches have left of a parameter."""
        self._sums[index] = stored.to(device=self._device, copy=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients received since the last step as well, as it would where they still lay on the device."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._sums.clear()
        self.shard.drop_gradients()

    # -- the step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """One step on device and host, then the exchange of what changed."""
        with postponed():
            self._before_step()
            self._deliver_remaining()
            outcome = self.shard.step(loss_scale=float(self.loss_scale), clip_norm=float(self.clip_grad))
            self.overflow = not outcome.applied
            if self.loss_scaler.dynamic:  # a fixed scale has nothing to update, and says so at every skipped step
                self._update_scale(self.overflow)  # type: ignore[attr-defined]
            self._global_grad_norm = outcome.grad_norm
            if self._world_size > 1 and (outcome.applied or any(outcome.changed)):
                with self.shard.time("exchange"):
                    self._exchange(outcome)
            self.shard.finish_step(applied=outcome.applied)

    def grad_norm(self) -> float:
        """Global norm of the averaged, unscaled gradient of this step. Every rank must call it."""
        self._wait_for_gradients()
        self._deliver_remaining()
        return self.shard.grad_norm(float(self.loss_scale))

    def holds(self, param: nn.Parameter) -> bool:
        """Whether the optimizer trains a parameter."""
        return id(param) in self._indices

    def gradient(self, param: Tensor) -> Tensor:
        """The averaged, unscaled gradient of a parameter, fp32 on the device, in its shape. Every rank must call it."""
        self.grad_norm()  # completes the step's gradients
        spec = self._layout.params[self._indices[id(param)]]
        whole = torch.zeros(spec.numel, dtype=torch.float32, device=self._device)
        segment = self._segments.get(id(param))
        if segment is not None:
            part = self.shard.inbox.read(segment).to(device=self._device, dtype=torch.float32)
            whole[segment.param_start : segment.param_start + segment.numel] = part
        self._sum_over_ranks(whole)
        return whole.div_(float(self.loss_scale)).view(spec.shape)

    def settle(self) -> None:
        """Applies every gradient the host holds; afterwards the model's weights are the rounded masters."""
        with postponed():
            self._release_weights()
            if self.shard.settle():
                self.gather_weights()

    def change_intervals(self, update_interval: int, select_interval: int | None) -> None:
        """Other intervals from the next step on. Every rank must call it with the same values."""
        with postponed():
            self._release_weights()
            if self.shard.change_intervals(update_interval, select_interval):
                self.gather_weights()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: the state is on the host already."""
        raise NotImplementedError("`offload_states` must not be called with ZenFlow: its state is on the host already.")

    # -- between ranks ----------------------------------------------------------------------------------------------

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        if self._world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.dp_process_group)
