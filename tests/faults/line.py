"""A line of the table of faults: what people met elsewhere, the tests that notice it here, and how that was tried."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Break:
    """A change of one line of the package that brings the fault in.

    Attributes:
        old: A part of the line; found once in the whole package.
        new: What stands there instead.
        seen: Tests that were seen to fail with it, by `python -m tests.faults`; the first of them is enough to see it again.
    """

    old: str
    new: str
    seen: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A kind of fault.

    Attributes:
        name: `Z1` to `Z13` for those of DeepSpeed's ZenFlow under Lightning, `1` to `43` for others.
        kind: What goes wrong.
        tests: Those that notice it: `file::test`, the file below `tests`.
        broken_by: The change under which tests were seen to fail. `None` says that nobody has tried it by hand.
    """

    name: str
    kind: str
    tests: tuple[str, ...] = field(default=())
    broken_by: Break | None = None
