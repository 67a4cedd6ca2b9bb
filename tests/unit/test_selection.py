import pytest
import torch

from lightning_zenflow.selection import ScoreBoard, selected_count, top_columns
from lightning_zenflow.shards import ParamSpec, ShardTable


@pytest.mark.parametrize(
    ("ratio", "cols", "count"), [(0, 10, 0), (0.01, 10, 1), (0.1, 25, 2), (0.5, 7, 4), (1, 7, 7), (0.3, 1, 1)]
)
def test_the_number_of_selected_columns_is_rounded_and_at_least_one(ratio: float, cols: int, count: int) -> None:
    assert selected_count(ratio, cols) == count


def test_ties_go_to_the_lower_column() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    assert top_columns(scores, 0.4).tolist() == [1, 2]
    assert top_columns(torch.zeros(1000), 0.1).tolist() == list(range(100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_all_ranks_add_up_to_the_squared_column_norms_of_the_whole_matrix(dtype: torch.dtype) -> None:
    specs = [ParamSpec("v", (3,), 0, 0), ParamSpec("w", (7, 5), 0, 3), ParamSpec("conv", (4, 2, 3), 0, 38)]
    grads = [torch.randn(spec.shape).to(dtype) for spec in specs]
    total = torch.zeros(5 + 6)
    for rank in range(3):
        table = ShardTable.build(specs, [22], rank)
        board = ScoreBoard(table.params, torch.device("cpu"))
        for segment in table.segments:
            flat = grads[segment.param].flatten()
            board.record(segment, flat[segment.param_start : segment.param_start + segment.numel])
        total += board.scores
    expected = [grad.float().flatten(1).square().sum(0) for grad in grads[1:]]
    torch.testing.assert_close(total, torch.cat(expected))


def test_a_gradient_handed_in_again_replaces_its_scores() -> None:
    specs = [ParamSpec("w", (2, 3), 0, 0)]
    table = ShardTable.build(specs, [6], 0)
    board = ScoreBoard(specs, torch.device("cpu"))
    board.record(table.segments[0], torch.ones(6))
    board.record(table.segments[0], torch.full((6,), 2.0))
    assert board.scores.tolist() == [8.0, 8.0, 8.0]
