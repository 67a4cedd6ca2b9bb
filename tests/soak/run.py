"""A soak from beginning to end: legs one after the other, the quiet run beside them, and what came of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.patience import patient
from tests.soak.flat import MIN_SAMPLES, Sample, grown, growth
from tests.soak.plan import Soak
from tests.soak.watch import Watch

REPO = Path(__file__).resolve().parents[2]
STUCK_SECS = 60.0
"""So long may pass without a batch: a process starts, or saves."""


@dataclass
class Result:
    """What came of a soak.

    Attributes:
        faults: In words; empty if all is well.
        paused: How often a process was stopped for a moment.
        samples: By leg and rank.
    """

    faults: list[str] = field(default_factory=list)
    paused: int = 0
    samples: list[list[Sample]] = field(default_factory=list)

    def slopes(self) -> dict[str, float]:
        """By name the steepest slope per batch of all legs with enough samples."""
        found: dict[str, float] = {}
        for samples in self.samples:
            for name in samples[0][1] if len(samples) >= MIN_SAMPLES else ():
                found[name] = max(found.get(name, -1e9), growth(samples, name)[0])
        return found


class Leg:
    """The processes of all ranks from one start to one end."""

    def __init__(self, soak: Soak, folder: Path, name: str, resume: Path | None) -> None:
        self._soak, self.name = soak, name
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.log = folder / f"{name}.log"
        command = [
            sys.executable,
            "-m",
            "tests.soak.leg",
            soak.to_json(),
            str(folder),
            *([str(resume)] if resume else []),
        ]
        self.processes = []
        for rank in range(soak.ranks):
            (folder / f"progress{rank}").unlink(missing_ok=True)
            with self.log.open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=REPO,
                        env={**os.environ, **_environment(rank, soak.ranks, port)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        self.watches = [
            Watch(process.pid, folder / f"progress{rank}", f"{soak.seed} {name} {rank}", pauses=not soak.quiet)
            for rank, process in enumerate(self.processes)
        ]
        self._batch, self._moved = 0, time.monotonic()

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def look(self) -> str | None:
        """Watches all ranks for a moment; what is wrong, if something is."""
        for watch in self.watches:
            watch.look()
        batch = self.watches[0].batch
        if batch != self._batch:
            self._batch, self._moved = batch, time.monotonic()
        if time.monotonic() - self._moved > patient(STUCK_SECS):
            return f"{self.name} is stuck after batch {batch}: {self.output}"
        return None

    def fault(self) -> str | None:
        """What is wrong with how it has ended."""
        codes = [process.returncode for process in self.processes]
        expected = 0
        if not self._soak.quiet and self._batch in self._soak.ends and self._soak.is_killed_after(self._batch):
            expected = -signal.SIGKILL
        return None if codes == [expected] * len(codes) else f"{self.name} ended with {codes}: {self.output}"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    alone = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_FR_BUFFER_SIZE": "0",  # PyTorch notes the last 2,000 collectives, 1 KiB each, which looks like a leak till then
    }
    if ranks == 1:
        return alone
    return {
        **alone,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(ranks),
        "NODE_RANK": "0",
    }


def _watch(legs: Sequence[Leg], result: Result, tell: Callable[[str], None]) -> bool:
    """Watches legs that run at the same time until the first one ends; whether none is stuck."""
    told = time.monotonic()
    while legs[0].is_running:
        for leg in legs:
            stuck = leg.look() if leg.is_running else None
            if stuck is not None:
                result.faults.append(stuck)
                return False
        if time.monotonic() - told > 20:
            told = time.monotonic()
            tell(", ".join(f"{leg.name}: batch {leg.watches[0].batch}" for leg in legs))
        time.sleep(0.005)
    return True


def _finish(leg: Leg, beside: Sequence[Leg], result: Result, tell: Callable[[str], None]) -> bool:
    """Watches a leg to its end, and others beside it; whether it ended as it should."""
    try:
        if not _watch([leg, *beside], result, tell):
            return False
        leg.look()
    finally:
        leg.end()
    for rank, watch in enumerate(leg.watches):
        result.paused += watch.paused
        result.samples.append(watch.samples)
        result.faults += [f"{leg.name}, rank {rank}: {text}" for text in grown(watch.samples)]
    fault = leg.fault()
    if fault is not None:
        result.faults.append(fault)
    tell(f"{leg.name}: ended after batch {leg.watches[0].batch}, {len(leg.watches[0].samples)} samples")
    return fault is None


def soak(settings: Soak, folder: Path, tell: Callable[[str], None] = lambda text: None) -> Result:
    """Runs it in `folder`, and compares the weights with those of the quiet run."""
    result = Result()
    for name in ("quiet", "disturbed"):
        (folder / name).mkdir(parents=True)
    quiet = Leg(replace(settings, quiet=True), folder / "quiet", "quiet run", None)
    try:
        checkpoint: Path | None = None
        for number in range(1, settings.legs + 1):
            leg = Leg(settings, folder / "disturbed", f"leg {number}", checkpoint)
            if not _finish(leg, [quiet], result, tell):
                return result
            checkpoint = folder / "disturbed" / "last.ckpt"
        if not _finish(quiet, [], result, tell):
            return result
    finally:
        quiet.end()
    whole, legs = (torch.load(folder / name / "weights.pt") for name in ("quiet", "disturbed"))
    if not torch.equal(whole, legs):
        result.faults.append(f"weights differ by up to {(whole - legs).abs().max():.3g}")
    if not whole.isfinite().all():
        result.faults.append("weights are not finite")
    return result
