"""Numbers as people write them, for reasons, messages and reports."""

from __future__ import annotations

import math


def in_words(secs: float) -> str:
    """A time from 0 on, with three digits: `12.3 µs`, `23.4 ms`, `1.20 s`, `12 min 5 s`, `3 h 20 min`."""
    if not secs or not math.isfinite(secs):
        return f"{secs:g} s"
    for scale, unit, limit in ((1e6, "µs", 999.5), (1e3, "ms", 999.5), (1.0, "s", 119.5)):
        if secs * scale < limit:  # as it is shown: 999.7 ms would be 1,000 ms
            return f"{three_digits(secs * scale)} {unit}"
    minutes, rest = divmod(round(secs), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def three_digits(value: float) -> str:
    """A number from 0 on: `1.23`, `12.3`, `123`, `1,234`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def percent(ratio: float) -> str:
    """A share: `31 %`, `2.1 %`."""
    return f"{100 * ratio:.0f} %" if ratio >= 0.0995 else f"{100 * ratio:.1f} %"
