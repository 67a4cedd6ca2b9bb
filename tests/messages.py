"""All messages that the package can show, read from its source: `...` stands for what is filled in while it runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
FILLED_IN = "..."

SAYS = {"rank_zero_warn", "rank_zero_info", "warn", "warning", "error"}
"""Functions whose text reaches a person without being raised."""

ENDS_OF_ERRORS = ("Error", "Exception", "Refused", "RunFailed", "WorkerDied", "WorkerTimeout", "cls")


class Message(NamedTuple):
    """A text for people, and where it stands."""

    place: str
    text: str


def sources() -> list[Path]:
    """The package's files, those of the command line where they are in a checkout."""
    found = [*(REPO / "lightning_zenflow").rglob("*.py"), *(REPO / "cli").rglob("*.py")]
    return sorted({path.resolve() for path in found})


@cache
def texts() -> list[str]:
    """All strings of the package."""
    return [text for path in sources() for node in _nodes(path) if (text := template(node))]


@cache
def messages() -> list[Message]:
    """What is raised, warned of or logged in words."""
    found = []
    for path in sources():
        for node in _nodes(path):
            if isinstance(node, ast.Call) and node.args and _is_said(node):
                text = template(node.args[0])
                if text and re.search("[a-z]{2,} [a-z]", text):  # not the name of a field or of a file
                    found.append(Message(f"{path.relative_to(REPO)}:{node.lineno}", text))
    return found


def error_classes() -> list[str]:
    """Names of the exceptions that the package defines."""
    classes = [node for path in sources() for node in _nodes(path) if isinstance(node, ast.ClassDef)]
    names = {"BaseException", "Exception", "RuntimeError", "ValueError", "TypeError", "OSError"}
    return [
        found.name for found in classes if any(isinstance(base, ast.Name) and base.id in names for base in found.bases)
    ]


def template(node: ast.AST) -> str | None:
    """A string as it is shown, on one line; `None` for what is no string."""
    if isinstance(node, ast.Constant):
        text = re.sub(r"%\.?\d*[sdrfg]", FILLED_IN, node.value) if isinstance(node.value, str) else None
    elif isinstance(node, ast.JoinedStr):
        parts = (template(part) if isinstance(part, ast.Constant) else FILLED_IN for part in node.values)
        text = "".join(part or "" for part in parts)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = (template(node.left) or FILLED_IN) + (template(node.right) or FILLED_IN)
    else:
        text = None
    return text


def matches(quote: str, text: str) -> bool:
    """Whether `quote` is a part of `text`; `...` in it stands for anything."""
    parts, line = one_line(quote).split(FILLED_IN), one_line(text)
    # Looked for one by one first, which is much faster than a pattern that does not match.
    return all(part in line for part in parts) and re.search(".*?".join(map(re.escape, parts)), line) is not None


def one_line(text: str) -> str:
    return " ".join(text.split())


def _is_said(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in SAYS or name.endswith(ENDS_OF_ERRORS)


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
