"""Faults that were reported of Lightning with DeepSpeed, and of offloading."""

from __future__ import annotations

from tests.faults.line import Break, Line

REPORTED: tuple[Line, ...] = (
    Line(
        "1",
        "accumulation with offload trained wrongly",
        (
            "integration/test_accumulation_parts.py::test_a_gradient_of_an_earlier_micro_batch_alone_is_applied",
            "integration/test_accumulation_parts.py::test_sums_in_16_bits_are_those_of_the_other_stages",
            "integration/test_accumulation_parts.py::test_two_ranks_may_have_it_in_different_micro_batches",
            "integration/test_exactness.py::test_one_batch_of_eight_equals_two_of_four_in_every_stage",
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
    ),
    Line(
        "3",
        "incomplete accumulation is rescaled or carried",
        (
            "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            "integration/test_trainer_steps.py::test_accumulation_that_changes_between_epochs_is_refused_in_words",
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
        ("integration/test_trainer_steps.py::test_clipping_by_value_is_refused",),
    ),
    Line(
        "8",
        "scheduler stepped twice",
        (
            "integration/test_trainer_schedulers.py::test_a_schedule_is_stepped_exactly_as_by_a_plain_trainer_and_reaches_both_parts_at_once",
            "integration/test_trainer_config.py::test_a_json_with_optimizer_schedule_and_clipping_trains_as_a_plain_trainer_told_the_same",
        ),
    ),
    Line(
        "9",
        "`estimated_stepping_batches` and device are wrong inside `configure_optimizers`",
        (
            "integration/test_trainer_schedulers.py::test_number_of_steps_and_device_are_right_inside_configure_optimizers",
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
        ("integration/test_trainer_schedulers.py::test_the_learning_rate_monitor_sees_all_groups",),
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
            "integration/test_trainer_two_ranks.py::test_two_ranks_train_clip_skip_and_save_together",
            "integration/test_auto_tuner.py::test_all_ranks_skip_a_step_together_with_the_tuner_on",
        ),
    ),
    Line(
        "14",
        "a precision trains wrongly or fails without words",
        (
            "integration/test_trainer_precision.py::test_a_precision_trains_with_falling_loss",
            "integration/test_trainer_precision.py::test_double_precision_is_refused",
            "integration/test_contract_precision.py::test_weights_and_inputs_have_the_dtype_of_the_precision_in_training_and_inference",
        ),
    ),
    Line(
        "15",
        "per-group learning rate ignored",
        (
            "integration/test_trainer_parameters.py::test_a_group_that_is_frozen_as_a_whole_does_not_disturb_the_others",
            "integration/test_exactness.py::test_the_two_extremes_equal_torch_adamw_and_adam_in_every_stage",
            "integration/test_trainer_two_ranks.py::test_two_ranks_train_clip_skip_and_save_together",
        ),
        Break(
            "return tuple(Hyper.of(group) for group in self.param_groups)",
            "return tuple(Hyper.of(self.param_groups[0]) for group in self.param_groups)",
            (
                "integration/test_trainer_parameters.py::test_a_group_that_is_frozen_as_a_whole_does_not_disturb_the_others",
            ),
        ),
    ),
    Line(
        "16",
        "tied weights come apart",
        (
            "integration/test_checkpoints.py::test_tied_weights_are_stored_once_and_tied_again",
            "integration/test_trainer_parameters.py::test_tied_weights_stay_tied_and_frozen_ones_stay_as_they_were",
            "integration/test_trainer_parameters.py::test_parameters_of_every_kind_follow_the_reference",
            "integration/test_export.py::test_tied_weights_take_their_place_once",
        ),
    ),
    Line(
        "17",
        "models of one matrix, none, or one column fail",
        (
            "integration/test_trainer_parameters.py::test_parameters_of_every_kind_follow_the_reference",
            "integration/test_trainer_parameters.py::test_nothing_to_train_is_refused",
        ),
    ),
    Line(
        "18",
        "flat tensors over 2^31 elements",
        ("unit/test_shards.py::test_offsets_beyond_two_to_the_31_stay_exact",),
    ),
    Line(
        "19",
        "gradients are `None`, or zeros, in hooks",
        (
            "integration/test_gradients_in_time.py::test_gradients_are_told_when_they_are_complete_and_refused_before_and_after",
            "integration/test_gradients_in_time.py::test_in_manual_optimization_every_backward_adds_to_it_until_the_step",
            "integration/test_trainer_steps.py::test_gradients_and_their_norm_can_be_read_in_hooks_and_nowhere_else",
            "integration/test_trainer_steps.py::test_asking_for_the_gradient_of_a_parameter_that_is_not_trained_is_an_error",
        ),
        Break(
            "        if not zero.shard.has_whole_gradient:\n",
            "        if False:\n",
            (
                "integration/test_gradients_in_time.py::test_gradients_are_told_when_they_are_complete_and_refused_before_and_after",
            ),
        ),
    ),
    Line(
        "20",
        "parameters that get no gradient in a step",
        (
            "integration/test_trainer_parameters.py::test_parameters_of_every_kind_follow_the_reference",
            "integration/test_accumulation_parts.py::test_a_gradient_of_an_earlier_micro_batch_alone_is_applied",
            "unit/test_inbox.py::test_a_step_without_gradients_has_zeros_everywhere",
        ),
        Break(
            "self._slot[segment.start : segment.stop].zero_()",
            "pass",
            ("unit/test_inbox.py::test_a_step_without_gradients_has_zeros_everywhere",),
        ),
    ),
    Line(
        "21",
        "resume does not restore everything",
        (
            "integration/test_resume.py::test_a_run_resumes_after_any_batch",
            "integration/test_resume.py::test_a_run_that_saves_after_every_batch_and_resumes_is_the_same",
            "integration/test_resume.py::test_random_runs_that_stop_twice_are_the_same",
            "integration/test_kept_memory.py::test_what_is_saved_after_fit_is_whole_all_the_same",
            "integration/test_soak.py::test_a_disturbed_run_ends_as_an_undisturbed_one_and_nothing_grows",
        ),
    ),
    Line(
        "22",
        "another world size",
        (
            "integration/test_resume_ranks.py::test_another_number_of_ranks_goes_on_from_settled_weights",
            "integration/test_stage3_checkpoints_ranks.py::test_another_number_of_ranks_goes_on_from_settled_weights",
            "integration/test_stage3_checkpoints.py::test_another_stage_goes_on_from_settled_weights",
        ),
    ),
    Line(
        "23",
        "`save_top_k=1` leaves more than one directory",
        (
            "integration/test_checkpoints.py::test_the_best_and_the_last_checkpoint_are_each_one_directory",
            "integration/test_full_disk.py::test_a_disk_that_is_full_in_the_middle_of_a_file_is_named_with_need_and_room",
            "integration/test_contract_saving.py::test_the_best_k_are_kept_and_the_best_is_loaded",
        ),
        Break(
            "directory.remove(Path(filepath))",
            "pass",
            ("integration/test_checkpoints.py::test_the_best_and_the_last_checkpoint_are_each_one_directory",),
        ),
    ),
    Line(
        "24",
        "checkpoints that do not load with `weights_only=True`",
        (
            "integration/test_checkpoint_plain.py::test_numbers_of_numpy_are_saved_as_pythons",
            "integration/test_checkpoint_plain.py::test_the_groups_of_an_optimizer_file_are_plain",
            "integration/test_checkpoint_plain.py::test_what_cannot_be_saved_safely_is_named_and_the_run_says_so",
            "integration/test_checkpoints.py::test_our_own_state_is_tensors_and_plain_types_alone",
            "unit/test_plain.py::test_a_value_becomes_one_of_a_plain_type_that_is_loaded_safely",
        ),
        Break(
            'plain({**_GROUP_DEFAULTS, **group}, f"param_groups[{index}]")',
            "{**_GROUP_DEFAULTS, **group}",
            ("integration/test_checkpoint_plain.py::test_numbers_of_numpy_are_saved_as_pythons",),
        ),
    ),
    Line(
        "25",
        "`save_weights_only` stores moments",
        (
            "integration/test_checkpoints.py::test_weights_alone_are_smaller_and_cannot_resume",
            "integration/test_stage3_checkpoints.py::test_weights_alone_and_links_are_saved",
        ),
        Break(
            'optimizer[zero.optimizer_key] = {**optimizer[zero.optimizer_key], "state": {}}',
            "pass",
            ("integration/test_checkpoints.py::test_weights_alone_are_smaller_and_cannot_resume",),
        ),
    ),
    Line(
        "26",
        "something unpicklable is reachable from the module",
        (
            "integration/test_pickled.py::test_a_module_is_copied_whole_and_without_its_engine",
            "integration/test_pickled.py::test_what_callbacks_see_of_a_checkpoint_can_be_pickled",
            "integration/test_pickled.py::test_a_cut_module_is_refused_by_name_and_copied_where_it_is_gathered",
            "integration/test_pickled.py::test_a_module_that_is_evaluated_is_copied_as_well",
            "integration/test_trainer_life.py::test_a_module_is_an_ordinary_one_again_after_fit",
        ),
        Break(
            "            self._guard.let_copy(engine)\n",
            "            pass\n",
            ("integration/test_pickled.py::test_a_module_is_copied_whole_and_without_its_engine",),
        ),
    ),
    Line(
        "27",
        "a wrong path is not answered",
        (
            "integration/test_checkpoints.py::test_a_wrong_path_is_answered_with_what_was_expected",
            "integration/test_full_disk.py::test_a_disk_that_is_full_in_the_middle_of_a_file_is_named_with_need_and_room",
        ),
        Break(
            "        directory.verify(path)\n",
            "        pass\n",
            ("integration/test_checkpoints.py::test_a_wrong_path_is_answered_with_what_was_expected",),
        ),
    ),
    Line(
        "28",
        "no single file of 16-bit and fp32 weights",
        (
            "integration/test_export.py::test_the_file_holds_the_masters_bit_for_bit_and_loads_without_running_code",
            "integration/test_export.py::test_weights_are_rounded_as_torch_rounds_and_integers_stay",
            "integration/test_checkpoints.py::test_masters_are_evaluated_and_exported_and_not_the_extrapolated_weights",
        ),
    ),
    Line(
        "29",
        "saving from a signal handler hangs or corrupts",
        (
            "integration/test_checkpoints.py::test_a_signal_handler_may_save_while_an_update_is_in_flight",
            "unit/test_signals.py::test_handlers_run_after_the_block_in_order_of_arrival",
            "integration/test_process_life_ends.py::test_a_checkpoint_can_be_saved_after_ctrl_c",
        ),
    ),
    Line(
        "30",
        "one rank fails and the others wait",
        (
            "integration/test_process_life_ranks.py::test_the_killed_worker_of_one_rank_ends_both",
            "integration/test_process_life_ranks.py::test_an_exception_on_one_rank_ends_both",
        ),
    ),
    Line(
        "31",
        "a process or memory is left after an exception, Ctrl-C or SIGTERM",
        (
            "integration/test_process_life_ends.py::test_sigterm_ends_everything",
            "integration/test_trainer_life.py::test_an_exception_in_a_hook_is_the_one_shown_and_leaves_no_process",
            "integration/test_trainer_life.py::test_an_engine_that_cannot_be_built_leaves_no_process",
            "integration/test_process_life_ends.py::test_ctrl_c_ends_everything",
        ),
        Break(
            "            optimizer.destroy()\n        raise",
            "            pass\n        raise",
            ("integration/test_trainer_life.py::test_an_engine_that_cannot_be_built_leaves_no_process",),
        ),
    ),
    Line(
        "32",
        "another exception than the first one is shown",
        (
            "integration/test_trainer_life.py::test_an_exception_in_a_hook_is_the_one_shown_and_leaves_no_process",
            "integration/test_trainer_life.py::test_a_checkpoint_on_an_exception_is_written_and_the_exception_shown",
            "integration/test_contract_saving.py::test_a_save_that_fails_on_an_exception_is_a_warning_and_the_exception_is_shown",
        ),
        Break(
            "            if ends_with is None:\n                raise",
            "            if True:\n                raise",
            (
                "integration/test_contract_saving.py::test_a_save_that_fails_on_an_exception_is_a_warning_and_the_exception_is_shown",
            ),
        ),
    ),
    Line(
        "33",
        "processes or memory pile up over runs and steps",
        (
            "integration/test_resume_memory.py::test_a_resumed_state_has_no_history_of_autograd",
            "integration/test_kept_memory.py::test_evaluation_after_fit_does_without_masters_and_moments",
            "integration/test_kept_memory.py::test_after_fit_the_device_has_nothing_left_but_the_weights",
            "integration/test_trainer_life.py::test_fit_evaluation_and_fit_again_take_turns",
            "integration/test_trainer_life.py::test_a_module_is_an_ordinary_one_again_after_fit",
            "integration/test_process_life.py::test_fit_and_test_five_times_in_one_process_hold_one_worker_and_no_memory",
            "integration/test_soak.py::test_a_disturbed_run_ends_as_an_undisturbed_one_and_nothing_grows",
        ),
        Break(
            "        self._free_last_run()\n        super().connect(model)",
            "        super().connect(model)",
            ("integration/test_kept_memory.py::test_evaluation_after_fit_does_without_masters_and_moments",),
        ),
    ),
    Line(
        "34",
        "evaluation alone starts a worker",
        (
            "integration/test_trainer_life.py::test_evaluation_alone_starts_no_background_process",
            "integration/test_process_life.py::test_validate_test_and_predict_alone_start_no_background_process",
            "integration/test_kept_memory.py::test_evaluation_of_a_checkpoint_alone_holds_no_masters_and_moments",
        ),
        Break(
            "        if trainer.training:\n            self._initialize_deepspeed_train",
            "        if True:\n            self._initialize_deepspeed_train",
            ("integration/test_trainer_life.py::test_evaluation_alone_starts_no_background_process",),
        ),
    ),
    Line(
        "35",
        "too little shared or locked memory is not said",
        (
            "integration/test_process_life.py::test_too_little_address_space_is_said_before_training_starts",
            "process/test_layout_and_arena.py::test_a_refusal_of_the_system_names_need_limit_and_remedy",
            "process/test_memory.py::test_the_address_space_of_this_process_is_a_limit",
        ),
        Break(
            "        if need_bytes > limit.nbytes:\n",
            "        if False:\n",
            ("process/test_memory.py::test_the_address_space_of_this_process_is_a_limit",),
        ),
    ),
    Line(
        "36",
        "pinning refused by the system ends the run",
        (
            "process/test_layout_and_arena.py::test_refused_pinning_warns_once_with_size_and_reason_and_goes_on",
            "process/test_layout_and_arena.py::test_pinning_without_cuda_is_a_refusal",
            "integration/test_process_life.py::test_refused_pinning_is_one_warning_and_training_goes_on",
        ),
        Break(
            "        except (RuntimeError, AssertionError, AttributeError) as error:\n            status, reason",
            "        except ZeroDivisionError as error:\n            status, reason",
            ("process/test_layout_and_arena.py::test_pinning_without_cuda_is_a_refusal",),
        ),
    ),
    Line(
        "37",
        "too little host memory is not said before start",
        (
            "process/test_worker_life.py::test_too_little_memory_is_said_before_anything_is_started",
            "process/test_memory.py::test_all_ranks_of_the_machine_must_fit",
            "process/test_memory.py::test_every_level_of_a_v2_hierarchy_counts",
        ),
        Break(
            "        check_host_memory(layout.touched_nbytes, local_ranks, numel=layout.numel)\n",
            "        pass\n",
            ("process/test_worker_life.py::test_too_little_memory_is_said_before_anything_is_started",),
        ),
    ),
    Line(
        "38",
        "pinned memory rounded up",
        (
            "process/test_layout_and_arena.py::test_the_exchange_region_is_registered_once_at_its_exact_size_and_unregistered_before_it_is_unmapped",
            "process/test_layout_and_arena.py::test_a_pinned_arena_is_pinned_anew_when_it_is_rebuilt",
        ),
        Break(
            "        nbytes = self.layout.exchange_nbytes\n        try:",
            "        nbytes = 1 << self.layout.exchange_nbytes.bit_length()\n        try:",
            (
                "process/test_layout_and_arena.py::test_the_exchange_region_is_registered_once_at_its_exact_size_and_unregistered_before_it_is_unmapped",
            ),
        ),
    ),
    Line(
        "39",
        "importing the package imports deepspeed",
        (
            "integration/test_process_life.py::test_importing_the_package_imports_no_deepspeed_and_starts_nothing",
            "integration/test_checkpoint_reader.py::test_importing_the_reader_does_not_import_deepspeed",
        ),
        Break(
            "from lightning_zenflow.strategy import ZenFlowStrategy\nexcept",
            "from lightning_zenflow.strategy import ZenFlowStrategy; import deepspeed\nexcept",
            ("integration/test_process_life.py::test_importing_the_package_imports_no_deepspeed_and_starts_nothing",),
        ),
    ),
    Line(
        "40",
        "forms of YAML and command line that do not work",
        (
            "integration/test_trainer_config.py::test_yaml_with_a_class_path_and_an_option_train_in_somebody_elses_command_line",
            "integration/test_readme.py::test_yaml_from_the_readme_trains_in_somebody_elses_command_line",
            "unit/test_cli.py::test_settings_reach_a_strategy_given_by_name",
        ),
    ),
    Line(
        "41",
        "`config` drops the other arguments",
        (
            "unit/test_strategy_arguments.py::test_an_argument_that_a_config_would_drop_is_named",
            "unit/test_strategy_arguments.py::test_what_is_said_twice_must_be_the_same",
            "integration/test_trainer_config.py::test_a_json_that_contradicts_trainer_or_package_is_refused_before_anything_starts",
        ),
        Break(
            "            arguments.refuse_beside_config(changed, self.config)\n",
            "            pass\n",
            ("unit/test_strategy_arguments.py::test_an_argument_that_a_config_would_drop_is_named",),
        ),
    ),
    Line(
        "42",
        "does not run on CPU",
        (
            "unit/test_strategy_arguments.py::test_a_registered_name_is_enough",
            "integration/test_trainer_two_ranks.py::test_the_trainer_launches_a_second_rank_by_itself",
            "integration/test_trainer_life.py::test_a_run_needs_no_compiler_and_uses_none",
        ),
    ),
    Line(
        "43",
        "the same seed gives other weights",
        (
            "integration/test_exactness.py::test_neither_a_second_run_nor_random_delays_change_a_bit",
            "integration/test_auto_tuner.py::test_a_run_is_repeated_bit_for_bit_from_its_record",
            "integration/test_soak.py::test_a_disturbed_run_ends_as_an_undisturbed_one_and_nothing_grows",
        ),
    ),
)
