"""`python -m tests.soak --steps 20000`: a long disturbed run must end with the weights of an undisturbed one, and stay flat.

Seen on two cores that other programs used as well; weights were equal each time, descriptors and threads did not grow:

- one rank, 8 processes: 210 saves, 216 skipped steps, 188 interval changes, 2,818 pauses; 19 minutes.
- two ranks, 16 processes: as many, 6,290 pauses; 23 minutes.
- one rank, one process (`--legs 1`): 203 saves, 5,520 pauses; 30 minutes. The trainer's memory grew by 464 KiB in 20,000 steps,
  48 of them in the second half; the worker's by 4.

`--legs 1 --steps 2000 --leak 300`, which keeps 300 bytes of each batch, fails: +372 and +328 bytes a step in its two runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from tests.soak.plan import Soak
from tests.soak.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    for field in fields(Soak):
        if field.name != "quiet":
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    settings = Soak(**vars(parser.parse_args()))
    begun = time.monotonic()

    def tell(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begun:7.1f} s  {text}\n")

    # As an exception, so that the processes of a leg end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    batches = range(1, settings.batches + 1)
    with tempfile.TemporaryDirectory(prefix="zenflow-soak-") as folder:
        result = soak(settings, Path(folder), tell)
    counts = {
        "steps": settings.steps,
        "processes": settings.legs * settings.ranks,
        "saves": sum(map(settings.saves_after, batches)),
        "skipped": sum(map(settings.overflows, batches)),
        "interval changes": sum(settings.intervals_after(batch) is not None for batch in batches),
        "pauses": result.paused,
        "samples": sum(map(len, result.samples)),
    }
    tell(", ".join(f"{count} {name}" for name, count in counts.items()))
    tell("steepest slopes a batch: " + ", ".join(f"{name} {each:+.3g}" for name, each in result.slopes().items()))
    for fault in result.faults:
        tell(f"FAULT: {fault}")
    tell("failed" if result.faults else "weights equal those of the undisturbed run, and nothing grows")
    return bool(result.faults)


if __name__ == "__main__":
    sys.exit(main())
