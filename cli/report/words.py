"""Numbers, and texts of the record, as people read them."""

from __future__ import annotations

from datetime import datetime, timezone

from lightning_zenflow.wording import three_digits

from .record import Run


def percent_text(ratio: float) -> str:
    """A share of 1 as a percentage with one decimal: `3.1 %`."""
    return f"{100 * ratio:.1f} %"


def count_text(count: float, unit: str = "") -> str:
    """A count with three digits and a decimal prefix: `67.1 M`, `1.20 GB`."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{three_digits(count / limit)} {prefix}{unit}"
    return f"{count:g} {unit}".rstrip() if float(count).is_integer() else f"{count:.3g} {unit}".rstrip()


def interval_text(steps: float | None) -> str:
    """A selection interval: `every 64 steps`, or `never`."""
    return "never" if steps is None or steps != steps else f"every {int(steps):,} step{'s' * (steps != 1)}"


def what_ran(run: Run) -> str:
    """One line: model size, stage, precision, device, ranks, start."""
    header = run.main.header
    size, ranks = header.get("shard_numel"), header["world_size"]
    parts = [
        f"{count_text(size)} parameters{' per rank' * (ranks > 1)}" if isinstance(size, (int, float)) else "",
        f"ZeRO stage {header.get('stage', '?')}",
        f"{header.get('precision', '?')} on {'' if ranks == 1 else f'{ranks} x '}{header.get('device', '?')}",
        f"started {start_text(run)}",
    ]
    return ", ".join(filter(None, parts))


def start_text(run: Run) -> str:
    """When the run began, to the minute and in UTC; as recorded if that is no time."""
    started = str(run.main.header.get("started", "?"))
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return started
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def drawable(text: str, most: int = 0) -> str:
    """`text` of the record in one line of letters that every font and terminal has, cut to `most` characters (0: not cut)."""
    line = " ".join(text.encode("latin-1", "replace").decode("latin-1").split())
    line = "".join(letter for letter in line if letter.isprintable())
    return line if not most or len(line) <= most else line[: most - 3].rstrip() + "..."
