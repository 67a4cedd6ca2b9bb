"""What one rank moves in a step: over the link to its host, and from other ranks. Pure arithmetic; symbols as in `costs`.

Checked against counted bytes, and against the sizes that are asked of collectives, by
`tests/integration/test_estimate_against_runs.py` and `tests/integration/test_guards_ranks.py`. The gradient norm, one number a
step, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zenflow.work import Work

KEPT_NUMEL = 500_000_000
"""Weights that stay gathered at the turn from forward to backward: DeepSpeed releases none that are needed again within
`stage3_max_reuse_distance`, 1e9 elements, of which forward and backward have one half each."""

PREFETCH_NUMEL = 50_000_000
"""Weights that are gathered ahead of their use (`stage3_prefetch_bucket_size`)."""

SCORE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one rank in one step.

    Attributes:
        to_host_bytes: From device to host.
        to_device_bytes: From host to device.
        from_ranks_bytes: Received from other ranks.
    """

    to_host_bytes: int
    to_device_bytes: int
    from_ranks_bytes: int


def gathered_numel(work: Work) -> tuple[int, int]:
    """Weights that one micro-batch brings together: in its forward pass, and again in its backward pass.

    None under stage 2, nor on a single rank that has them on its device.
    """
    if not work.cuts_weights:
        return 0, 0
    return work.numel, work.numel - min(work.numel, KEPT_NUMEL)


def live_numel(work: Work) -> int:
    """The most weights that are on a device as copies for computing, beside what the rank itself holds."""
    if not work.cuts_weights:
        return 0
    return min(work.numel, max(KEPT_NUMEL, work.largest_numel) + PREFETCH_NUMEL)


def exchanged_numel(work: Work, changed_numel: float) -> float:
    """Weights that every rank must have after an update that changed `changed_numel`: none if ranks hold only their own."""
    return 0.0 if work.stage == 3 else changed_numel


def changed_numel(work: Work, update_interval: int) -> float:
    """Weights that differ after a step: one block and what is selected, or all if the device itself moves deferred ones."""
    return work.numel if work.moves_deferred else work.numel / update_interval + work.selected_numel


def reduced_numel(work: Work) -> int:
    """Elements that bring a micro-batch's gradients together, as `received` takes them.

    Under stage 3 each rank gets the sum of its own part. Under stage 2 DeepSpeed 0.19 sums by an all-reduce
    (`use_multi_rank_bucket_allreduce`, on unless somebody turns it off): every rank gets every sum, in twice the bytes.
    """
    return work.numel if work.stage == 3 else 2 * work.numel


def received(work: Work, numel: float) -> float:
    """What a rank receives of `numel` elements that all ranks hold parts of, or keep a part of the sum of: all but its own.

    An all-reduce is both, one after the other, and receives that twice.
    """
    return numel * (work.ranks - 1) / work.ranks


def zenflow(work: Work, update_interval: int) -> Traffic:
    """Every gradient goes to the host, one block comes back, and its gradient if the device itself moves deferred weights.

    With offloaded parameters the block stays in host memory; selected values go there, and weights come for each pass.
    """
    down = work.shard_numel + (work.selected_shard_numel if work.offload_parameters else 0)
    up = 0.0 if work.offload_parameters else work.shard_numel / update_interval
    if work.moves_deferred:
        up *= 2
    exchanged = exchanged_numel(work, changed_numel(work, update_interval))
    return _in_bytes(work, work.wire_bytes * down, up, exchanged)


def zero_offload(work: Work) -> Traffic:
    """DeepSpeed's ZeRO-Offload: gradients go down in fp32, all weights come back."""
    up = 0.0 if work.offload_parameters else work.shard_numel
    return _in_bytes(work, 4 * work.shard_numel, up, exchanged_numel(work, work.numel))


def on_device(work: Work) -> Traffic:
    """AdamW on the device."""
    return _in_bytes(work, 0, 0.0, exchanged_numel(work, work.numel))


def score_bytes(work: Work) -> int:
    """What a rank receives to choose columns: the scores, one for each column, summed over the ranks by an all-reduce."""
    return round(2 * received(work, SCORE_BYTES * work.columns))


def select_bytes(work: Work) -> int:
    """What a rank receives for one re-selection: the scores, and all weights that it does not own.

    The weights are needed because the barrier before a re-selection updates every block, so that all deferred weights have
    changed. They come instead of what the step has changed, which `zenflow` counts. Under ZeRO-3 no rank keeps the weights of
    others, and the next forward gathers them as always.
    """
    return score_bytes(work) + round(work.wire_bytes * received(work, exchanged_numel(work, work.numel)))


def _in_bytes(work: Work, down_bytes: int, up_numel: float, exchanged: float) -> Traffic:
    passes = sum(gathered_numel(work))
    fetched = passes / work.ranks if work.offload_parameters else 0.0
    per_batch = passes + reduced_numel(work)  # weights are gathered and gradients reduced for each micro-batch
    return Traffic(
        to_host_bytes=down_bytes,
        to_device_bytes=round(work.wire_bytes * (up_numel + work.micro_batches * fetched)),
        from_ranks_bytes=round(work.wire_bytes * received(work, work.micro_batches * per_batch + exchanged)),
    )
