"""`lightning-zenflow simulate`: how the methods compare on a machine without an accelerator.

Device and link are simulated: they take the time that they are given. The host is real: the package's own background
processes, over real memory, driven by the package's own waits and hand-overs.
"""

from __future__ import annotations

import json
import os
import reprlib
import sys
from pathlib import Path

from jsonargparse import Namespace

from lightning_zenflow.offload.errors import WorkerDied, WorkerTimeout

from ..console import Parser, write
from ..measure import on_cores, split_cores

__all__ = ["main"]

NUMBERS, PICTURE = "simulate.json", "simulate.png"
RATIOS = "0.1,0.25,0.5,1,2,4,10,13,20"

DESCRIPTION = """Compares ZenFlow with other schedules on a simulated device, beside this machine's real host.

Forward, backward and the link take the time they are given, without a core; the background process is the real one, on half
of the cores. Takes one to two minutes. For example: lightning-zenflow simulate --ratios 0.5,1,2 --output simulated"""

LEAST_NUMEL, MOST_NUMEL = 1 << 16, 1 << 33
LEAST_BANDWIDTH, MOST_BANDWIDTH = 1e6, 1e15
LEAST_RATIO, MOST_RATIO, MOST_RATIOS = 0.01, 100.0, 40
MOST_INTERVAL, MOST_STEPS = 16, 1000


def main(args: list[str] | None = None) -> int:
    """Runs the subcommand.

    Args:
        args: Arguments after `simulate`; `None` takes them from `sys.argv`.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        SystemExit: With status 2 and one line on stderr, where an argument or the machine cannot be used.
    """
    parser = _parser()
    options = parser.parse_args(args)
    try:
        _run(options)
    except (ValueError, MemoryError, OSError, WorkerDied, WorkerTimeout) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("stopped: nothing was written\n")
        return 130
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lightning-zenflow simulate", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--numel", type=int, default=8 << 20, help="Parameters of the simulated shard; host memory is 90 bytes for each"
    )
    add("--link-bandwidth", type=float, default=2.5e10, help="Of the simulated link, bytes/s per direction")
    add("--update-interval", type=int, default=4, help="U of ZenFlow and of the whole model's form")
    ratio = "Host seconds for one update of everything, by device seconds of a step: numbers with commas between them"
    add("--ratios", type=str, default=RATIOS, help=ratio)
    add("--steps", type=int, default=8, help="Steps of each method at each ratio, twice")
    add("--output", type=str, default=".", help=f"Folder for {NUMBERS} and {PICTURE}")
    add("--json", action="store_true", help="Print JSON, in seconds and bytes/s")
    return parser


def _run(options: Namespace) -> None:
    _check(options)
    ratios = ratios_of(options.ratios)
    trainer_cores, host_cores = cores()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)  # before the work, which would be lost if this failed
    from .experiment import simulate
    from .pace import RealClock
    from .picture import picture_png
    from .view import as_dict, show
    from .workload import Workload

    with on_cores(trainer_cores):
        found = simulate(
            Workload(options.numel, tuple(host_cores)),
            options.link_bandwidth,
            options.update_interval,
            ratios,
            options.steps,
            RealClock(),
            lambda line: sys.stderr.write(f"{line}\n"),
        )
    text = json.dumps(as_dict(found), indent=2, allow_nan=False) + "\n"
    png = picture_png(found)
    numbers, picture = folder / NUMBERS, folder / PICTURE
    numbers.write_text(text, encoding="utf-8")
    picture.write_bytes(png)
    if options.json:
        write(text)
    else:
        show(found, [f"Numbers: {numbers}", f"Picture: {picture}"])


def _check(options: Namespace) -> None:
    bounds = {
        "numel": (LEAST_NUMEL, MOST_NUMEL, "Give for example 8388608."),
        "link_bandwidth": (LEAST_BANDWIDTH, MOST_BANDWIDTH, "It is in bytes/s: write for example 2.5e10."),
        "update_interval": (1, MOST_INTERVAL, "4 is usual."),
        "steps": (1, MOST_STEPS, "8 is usual."),
    }
    for name, (least, most, remedy) in bounds.items():
        value = options[name]
        if not least <= value <= most:  # NaN is not
            option = f"`--{name.replace('_', '-')}`"
            raise ValueError(f"{option} must be from {least:g} to {most:g}, got {reprlib.repr(value)}. {remedy}")
    if not options.output:
        raise ValueError("`--output` must be a path, got an empty one. Write . for the current folder.")


def ratios_of(text: str) -> list[float]:
    """The ratios in `text`, in order and each once.

    Raises:
        ValueError: They are not numbers, out of range, or too many.
    """
    try:
        ratios = sorted({float(word) for word in text.split(",")})
    except ValueError:
        ratios = []
    if not 1 <= len(ratios) <= MOST_RATIOS or not all(LEAST_RATIO <= ratio <= MOST_RATIO for ratio in ratios):
        raise ValueError(
            f"`--ratios` must be 1 to {MOST_RATIOS} numbers from {LEAST_RATIO:g} to {MOST_RATIO:g} with commas between them,"
            f" got {reprlib.repr(text)}. Write for example 0.5,1,2."
        )
    return ratios


def cores() -> tuple[list[int], list[int]]:
    """The cores of the trainer and those of the background process.

    Raises:
        ValueError: They would be the same one.
    """
    trainer_cores, host_cores = split_cores()
    if set(trainer_cores) & set(host_cores):
        raise ValueError(
            f"`simulate` must have 2 cores or more, one for the device's side and one for the host's, got"
            f" {len(os.sched_getaffinity(0))}. Give this process more (taskset, or the container's limit)."
        )
    return trainer_cores, host_cores
