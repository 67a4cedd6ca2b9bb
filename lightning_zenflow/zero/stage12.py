"""The adapter for ZeRO stages 1 and 2: flattened groups are cut over the ranks, and every rank has all weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor

from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.selected_layout import SelectedLayout
from lightning_zenflow.shard_optimizer import Outcome
from lightning_zenflow.shard_state import StoredLayout
from lightning_zenflow.shards import ParamSpec, Segment, ShardTable
from lightning_zenflow.weights import ShardWeights
from lightning_zenflow.zero.adapter import ZenFlowZero
from lightning_zenflow.zero.gathered import rounded_masters


class ZenFlowZeroOptimizer(ZenFlowZero, DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1/2 optimizer with ZenFlow's step."""

    reduce_bucket_size: int
    _sums_in_autograd = False  # ZeRO-1 alone: whether earlier micro-batches of this step have gradients

    # -- start ------------------------------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """Called by DeepSpeed once its partitions exist."""
        self.start()

    def _read_layout(self) -> tuple[list[Any], StoredLayout]:
        """From the order in which DeepSpeed flattened the parameters."""
        groups = self.round_robin_bit16_groups
        params = [param for group in groups for param in group]
        specs = [
            ParamSpec(self.param_names[param], tuple(param.shape), group, offset)
            for group, own in enumerate(groups)
            for param, offset in zip(own, self.round_robin_bit16_offsets[group], strict=True)
        ]
        numels = tuple(parts[0].numel() for parts in self.parallel_partitioned_bit16_groups)
        layout = StoredLayout(False, tuple(specs), numels, self._rank, self._world_size, self.dtype)
        return params, layout

    def _weights_of_groups(self) -> list[Tensor]:
        return [parts[self._rank] for parts in self.parallel_partitioned_bit16_groups]

    def _move_masters(self, client: HostClient, table: ShardTable) -> None:
        for partition, part in self.fp32_partitions():
            view = client.arena.master[part]
            view.copy_(partition.data)
            partition.data = view
        # DeepSpeed's own buffers for offloading, 2 bytes a parameter and two of the largest parameter, have no use here.
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None

    def fp32_partitions(self) -> Iterator[tuple[Tensor, slice]]:
        start = 0
        for partition, numel in zip(self.single_partition_of_fp32_groups, self._layout.partition_numels, strict=True):
            yield partition, slice(start, start + numel)
            start += numel

    def _get_offload_gradient_dict(self) -> None:
        """DeepSpeed would keep an fp32 gradient here, 4 bytes a parameter; `ZenFlowStrategy.gradient` replaces it."""

    # -- gradients --------------------------------------------------------------------------------------------------

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Never: `copy_grads_in_partition` sums micro-batches itself."""
        return False

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Tensor, i: int) -> None:
        """Called by DeepSpeed with each gradient; on a single rank there is nothing to reduce and no bucket to fill."""
        if self._world_size > 1:
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif param.numel() > 0 and getattr(param, "ds_grad_is_ready", True):
            stream = self.reduction_stream or get_accelerator().current_stream()
            if self.reduction_stream is not None:
                # The side stream may read the gradient only once backward has written it; the copy to the host then runs
                # beside backward instead of holding it up.
                stream.wait_stream(get_accelerator().current_stream())
            with get_accelerator().stream(stream):
                self.copy_grads_in_partition(param, i)

    def process_gradients(self, param: Tensor, i: int) -> None:
        """Called by DeepSpeed with each gradient of a micro-batch."""
        if not self.partition_gradients and not self.is_gradient_accumulation_boundary():
            self._sums_in_autograd = True
        if self._reduces_at_the_end:
            self.setup_buckets()
            if self.use_grad_accum_attribute:
                self._fill_param_grad_accum_attribute(param)
        else:
            super().process_gradients(param, i)

    @property
    def _reduces_at_the_end(self) -> bool:
        """Whether gradients wait for the end of the last backward, as without `overlap_comm`.

        Which of them the last micro-batch has may differ between ranks, and they must be reduced in one order.
        """
        return self._sums_in_autograd and self._world_size > 1

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Called by DeepSpeed under ZeRO-1 once the last backward of a step is over.

        With `overlap_comm` it has reduced what this backward had, and would drop what only earlier micro-batches have.
        """
        if self.overlap_comm and (self._world_size == 1 or self._reduces_at_the_end):
            for group, params in enumerate(self.bit16_groups):
                for param in params:
                    if self.get_gradient_for_reduction(param) is not None:
                        self.reduce_ready_partitions_and_remove_grads(param, group)
        super().reduce_gradients(pipeline_parallel)

    def setup_buckets(self) -> None:
        """Called by DeepSpeed before the first gradient of a micro-batch: buckets that nobody fills are not allocated."""
        size = self.reduce_bucket_size
        if self._world_size == 1:
            self.reduce_bucket_size = 0
        try:
            super().setup_buckets()
        finally:
            self.reduce_bucket_size = size

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Called by DeepSpeed when a bucket is full or backward ends; on a single rank no bucket was filled."""
        if self._world_size > 1:
            super().reduce_ipg_grads(comm_dtype)

    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        """Called by DeepSpeed with each reduced gradient, within the stream that reduced it."""
        segment = self._segments[id(param)]
        grad = self.get_param_gradient_attribute(param).view(-1).narrow(0, segment.param_start, segment.numel)
        self.take_gradient(segment, grad)
        # DeepSpeed then keeps the gradient's memory until this stream is done with it, and `step` waits for the stream.
        self._record_gradient_stream(grad, get_accelerator().current_stream())
        self._record_offload_copy()
        self.clear_grad_attribute(param)

    def _wait_for_gradients(self) -> None:
        self._wait_for_offload_copies()  # DeepSpeed's own events on the reduction stream

    def partial_step(self) -> dict[str, Tensor]:
        if self.partition_gradients:
            return super().partial_step()
        # Under ZeRO-1 autograd sums micro-batches.
        grads = zip(self._layout.params, map(self.get_param_gradient_attribute, self._params), strict=True)
        return {spec.name: grad.cpu() for spec, grad in grads if grad is not None}

    def _put_sum(self, index: int, stored: Tensor) -> None:
        param = self._params[index]
        self._sums_in_autograd = not self.partition_gradients
        if self.partition_gradients:
            super()._put_sum(index, stored)
        elif self.use_grad_accum_attribute:
            param.grad_accum = stored.to(device=self._device, copy=True)
        else:
            param.grad = stored.to(device=self._device, dtype=param.dtype, copy=True)

    # -- weights ----------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        self.micro_step_id = INITIAL_MICRO_STEP_ID
        self._sums_in_autograd = False
        self._wait_for_gradients()

    def own_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        for segment in self._segments.values():
            flat = self._params[segment.param].detach().reshape(-1)
            yield segment, flat[segment.param_start : segment.param_start + segment.numel].cpu()

    def module_state(self, engine: Any, *, exclude_frozen: bool) -> dict[str, Any] | None:
        """On the first rank, with the masters instead of the weights that the device shows, which may be extrapolated."""
        master = self.shard.host.arena.master
        masters = rounded_masters(self.layout, master, self._device, self.dp_process_group)
        if self._rank > 0:
            return None
        module: dict[str, Any] = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
        specs = {spec.name: spec for spec in self.layout.params}
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            spec = specs.get(self.param_names.get(param, name))
            if spec is not None and name in module:
                flat = masters[spec.group][spec.offset : spec.offset + spec.numel]
                module[name] = flat.view(module[name].shape)
        return module

    def _exchange(self, outcome: Outcome) -> None:
        """Sends the other ranks what changed here: the selected values and one block, or everything after a barrier.

        After a re-selection that is everything indeed: the barrier has updated every block with what it held, and shows the
        masters instead of the extrapolated weights, so that no deferred weight is what the other ranks have.
        """
        start, stop = outcome.changed
        if stop - start == self._tables[self._rank].numel:
            self.gather_weights()
            return
        layouts = self._layouts()
        count = max(layout.numel for layout in layouts)
        mine = torch.zeros(stop - start + count, dtype=self.dtype, device=self._device)
        for offset, weights in self._weights_of(self._rank).ranges(start, stop):
            mine[offset : offset + weights.numel()] = weights
        mine[stop - start : stop - start + layouts[self._rank].numel] = self.shard.selected.wire
        everyone = torch.empty(self._world_size * mine.numel(), dtype=self.dtype, device=self._device)
        # As bytes, since not every backend gathers 16-bit floats.
        dist.all_gather_into_tensor(everyone.view(torch.uint8), mine.view(torch.uint8), group=self.dp_process_group)
        for rank, theirs in enumerate(everyone.split(mine.numel())):
            if rank != self._rank:
                target = self._weights_of(rank)
                for offset, weights in target.ranges(start, stop):
                    weights.copy_(theirs[offset : offset + weights.numel()])
                layouts[rank].unpack(theirs[stop - start :], target.view)

    def _weights_of(self, rank: int) -> ShardWeights:
        return ShardWeights(self._tables[rank], [parts[rank] for parts in self.parallel_partitioned_bit16_groups])

    def _layouts(self) -> list[SelectedLayout]:
        """Where every rank packs its selected elements, kept until columns are selected anew."""
        if self.__dict__.get("_layout_columns") is not self.shard.columns:
            self._layout_columns = self.shard.columns
            self._all_layouts = [SelectedLayout(table, self.shard.columns, self._device) for table in self._tables]
        return self._all_layouts

    def gather_weights(self) -> None:
        if self._world_size > 1:
            all_gather_dp_groups(
                groups_flat=self.bit16_groups_flat,
                partitioned_param_groups=self.parallel_partitioned_bit16_groups,
                dp_process_group=self.real_dp_process_group,
                start_alignment_factor=self.nccl_start_alignment_factor,
                allgather_bucket_size=self.allgather_bucket_size,
            )
