"""Which columns are important: scores from gradients, and the columns that win.

The score of a column is the squared norm of its gradient (arXiv 2505.12242, section 3.2). Each rank scores its shard and
only the scores are summed over ranks: `cols` numbers per matrix instead of `rows * cols`.

They are summed in fp32. In 16 bits, columns whose scores differ by less than 1 in 256 would be taken for equal, and sums of
rounded parts would depend on how a matrix is cut over ranks: another number of ranks would select other columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_zenflow.shards import ParamSpec, Segment

_CHUNK_NUMEL, _DEVICE_CHUNK_NUMEL = 1 << 17, 1 << 20
"""fp32 copies of a 16-bit gradient are made in chunks, so that they never take its size again, and stay in cache on CPU."""


def selected_count(topk_ratio: float, cols: int) -> int:
    """How many of a matrix's `cols` columns are selected: `max(1, round(k * cols))`, and none if k is 0."""
    return 0 if topk_ratio == 0 else max(1, round(topk_ratio * cols))


def add_column_scores(segment: Segment, grad: Tensor, scores: Tensor) -> None:
    """Adds the squared norm of each column of `grad` to `scores`.

    Args:
        segment: The part of a matrix that this rank owns.
        grad: Its gradient, flat `[segment.numel]`, any floating dtype.
        scores: fp32 `[cols]` of the whole parameter, same device; updated in place.
    """
    chunk_numel = _CHUNK_NUMEL if grad.device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    for piece in segment.pieces:
        flat = grad[piece.start - segment.start : piece.stop - segment.start]
        into = scores[piece.column : piece.column + piece.width]
        for rows in flat.view(piece.rows, piece.width).split(max(1, chunk_numel // piece.width)):
            into += rows.to(torch.float32, copy=True).square_().sum(0)


def top_columns(scores: Tensor, topk_ratio: float) -> Tensor:
    """The winning columns in ascending order, int64 `[selected_count]` on the device of `scores`.

    Equal scores go to the lower column: `sort` is asked to be stable, since `topk` promises nothing about ties and every
    rank must pick the same columns.
    """
    count = selected_count(topk_ratio, scores.numel())
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def agreement(before: Mapping[int, Tensor], now: Mapping[int, Tensor]) -> float | None:
    """Share of the columns selected `now` that were selected `before` too, over all matrices; `None` without a before."""
    if not before:
        return None
    kept = sum(int(torch.isin(columns, before[param], assume_unique=True).sum()) for param, columns in now.items())
    return kept / max(1, sum(columns.numel() for columns in now.values()))


class ScoreBoard:
    """The scores of all matrices in one fp32 tensor, so that one collective sums them over ranks."""

    def __init__(self, params: Sequence[ParamSpec], device: torch.device) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        end = 0
        for index, spec in enumerate(params):
            if spec.is_matrix:
                self._ranges[index] = (end, end + spec.cols)
                end += spec.cols
        self.scores = torch.zeros(end, dtype=torch.float32, device=device)

    def record(self, segment: Segment, grad: Tensor) -> None:
        """Scores one segment; a gradient handed in again for the same segment replaces the first."""
        if segment.spec.is_matrix:
            start, stop = self._ranges[segment.param]
            into = self.scores[start:stop].zero_()
            add_column_scores(segment, grad, into)

    def winners(self, topk_ratio: float) -> dict[int, Tensor]:
        """The selected columns of every matrix, by parameter index."""
        return {param: top_columns(self.scores[a:b], topk_ratio) for param, (a, b) in self._ranges.items()}

    def deferred_mass_ratio(self, columns: Mapping[int, Tensor]) -> float:
        """Share of the squared norm that lies outside `columns`, over all matrices, from 0 to 1; 0 if all is zero."""
        selected = sum((self.scores[start:][columns[param]].sum() for param, (start, _) in self._ranges.items()), 0.0)
        total = self.scores.sum().item()
        return max(0.0, 1 - float(selected) / total) if total > 0 else 0.0

    def clear(self) -> None:
        self.scores.zero_()
