"""What `doctor` looks up: software, limits and memory of this machine, each with a verdict and a remedy."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_zenflow.internals import problems
from lightning_zenflow.internals_table import TABLE
from lightning_zenflow.offload.layout import ArenaLayout

from .console import size
from .machine import host_limits
from .measure import accelerator, device_title, split_cores

DISTRIBUTION = "lightning-zenflow"
MALICIOUS_LIGHTNING = ("2.6.2", "2.6.3")
SHM_BYTES = 64 * 2**20
"""What containers give to /dev/shm unless told otherwise."""

OPEN_FILES = 1024
BLOCKS = 4
NODES = Path("/sys/devices/system/node")

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One row.

    Attributes:
        name: What was looked at.
        verdict: `fail` if ZenFlow cannot run.
        found: What was found.
        remedy: What to do; empty if nothing.
        numbers: The measured numbers, with units in their names.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def guarded(name: str, look: Callable[[], Check], on_error: Verdict = "warn") -> Check:
    """`look()`, or a row that says why the check itself failed: a doctor does not die of a patient."""
    try:
        return look()
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        return Check(name, on_error, f"could not be checked: {type(error).__name__}: {reason}")


def python() -> Check:
    """Python against our own metadata."""
    wanted = SpecifierSet(metadata.metadata(DISTRIBUTION)["Requires-Python"])
    mine = platform.python_version()
    if wanted.contains(mine, prereleases=True):
        return Check("Python", "ok", mine)
    return Check("Python", "fail", mine, f"Use Python {wanted}.")


def system() -> Check:
    """Linux with `memfd_create`; `pidfd_open` if there is."""
    name = f"{platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Check("System", "fail", name, "Use Linux: the state lives in a memfd.")
    if not hasattr(os, "pidfd_open"):
        return Check("System", "warn", f"{name}, Python without pidfd", "Deaths are noticed later, at the next step.")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return Check("System", "warn", f"{name}, no pidfd", "Deaths are noticed later; Linux 5.3 has it.")
    return Check("System", "ok", name)


def distribution(name: str) -> Check:
    """An installed distribution against the range in our own metadata, and what of it we use."""
    wanted = next(
        requirement.specifier
        for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or ())
        if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    )
    try:
        mine = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", f"pip install '{name}{wanted}'")
    if name == "lightning" and mine in MALICIOUS_LIGHTNING:
        return Check(
            name, "fail", f"{mine}, a malicious release", "Uninstall it, and replace all credentials it could read."
        )
    if not wanted.contains(mine, prereleases=True):
        return Check(name, "fail", mine, f"pip install '{name}{wanted}'")
    lacks = [problem for row in TABLE if row.package == name for problem in problems(row)]
    if lacks:
        return Check(name, "fail", f"{mine}, without {lacks[0]}", f"pip install --force-reinstall '{name}{wanted}'")
    return Check(name, "ok", mine)


def device() -> Check:
    """DeepSpeed's accelerator: name, number, memory."""
    found = accelerator()
    name, count, nbytes = found.device_name(), int(found.device_count()), int(found.total_memory())
    numbers = {"devices": float(count), "device_memory_bytes": float(nbytes)}
    if name == "cpu":
        return Check("Accelerator", "ok", "none: the CPU plays it, for trying things out", numbers=numbers)
    if name == "mps":
        return Check("Accelerator", "fail", "MPS", "Not supported. Use Trainer(accelerator='cpu').", numbers)
    each = "" if count == 1 else " each"
    return Check("Accelerator", "ok", f"{count} x {device_title()}, {size(nbytes)}{each}", numbers=numbers)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Not for ZenFlow's own state, but for the processes beside it."""
    if not folder.is_dir():
        return Check("Shared memory", "warn", f"no {folder}", "Data loader workers and NCCL need it.")
    stat = os.statvfs(folder)
    free = stat.f_frsize * stat.f_bavail
    numbers = {"shm_free_bytes": float(free)}
    if free <= SHM_BYTES:
        remedy = "Data loader workers, gloo and NCCL need it, ZenFlow does not: --shm-size=8g for Docker."
        return Check("Shared memory", "warn", f"{size(free)} free in {folder}", remedy, numbers)
    return Check("Shared memory", "ok", f"{size(free)} free in {folder}", numbers=numbers)


