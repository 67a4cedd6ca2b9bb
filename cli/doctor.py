"""`lightning-zenflow doctor`: can ZenFlow run on this machine, and how fast is what it depends on?"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial

import torch

from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.wording import in_words

from . import checks, measure
from .checks import Check, Verdict, guarded
from .console import Parser, console, quiet_deepspeed, table, write
from .passes import BLOCKS, host_passes

DESCRIPTION = """Checks whether ZenFlow can run on this machine, and measures what its speed depends on, in some 15 seconds.

Exit code 0: it will run, maybe with warnings. 1: it will not."""

START_SECS = 3.0
TIMEOUT_SECS = 60.0
SLOW_HOST_BANDWIDTH = 4e9
"""Half of what one core of a server moves: the machine is busy, or emulated."""


def main(args: list[str] | None = None) -> int:
    """Runs the subcommand and returns its exit code.

    Args:
        args: Arguments after `doctor`; `None` takes them from `sys.argv`.
    """
    parser = Parser(prog="lightning-zenflow doctor", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="Print JSON: the same rows, and the numbers behind them")
    options = parser.parse_args(args)
    quiet_deepspeed()
    rows = examine()
    will_run = all(row.verdict != "fail" for row in rows)
    if options.json:
        found = {"will_run": will_run, "checks": [dataclasses.asdict(row) for row in rows]}
        write(json.dumps(found, indent=2) + "\n")
    else:
        _show(rows, will_run)
    return 0 if will_run else 1


def examine() -> list[Check]:
    """All rows; a check that fails itself becomes one."""
    needed: Verdict = "fail"
    looks: list[tuple[str, Callable[[], Check], Verdict]] = [
        ("Python", checks.python, needed),
        ("System", checks.system, needed),
        *((name, partial(checks.distribution, name), needed) for name in ("torch", "lightning", "deepspeed")),
        ("Accelerator", checks.device, needed),
        ("Host memory", checks.host_memory, "warn"),
        ("Cores", checks.cores, "warn"),
        ("Shared memory", checks.shared_memory, "warn"),
        ("Locked memory", checks.locked_memory, "warn"),
        ("Open files", checks.open_files, "warn"),
        ("Background process", background_process, needed),
        ("Host bandwidth", host_bandwidth, "warn"),
        ("Host AdamW", host_adamw, "warn"),
        ("Link", link, "warn"),
    ]
    return [guarded(name, look, on_error) for name, look, on_error in looks]


def background_process() -> Check:
    """Starts the real one on a tiny shard."""
    begin = time.perf_counter()
    client = HostClient.start(
        ArenaLayout(1024, torch.bfloat16, BLOCKS),
        [1024],
        cores=measure.split_cores()[1],
        lr_scale="linear",
        timeout_secs=TIMEOUT_SECS,
    )
    secs = time.perf_counter() - begin
    client.close()
    numbers = {"start_secs": secs}
    if secs > START_SECS:
        remedy = "Busy machine, or slow disk under PyTorch: training starts, but later."
        return Check("Background process", "warn", f"answered after {in_words(secs)}", remedy, numbers)
    return Check("Background process", "ok", f"answered after {in_words(secs)}", numbers=numbers)


def host_bandwidth() -> Check:
    """A copy on one core, then on all that a background process would have."""
    _, host = measure.split_cores()
    one = measure.host_bandwidth(host[-1:])
    every = measure.host_bandwidth(host) if len(host) > 1 else one
    numbers = {"one_core_bytes_per_sec": one.bandwidth, "worker_bytes_per_sec": every.bandwidth}
    found = f"{one.bandwidth / 1e9:.1f} GB/s on one core"
    if len(host) > 1:
        found += f", {every.bandwidth / 1e9:.1f} GB/s on {len(host)}"
    if one.bandwidth < SLOW_HOST_BANDWIDTH:
        return Check("Host bandwidth", "warn", found, "Slow: is something else running here?", numbers)
    return Check("Host bandwidth", "ok", found, numbers=numbers)


def host_adamw() -> Check:
    """The background process's own passes, on one core."""
    passes = host_passes(torch.bfloat16, measure.split_cores()[1][-1:])
    step_secs = (passes.accumulate_secs * (BLOCKS - 1) + passes.update_secs) / BLOCKS
    numbers = {
        "accumulate_secs_per_element": passes.accumulate_secs,
        "update_secs_per_element": passes.update_secs,
        "accumulate_bytes_per_sec": passes.accumulate_bandwidth,
        "update_bytes_per_sec": passes.update_bandwidth,
    }
    found = (
        f"on one core {1e-9 / passes.accumulate_secs:.2f}e9 gradients/s ({passes.accumulate_bandwidth / 1e9:.1f} GB/s) and"
        f" {1e-9 / passes.update_secs:.2f}e9 updates/s ({passes.update_bandwidth / 1e9:.1f} GB/s);"
        f" {in_words(1e9 * step_secs)} a step for 1e9 parameters"
    )
    return Check("Host AdamW", "ok", found, numbers=numbers)


def link() -> Check:
    """Copies from and to the device."""
    speeds = measure.link(measure.split_cores()[0])
    numbers = {"to_host_bytes_per_sec": speeds.down_bandwidth, "to_device_bytes_per_sec": speeds.up_bandwidth}
    found = f"{speeds.down_bandwidth / 1e9:.1f} GB/s to the host, {speeds.up_bandwidth / 1e9:.1f} GB/s to the device"
    if measure.device().type == "cpu":
        return Check("Link", "ok", f"{found} (a copy within host memory)", numbers=numbers)
    if not speeds.is_pinned:
        return Check("Link", "warn", f"{found}, not page-locked", "Raise `ulimit -l`: copies wait otherwise.", numbers)
    return Check("Link", "ok", found, numbers=numbers)


def _show(rows: list[Check], will_run: bool) -> None:
    out = console()
    grid = table("check", "", "found")
    grid.columns[0].no_wrap = True
    for row in rows:
        grid.add_row(row.name, row.verdict, f"{row.found}\n-> {row.remedy}" if row.remedy else row.found)
    out.print(grid)
    out.print()
    warnings = sum(row.verdict == "warn" for row in rows)
    if not will_run:
        failed = ", ".join(row.name for row in rows if row.verdict == "fail")
        out.print(f"ZenFlow will not run here: {failed}.")
    elif warnings:
        out.print(f"ZenFlow will run here, with {warnings} warning{'s' if warnings > 1 else ''}.")
    else:
        out.print("ZenFlow will run here.")
