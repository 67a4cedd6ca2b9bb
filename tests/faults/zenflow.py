"""Faults of DeepSpeed's ZenFlow under Lightning."""

from __future__ import annotations

from tests.faults.line import Break, Line

ZENFLOW: tuple[Line, ...] = (
    Line(
        "Z1",
        "any optimizer from `configure_optimizers` crashes",
        (
            "unit/test_conversion.py::test_each_group_keeps_its_settings_and_its_dict",
            "unit/test_conversion.py::test_a_flag_that_changes_the_maths_is_refused_by_name",
            "unit/test_conversion.py::test_any_other_optimizer_is_named_beside_those_that_are_accepted",
            "integration/test_trainer_parameters.py::test_a_group_that_is_frozen_as_a_whole_does_not_disturb_the_others",
        ),
        Break(
            "if kind in (torch.optim.AdamW, torch.optim.Adam, ZenFlowAdamW):",
            "if kind in (torch.optim.AdamW, ZenFlowAdamW):",
            ("unit/test_conversion.py::test_each_group_keeps_its_settings_and_its_dict",),
        ),
    ),
    Line(
        "Z2",
        "accumulation overwritten by the update interval",
        (
            "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            "integration/test_accumulation_parts.py::test_a_gradient_of_an_earlier_micro_batch_alone_is_applied",
        ),
        Break(
            'self.config["gradient_accumulation_steps"] = 1',
            'self.config["gradient_accumulation_steps"] = self.zenflow.update_interval_steps()',
            (
                "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            ),
        ),
    ),
    Line(
        "Z3",
        "selection by epoch happens once only",
        (
            "integration/test_trainer_steps.py::test_an_interval_in_epochs_comes_from_the_trainer",
            "integration/test_trainer_steps.py::test_an_interval_in_epochs_counts_only_batches_that_are_used",
            "integration/test_trainer_steps.py::test_an_interval_in_epochs_asks_for_steps_where_the_loader_has_no_length",
            "unit/test_config.py::test_epochs_of_an_endless_loader_ask_for_a_step_interval",
        ),
        Break(
            "max(1, math.ceil(batches / trainer.accumulate_grad_batches))",
            "max(1, math.ceil(batches))",
            ("integration/test_trainer_steps.py::test_an_interval_in_epochs_comes_from_the_trainer",),
        ),
    ),
    Line(
        "Z4",
        "`auto` with an integer interval raises `Warning`",
        (
            "unit/test_config.py::test_a_selection_interval_without_its_unit_is_refused_with_the_way_out",
            "unit/test_config.py::test_a_value_of_the_wrong_type_is_a_type_error_that_names_field_and_value",
            "unit/test_strategy_arguments.py::test_a_bad_setting_is_named",
        ),
        Break(
            'automatic = self.select_strategy != "auto" or self.select_interval == "auto"',
            "automatic = True",
            ("unit/test_config.py::test_a_selection_interval_without_its_unit_is_refused_with_the_way_out",),
        ),
    ),
    Line(
        "Z5",
        "checkpoints hold no Adam state",
        (
            "integration/test_resume.py::test_a_run_resumes_after_any_batch",
            "integration/test_checkpoint_interop.py::test_a_plain_run_takes_over_with_all_that_was_held",
            "integration/test_checkpoints.py::test_saving_changes_no_bit_of_training",
        ),
        Break(
            '"exp_avg": moments[0],',
            '"exp_avg": torch.zeros_like(moments[0]),',
            ("integration/test_resume.py::test_a_run_resumes_after_any_batch",),
        ),
    ),
    Line(
        "Z6",
        "worker outlives a killed trainer",
        (
            "process/test_trainer_death.py::test_a_killed_trainer_takes_its_worker_along",
            "integration/test_process_life_ends.py::test_a_killed_trainer_takes_its_worker_along",
            "integration/test_process_life_ends.py::test_a_trainer_killed_while_its_worker_starts_takes_it_along",
        ),
        Break(
            "        except (EOFError, OSError):\n            pass\n        raise TrainerGone",
            "        except (EOFError, OSError):\n            pass\n        select.select([], [], [], 30); raise TrainerGone",
            ("process/test_trainer_death.py::test_a_killed_trainer_takes_its_worker_along",),
        ),
    ),
    Line(
        "Z7",
        "a script without main guard is run again by the child",
        (
            "integration/test_process_life.py::test_a_script_without_a_main_guard_trains_once",
            "process/test_trainer_death.py::test_a_script_without_a_main_guard_runs_once",
            "integration/test_process_life.py::test_code_that_is_typed_in_trains_once",
        ),
        Break(
            "import types\nstub = ",
            'import os, runpy, types; os.environ.get("AGAIN") or (os.environ.update(AGAIN="1"), '
            'runpy.run_path(open(f"/proc/{os.getppid()}/cmdline").read().split(chr(0))[1]))\nstub = ',
            ("process/test_trainer_death.py::test_a_script_without_a_main_guard_runs_once",),
        ),
    ),
    Line(
        "Z8",
        "trainer and data loader workers squeezed onto fewer cores",
        (
            "process/test_affinity.py::test_only_the_worker_is_bound",
            "integration/test_trainer_life.py::test_data_loader_workers_and_the_trainer_keep_their_cores",
            "integration/test_process_life.py::test_only_the_worker_is_bound_and_loader_workers_keep_all_cores",
        ),
        Break(
            "        self._begin_run()\n        if isinstance(trainer._signal_connector",
            "        self._begin_run(); os.sched_setaffinity(0, {0})\n        if isinstance(trainer._signal_connector",
            ("integration/test_trainer_life.py::test_data_loader_workers_and_the_trainer_keep_their_cores",),
        ),
    ),
    Line(
        "Z9",
        "selected columns are neither clipped nor unscaled",
        (
            "integration/test_trainer_steps.py::test_both_parts_are_clipped_as_a_plain_trainer_clips",
            "integration/test_trainer_precision.py::test_fp16_gradients_are_unscaled_and_clipped_in_both_parts",
            "integration/test_trainer_precision.py::test_gradients_in_hooks_are_unscaled_and_masters_follow_the_reference",
        ),
        Break(
            "self.selected.update(groups, factor, plan.step)",
            "self.selected.update(groups, 1.0, plan.step)",
            ("integration/test_trainer_steps.py::test_both_parts_are_clipped_as_a_plain_trainer_clips",),
        ),
    ),
    Line(
        "Z10",
        "two alternating Adam states, bias correction runs ahead",
        (
            "integration/test_exactness.py::test_the_two_extremes_equal_torch_adamw_and_adam_in_every_stage",
            "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            "process/test_worker_numbers.py::test_blocks_follow_the_formulas",
        ),
        Break(
            "step = torch.full((), clock / steps,",
            "step = torch.full((), clock,",
            ("process/test_worker_numbers.py::test_blocks_follow_the_formulas",),
        ),
    ),
    Line(
        "Z11",
        "NaN after `update_interval` steps",
        (
            "integration/test_trainer_steps.py::test_leftover_batches_step_at_the_end_of_each_epoch_and_all_counters_agree",
            "process/test_worker_numbers.py::test_a_lane_is_overwritten_by_the_first_gradient_that_a_block_gets",
            "integration/test_against_reference.py::test_every_pair_of_settings_equals_the_reference",
        ),
        Break(
            "            if is_fresh:\n",
            "            if False:\n",
            ("process/test_worker_numbers.py::test_a_lane_is_overwritten_by_the_first_gradient_that_a_block_gets",),
        ),
    ),
    Line(
        "Z12",
        "prints on every update",
        (
            "integration/test_trainer_life.py::test_nothing_is_printed_while_training",
            "integration/test_trainer_steps.py::test_deepspeed_does_not_repeat_what_is_said_of_a_skipped_step",
        ),
        Break(
            "        self.clock = plan.step\n        changed = ",
            "        self.clock = plan.step; print('updated')\n        changed = ",
            ("integration/test_trainer_life.py::test_nothing_is_printed_while_training",),
        ),
    ),
    Line(
        "Z13",
        "JIT build at the first step",
        ("integration/test_trainer_life.py::test_a_run_needs_no_compiler_and_uses_none",),
        Break(
            "        with without_compiling(), store_of_this_attempt():\n",
            "        if True:\n",
            ("integration/test_trainer_life.py::test_a_run_needs_no_compiler_and_uses_none",),
        ),
    ),
)
