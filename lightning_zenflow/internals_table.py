"""What of DeepSpeed, Lightning, torch and jsonargparse the package relies on without being promised it.

Whoever raises a version bound goes through these rows. `internals` checks them when a strategy is made, and a test that the
source touches nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

SUPPORTED = {
    "torch": ">=2.13,<2.15",
    # 2.6.2 and 2.6.3 were malicious releases
    "lightning": ">=2.6.1,<2.6.7,!=2.6.2,!=2.6.3",
    "deepspeed": "==0.19.8",
    "jsonargparse": ">=4.53,<5",
}
"""Versions of each package whose internals are those below. The bounds of pyproject.toml are the same."""


@dataclass(frozen=True)
class Internal:
    """A name that another package may change without notice.

    Attributes:
        name: Dotted, from the package on.
        use: What for, as the end of "is used to ...".
        params: Parameters that it must have by these names.
        attributes: What it, or its instances, must have.
        by_command_line: Only the command line uses it.
    """

    name: str
    use: str
    params: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    by_command_line: bool = False

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


_ZERO = "deepspeed.runtime.zero"
_STAGE_12 = f"{_ZERO}.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3 = f"{_ZERO}.stage3.DeepSpeedZeroOptimizer_Stage3"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_PARTITIONING = f"{_ZERO}.partition_parameters"
_STRATEGY = "lightning.pytorch.strategies.DeepSpeedStrategy"

_OF_BOTH_OPTIMIZERS = (
    *("_global_grad_norm", "_update_scale", "clip_grad", "destroy", "dp_process_group", "dtype"),
    *("elastic_checkpoint", "is_gradient_accumulation_boundary", "load_state_dict", "loss_scale", "loss_scaler"),
    *(
        "offload_states",
        "optimizer",
        "overflow",
        "param_names",
        "reduce_bucket_size",
        "state_dict",
        "step",
        "zero_grad",
    ),
)

DEEPSPEED = (
    Internal("deepspeed.runtime.engine", "put our optimizer in", attributes=("is_zero_supported_optimizer",)),
    Internal(f"{_ZERO}.stage3", "put our optimizer in"),
    Internal("deepspeed.runtime.superoffload.superoffload_stage3", "have its class made before ours is put in"),
    Internal("deepspeed.comm.torch", "start without compiling", attributes=("build_shm_op",)),
    # ZeRO stages 1 and 2
    Internal(_STAGE_12, "be trained with in ZeRO stages 1 and 2", attributes=_OF_BOTH_OPTIMIZERS),
    Internal(
        _STAGE_12,
        "find what this rank owns of the flattened groups",
        attributes=(
            *("bit16_groups_flat", "parallel_partitioned_bit16_groups", "partition_gradients", "real_dp_process_group"),
            *("round_robin_bit16_groups", "round_robin_bit16_offsets", "single_partition_of_fp32_groups"),
            *("allgather_bucket_size", "nccl_start_alignment_factor", "_grad_acc_hooks"),
            *("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload"),
            "temp_grad_buffer_for_gpu_offload",
        ),
    ),
    Internal(
        _STAGE_12,
        "take gradients while backward runs",
        attributes=(
            *("_record_gradient_stream", "_record_offload_copy", "_wait_for_offload_copies", "clear_grad_attribute"),
            *("get_param_gradient_attribute", "micro_step_id", "reduction_stream", "use_grad_accum_attribute"),
            *("ds_grad_is_ready", "grad_accum", "_fill_param_grad_accum_attribute"),
            *("bit16_groups", "get_gradient_for_reduction", "overlap_comm", "process_gradients", "reduce_gradients"),
            "reduce_ready_partitions_and_remove_grads",
        ),
    ),
    Internal(_STAGE_12, "know whether backward is under way", attributes=("enter_backward", "exit_backward")),
    Internal(_STAGE_3, "know whether backward is under way", attributes=("enter_backward", "exit_backward")),
    Internal(f"{_STAGE_12}.initialize_optimizer_states", "start once the partitions exist"),
    Internal(f"{_STAGE_12}._get_offload_gradient_dict", "keep no second copy of gradients"),
    Internal(f"{_STAGE_12}._use_compact_grad_partition_buffer", "sum micro-batches", ("group_idx",)),
    Internal(f"{_STAGE_12}.reduce_independent_p_g_buckets_and_remove_grads", "take each gradient", ("param", "i")),
    Internal(f"{_STAGE_12}.setup_buckets", "allocate no bucket on a single rank"),
    Internal(f"{_STAGE_12}.reduce_ipg_grads", "reduce nothing on a single rank", ("comm_dtype",)),
    Internal(f"{_STAGE_12}.copy_grads_in_partition", "take each reduced gradient", ("param", "group_idx")),
    Internal(f"{_ZERO}.stage_1_and_2.INITIAL_MICRO_STEP_ID", "begin a step"),
    Internal(
        "deepspeed.runtime.utils.all_gather_dp_groups",
        "send weights to the other ranks",
        (
            *("groups_flat", "partitioned_param_groups", "dp_process_group", "start_alignment_factor"),
            "allgather_bucket_size",
        ),
    ),
    # ZeRO stage 3
    Internal(_STAGE_3, "be trained with in ZeRO stage 3", attributes=_OF_BOTH_OPTIMIZERS),
    Internal(
        _STAGE_3,
        "find what this rank owns of each parameter",
        attributes=(
            *("fp16_groups", "fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", "sub_group_to_group_id"),
            *("offload_param", "parameter_offload", "persistent_parameters", "_leaf_module_hooks"),
        ),
    ),
    Internal(
        _STAGE_3,
        "take gradients while backward runs, and cut weights again",
        attributes=(
            *("_partition_all_parameters", "_pre_step", "contiguous_gradients", "get_param_comm_dtype", "ipg_buckets"),
            *("_z3_optimizer", "invalidate_secondary_tensor", "reduce_and_partition_stream"),
        ),
    ),
    Internal(f"{_STAGE_3}._setup_for_real_optimizer", "start once the weights are cut"),
    Internal(f"{_STAGE_3}.reduce_independent_p_g_buckets_and_remove_grads", "take each gradient", ("param",)),
    Internal(f"{_STAGE_3}.partition_grads", "take each reduced gradient", ("params_to_release", "grad_partitions")),
    Internal(f"{_PARTITIONING}.Init", "cut parameters of any layout", attributes=("get_partition_dp_group",)),
    Internal(f"{_PARTITIONING}.Init._zero_init_param", "cut parameters of any layout", ("param",)),
    Internal(
        f"{_PARTITIONING}.Init._convert_to_deepspeed_param",
        "know what a cut parameter is",
        ("param",),
        (
            *("all_gather", "ds_active_sub_modules", "ds_id", "ds_numel", "ds_persist", "ds_process_group"),
            *("ds_secondary_tensor", "ds_shape", "ds_status", "ds_tensor", "ds_zero_partition_rank", "partition"),
            "partition_numel",
        ),
    ),
    Internal(f"{_PARTITIONING}.GatheredParameters", "gather weights that are saved", ("params", "enabled")),
    Internal(
        f"{_PARTITIONING}.ZeroParamStatus",
        "know whether a parameter is cut",
        attributes=("AVAILABLE", "INFLIGHT", "NOT_AVAILABLE"),
    ),
    Internal(f"{_PARTITIONING}.free_param", "cut what an exception left gathered"),
    Internal(f"{_PARTITIONING}.is_zero_param", "know whether a parameter is cut"),
    Internal(
        f"{_ZERO}.parameter_offload",
        "take a run off its module",
        attributes=(
            *("FWD_MODULE_STACK", "ZeROOrderedDict", "_original_parameters", "pre_bwd_fn"),
            *("post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining", "partition_all_parameters"),
            *("ds_inflight_param_registry", "ds_recompute_parameters"),
        ),
    ),
    Internal(
        f"{_ZERO}.partitioned_param_coordinator.PartitionedParameterCoordinator",
        "take a run off its module",
        attributes=("_PartitionedParameterCoordinator__params_to_release",),
    ),
    Internal(
        "deepspeed.utils.groups",
        "find the ranks that keep copies of parameters",
        attributes=("_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_get_broadcast_src_rank"),
    ),
    Internal("deepspeed.utils.groups._create_zero_param_parallel_group", "make that group anew", ("group_size",)),
    # The engine and its checkpoints
    Internal(
        _ENGINE,
        "build and end a run",
        attributes=(
            *("dist_backend", "global_rank", "module_forward_post_hook", "module_forward_pre_hook"),
            *("seq_data_parallel_group", "set_gradient_accumulation_boundary", "config"),
            *("zero_optimization_partition_gradients", "zero_optimization_partition_weights"),
        ),
    ),
    Internal(f"{_ENGINE}._broadcast_model", "send weights of any layout to the other ranks"),
    Internal(f"{_ENGINE}.module_state_dict", "save weights", ("exclude_frozen_parameters",)),
    Internal(
        f"{_ENGINE}._common_checkpoint_state",
        "save in DeepSpeed's layout",
        ("module_state_dict", "zero_optimizer_state", "save_frozen_param"),
    ),
    Internal(f"{_ENGINE}._copy_recovery_script", "save in DeepSpeed's layout", ("save_path",)),
    Internal(f"{_ENGINE}._get_ckpt_name", "save in DeepSpeed's layout", ("checkpoints_path", "tag")),
    Internal(f"{_ENGINE}._get_zero_ckpt_name", "save in DeepSpeed's layout", ("checkpoints_path", "tag")),
    Internal(
        "deepspeed.checkpoint.constants",
        "save in DeepSpeed's layout",
        attributes=(
            *("UNIVERSAL_CHECKPOINT_INFO", "UNIVERSAL_CHECKPOINT_VERSION_KEY"),
            "UNIVERSAL_CHECKPOINT_VERSION_VALUE",
        ),
    ),
    # The config
    Internal("deepspeed.runtime.config.DeepSpeedConfig", "try a config out", ("config",)),
    Internal("deepspeed.runtime.config_utils.DeepSpeedConfigModel", "name the closest key"),
    Internal("deepspeed.runtime.precision_config.DeepSpeedFP16Config", "refuse true for a number"),
    Internal(f"{_ZERO}.config.DeepSpeedZeroConfig", "refuse true for a number"),
    Internal("deepspeed.runtime.lr_schedules", "name the schedules that there are", attributes=("VALID_LR_SCHEDULES",)),
    Internal("deepspeed.checkpoint.universal_checkpoint.SubparamShape", "read DeepSpeed's checkpoints"),
    Internal("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", "read DeepSpeed's checkpoints"),
    Internal("deepspeed.runtime.fp16.loss_scaler.LossScaler", "read DeepSpeed's checkpoints"),
    Internal(f"{_ZERO}.config.ZeroStageEnum", "read DeepSpeed's checkpoints"),
    Internal("deepspeed.utils.tensor_fragment.fragment_address", "read DeepSpeed's checkpoints"),
    # Models that are refused
    Internal("deepspeed.moe.utils.is_moe_param", "refuse mixtures of experts"),
    Internal("deepspeed.runtime.pipe.module.PipelineModule", "refuse pipelines"),
    Internal("deepspeed.runtime.utils.is_model_parallel_parameter", "refuse tensor parallel models"),
    # Measurements
    Internal("deepspeed.git_version_info.installed_ops", "tell what must be compiled", by_command_line=True),
    Internal("deepspeed.ops.op_builder.CPUAdamBuilder", "tell what must be compiled", by_command_line=True),
)

LIGHTNING = (
    Internal("lightning.fabric.strategies._StrategyRegistry", "register the strategies"),
    Internal("lightning.fabric.utilities.seed.reset_seed", "set ranks up"),
    Internal(
        "lightning.fabric.utilities.exceptions.MisconfigurationException", "answer in words", by_command_line=True
    ),
    Internal("torch.distributed.rendezvous._create_c10d_store", "start ranks again"),
    Internal("lightning.pytorch.core.optimizer._MockOptimizer", "see that there is no optimizer"),
    Internal("lightning.pytorch.strategies.strategy.TBroadcast", "resolve annotations"),
    Internal("lightning.pytorch.utilities.model_helpers.is_overridden", "see whether layers are made in a hook"),
    Internal("lightning.pytorch.LightningModule", "find the Trainer", attributes=("_trainer",)),
    Internal(
        "lightning.pytorch.callbacks.ModelPruning",
        "refuse what would replace weights",
        attributes=("_use_lottery_ticket_hypothesis",),
    ),
    Internal(
        "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector",
        "have all ranks hear SIGTERM",
        attributes=("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    ),
    Internal("lightning.pytorch.trainer.connectors.signal_connector._HandlersCompose", "have all ranks hear SIGTERM"),
    Internal("lightning.pytorch.utilities.exceptions.SIGTERMException", "have all ranks hear SIGTERM"),
    Internal(
        "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop",
        "have all ranks hear SIGTERM",
        attributes=("_broadcast_sigterm_tensor",),
    ),
    Internal(
        "lightning.pytorch.trainer.Trainer",
        "find out who asks for a requeue",
        attributes=("_accelerator_connector", "_signal_connector"),
    ),
    Internal(_STRATEGY, "build on", attributes=("_launcher",)),
    Internal(f"{_STRATEGY}._load_config", "take the settings out of the config", ("config",)),
    Internal(f"{_STRATEGY}._create_default_config", "know what a config replaces"),
    Internal(f"{_STRATEGY}._format_config", "complete the config"),
    Internal(f"{_STRATEGY}._auto_select_batch_size", "complete the config"),
    Internal(f"{_STRATEGY}._init_deepspeed_distributed", "start the process group"),
    Internal(f"{_STRATEGY}._configure_launcher", "run in a notebook"),
    Internal(f"{_STRATEGY}._init_optimizers", "take the module's optimizer"),
    Internal(f"{_STRATEGY}._initialize_deepspeed_train", "build the engine", ("model",)),
    Internal(f"{_STRATEGY}._initialize_deepspeed_inference", "build the engine", ("model",)),
    Internal(f"{_STRATEGY}._setup_model_and_optimizer", "build the engine", ("model", "optimizer", "lr_scheduler")),
    Internal(
        "lightning.pytorch.cli.LightningCLI",
        "hand the settings to the strategy",
        attributes=("_get", "_parser", "_add_subcommands"),
        by_command_line=True,
    ),
)

TORCH = (
    Internal("torch._utils._rebuild_parameter", "copy a module in mid-run"),
    Internal("torch._utils._rebuild_parameter_with_state", "copy a module in mid-run"),
    Internal("torch.distributed.distributed_c10d._get_default_store", "see which ranks still come to save"),
    Internal("torch.distributed.distributed_c10d._world", "keep a forked child from ending the parent's groups"),
    Internal("torch._fused_adam_", "update weights"),
    Internal("torch._fused_adamw_", "update weights"),
    Internal(
        "torch.nn.Module",
        "take a run off its module",
        attributes=(
            *("_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs"),
            *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_parameters"),
        ),
    ),
    Internal(
        "torch.optim.Optimizer",
        "refuse hooks that would not run",
        attributes=("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    ),
    Internal("torch.optim.lr_scheduler.LRScheduler", "say that steps are taken", attributes=("_opt_called",)),
    Internal("torch.utils._python_dispatch.TorchDispatchMode", "count what a step does", by_command_line=True),
    Internal("torch.utils._pytree.tree_leaves", "count what a step does", by_command_line=True),
    Internal("torch._ops.OpOverload", "count what a step does", attributes=("_schema",), by_command_line=True),
)

JSONARGPARSE = (
    Internal(
        "jsonargparse.ArgumentParser",
        "list the tools in --help",
        attributes=("_subcommands_action",),
        by_command_line=True,
    ),
    Internal("jsonargparse.ArgumentParser.error", "answer in words", ("message", "ex"), by_command_line=True),
)

TABLE = (*DEEPSPEED, *LIGHTNING, *TORCH, *JSONARGPARSE)
