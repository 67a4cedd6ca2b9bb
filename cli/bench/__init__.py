"""`lightning-zenflow bench`: this package side by side with what a person would pick instead, on this machine."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..console import quiet_deepspeed, write
from .arguments import Plan, plan_of
from .result import Result

__all__ = ["main"]

JSON, PICTURE = "bench.json", "bench.png"
INTERRUPTED = 130


def main(args: list[str] | None = None) -> int:
    """Runs the subcommand and returns its exit code: 0, 1 if no mode could be measured, 130 after Ctrl-C.

    Args:
        args: Arguments after `bench`; `None` takes them from `sys.argv`.

    Raises:
        SystemExit: With status 2 and a message, where an option cannot be used.
    """
    plan = plan_of(args)
    quiet_deepspeed()
    try:
        with _ended_by_signals():
            result = _measure(plan)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted: nothing is left running.\n")
        return INTERRUPTED
    _show(result)
    return 0 if result.figures else 1


def _measure(plan: Plan) -> Result:
    from ..measure import accelerator, device_title
    from .compare import compare
    from .result import hardware_of, versions_of
    from .settings import cores_of, environment_of

    device_type = str(accelerator().device_name())
    cores_of(plan.of, device_type)  # refuses a single core now
    environment = environment_of(plan.of, device_type, keeps_memory=plan.keeps_memory)
    hardware = hardware_of(device_title())
    return Result(plan, hardware, versions_of(), environment, compare(plan, device_type, environment, _tell))


def _show(result: Result) -> None:
    from .view import footnotes, show

    text = json.dumps(result.as_dict(footnotes(result)), indent=1, allow_nan=False) + "\n"
    if result.plan.json:
        write(text)
    else:
        show(result)
    folder = result.plan.output
    if folder is None:
        return
    from .picture import bench_png

    (folder / JSON).write_text(text, encoding="utf-8")
    (folder / PICTURE).write_bytes(bench_png(result))
    if not result.plan.json:
        write(f"Numbers: {folder / JSON}\nPicture: {folder / PICTURE}\n")


def _tell(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within this context SIGTERM and SIGHUP end the program as Ctrl-C does: with what it has started."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
