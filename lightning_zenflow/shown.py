"""How a value that is refused is shown in a message: in one line, and never at the cost of another error."""

from __future__ import annotations

from typing import Any

_LENGTH = 200


def shown(value: Any) -> str:
    """`repr`, cut where it is long; numbers that Python will not print, and objects that fail to, by their type."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"
    text = " ".join(text.split())
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}... ({len(text)} characters)"
