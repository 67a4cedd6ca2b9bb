"""The adapter for ZeRO stages 1 and 2: gradient slices of shards out of DeepSpeed, weight slices of shards back into it.

DeepSpeed's optimizer runs with CPU offload on, which makes it hand over each reduced gradient during backward. Its own
fp32 partitions become views of the arena, and its own step is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.offload.arena import ArenaLayout
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.optimizer import ZenFlowAdamW
from lightning_zenflow.schedule import Schedule
from lightning_zenflow.selected import SelectedLayout
from lightning_zenflow.shard_optimizer import Outcome, ShardOptimizer
from lightning_zenflow.shards import ParamSpec, Segment, ShardTable
from lightning_zenflow.signals import postponed
from lightning_zenflow.weights import ShardWeights
from lightning_zenflow.zero.stored import StoresState

_CPU_PIECE_NUMEL = 1 << 18
"""On CPU a gradient is measured, packed and copied in pieces of this size, which stay in cache; kernels of a GPU want it
whole."""


@dataclass(frozen=True)
class RunSettings:
    """What a run needs to know beyond DeepSpeed's config.

    Attributes:
        config: The user's settings.
        select_interval: Steps between selections.
        worker_cores: Cores of this rank's background process; empty for no pinning.
        local_ranks: Ranks on this machine, which share its memory.
    """

    config: ZenFlowConfig
    select_interval: int
    worker_cores: list[int] = field(default_factory=list)
    local_ranks: int = 1

    @property
    def configured(self) -> tuple[int | str, int | str]:
        """The update interval and the selection interval that were asked for: steps, or `auto`."""
        config = self.config
        return config.update_interval, "auto" if config.select_interval == "auto" else self.select_interval

    def schedule(self) -> Schedule:
        return Schedule(
            update_interval=self.config.update_interval_steps(),
            select_interval=self.select_interval if self.config.topk_ratio > 0 else None,
            warm_up_steps=self.config.full_warm_up_rounds,
            overlap=self.config.overlap_step,
            look_ahead=self.config.look_ahead,
        )


class ZenFlowZeroOptimizer(StoresState, DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1/2 optimizer with ZenFlow's step.

    Attributes:
        shard: This rank's shard at work.
    """

    shard: ShardOptimizer
    optimizer: ZenFlowAdamW
    reduce_bucket_size: int

    def __init__(self, init_optimizer: ZenFlowAdamW, *args: Any, settings: RunSettings, **kwargs: Any) -> None:
        self.settings = settings
        super().__init__(init_optimizer, *args, **kwargs)

    # -- start and end ----------------------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """Called by DeepSpeed once its partitions exist: moves the masters into the arena and starts the host."""
        self._rank = dist.get_rank(group=self.dp_process_group)
        self._world_size = dist.get_world_size(group=self.dp_process_group)
        self._device = torch.device(get_accelerator().current_device_name())
        # ZeRO-2 sums micro-batches here in fp32; ZeRO-1 lets autograd do it and hands over the sum.
        self._sums: dict[int, Tensor] = {}
        self._tables = self._build_tables()
        table = self._tables[self._rank]
        self._segments: dict[int, Segment] = {}
        for segment in table.segments:
            self._segments[id(self._params[segment.param])] = segment
        config = self.settings.config
        layout = ArenaLayout(table.numel, self.dtype, config.update_interval_steps(), fewest_blocks=1)
        client = HostClient.start(
            layout,
            table.group_ends,
            cores=self.settings.worker_cores or None,
            lr_scale=config.deferred_lr_scale,
            timeout_secs=config.worker_timeout_secs,
            pin=get_accelerator().device_name() == "cuda",
            local_ranks=self.settings.local_ranks,
        )
        try:
            self._move_masters(client, table)
            self.shard = ShardOptimizer(
                self.optimizer.hypers,
                table,
                ShardWeights(table, [parts[self._rank] for parts in self.parallel_partitioned_bit16_groups]),
                client,
                self.settings.schedule(),
                topk_ratio=config.topk_ratio,
                wire_dtype=self.dtype,
                device=self._device,
                sum_over_ranks=self._sum_over_ranks,
            )
        except BaseException:
            client.close()
            raise

    def _build_tables(self) -> list[ShardTable]:
        """The shard tables of all ranks, from the order in which DeepSpeed flattened the parameters."""
        self._params = [param for group in self.round_robin_bit16_groups for param in group]
        specs = [
            ParamSpec(self.param_names[param], tuple(param.shape), group, offset)
            for group, params in enumerate(self.round_robin_bit16_groups)
            for param, offset in zip(params, self.round_robin_bit16_offsets[group], strict=True)
        ]
        partition_numels = [parts[0].numel() for parts in self.parallel_partitioned_bit16_groups]
        piece_numel = _CPU_PIECE_NUMEL if self._device.type == "cpu" else 1 << 62
        return [ShardTable.build(specs, partition_numels, rank, piece_numel) for rank in range(self._world_size)]

    def _move_masters(self, client: HostClient, table: ShardTable) -> None:
        for group, partition in enumerate(self.single_partition_of_fp32_groups):
            view = client.arena.master[table.group_start(group) : table.group_ends[group]]
            view.copy_(partition.data)
            partition.data = view
        # DeepSpeed's own buffers for offloading, 2 bytes a parameter and two of the largest parameter, have no use here.
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None

    def _get_offload_gradient_dict(self) -> None:
        """DeepSpeed would keep an fp32 gradient here, 4 bytes a parameter; `ZenFlowStrategy.gradient` replaces it."""

    def destroy(self) -> None:
        """Ends the background process, unless its state is kept for a checkpoint, then lets DeepSpeed remove its hooks."""
        if not self._is_retired:
            self.free()
        super().destroy()

    def free(self) -> None:
        """Ends the background process and gives all host memory back. Idempotent."""
        shard = self.__dict__.get("shard")
        if shard is not None:
            shard.close()
        for partition in self.single_partition_of_fp32_groups:
            partition.data = torch.empty(0)  # the last views of the arena: its memory is returned with them

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
        if self.is_gradient_accumulation_boundary():
            self._deliver(segment, grad)
        else:
            self._sum(segment).add_(grad)
        # DeepSpeed then keeps the gradient's memory until this stream is done with it, and `step` waits for the stream.
        self._record_gradient_stream(grad, get_accelerator().current_stream())
        self._record_offload_copy()
        self.clear_grad_attribute(param)

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
        self.shard.receive(segment, grad.to(self.dtype))

    def _deliver_remaining(self) -> None:
        """Parameters that had a gradient in an earlier micro-batch of this step but not in the last one."""
        for segment in self._segments.values():
            if segment.param in self._sums:
                self._deliver(segment, None)

    def own_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        for segment in self._tables[self._rank].segments:
            flat = self._params[segment.param].detach().reshape(-1)
            yield segment, flat[segment.param_start : segment.param_start + segment.numel].cpu()

    def partial_step(self) -> dict[str, Tensor]:
        specs = self._tables[self._rank].params
        if self.partition_gradients:
            return {specs[index].name: total.cpu() for index, total in self._sums.items()}
        grads = zip(specs, map(self.get_param_gradient_attribute, self._params), strict=True)
        return {spec.name: grad.cpu() for spec, grad in grads if grad is not None}

    def received(self) -> dict[str, Tensor]:
        if not self.shard.inbox.has_gradients:
            return {}
        self._wait_for_offload_copies()
        # Completes the slot. Not `grad_norm`, which sums over ranks: one whose shard has no gradient yet would not be there.
        self.shard.inbox.finish()
        return {segment.spec.name: self.shard.inbox.read(segment) for segment in self._segments.values()}

    def put_partial_step(self, saved: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        for segment in self._segments.values():
            if segment.spec.name in received:
                self.shard.receive(segment, received[segment.spec.name].to(self._device))
        for index, param in enumerate(self._params):
            stored = saved.get(self._tables[0].params[index].name)
            if stored is None:
                continue
            if self.partition_gradients:
                self._sums[index] = stored.to(device=self._device, copy=True)
            elif self.use_grad_accum_attribute:
                param.grad_accum = stored.to(device=self._device, copy=True)
            else:
                param.grad = stored.to(device=self._device, dtype=param.dtype, copy=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients received since the last step as well, as it would where they still lay on the device."""
        super().zero_grad(set_to_none)
        self._sums.clear()
        self.shard.drop_gradients()

    # -- the step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """One step on device and host, then the exchange of what changed."""
        with postponed():
            self.micro_step_id = INITIAL_MICRO_STEP_ID
            self._wait_for_offload_copies()  # DeepSpeed's own events on the reduction stream
            self._deliver_remaining()
            outcome = self.shard.step(loss_scale=float(self.loss_scale), clip_norm=float(self.clip_grad))
            self.overflow = not outcome.applied
            if self.loss_scaler.dynamic:  # a fixed scale has nothing to update, and says so at every skipped step
                self._update_scale(self.overflow)
            self._global_grad_norm = outcome.grad_norm
            if outcome.applied and self._world_size > 1:
                with self.shard.time("exchange"):
                    self._exchange(outcome)
            self.shard.finish_step(applied=outcome.applied)

    def grad_norm(self) -> float:
        """Global norm of the averaged, unscaled gradient of this step. Every rank must call it."""
        self._wait_for_offload_copies()
        self._deliver_remaining()
        return self.shard.grad_norm(float(self.loss_scale))

    def gradient(self, param: Tensor) -> Tensor:
        """The averaged, unscaled gradient of a parameter, fp32 on the device, in its shape. Every rank must call it."""
        self.grad_norm()  # completes the step's gradients
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=self._device)
        segment = self._segments.get(id(param))
        if segment is not None:
            part = self.shard.inbox.read(segment).to(device=self._device, dtype=torch.float32)
            whole[segment.param_start : segment.param_start + segment.numel] = part
        self._sum_over_ranks(whole)
        return whole.div_(float(self.loss_scale)).view(param.shape)

    def settle(self) -> None:
        """Applies every gradient the host holds; afterwards the model's weights are the rounded masters."""
        with postponed():
            if self.shard.settle():
                self.gather_weights()

    def change_intervals(self, update_interval: int, select_interval: int | None) -> None:
        """Other intervals from the next step on. Every rank must call it with the same values."""
        with postponed():
            if self.shard.change_intervals(update_interval, select_interval):
                self.gather_weights()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: the state is on the host already."""
        raise NotImplementedError("`offload_states` must not be called with ZenFlow: its state is on the host already.")

    # -- between ranks ----------------------------------------------------------------------------------------------

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        if self._world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.dp_process_group)

    def _exchange(self, outcome: Outcome) -> None:
        """Sends the other ranks what changed here: the selected values and one block, or everything after a barrier."""
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
