import pytest
import torch

from lightning_zenflow.schedule import block_range
from lightning_zenflow.shards import ParamSpec, ShardTable

SPECS = [
    ParamSpec("a", (5, 7), 0, 0),
    ParamSpec("v", (3,), 0, 35),
    ParamSpec("conv", (4, 2, 3), 0, 38),
    ParamSpec("scalar", (), 1, 0),
    ParamSpec("column", (9, 1), 1, 1),
]
GROUP_NUMELS = (62, 10)


def tables(ranks: int) -> list[ShardTable]:
    partitions = [-(-numel // (2 * ranks)) * 2 for numel in GROUP_NUMELS]
    return [ShardTable.build(SPECS, partitions, rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_element_of_every_parameter_lies_in_exactly_one_shard(ranks: int) -> None:
    seen = [torch.zeros(spec.numel, dtype=torch.int64) for spec in SPECS]
    for table in tables(ranks):
        occupied = torch.zeros(table.numel, dtype=torch.int64)
        for segment in table.segments:
            seen[segment.param][segment.param_start : segment.param_start + segment.numel] += 1
            occupied[segment.start : segment.stop] += 1
        assert occupied.max() <= 1
    assert all((count == 1).all() for count in seen)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pieces_cover_a_segment_in_order_and_name_the_right_columns(ranks: int) -> None:
    for table in tables(ranks):
        for segment in table.segments:
            at = segment.start
            for piece in segment.pieces:
                assert piece.start == at
                assert piece.rows == 1 or (piece.column == 0 and piece.width == segment.spec.cols)
                for row in range(piece.rows):
                    first = segment.param_start + piece.start - segment.start + row * piece.width
                    assert first % segment.spec.cols == piece.column
                at = piece.stop
            assert at == segment.stop


def test_a_boundary_in_the_middle_of_a_row_leaves_a_head_whole_rows_and_a_tail() -> None:
    spec = ParamSpec("w", (6, 10), 0, 3)  # partitions of 32 cut it at its elements 29 and 61
    middle = ShardTable.build([spec], [32], 1).segments[0]
    assert [(piece.rows, piece.width, piece.column) for piece in middle.pieces] == [(1, 1, 9), (3, 10, 0)]
    first = ShardTable.build([spec], [32], 0).segments[0]
    assert [(piece.rows, piece.width, piece.column) for piece in first.pieces] == [(2, 10, 0), (1, 9, 0)]


def test_a_segment_within_one_row_is_a_single_piece() -> None:
    spec = ParamSpec("w", (2, 100), 0, 0)
    segment = ShardTable.build([spec], [40], 1).segments[0]
    assert [(piece.rows, piece.width, piece.column) for piece in segment.pieces] == [(1, 40, 40)]


def test_offsets_beyond_two_to_the_31_stay_exact() -> None:
    """FAULTS 18; the background process's own offsets are tested with its arena."""
    spec = ParamSpec("huge", (3_000_000, 1_000), 0, 0)
    table = ShardTable.build([spec], [3_000_000_000], 0)
    assert table.segments[0].numel == 3_000_000_000 and table.segments[0].pieces[0].stop == 3_000_000_000
    assert block_range(table.numel, 4, 3) == (2_250_000_000, 3_000_000_000)
