"""Reported faults of precision and parameters."""

from __future__ import annotations

from tests.faults.line import Break, Line

PARAMETERS: tuple[Line, ...] = (
    Line(
        "14",
        "a precision trains wrongly or fails without words",
        (
            "integration/test_trainer_precision.py::test_fp16_is_refused_before_training_where_the_device_has_no_instructions_for_it",
            "integration/test_trainer_precision.py::test_a_precision_trains_with_falling_loss",
            "integration/test_trainer_precision.py::test_double_precision_is_refused",
            "integration/test_contract_precision.py::test_weights_and_inputs_have_the_dtype_of_the_precision_in_training_and_inference",
        ),
        Break(
            "        if str(precision).startswith(prefix) and not is_supported():\n",
            "        if False:\n",
            (
                "integration/test_trainer_precision.py::test_fp16_is_refused_before_training_where_the_device_has_no_instructions_for_it",
            ),
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
            "integration/test_checkpoints.py::test_every_name_of_a_tied_weight_has_the_master_and_one_place_in_the_file",
            "integration/test_checkpoints.py::test_tied_weights_are_stored_once_and_tied_again",
            "integration/test_trainer_parameters.py::test_tied_weights_stay_tied_and_frozen_ones_stay_as_they_were",
            "integration/test_trainer_parameters.py::test_parameters_of_every_kind_follow_the_reference",
            "integration/test_export.py::test_tied_weights_take_their_place_once",
        ),
        Break(
            "specs.get(self.param_names.get(param, name))",
            "specs.get(name)",
            (
                "integration/test_checkpoints.py::test_every_name_of_a_tied_weight_has_the_master_and_one_place_in_the_file",
            ),
        ),
    ),
    Line(
        "17",
        "models of one matrix, none, or one column fail",
        (
            "integration/test_trainer_parameters.py::test_parameters_of_every_kind_follow_the_reference",
            "integration/test_trainer_parameters.py::test_nothing_to_train_is_refused",
        ),
        Break(
            "max(1, round(topk_ratio * cols))",
            "round(topk_ratio * cols)",
            ("integration/test_trainer_parameters.py::test_parameters_of_every_kind_follow_the_reference",),
        ),
    ),
    Line(
        "18",
        "flat tensors over 2^31 elements",
        (
            "unit/test_rounding.py::test_columns_are_rounded_as_runs_are_beyond_two_to_the_31",
            "process/test_worker_numbers.py::test_a_block_beyond_two_to_the_31_elements_is_updated_as_one_at_the_start",
            "unit/test_shards.py::test_offsets_beyond_two_to_the_31_stay_exact",
        ),
        Break(
            "torch.arange(row, min(row + band, piece.rows))",
            "torch.arange(row, min(row + band, piece.rows), dtype=torch.int32)",
            ("unit/test_rounding.py::test_columns_are_rounded_as_runs_are_beyond_two_to_the_31",),
        ),
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
)
