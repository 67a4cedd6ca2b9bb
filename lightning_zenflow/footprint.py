"""What a model takes of device and host memory, in bytes per device. Pure arithmetic; symbols as in `costs`.

Activations are not counted: they depend on the model's code. What the device has left is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zenflow import traffic
from lightning_zenflow.costs import backward_secs
from lightning_zenflow.rates import Rates
from lightning_zenflow.work import Work

BUCKET_NUMEL = 200_000_000
"""Elements of DeepSpeed's reduction bucket as Lightning sets it; two of them, so that reducing overlaps with backward."""

STATE_BYTES = 12
"""fp32 master and both moments."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Device memory of one rank, in bytes.

    Attributes:
        weights_bytes: The model's weights: whole on every device, or under ZeRO-3 the rank's part and what is gathered.
        gradients_bytes: The most that gradients take at a time.
        state_bytes: Optimizer state on the device.
        buffers_bytes: Reduction buckets and other fixed buffers.
    """

    weights_bytes: int
    gradients_bytes: int
    state_bytes: int
    buffers_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.gradients_bytes + self.state_bytes + self.buffers_bytes


def _weights_bytes(work: Work) -> int:
    """Under ZeRO-3 gathered copies add to the rank's own part, which is elsewhere with offloaded parameters."""
    if work.stage < 3:
        return work.wire_bytes * work.numel
    held = 0 if work.offload_parameters else work.shard_numel
    return work.wire_bytes * (held + traffic.live_numel(work))


def _buckets_bytes(work: Work) -> int:
    return 2 * BUCKET_NUMEL * work.wire_bytes


def _waiting_bytes(work: Work, rates: Rates, down_secs: float) -> int:
    """Gradients that are finished before the link has taken them: none if the link is faster than backward."""
    way_secs = work.shard_numel * down_secs
    if not rates.link_overlaps or way_secs == 0:
        return 0
    waiting_ratio = max(0.0, 1 - backward_secs(work, rates) / way_secs)
    return round(waiting_ratio * work.wire_bytes * work.shard_numel)


def zenflow_device(work: Work, rates: Rates) -> Footprint:
    """ZenFlow: gradients leave during backward, so that only those that wait for the link are there at once.

    A selected element takes 14 bytes in 16 bit: fp32 master and moments, and its gradient, which becomes its new weight. A
    single rank needs no bucket. Micro-batches are summed on the device in fp32.
    """
    summed_bytes = 4 * work.shard_numel if work.micro_batches > 1 else 0
    largest_bytes = work.wire_bytes * work.largest_numel
    return Footprint(
        weights_bytes=_weights_bytes(work),
        gradients_bytes=summed_bytes + largest_bytes + _waiting_bytes(work, rates, rates.down_secs),
        state_bytes=(STATE_BYTES + work.wire_bytes) * work.selected_shard_numel,
        buffers_bytes=_buckets_bytes(work) if work.ranks > 1 else 0,
    )


def offload_device(work: Work, rates: Rates) -> Footprint:
    """DeepSpeed's ZeRO-Offload: no state, but buckets, a buffer for the largest gradient, and its copies in fp32 and fp64."""
    return Footprint(
        weights_bytes=_weights_bytes(work),
        gradients_bytes=(work.wire_bytes + 4 + 8) * work.largest_numel
        + _waiting_bytes(work, rates, rates.offload_down_secs),
        state_bytes=0,
        buffers_bytes=_buckets_bytes(work) + work.wire_bytes * work.largest_numel,
    )


def on_device(work: Work) -> Footprint:
    """AdamW on the device, at least: 16-bit gradients and fp32 state are partitioned over the ranks.

    Source: arXiv 1910.02054, section 5.2 (2 + 14/R bytes per parameter); DeepSpeed's step takes 4/R more for a moment.
    Give it work without offloaded parameters.
    """
    return Footprint(
        weights_bytes=_weights_bytes(work),
        gradients_bytes=work.wire_bytes * work.shard_numel,
        state_bytes=STATE_BYTES * work.shard_numel,
        buffers_bytes=_buckets_bytes(work) if work.ranks > 1 else 0,
    )


def host_weights_bytes(work: Work) -> int:
    """Weights of a rank in host memory, with offloaded parameters; page-locked where the device is not the CPU.

    PyTorch rounds page-locked memory up to a power of two unless told otherwise (`pinned_max_round_threshold_mb`).
    """
    return work.wire_bytes * work.shard_numel if work.offload_parameters else 0


def offload_host_bytes(work: Work) -> int:
    """Host memory of a rank in DeepSpeed's ZeRO-Offload: fp32 master, gradient and moments, 16-bit weights.

    Source: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`, before their factor of 1.5
    for buffers. Under ZeRO-3 without offloaded parameters the weights stay on the device.
    """
    weights_bytes = host_weights_bytes(work) if work.stage == 3 else work.wire_bytes * work.shard_numel
    return (STATE_BYTES + 4) * work.shard_numel + weights_bytes
