"""Reported faults in the life of a process: its end, its memory, how it is started."""

from __future__ import annotations

from tests.faults.line import Break, Line

LIFE: tuple[Line, ...] = (
    Line(
        "30",
        "one rank fails and the others wait",
        (
            "integration/test_process_life_ranks.py::test_an_exception_in_configure_optimizers_on_one_rank_ends_both",
            "integration/test_process_life_ranks.py::test_the_killed_worker_of_one_rank_ends_both",
            "integration/test_process_life_ranks.py::test_an_exception_on_one_rank_ends_both",
        ),
        Break(
            "        self.barrier()  # a rank that failed",
            "        pass  # a rank that failed",
            (
                "integration/test_process_life_ranks.py::test_an_exception_in_configure_optimizers_on_one_rank_ends_both",
            ),
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
        Break(
            "zenflow: ZenFlowConfig = ZenFlowConfig(),",
            "zenflow: Any = ZenFlowConfig(),",
            (
                "integration/test_trainer_config.py::test_yaml_with_a_class_path_and_an_option_train_in_somebody_elses_command_line",
            ),
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
        Break(
            "        super(DeepSpeedStrategy, self).setup_environment()",
            "        super().setup_environment()",
            ("integration/test_trainer_life.py::test_a_run_needs_no_compiler_and_uses_none",),
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
        Break(
            "        if not self.host.slot_is_read(start, stop):\n",
            "        if False:\n",
            ("integration/test_exactness.py::test_neither_a_second_run_nor_random_delays_change_a_bit",),
        ),
    ),
)
