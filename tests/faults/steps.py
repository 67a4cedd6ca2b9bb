"""Faults of steps that were reported of Lightning with DeepSpeed: accumulation, clipping, schedules, skipped steps."""

from __future__ import annotations

from tests.faults.line import Break, Line

STEPS: tuple[Line, ...] = (
    Line(
        "1",
        "accumulation with offload trained wrongly",
        (
            "integration/test_accumulation_parts.py::test_a_gradient_of_an_earlier_micro_batch_alone_is_applied",
            "integration/test_accumulation_parts.py::test_sums_in_16_bits_are_those_of_the_other_stages",
            "integration/test_accumulation_parts.py::test_two_ranks_may_have_it_in_different_micro_batches",
            "integration/test_exactness.py::test_one_batch_of_eight_equals_two_of_four_in_every_stage",
            "integration/test_trainer_manual.py::test_all_backward_passes_of_a_step_see_the_same_weights",
            "integration/test_trainer_precision.py::test_batches_are_accumulated_in_fp32_whatever_the_precision",
        ),
        Break(
            "        if self.overlap_comm and (self._world_size == 1 or self._reduces_at_the_end):\n",
            "        if False:\n",
            ("integration/test_accumulation_parts.py::test_a_gradient_of_an_earlier_micro_batch_alone_is_applied",),
        ),
    ),
    Line(
        "2",
        "leftover batches at the end of an epoch",
        (
            "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            "integration/test_trainer_steps.py::test_leftover_batches_of_a_loader_without_length_step_as_well",
            "integration/test_trainer_two_ranks.py::test_two_ranks_train_clip_skip_and_save_together",
        ),
        Break(
            "        return False\n\n    @contextmanager\n    def block_backward_sync",
            "        return True\n\n    @contextmanager\n    def block_backward_sync",
            (
                "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            ),
        ),
    ),
    Line(
        "3",
        "incomplete accumulation is rescaled or carried",
        (
            "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            "integration/test_trainer_steps.py::test_accumulation_that_changes_between_epochs_is_refused_in_words",
        ),
        Break(
            'self.config["gradient_accumulation_steps"] = 1',
            'self.config["gradient_accumulation_steps"] = trainer.accumulate_grad_batches',
            (
                "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            ),
        ),
    ),
    Line(
        "4",
        "optimizer hooks fire for every micro-batch",
        (
            "integration/test_trainer_steps.py::test_optimizer_hooks_fire_once_per_real_step",
            "integration/test_auto_tuner.py::test_windows_count_applied_steps_not_micro_batches_and_not_skipped_steps",
            "integration/test_trainer_manual.py::test_each_way_of_manual_optimization_equals_a_plain_trainer",
        ),
        Break(
            "        return False\n\n    @contextmanager\n    def block_backward_sync",
            "        return True\n\n    @contextmanager\n    def block_backward_sync",
            ("integration/test_trainer_steps.py::test_optimizer_hooks_fire_once_per_real_step",),
        ),
    ),
    Line(
        "5",
        "logged norm above the limit",
        (
            "integration/test_trainer_steps.py::test_the_stall_monitor_logs_fixed_names_once_per_step_with_the_norm_before_and_after_clipping",
        ),
        Break(
            'self._figures = {"grad_norm": norm, "grad_norm_clipped": norm * clip}',
            'self._figures = {"grad_norm": norm, "grad_norm_clipped": norm}',
            (
                "integration/test_trainer_steps.py::test_the_stall_monitor_logs_fixed_names_once_per_step_with_the_norm_before_and_after_clipping",
            ),
        ),
    ),
    Line(
        "6",
        "`gradient_clip_val` does not reach both parts",
        (
            "integration/test_trainer_steps.py::test_both_parts_are_clipped_as_a_plain_trainer_clips",
            "integration/test_trainer_steps.py::test_a_clipping_hook_of_ones_own_is_obeyed",
            "integration/test_trainer_life.py::test_a_limit_changed_between_two_fits_is_obeyed",
            "integration/test_trainer_config.py::test_a_json_with_optimizer_schedule_and_clipping_trains_as_a_plain_trainer_told_the_same",
        ),
        Break(
            "zero.clip_grad = float(clip_val)",
            "float(clip_val)",
            ("integration/test_trainer_steps.py::test_both_parts_are_clipped_as_a_plain_trainer_clips",),
        ),
    ),
    Line(
        "7",
        "clipping by value is ignored",
        (
            "integration/test_trainer_steps.py::test_a_module_that_clips_by_value_is_refused_at_its_first_step",
            "integration/test_trainer_steps.py::test_clipping_by_value_is_refused_before_anything_is_trained",
        ),
        Break(
            "        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:\n",
            "        if False:\n",
            ("integration/test_trainer_steps.py::test_clipping_by_value_is_refused_before_anything_is_trained",),
        ),
    ),
    Line(
        "8",
        "scheduler stepped twice",
        (
            "integration/test_trainer_schedulers.py::test_a_schedule_is_stepped_exactly_as_by_a_plain_trainer_and_reaches_both_parts_at_once",
            "integration/test_trainer_config.py::test_a_json_with_optimizer_schedule_and_clipping_trains_as_a_plain_trainer_told_the_same",
        ),
        Break(
            "        self._log_skipped_step()\n        return result",
            "        [each.scheduler.step() for each in self.lr_scheduler_configs]\n        return result",
            (
                "integration/test_trainer_schedulers.py::test_a_schedule_is_stepped_exactly_as_by_a_plain_trainer_and_reaches_both_parts_at_once",
            ),
        ),
    ),
    Line(
        "9",
        "`estimated_stepping_batches` and device are wrong inside `configure_optimizers`",
        (
            "integration/test_trainer_schedulers.py::test_number_of_steps_and_device_are_right_inside_configure_optimizers",
        ),
        Break(
            'return torch.device("cpu", 0) if device.type == "cpu" else device',
            "return device",
            (
                "integration/test_trainer_schedulers.py::test_number_of_steps_and_device_are_right_inside_configure_optimizers",
            ),
        ),
    ),
    Line(
        "10",
        "a new learning rate reaches one part late",
        (
            "integration/test_trainer_schedulers.py::test_a_schedule_is_stepped_exactly_as_by_a_plain_trainer_and_reaches_both_parts_at_once",
            "integration/test_trainer_schedulers.py::test_early_stopping_stops_and_a_rate_set_by_hand_is_used_in_the_same_step",
        ),
        Break(
            'lr=float(group["lr"]),',
            'lr=float(group.get("initial_lr", group["lr"])),',
            (
                "integration/test_trainer_schedulers.py::test_a_schedule_is_stepped_exactly_as_by_a_plain_trainer_and_reaches_both_parts_at_once",
            ),
        ),
    ),
    Line(
        "11",
        "`LearningRateMonitor` sees one group",
        (
            "integration/test_trainer_schedulers.py::test_the_learning_rate_monitor_sees_all_groups_without_a_scheduler",
            "integration/test_trainer_schedulers.py::test_the_learning_rate_monitor_sees_all_groups",
        ),
        Break(
            "converted.param_groups = groups\n",
            "converted.param_groups = groups[:1]\n",
            (
                "integration/test_trainer_schedulers.py::test_the_learning_rate_monitor_sees_all_groups_without_a_scheduler",
            ),
        ),
    ),
    Line(
        "12",
        "skipped steps are silent",
        (
            "integration/test_trainer_steps.py::test_a_loss_that_is_not_finite_skips_the_step_is_counted_and_said_once_each",
            "integration/test_trainer_steps.py::test_skipped_steps_of_a_second_fit_are_said_as_well",
            "integration/test_trainer_precision.py::test_an_overflow_is_skipped_until_the_scale_fits",
        ),
        Break(
            "self._skipped_steps_logged = stats.skipped_steps\n",
            "return\n",
            (
                "integration/test_trainer_steps.py::test_a_loss_that_is_not_finite_skips_the_step_is_counted_and_said_once_each",
            ),
        ),
    ),
    Line(
        "13",
        "overflow is decided by each rank alone",
        (
            "integration/test_trainer_two_ranks.py::test_an_overflow_in_the_shard_of_one_rank_is_skipped_by_both",
            "integration/test_trainer_two_ranks.py::test_two_ranks_train_clip_skip_and_save_together",
            "integration/test_auto_tuner.py::test_all_ranks_skip_a_step_together_with_the_tuner_on",
        ),
        Break(
            "        if not math.isfinite(norm):  #",
            "        if not math.isfinite(self.inbox.finish().sum().item()):  #",
            ("integration/test_trainer_two_ranks.py::test_an_overflow_in_the_shard_of_one_rank_is_skipped_by_both",),
        ),
    ),
)
