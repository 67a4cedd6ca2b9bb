"""What `estimate` finds out: one model on one machine, trained in three ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_zenflow import costs, footprint, recommended, traffic
from lightning_zenflow.costs import Step
from lightning_zenflow.footprint import Footprint
from lightning_zenflow.offload.layout import MOMENTS_DTYPES, ArenaLayout
from lightning_zenflow.traffic import Traffic
from lightning_zenflow.work import Work

from .machine import DTYPES, Machine
from .sizes import Size


@dataclass(frozen=True)
class Method:
    """One way to train the model.

    Attributes:
        name: For people.
        step: Where the time goes, in seconds.
        traffic: What is moved in a step.
        device: Device memory, without activations.
        host_bytes: Host memory of a rank.
        fits: Whether that is there.
    """

    name: str
    step: Step
    traffic: Traffic
    device: Footprint
    host_bytes: int
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """Everything that is printed.

    Attributes:
        size: The model.
        work: One step of it.
        precision: `bf16`, `fp16` or `fp32`.
        topk_ratio: Share of the columns on the device.
        machine: The machine.
        update_interval: As recommended or given, in steps.
        select_interval: As recommended, in steps; `None` if there is nothing to choose: none or all are selected.
        barrier_secs: One re-selection.
        score_bytes: What a rank receives from the others to choose; 0 if the columns are not known.
        select_bytes: What it receives from them for a re-selection in all.
        fits_under_zero_2: Whether ZenFlow under ZeRO-3 was asked for although it fits under ZeRO-2.
        zenflow: This package, between two re-selections.
        zero_offload: DeepSpeed's ZeRO-Offload.
        on_device: AdamW with all state on the device.
    """

    size: Size
    work: Work
    precision: str
    topk_ratio: float
    moments: str
    machine: Machine
    update_interval: int
    select_interval: int | None
    barrier_secs: float
    score_bytes: int
    select_bytes: int
    fits_under_zero_2: bool
    zenflow: Method
    zero_offload: Method
    on_device: Method

    @property
    def methods(self) -> tuple[Method, Method, Method]:
        """All three."""
        return self.zenflow, self.zero_offload, self.on_device

    @property
    def select_stall_secs(self) -> float:
        """What re-selections add to a step, on average."""
        return 0.0 if self.select_interval is None else self.barrier_secs / self.select_interval


def estimate(
    size: Size,
    work: Work,
    precision: str,
    topk_ratio: float,
    machine: Machine,
    update_interval: int | None = None,
    moments: str = "fp32",
) -> Estimate:
    """Computes all of it.

    Args:
        size: The model.
        work: One step of it.
        precision: A key of `DTYPES`.
        topk_ratio: Share of the columns on the device.
        machine: The machine.
        update_interval: In steps; `None` for the smallest the host keeps up with.
        moments: `moments_dtype` of the config. Only memory depends on it: the rates are those of moments in fp32.
    """
    rates, selects = machine.rates, 0 < topk_ratio < 1
    interval = update_interval or recommended.smallest_update_interval(work, rates)
    arena = ArenaLayout(work.shard_numel, DTYPES[precision], interval, MOMENTS_DTYPES[moments])
    plain = replace(work, offload_parameters=False)
    under_2 = replace(plain, stage=2)
    fits_under_2 = _fits(
        machine, work.ranks, footprint.zenflow_device(under_2, rates).total_bytes, arena.touched_nbytes
    )

    def method(name: str, step: Step, moved: Traffic, device: Footprint, host_bytes: int) -> Method:
        fits = _fits(machine, work.ranks, device.total_bytes, host_bytes)
        return Method(name, step, moved, device, host_bytes, fits)

    return Estimate(
        size=size,
        work=work,
        precision=precision,
        topk_ratio=topk_ratio,
        moments=moments,
        machine=machine,
        update_interval=interval,
        select_interval=recommended.smallest_select_interval(work, rates, interval) if selects else None,
        barrier_secs=recommended.barrier_secs(work, rates, interval),
        score_bytes=traffic.score_bytes(work) if selects else 0,
        select_bytes=traffic.select_bytes(work) if selects else 0,
        fits_under_zero_2=work.stage == 3 and fits_under_2,
        zenflow=method(
            "ZenFlow",
            costs.zenflow(work, rates, interval),
            traffic.zenflow(work, interval),
            footprint.zenflow_device(work, rates),
            arena.touched_nbytes + footprint.host_weights_bytes(work),
        ),
        zero_offload=method(
            "ZeRO-Offload",
            costs.zero_offload(work, rates),
            traffic.zero_offload(work),
            footprint.offload_device(work, rates),
            footprint.offload_host_bytes(work),
        ),
        on_device=method(
            "no offload", costs.on_device(plain, rates), traffic.on_device(plain), footprint.on_device(plain), 0
        ),
    )


def _fits(machine: Machine, ranks: int, device_bytes: int, host_bytes: int) -> bool:
    if machine.shares_memory:
        free_bytes = machine.device_bytes if machine.host_bytes is None else machine.host_bytes
        return ranks * (device_bytes + host_bytes) <= free_bytes
    enough = machine.host_bytes is None or ranks * host_bytes <= machine.host_bytes
    return enough and device_bytes <= machine.device_bytes
