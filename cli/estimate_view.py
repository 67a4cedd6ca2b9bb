"""How an estimate looks: a table for people, or everything as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lightning_zenflow.recommended import TUNER
from lightning_zenflow.wording import in_words
from lightning_zenflow.work import Work

from .console import console, facts, size, table
from .estimation import Estimate, Method

FRESH_INTERVAL_STEPS = 8
"""Up to here training was measured to lose nothing to stale updates (`examples/accuracy.md`)."""

NOT_COUNTED = (
    "Not counted: activations, which take device memory of their own; attention's work beyond its weights; what a step costs"
    " whatever its size (launching kernels, Python, loading data)."
)


def show(found: Estimate) -> None:
    """Prints the table and what follows from it."""
    out = console()
    out.print(facts(_heading(found)))
    out.print()
    out.print(_table(found))
    out.print()
    for sentence in (*_advice(found), NOT_COUNTED):
        out.print(sentence)


def as_dict(found: Estimate) -> dict[str, Any]:
    """Everything as plain numbers, in seconds and bytes; a rate that is not counted is `None`."""
    plain = dataclasses.asdict(found)
    for key, method in zip(("zenflow", "zero_offload", "on_device"), found.methods, strict=True):
        plain[key]["step"].update(step_secs=method.step.step_secs, limit=method.step.limit)
        plain[key]["device"]["total_bytes"] = method.device.total_bytes
    plain["select_stall_secs"] = found.select_stall_secs
    del plain["size"]["shapes"]
    rates = plain["machine"]["rates"]
    rates.update({name: None for name, value in rates.items() if math.isinf(value)})
    return plain


def _heading(found: Estimate) -> list[tuple[str, str]]:
    work, machine, rates = found.work, found.machine, found.machine.rates
    vectors = f", {found.size.vector_numel:,} of them in vectors" if found.size.vector_numel else ""
    batches = f" in {work.micro_batches} micro-batches" if work.micro_batches > 1 else ""
    devices = f"on {work.ranks} devices" if work.ranks > 1 else "on one device"
    flops = rates.beside_flops
    cores = f"{machine.cores} core" + ("s" if machine.cores > 1 else "")
    speeds = (
        f"{flops / 1e12:.3g} TFLOP/s; per element {1e9 * rates.down_secs:.2g} ns to the host,"
        f" {1e9 * rates.accumulate_secs:.2g} ns to accumulate and {1e9 * rates.update_secs:.2g} ns to update on {cores}"
    )
    moments = "" if found.moments == "fp32" else f" with moments in {found.moments}"
    counted = f"{work.numel:,} trainable parameters{vectors}"
    return [
        ("Model", counted if found.size.title.endswith("parameters") else f"{found.size.title}: {counted}"),
        ("Step", f"{work.tokens:,} tokens per device{batches}, {found.precision}{moments}, {devices}, {_stage(work)}"),
        ("Machine", f"{machine.title}: {speeds}"),
    ]


def _stage(work: Work) -> str:
    return f"ZeRO-{work.stage}" + (", parameters in host memory" if work.offload_parameters else "")


def _table(found: Estimate) -> Any:
    rows = table("", *(method.name for method in found.methods), right=True)

    def add(name: str, cell: Any) -> None:
        rows.add_row(name, *(cell(method) for method in found.methods))

    def add_secs(name: str, attribute: str) -> None:
        add(name, lambda method: _or_dash(getattr(method.step, attribute)))

    def add_bytes(name: str, attribute: str) -> None:
        add(
            name, lambda method: size(getattr(method.traffic, attribute)) if getattr(method.traffic, attribute) else "-"
        )

    add("Device memory", lambda method: size(method.device.total_bytes))
    add("Host memory per rank", lambda method: size(method.host_bytes) if method.host_bytes else "-")
    add("Fits", lambda method: "yes" if method.fits else "does not fit")
    rows.add_row()
    add_secs("Step", "step_secs")
    add_secs("  forward and backward", "compute_secs")
    add_secs("  link, not hidden", "link_secs")
    add_secs("  optimizer on the device", "optimizer_secs")
    if found.work.ranks > 1:
        add_secs("  between devices, not hidden", "exchange_secs")
    add_secs("  waiting for the host", "stall_secs")
    rows.add_row()
    add_secs("Host busy", "host_secs")
    add_secs("Link busy", "link_busy_secs")
    add("Limited by", lambda method: method.step.limit)
    rows.add_row()
    add_bytes("To the host, a step", "to_host_bytes")
    add_bytes("To the device, a step", "to_device_bytes")
    if found.work.ranks > 1:
        add_bytes("From other devices, a step", "from_ranks_bytes")
    return rows


def _or_dash(secs: float) -> str:
    return in_words(secs) if secs > 0 else "-"


def _advice(found: Estimate) -> list[str]:
    zenflow, offload, plain = found.methods
    step = zenflow.step
    selects = (
        "nothing to select"
        if found.select_interval is None
        else f"select_interval {found.select_interval} (a re-selection takes {in_words(found.barrier_secs)},"
        f" {found.select_stall_secs / step.step_secs:.1%} of the time)"
    )
    said = [f"Intervals: update_interval {found.update_interval}, {selects}."]
    if found.select_bytes:
        scores, weights = found.score_bytes, found.select_bytes - found.score_bytes
        parts = [f"{size(nbytes)} of {what}" for nbytes, what in ((scores, "scores"), (weights, "weights")) if nbytes]
        said.append(f"To select, a device receives {' and '.join(parts)} from the others.")
    if found.update_interval > FRESH_INTERVAL_STEPS:
        said.append(
            f"Updates come up to {found.update_interval} steps late: above {FRESH_INTERVAL_STEPS}, what that does"
            " to accuracy has not been measured."
        )
    stall_ratio = step.stall_secs / step.step_secs
    if stall_ratio > TUNER.stall_budget:
        said.append(
            f"The host does not keep up: the device waits for {stall_ratio:.0%} of the step. More cores or memory channels"
            " for the host, more devices to share its work, or more tokens per step help."
        )
    if plain.fits:
        simpler = "plain data parallelism" if found.work.stage == 2 else "DeepSpeed's ZeRO-3 alone"
        said.append(f"It fits without offload: {simpler} is then exact, and simpler.")
    elif not zenflow.fits:
        said.append(f"ZenFlow does not fit either: {_what_lacks(found, zenflow)}.")
    else:
        said.append(
            f"ZenFlow is {offload.step.step_secs / step.step_secs:.1f} times as fast as ZeRO-Offload; a step takes"
            f" {step.step_secs / step.compute_secs:.2f} times as long as its forward and backward."
        )
    if found.machine.host_bytes is None and not found.machine.shares_memory and not plain.fits:
        said.append(
            f"The host's memory is not checked: ZenFlow takes {size(found.work.ranks * zenflow.host_bytes)} in all."
        )
    if found.fits_under_zero_2:
        said.append("It fits under ZeRO-2 as well, which gathers no weights: compare --stage 2.")
    return said


def _what_lacks(found: Estimate, method: Method) -> str:
    machine, ranks = found.machine, found.work.ranks
    if not machine.shares_memory and method.device.total_bytes > machine.device_bytes:
        other = {2: ", or --stage 3", 3: ", or --offload-parameters"}[found.work.stage]
        other = "" if found.work.offload_parameters else other
        return f"a device has {size(machine.device_bytes)} to give; lower topk_ratio, or use more devices{other}"
    free = machine.host_bytes if machine.host_bytes is not None else machine.device_bytes
    return f"the host has {size(free)} for {ranks} rank{'s' if ranks > 1 else ''}; use a machine with more memory"
