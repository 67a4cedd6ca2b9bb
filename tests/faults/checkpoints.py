"""Reported faults of checkpoints."""

from __future__ import annotations

from tests.faults.line import Break, Line

CHECKPOINTS: tuple[Line, ...] = (
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
        Break(
            "        self._blocks.load_state(state)\n",
            "        pass\n",
            ("integration/test_resume.py::test_a_run_resumes_after_any_batch",),
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
        Break(
            "    if mine.layout == layout:\n",
            "    if True:\n",
            ("integration/test_resume_ranks.py::test_another_number_of_ranks_goes_on_from_settled_weights",),
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
        Break(
            'self.read(name, "fp32").view(self.shapes[name]).to(dtype)',
            "self.module[name].to(dtype)",
            ("integration/test_export.py::test_the_file_holds_the_masters_bit_for_bit_and_loads_without_running_code",),
        ),
    ),
    Line(
        "29",
        "saving from a signal handler hangs or corrupts",
        (
            "integration/test_resume_signals.py::test_a_run_that_a_handler_has_saved_goes_on_as_if_never_stopped",
            "integration/test_resume_signals.py::test_no_batch_of_a_loader_that_knows_its_place_is_skipped_or_repeated",
            "integration/test_checkpoints.py::test_a_signal_handler_may_save_while_an_update_is_in_flight",
            "unit/test_signals.py::test_handlers_run_after_the_block_in_order_of_arrival",
            "integration/test_process_life_ends.py::test_a_checkpoint_can_be_saved_after_ctrl_c",
        ),
        Break(
            "            self._held.hold(ASKING)\n",
            "            pass\n",
            ("integration/test_resume_signals.py::test_a_run_that_a_handler_has_saved_goes_on_as_if_never_stopped",),
        ),
    ),
)
