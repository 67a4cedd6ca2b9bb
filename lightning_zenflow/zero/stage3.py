"""The adapter for ZeRO stage 3: each parameter is cut over the ranks, and no rank has all weights.

A rank's weights lie in one flat buffer, on the device or, with parameter offload, in host memory. A forward gathers a
layer from all ranks when it needs it, so that nothing has to be exchanged after an update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.shard_optimizer import Outcome
from lightning_zenflow.shard_state import StoredLayout
from lightning_zenflow.shards import ParamSpec, Segment, ShardTable
from lightning_zenflow.zero.adapter import ZenFlowZero


class ZenFlowZeroOptimizerStage3(ZenFlowZero, DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's ZeRO-3 optimizer with ZenFlow's step.

    Attributes:
        fp32_partitioned_groups_flat: The masters of each sub-group, views of the arena, as DeepSpeed's checkpoints and
            accessors look for them.
    """

    optimizer_key = "optimizer_state_dict"
    fp32_partitioned_groups_flat: list[Tensor]

    # -- start ------------------------------------------------------------------------------------------------------

    def _setup_for_real_optimizer(self) -> None:
        """Called by DeepSpeed once the weights are cut; it would allocate fp32 partitions and gradients here."""
        self.start()
        for group in self.optimizer.param_groups:
            group["params"] = []  # as DeepSpeed has it; checkpoints put the partitions in
        if self._world_size > 1 and self.contiguous_gradients:
            for dtype, bucket in self.ipg_buckets.items():
                bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=self._device)

    def _read_layout(self) -> tuple[list[Any], StoredLayout]:
        """From the order of the sub-groups, into which DeepSpeed divides each group."""
        numels = [0] * len(self.optimizer.param_groups)
        params, specs = [], []
        for sub_group, own in enumerate(self.fp16_groups):
            group = self.sub_group_to_group_id[sub_group]
            for param in own:
                params.append(param)
                specs.append(ParamSpec(self.param_names[param], tuple(param.ds_shape), group, numels[group]))
                numels[group] += param.partition_numel()
        layout = StoredLayout(True, tuple(specs), tuple(numels), self._rank, self._world_size, self.dtype)
        return params, layout

    def _weights_of_groups(self) -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in self._layout.partition_numels]
        for sub_group, flat in enumerate(self.fp16_partitioned_groups_flat):
            parts[self.sub_group_to_group_id[sub_group]].append(flat)
        return [_joined(flats, self.dtype) for flats in parts]

    @property
    def _offloads_weights(self) -> bool:  # type: ignore[override]
        return bool(self.offload_param)

    def _move_masters(self, client: HostClient, table: ShardTable) -> None:
        # DeepSpeed leaves its padding as the memory was, which may be a NaN.
        for param in self._params:
            _padding(param).zero_()
        self.fp32_partitioned_groups_flat.extend(torch.empty(0) for _ in self.fp16_groups)
        for (partition, part), flat in zip(self.fp32_partitions(), self.fp16_partitioned_groups_flat, strict=True):
            partition.data = client.arena.master[part]
            partition.copy_(flat)

    def fp32_partitions(self) -> Iterator[tuple[Tensor, slice]]:
        start = 0
        for partition, flat in zip(self.fp32_partitioned_groups_flat, self.fp16_partitioned_groups_flat, strict=True):
            yield partition, slice(start, start + flat.numel())
            start += flat.numel()

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        if "parameter_offload" in self.__dict__:
            self.parameter_offload.destroy()

    # -- gradients --------------------------------------------------------------------------------------------------

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """Called by DeepSpeed with each gradient; on a single rank there is nothing to reduce and no bucket to fill.

        Raises:
            RuntimeError: The gradient is not that of the whole parameter.
        """
        if param.grad is not None and param.grad.numel() != param.ds_numel:
            raise RuntimeError(
                f"The gradient of `{self.param_names[param]}` must have {param.ds_numel} elements, got {param.grad.numel()}:"
                " DeepSpeed takes gradients of a leaf module before they are there if its inputs need none. Remove"
                " `stage3_module_granularity_threshold`, or lower it."
            )
        if self._world_size > 1:
            waiting = self.ipg_buckets[self.get_param_comm_dtype(param)].params
            if any(param is other for other in waiting):
                self._take_again(param)
            else:
                super().reduce_independent_p_g_buckets_and_remove_grads(param)
        elif param.ds_numel > 0 and getattr(param, "ds_grad_is_ready", True):
            stream = self.reduce_and_partition_stream
            if not get_accelerator().resolves_data_dependency():
                # The side stream may read the gradient only once backward has written it.
                stream.wait_stream(get_accelerator().current_stream())
            with get_accelerator().stream(stream):
                self.partition_grads([param], [param.grad.view(-1)])

    def _take_again(self, param: Any) -> None:
        """A second gradient, which autograd has added to the one that waits in the bucket.

        Raises:
            RuntimeError: It may have been added before the first one had arrived there.
        """
        if not get_accelerator().resolves_data_dependency():
            if self.contiguous_gradients:
                raise RuntimeError(
                    f"`{self.param_names[param]}` must get one gradient in a backward pass with ZeRO stage 3 on several ranks,"
                    " got two. Activation checkpointing does that to a layer that is used twice: pass"
                    " `use_reentrant=False` to it, or set `contiguous_gradients` to False."
                )
            # The sum of both is reduced only once backward has written it.
            self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())

    def partition_grads(self, params_to_release: Sequence[Any], grad_partitions: Sequence[Tensor]) -> None:
        """Called by DeepSpeed with this rank's part of each reduced gradient, within the stream that reduced it."""
        for param, grad in zip(params_to_release, grad_partitions, strict=True):
            segment = self._segments.get(id(param))
            if segment is not None:  # a small parameter may have no part here
                self.take_gradient(segment, grad.view(-1)[: segment.numel])
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                # The gradient's memory is not given to others before this stream is done with it.
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def _wait_for_gradients(self) -> None:
        """DeepSpeed waits for its stream at the end of each backward."""

    # -- weights ----------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        self._pre_step()
        self._release_weights()

    def _release_weights(self) -> None:
        # Gathered copies of weights go, so that the next forward gathers what is current then.
        self._partition_all_parameters()
        if self.offload_param:
            get_accelerator().synchronize()  # copies of weights that the host is about to overwrite

    def _exchange(self, outcome: Outcome) -> None:
        self.gather_weights()

    def gather_weights(self) -> None:
        """Small parameters stay gathered between steps; all must have been cut before the weights changed."""
        # The copies that the ranks of a machine keep (hpZ) are of older weights, and must not be gathered again.
        self.invalidate_secondary_tensor()
        if self.persistent_parameters:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)

    def own_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        for segment in self._segments.values():
            param = self._params[segment.param]
            # A small one is gathered, and a callback may have changed that copy.
            if param.ds_status == ZeroParamStatus.AVAILABLE:
                flat = param.detach().reshape(-1)[segment.param_start :]
            else:
                flat = param.ds_tensor.detach().view(-1)
            yield segment, flat[: segment.numel].cpu()

    def module_state(self, engine: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """On every rank, with placeholders for parameters: their masters are in the optimizer's files.

        DeepSpeed cuts all parameters for it and gathers the small ones again, which a forward or backward under way would
        not survive. This leaves them as they are, and needs no other rank.
        """
        module: dict[str, Any] = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            if name in module:
                module[name] = torch.empty(0, dtype=param.dtype)
        return module


def _joined(flats: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Flat tensors that lie one behind the other in one buffer, as one tensor of it."""
    if not flats:
        return torch.empty(0, dtype=dtype)
    first, total = flats[0], sum(flat.numel() for flat in flats)
    at = first.storage_offset()
    for flat in flats:
        assert flat.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and flat.storage_offset() == at
        at += flat.numel()
    return first.detach().as_strided((total,), (1,), first.storage_offset())


def _padding(param: Any) -> Tensor:
    """What of a parameter's part on this rank belongs to no element."""
    part = param.ds_tensor.detach().view(-1)
    held = max(0, min(part.numel(), param.ds_numel - param.ds_zero_partition_rank * part.numel()))
    return part[held:]
