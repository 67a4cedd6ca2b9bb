"""The machine that `estimate` counts with: this one, measured, or one by name; single numbers can be given instead."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_zenflow.offload import memory
from lightning_zenflow.offload.memory import Available
from lightning_zenflow.rates import Rates, accumulate_bytes

from .measure import accelerator, device, device_title, host_bandwidth, split_cores
from .presets import GIB, PRESETS
from .rehearsal import rehearse

CONTEXT_BYTES = GIB
"""What driver, libraries and the caching allocator's slack take of a device."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Machine:
    """A machine as one rank sees it.

    Attributes:
        title: For people.
        rates: Its rates.
        cores: Cores of the background process.
        device_bytes: Memory of a device that training can use.
        host_bytes: Host memory that is free, for all ranks; `None` if not known.
        shares_memory: Device and host are one memory, as where the CPU plays the device.
    """

    title: str
    rates: Rates
    cores: int
    device_bytes: int
    host_bytes: int | None
    shares_memory: bool = False


@dataclass(frozen=True)
class Given:
    """What the user knows better, as achieved; `None` where nothing was given.

    Attributes:
        device_flops: FLOP/s of forward and backward.
        link_bandwidth: Host to device, bytes/s per direction.
        host_bandwidth: Host memory for one rank, bytes/s.
    """

    device_flops: float | None = None
    link_bandwidth: float | None = None
    host_bandwidth: float | None = None

    def applied_to(self, rates: Rates, wire_bytes: int) -> Rates:
        """`rates` with what was given in place of what was measured or looked up."""
        if self.device_flops is not None:
            rates = replace(rates, compute_flops=self.device_flops, beside_flops=self.device_flops)
        if self.link_bandwidth is not None:
            rates = rates.with_link(self.link_bandwidth, wire_bytes)
        if self.host_bandwidth is not None:
            rates = rates.with_host(self.host_bandwidth, wire_bytes)
        return rates


def by_name(name: str, precision: str, cores: int | None, given: Given) -> Machine:
    """The machine of a preset.

    Raises:
        ValueError: Other `cores` than those with which the preset was measured.
    """
    preset = PRESETS[name]
    wire_bytes = DTYPES[precision].itemsize
    on_cpu = preset.measured is not None
    if on_cpu and cores not in (None, preset.cores):
        raise ValueError(
            f"`--cores` must be {preset.cores} with --preset {name}, which was measured so, got {cores}. Leave it out, or"
            " give --host-bandwidth."
        )
    return Machine(
        title=f"{preset.title} (preset {name})",
        rates=given.applied_to(preset.rates(wire_bytes, cores), wire_bytes),
        cores=cores or preset.cores,
        device_bytes=preset.memory_bytes - (0 if on_cpu else CONTEXT_BYTES),
        host_bytes=preset.memory_bytes if on_cpu else None,
        shares_memory=on_cpu,
    )


def here(tokens: int, precision: str, topk_ratio: float, ranks: int, cores: int | None, given: Given) -> Machine:
    """This machine, measured with one rank at work; of several, each gets its share of the host memory's bandwidth.

    Args:
        tokens: Tokens of a micro-batch.
        precision: A key of `DTYPES`.
        topk_ratio: Share of the columns that are selected.
        ranks: Ranks that share the cores.
        cores: Cores of the background process; `None` for its share.
        given: What is not to be measured.

    Raises:
        ValueError: `cores` is more than this process may use.
    """
    trainer_cores, host_cores = split_cores(ranks)
    if cores is not None:
        available = sorted(os.sched_getaffinity(0))
        if cores > len(available):
            raise ValueError(
                f"`--cores` must be at most {len(available)} on this machine, got {cores}. Give --preset for another one."
            )
        host_cores = available[-cores:]
        trainer_cores = available[:-cores] or available
    rates = rehearse(tokens, DTYPES[precision], topk_ratio, trainer_cores, host_cores)
    if ranks > 1:
        rates = _shared(rates, ranks, host_bandwidth(split_cores()[1]).bandwidth, DTYPES[precision].itemsize)
    on_cpu = device().type == "cpu"
    free_bytes = min((limit.nbytes for limit in host_limits()), default=None)
    return Machine(
        title=f"this one ({device_title()}), measured now",
        rates=given.applied_to(rates, DTYPES[precision].itemsize),
        cores=len(host_cores),
        device_bytes=int(accelerator().total_memory()) - (0 if on_cpu else CONTEXT_BYTES),
        host_bytes=free_bytes,
        shares_memory=on_cpu,
    )


def _shared(rates: Rates, ranks: int, bandwidth: float, wire_bytes: int) -> Rates:
    """Rates of one of `ranks` ranks whose workers' cores move `bandwidth` bytes/s together."""
    wanted = ranks * accumulate_bytes(wire_bytes) / rates.accumulate_secs
    slower = max(1.0, wanted / bandwidth)
    names = ("accumulate_secs", "update_secs", "offload_step_secs")
    return replace(rates, **{name: slower * getattr(rates, name) for name in names})


def host_limits() -> list[Available]:
    """What can still be allocated in host memory, under every limit of machine, container and process."""
    root = Path("/")
    return [*memory._of_machine(root), *memory._of_cgroups(root), *memory._of_process(root)]
