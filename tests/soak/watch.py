"""Looks at the processes of a soak from outside: measures them, and stops them for moments."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.live import is_worker
from tests.soak.flat import Sample

SAMPLE_SECS = 0.2
PAUSE_SECS = (0.001, 0.08)
BETWEEN_PAUSES_SECS = (0.02, 0.5)


class Watch:
    """Of one rank of a leg.

    Args:
        pid: Of the trainer.
        progress: File with the number of its batch.
        seed: Of the pauses.
        pauses: Whether trainer and worker are stopped for moments.

    Attributes:
        samples: What was measured.
        paused: How often a process was stopped.
    """

    def __init__(self, pid: int, progress: Path, seed: str, *, pauses: bool) -> None:
        self._trainer, self._progress = psutil.Process(pid), progress
        self._worker: psutil.Process | None = None
        self._random, self._pauses = random.Random(seed), pauses
        self._next_sample = self._next_pause = 0.0
        self.samples: list[Sample] = []
        self.paused = 0

    @property
    def batch(self) -> int:
        """The last batch that is over; 0 before the first one."""
        try:
            return int(self._progress.read_text() or 0)
        except (OSError, ValueError):
            return 0

    def look(self) -> None:
        """Does what is due; takes as long as a pause at most."""
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError, FileNotFoundError):
            now = time.monotonic()
            if self.batch and now > self._next_sample:
                self._next_sample = now + SAMPLE_SECS
                self._measure()
            if self._pauses and self.batch and now > self._next_pause:
                self._next_pause = now + self._random.uniform(*BETWEEN_PAUSES_SECS)
                self._pause()

    def _find_worker(self) -> psutil.Process | None:
        if self._worker is None or not self._worker.is_running():
            self._worker = next(filter(is_worker, self._trainer.children()), None)
        return self._worker

    def _measure(self) -> None:
        worker, batch = self._find_worker(), self.batch
        if worker is None:
            return
        found = {}
        for name, process in (("trainer", self._trainer), ("worker", worker)):
            found[f"bytes {name}"] = _anonymous_bytes(process.pid)
            found[f"files {name}"] = process.num_fds()
            found[f"threads {name}"] = process.num_threads()
        self.samples.append((batch, found))

    def _pause(self) -> None:
        process = self._random.choice([self._trainer, self._find_worker()])
        if process is None:
            return
        process.send_signal(signal.SIGSTOP)
        try:
            self.paused += 1
            time.sleep(self._random.uniform(*PAUSE_SECS))
        finally:
            process.send_signal(signal.SIGCONT)


def _anonymous_bytes(pid: int) -> int:
    """Resident memory without what is mapped from files, which the system takes back as it likes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    if not kib:
        raise ProcessLookupError(f"{pid} has ended")  # and waits for its parent to be told
    return 1024 * kib[0]
