"""How a simulation is told: tables for people, or everything as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.table import Table

from lightning_zenflow.wording import in_words

from ..console import console, facts, size, table
from ..estimate_view import FRESH_INTERVAL_STEPS
from .experiment import METHODS, SYNCHRONOUS, TUNED, WHOLE_MODEL, ZENFLOW, Point, Simulation
from .workload import SEGMENTS, WIRE_DTYPE

PUBLISHED_RATIO = 13.0
"""Llama-2-7B on four A100s (arXiv 2505.12242): a step goes from 0.5 s to over 7 s, so the host's part is 13 times the
device's."""

MOST_DRIFT = 1.3
"""A host whose pace changes by more than this was not measured alone."""

NAMES = {SYNCHRONOUS: "synchronous", WHOLE_MODEL: "whole model", ZENFLOW: "ZenFlow", TUNED: "ZenFlow, auto"}

TITLE = "This is a simulation of the device and of the link, beside this machine's real host."


def show(found: Simulation, files: list[str]) -> None:
    """Prints what was found, and the files that hold it."""
    out = console()
    out.print(TITLE)
    out.print()
    out.print(facts(_heading(found)))
    for title, cell in (
        ("Step time", lambda point: in_words(point.step_secs)),
        ("Stall: share of the step in which the device does not compute", lambda point: f"{point.stall_ratio:.0%}"),
        ("Times as fast as the synchronous schedule", lambda point: f"{found.speedup(point):.2f}x"),
    ):
        out.print()
        out.print(title)
        out.print(_table(found, cell))
    out.print()
    for sentence in notes(found):
        out.print(sentence)
    for file in files:
        out.print(file)


def as_dict(found: Simulation) -> dict[str, Any]:
    """Everything as plain numbers, in seconds and bytes/s."""
    points = [
        {
            **dataclasses.asdict(point),
            "other_secs": point.step_secs - point.compute_secs - point.host_wait_secs - point.link_wait_secs,
            "stall_ratio": point.stall_ratio,
            "speedup": found.speedup(point),
        }
        for point in found.points
    ]
    return {
        "what": TITLE,
        "numel": found.workload.numel,
        "wire_dtype": str(WIRE_DTYPE).removeprefix("torch."),
        "host_cores": list(found.workload.host_cores),
        "link_bandwidth": found.link_bandwidth,
        "update_interval": found.update_interval,
        "host_update_secs": found.host_update_secs,
        "published_ratio": PUBLISHED_RATIO,
        "points": points,
    }


def notes(found: Simulation) -> list[str]:
    """What is to be known beside the numbers."""
    ratio = (
        "Ratio: host seconds for one update of everything, by device seconds of forward and backward. Every method moves the"
        " same gradients and weights. What selected columns cost the device is part of its given time."
    )
    said = [ratio]
    if PUBLISHED_RATIO in found.ratios:
        said.append(
            f"* The published case: Llama-2-7B on four A100s, 0.5 s of computing and over 7 s a step with ZeRO-Offload"
            f" (arXiv 2505.12242), (7 - 0.5) / 0.5 = {PUBLISHED_RATIO:g}. Times are scaled down to this host's; the ratio is"
            " kept."
        )
    slowest = found.point(ZENFLOW, found.ratios[-1])
    if slowest.host_busy_secs is not None and slowest.host_busy_secs > slowest.compute_secs:
        said.append(
            f"At ratio {slowest.ratio:g} the host bounds every method: with U = {found.update_interval} it works"
            f" {in_words(slowest.host_busy_secs)} for each step of ZenFlow, of which the device computes"
            f" {in_words(slowest.compute_secs)}. Only a larger U, or a faster host, makes a step shorter than that."
        )
    interval = found.update_interval
    said.append(
        f"The whole model's form applies gradients {interval} to {2 * interval - 1} steps late, ZenFlow's blocks at most"
        f" {interval}; both update every element once in {interval} steps."
    )
    if any(found.point(TUNED, ratio).update_interval > FRESH_INTERVAL_STEPS for ratio in found.ratios):
        said.append(
            f"Above U = {FRESH_INTERVAL_STEPS}, which auto may choose, accuracy has not been measured; no accuracy is"
            " simulated here."
        )
    if found.drift > MOST_DRIFT:
        said.append(
            f"This machine was busy: the same update took the host up to {found.drift:.1f} times as long as at other moments."
            " Ratios and times are off by as much. Run it again on a quiet machine."
        )
    return said


def _heading(found: Simulation) -> list[tuple[str, str]]:
    cores, numel = len(found.workload.host_cores), found.workload.numel
    gradients = f"{size(2 * numel)} of gradients"
    return [
        (
            "Host",
            f"{cores} core{'s' if cores > 1 else ''}: {in_words(found.host_update_secs)} for one update of everything",
        ),
        ("Shard", f"{numel:,} parameters in {SEGMENTS} pieces, {gradients}, all deferred"),
        ("Link", f"{found.link_bandwidth / 1e9:.3g} GB/s in each direction, simulated"),
        ("Interval", f"U = {found.update_interval}; with auto, as the auto-tuner's controller decides"),
    ]


def _table(found: Simulation, cell: Callable[[Point], str]) -> Table:
    made = table("Ratio", "Compute", *NAMES.values(), "U", right=True)
    for ratio in found.ratios:
        points = [found.point(method, ratio) for method in METHODS]
        marked = f"{ratio:g}*" if ratio == PUBLISHED_RATIO else f"{ratio:g}"
        made.add_row(marked, in_words(points[0].compute_secs), *map(cell, points), str(points[-1].update_interval))
    return made
