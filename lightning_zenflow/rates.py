"""How fast a machine is, as far as a step is concerned: seconds per element of every pass over the parameters.

Two sources: measured on a machine (`lightning_zenflow.cli.rehearsal`), or derived from bandwidths, as data sheets give them,
by counting the bytes that each pass moves. Pure arithmetic, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MASTER_BYTES = MOMENT_BYTES = ACCUMULATOR_BYTES = 4
CACHE_LINE_BYTES = 64
"""What memory moves for a single element out of a row: selected columns lie apart."""


def accumulate_bytes(wire_bytes: int) -> int:
    """Host memory traffic per element of adding a gradient: read it, read and write the fp32 accumulator."""
    return wire_bytes + 2 * ACCUMULATOR_BYTES


def update_bytes(wire_bytes: int, update_interval: int = 2) -> int:
    """Host memory traffic per element of AdamW on a block.

    Master and both moments are read and written, the accumulator and the step's gradient read, the outbox written.
    Everything in between (the sum, the mean, look-ahead) happens in chunks that stay in cache.

    Args:
        wire_bytes: As in `Rates.from_bandwidths`.
        update_interval: `U`. With 1 nothing is accumulated; above that it makes no difference.
    """
    accumulated = ACCUMULATOR_BYTES if update_interval > 1 else 0
    return 2 * (MASTER_BYTES + 2 * MOMENT_BYTES) + accumulated + 2 * wire_bytes


def device_adamw_bytes(wire_bytes: int) -> int:
    """Device memory traffic per element of AdamW there: fp32 copy of the gradient, its scaling, the kernel, the rounding.

    The kernel reads four fp32 numbers and writes three.
    """
    return (wire_bytes + 4) + 8 + 28 + (4 + wire_bytes)


def offload_device_bytes(wire_bytes: int) -> int:
    """Device memory traffic per gradient element of DeepSpeed's ZeRO-2 offload, version 0.19.

    Copied into the bucket, averaged and copied back, its norm taken in fp64, checked for overflow twice, cast to fp32
    (`reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`, `copy_grads_in_partition`).
    """
    return 6 * wire_bytes + (wire_bytes + 16) + 2 * wire_bytes + (wire_bytes + 4)


def offload_step_bytes(wire_bytes: int) -> int:
    """Host memory traffic per element of DeepSpeed's offloaded step: clipping, Adam, rounding (`step`)."""
    return 8 + 28 + (4 + wire_bytes)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates one rank gets. Every `_secs` is in seconds per element.

    Attributes:
        compute_flops: FLOP/s that forward and backward reach.
        beside_flops: The same while the background process is at work: less where both share a memory.
        down_secs: A gradient element from backward into the host slot: measured, packed, copied.
        up_secs: A weight element from host to device.
        accumulate_secs: The host adds a gradient element to the accumulator of a block that is not updated at this step.
        update_secs: The host updates an element of a block, with its gradient.
        device_adamw_secs: AdamW on an element that lives on the device.
        write_secs: A selected element is written into the weights.
        interim_secs: The device moves a deferred weight by its gradient.
        move_secs: A selected element goes home and a newly selected one is fetched, fp32 weight and moments.
        offload_down_secs: As `down_secs`, in DeepSpeed's own ZeRO-Offload, which copies gradients in fp32.
        offload_step_secs: As `update_secs`, in DeepSpeed's own ZeRO-Offload.
        link_overlaps: Whether gradients travel while backward goes on: yes on accelerators, no where the CPU is one.
        device_bandwidth: Device memory, bytes/s; infinite where `compute_flops` was measured and contains it.
        interconnect_bandwidth: Between devices, bytes/s per device and direction; infinite if it is not to be counted.
    """

    compute_flops: float
    beside_flops: float
    down_secs: float
    up_secs: float
    accumulate_secs: float
    update_secs: float
    device_adamw_secs: float
    write_secs: float
    interim_secs: float
    move_secs: float
    offload_down_secs: float
    offload_step_secs: float
    link_overlaps: bool
    device_bandwidth: float = math.inf
    interconnect_bandwidth: float = math.inf

    @classmethod
    def from_bandwidths(
        cls,
        *,
        compute_flops: float,
        device_bandwidth: float,
        link_bandwidth: float,
        host_bandwidth: float,
        interconnect_bandwidth: float = math.inf,
        wire_bytes: int = 2,
        link_overlaps: bool = True,
    ) -> Rates:
        """Rates of a machine of which only bandwidths are known, all in bytes/s and as achieved.

        Args:
            compute_flops: As in the class.
            device_bandwidth: Memory of the device.
            link_bandwidth: Between host and device, per direction.
            host_bandwidth: Host memory, this rank's share.
            interconnect_bandwidth: As in the class.
            wire_bytes: Bytes of a gradient or weight element: 2, or 4 in fp32.
            link_overlaps: As in the class.
        """
        column_bytes = 3 * 3 * CACHE_LINE_BYTES  # three tensors: written home (read and write), fetched (read)
        return cls(
            compute_flops=compute_flops,
            beside_flops=compute_flops,
            down_secs=wire_bytes / link_bandwidth + wire_bytes / device_bandwidth,
            up_secs=wire_bytes / link_bandwidth,
            accumulate_secs=accumulate_bytes(wire_bytes) / host_bandwidth,
            update_secs=update_bytes(wire_bytes) / host_bandwidth,
            device_adamw_secs=device_adamw_bytes(wire_bytes) / device_bandwidth,
            write_secs=(wire_bytes + CACHE_LINE_BYTES) / device_bandwidth,
            interim_secs=3 * wire_bytes / device_bandwidth,  # the gradient is read, the weight read and written
            move_secs=2 * 12 / link_bandwidth + column_bytes / host_bandwidth,
            offload_down_secs=4 / link_bandwidth + offload_device_bytes(wire_bytes) / device_bandwidth,
            offload_step_secs=offload_step_bytes(wire_bytes) / host_bandwidth,
            link_overlaps=link_overlaps,
            device_bandwidth=device_bandwidth,
            interconnect_bandwidth=interconnect_bandwidth,
        )

    def with_link(self, link_bandwidth: float, wire_bytes: int) -> Rates:
        """The same machine with another link between host and device, bytes/s per direction."""
        return replace(
            self,
            down_secs=wire_bytes / link_bandwidth,
            up_secs=wire_bytes / link_bandwidth,
            offload_down_secs=4 / link_bandwidth,
        )

    def with_host(self, host_bandwidth: float, wire_bytes: int) -> Rates:
        """The same machine with other host memory, bytes/s for this rank."""
        return replace(
            self,
            accumulate_secs=accumulate_bytes(wire_bytes) / host_bandwidth,
            update_secs=update_bytes(wire_bytes) / host_bandwidth,
            offload_step_secs=offload_step_bytes(wire_bytes) / host_bandwidth,
        )
