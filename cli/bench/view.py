"""How a comparison looks in a terminal: two tables and what has to be known to read them."""

from __future__ import annotations

from typing import Any

from lightning_zenflow.footprint import STATE_BYTES

from ..console import console, facts, table
from ..sizes import Size
from .figures import Figures, overhead_of_stage_3
from .job import WARM_UP_STEPS
from .modes import MODES, is_ours
from .result import Result

NARROW_COLUMNS = 100


def show(result: Result) -> None:
    """Prints everything."""
    out = console()
    found = result.figures
    out.print(facts(heading(result)))
    out.print()
    out.print(_times(result, found, narrow=out.width < NARROW_COLUMNS))
    out.print()
    out.print(_bytes(result, found))
    out.print()
    for sentence in footnotes(result):
        out.print(sentence)


def heading(result: Result) -> list[tuple[str, str]]:
    """What was measured where."""
    plan, hardware = result.plan, result.hardware
    numel = next((run.numel for found in result.measured.values() for run in found.runs), None)
    size = f", {numel / 1e6:.3g} million parameters" if numel else ""
    emulated = plan.of.plays_device and hardware["device"] == "cpu"
    roles = "; one core plays the accelerator, another the host" if emulated else ""
    cores = f"{hardware['cores']} core" + ("s" if hardware["cores"] != 1 else "")
    ranks = f", {plan.ranks} ranks" if plan.ranks > 1 else ""
    return [
        ("Model", f"{plan.of.title}, depth {plan.depth}{size}"),
        ("Step", f"{plan.tokens} tokens, bf16, ZeRO-{plan.stage}{ranks}"),
        ("Machine", f"{hardware['processor']}, {cores}, device {hardware['device']}{roles}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
        ("Variables", " ".join(f"{name}={value}" for name, value in result.environment.items())),
    ]


def _times(result: Result, found: dict[str, Figures], narrow: bool) -> Any:
    rows = table(
        "\n\nmode",
        "mean\nstep\nms",
        "\nmedian\nms",
        "mean over\nrepeats\nms",
        "\nto\ncompute",
        "\nto\nzenflow",
        "\nmax to\nmedian",
        "\nstall\nms",
        "of\nthe\nstep",
        "re-se-\nlection\nms",
        right=True,
    )
    rows.padding = (0, 1 if narrow else 2, 0, 0)
    for mode in result.measured:
        if mode not in found:
            rows.add_row(mode, "not run")
            continue
        row = found[mode]
        rows.add_row(
            mode,
            _ms(row.mean_ms),
            _ms(row.median_ms),
            f"{_ms(row.least_ms)}-{_ms(row.most_ms)}",
            _ratio(row.to_compute_ratio),
            _ratio(row.to_zenflow_ratio),
            f"{row.max_to_median_ratio:.2f}",
            _ms(row.stall_ms),
            "-" if row.stall_ratio is None else f"{row.stall_ratio:.1%}",
            _ms(row.reselection_ms),
        )
    return rows


def _bytes(result: Result, found: dict[str, Figures]) -> Any:
    rows = table(
        "per parameter\nmode",
        "memory\nbytes",
        "to host\nbytes a step",
        "to device\nbytes a step",
        "these two\nare",
        "from ranks\nbytes a step",
        right=True,
    )
    for mode in result.measured:
        if mode not in found:
            rows.add_row(mode, "not run")
            continue
        row = found[mode]
        known = row.to_host_bytes is not None
        rows.add_row(
            mode,
            _short(row.memory_bytes),
            _short(row.to_host_bytes),
            _short(row.to_device_bytes),
            ("counted" if row.is_counted else "computed") if known else "not known",
            _short(row.from_ranks_bytes),
        )
    return rows


def footnotes(result: Result) -> list[str]:
    """What the tables do not say by themselves."""
    plan, found = result.plan, result.figures
    said = [f"{mode}: {MODES[mode]}." for mode in result.measured]
    said += [
        f"Not run{'' if not entry.runs else ' to the end'}: {mode}. {entry.reason[:1].upper()}{entry.reason[1:]}."
        for mode, entry in result.measured.items()
        if entry.reason
    ]
    said.append(
        f"Figures are medians over {plan.repeats} run{'s' if plan.repeats > 1 else ''} of each mode, of"
        f" {plan.steps - WARM_UP_STEPS} steps after the first {WARM_UP_STEPS}."
    )
    if "zenflow" in found and found["zenflow"].reselection_ms is not None:
        said.append(
            "One of zenflow's counted steps selects anew: its cost beyond the median is in the last column, and in mean,"
            f" maximum and stall as well. That is once in {plan.steps - WARM_UP_STEPS} steps; automatic intervals begin with"
            " once in 64."
        )
    if "zenflow_auto" in found:
        intervals = found["zenflow_auto"].intervals or [None, None]
        said.append(f"zenflow_auto ended at update_interval {intervals[0]}, select_interval {intervals[1]}.")
    if "zero_offload" in found:
        said.append("The stall of zero_offload is its whole optimizer step, for which training waits.")
    if any(row.memory_bytes is not None for row in found.values()):
        said.append(_memory_note(result, found))
    overhead = overhead_of_stage_3(found) if plan.stage == 3 else None
    return [*said, overhead] if overhead else said


def _memory_note(result: Result, found: dict[str, Figures]) -> str:
    plan = result.plan
    small, large = plan.of.memory_depths(plan.depth)
    note = (
        f"Memory is what resident memory (proportional, with all child processes, after a step) grows by for each parameter"
        f" from depth {small} to {large}, less what that of compute grows by, its weights."
    )
    if result.hardware["device"] != "cpu":
        return note
    parts = []
    if any(is_ours(mode) for mode in found):
        state_bytes = device_state_bytes(result)
        parts.append(f"{state_bytes:.1f} of zenflow's bytes ({STATE_BYTES + 2} for each selected element)")
    if "zero" in found or "zero_2" in found:
        parts.append(f"the {STATE_BYTES} of zero")
    if parts:
        note += f" Device and host share one memory here: by formula, {' and '.join(parts)} are the device's."
    return note


def device_state_bytes(result: Result) -> float:
    """What ZenFlow keeps on the device for each parameter of the deeper model, by `footprint`'s formula."""
    import torch

    plan = result.plan
    with torch.device("meta"):
        model = plan.of.build(plan.of.memory_depths(plan.depth)[1])
    size = Size.of("", (tuple(param.shape) for param in model.parameters()))
    return (STATE_BYTES + 2) * size.selected_numel(plan.topk_ratio) / size.numel


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
