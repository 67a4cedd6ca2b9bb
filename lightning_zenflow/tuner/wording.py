"""Numbers as people write them, for reasons and messages."""

from __future__ import annotations


def in_words(secs: float) -> str:
    """A time: `3.2 s`, `210 ms`, `1.4 ms`."""
    if secs >= 0.9995:
        return f"{secs:.3g} s" if secs < 999.5 else f"{secs:.0f} s"
    return f"{1e3 * secs:.0f} ms" if secs >= 0.00995 else f"{1e3 * secs:.1f} ms"


def percent(ratio: float) -> str:
    """A share: `31 %`, `2.1 %`."""
    return f"{100 * ratio:.0f} %" if ratio >= 0.0995 else f"{100 * ratio:.1f} %"