def locked_memory() -> Check:
    """`ulimit -l`, which page-locking on CUDA may run into."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return Check("Locked memory", "ok", "unlimited")
    if accelerator().device_name() == "cpu":
        return Check("Locked memory", "ok", f"{size(soft)}, enough without CUDA")
    locked, with_weights = _locked_bytes_per_param()
    numbers = {
        "locked_limit_bytes": float(soft),
        "params_whose_exchange_fits": soft / locked,
        "params_whose_exchange_and_weights_fit": soft / with_weights,
    }
    found = (
        f"{size(soft)}; {_millions(soft / locked)} million parameters' gradients and blocks, or with parameters offloaded under"
        f" ZeRO-3 {_millions(soft / with_weights)} million and their weights"
    )
    remedy = "If training cannot page-lock: ulimit -l unlimited. Without it offloaded parameters may not start."
    return Check("Locked memory", "warn", found, remedy, numbers)


def _locked_bytes_per_param() -> tuple[float, float]:
    """What is page-locked for each parameter of a shard in 16 bit: what is exchanged, and that and its offloaded weight."""
    numel = 10**9
    exchanged = ArenaLayout(numel, torch.bfloat16, BLOCKS).exchange_nbytes / numel
    return exchanged, exchanged + torch.bfloat16.itemsize


def _millions(params: float) -> str:
    return f"{params / 1e6:.3g}"


def open_files() -> Check:
    """`ulimit -n`."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return Check("Open files", "warn", found, f"ulimit -n {OPEN_FILES}, for data loaders and many ranks.")
    return Check("Open files", "ok", found)


def host_memory() -> Check:
    """The tightest limit on host memory, and how many parameters fit under it."""
    tightest = min(host_limits(), key=lambda limit: limit.nbytes, default=None)
    if tightest is None:
        remedy = "Count 18 bytes per parameter yourself, 20 with parameters offloaded under ZeRO-3."
        return Check("Host memory", "warn", "not known: no /proc/meminfo", remedy)
    numel = 10**9
    per_param = ArenaLayout(numel, torch.bfloat16, BLOCKS).touched_nbytes / numel
    with_weights = per_param + torch.bfloat16.itemsize
    params = tightest.nbytes / per_param
    numbers = {
        "host_free_bytes": float(tightest.nbytes),
        "params_that_fit": params,
        "offloaded_params_that_fit": tightest.nbytes / with_weights,
    }
    found = (
        f"{size(tightest.nbytes)} free ({tightest.source}): {params / 1e9:.2g} billion parameters at {per_param:.0f} bytes,"
        f" {tightest.nbytes / with_weights / 1e9:.2g} billion at {with_weights:.0f} if offloaded under ZeRO-3"
    )
    if params < 1e6:
        return Check("Host memory", "fail", found, f"{tightest.remedy}.", numbers)
    return Check("Host memory", "ok", found, numbers=numbers)


def cores() -> Check:
    """Cores this process may use, and how they are shared with the background process; NUMA nodes."""
    trainer, host = split_cores()
    nodes = [node.name for node in NODES.glob("node[0-9]*")]
    count = len(os.sched_getaffinity(0))
    spread = f", {len(nodes)} NUMA nodes" if len(nodes) > 1 else ""
    numbers = {"cores": float(count), "worker_cores": float(len(host)), "numa_nodes": float(max(1, len(nodes)))}
    if set(trainer) & set(host):
        return Check("Cores", "warn", f"1{spread}", "The background process shares it: give this job more.", numbers)
    found = f"{count}{spread}; {len(host)} of them for the background process"
    remedy = "Several nodes: bind each rank to the node of its device." if len(nodes) > 1 else ""
    return Check("Cores", "ok", found, remedy, numbers)
