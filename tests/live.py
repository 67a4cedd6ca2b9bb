"""Trainings as programs of their own, started by a test and watched from outside, by process id."""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from tests.patience import patient

REPO = Path(__file__).resolve().parents[1]
MARK = "LIVE_PROGRAM"
"""Environment variable by which everything that a program has started is found, whoever its parent is by then."""

LOOK_SECS = 0.05
"""Between two looks at all processes of the machine: looking costs the programs time."""

ERROR = re.compile(
    r"^(?:\[rank\d\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Died|Timeout))(?:: (.*))?$", re.MULTILINE
)
"""Last line of a traceback: type and first line of the message."""


class Program:
    """A training under way.

    Attributes:
        pid: Its process id, which is its session id too.
    """

    def __init__(self, pid: int, log: Path, poll: Callable[[], int | None], mark: str) -> None:
        self.pid, self._log, self._poll, self._mark = pid, log, poll, mark

    @property
    def output(self) -> str:
        """What it and its children have written so far, to standard output and to standard error."""
        return self._log.read_text(errors="replace")

    def has_said(self, words: str, times: int = 1) -> bool:
        return self.output.split("\n").count(words) >= times

    def wait_for(self, words: str, times: int = 1, within_secs: float = 60.0) -> None:
        """Waits until it has said `words`, as a line of its own, so many times."""
        arrived = until(lambda: self.has_said(words, times) or self.ended(), patient(within_secs))
        assert arrived and self.has_said(words, times), f"It did not say {words!r}:\n{self.output[-8000:]}"

    def last_step(self) -> int:
        """The last step of which it has said that it is over."""
        return max((int(step) for step in re.findall(r"^step (\d+)$", self.output, re.MULTILINE)), default=0)

    def family(self) -> list[psutil.Process]:
        """Itself and every process that descends from it, alive, also after its own end."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Forked children stay in the session; a worker has its own, but a fresh environment.
            return os.getsid(process.pid) == self.pid or process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):
            return False

    def workers(self) -> list[psutil.Process]:
        """Its background processes, oldest first."""
        found = [process for process in self.family() if is_worker(process)]
        return sorted(found, key=lambda process: process.create_time())

    def worker(self, within_secs: float = 60.0) -> psutil.Process:
        """Waits until it has a background process."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = self.workers()
            return bool(found) or self.ended()

        until(look, patient(within_secs), LOOK_SECS)
        assert found, f"It has started no background process:\n{self.output[-8000:]}"
        return found[0]

    def host_state_bytes(self) -> list[int]:
        """Bytes that are really allocated for each host state of which one of its processes holds a descriptor."""
        sizes = {}
        for process in self.family():
            with suppress(OSError):
                for link in Path(f"/proc/{process.pid}/fd").iterdir():
                    with suppress(OSError):
                        if "lightning-zenflow" in os.readlink(link):
                            sizes[link.stat().st_ino] = 512 * link.stat().st_blocks
        return list(sizes.values())

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def send_as_terminal(self, number: signal.Signals) -> None:
        """To all of its processes that a terminal would reach."""
        os.killpg(self.pid, number)

    def ended(self) -> bool:
        return self._poll() is not None

    def end(self, within_secs: float = 60.0) -> int:
        """Its exit code, negative for a signal. It must end by itself in this time, and so must all it has started."""
        in_time = until(self.ended, patient(within_secs))
        assert in_time, f"It runs for over {patient(within_secs)} s:\n{self.output[-8000:]}"
        assert until(lambda: not self.family(), patient(3.0), LOOK_SECS), f"It left behind: {self.family()}"
        code = self._poll()
        assert code is not None
        return code

    def error(self, name: str) -> str:
        """The message of the first exception of this type that it has written as a traceback."""
        found = [text for kind, text in ERROR.findall(self.output) if kind == name]
        assert found, f"It shows no {name}:\n{self.output[-8000:]}"
        return found[0]

    def errors(self) -> list[str]:
        """Types of the exceptions in all of its tracebacks, in order."""
        return [kind for kind, _ in ERROR.findall(self.output)]

    def kill(self) -> None:
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: self.ended() and not self.family(), patient(10.0))


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("lightning_zenflow.offload" in word for word in process.cmdline())
    except psutil.Error:
        return False


def until(holds: Callable[[], bool], limit_secs: float, pause_secs: float = 0.01) -> bool:
    """Waits until `holds`, at most so long; whether it does."""
    deadline = time.monotonic() + limit_secs
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_secs)
    return True


@contextmanager
def started(
    folder: Path,
    code: str,
    *,
    cold: bool = False,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    address_space_bytes: int | None = None,
) -> Iterator[Program]:
    """A program that runs `code` after `from tests.live_training import *`; killed at the end if it still runs.

    Args:
        folder: Its working directory, where its script and its output go as well.
        code: Its Python code.
        cold: Start a new interpreter, as a user does, instead of forking one that has imported everything.
        options: What stands on the command line instead of the script's name, if not empty. Needs `cold`.
        env: Added to the environment.
        address_space_bytes: Limit of its address space.
    """
    mark = uuid.uuid4().hex
    script, log = folder / f"train_{mark[:6]}.py", folder / f"{mark[:6]}.log"
    script.write_text(f"from tests.live_training import *\n{code}\n")
    log.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",  # ranks share the cores of a small machine
        "GLOO_SOCKET_IFNAME": "lo",
        **(env or {}),
        MARK: mark,
    }
    limit = address_space_bytes or 0
    if cold:
        command = [sys.executable, *(option.replace("{script}", str(script)) for option in options or ["{script}"])]
        program = _start_cold(command, folder, log, environment, limit, mark)
    else:
        program = _start_warm(script, folder, log, environment, limit, mark)
    try:
        yield program
    finally:
        program.kill()


def _start_cold(
    command: list[str], folder: Path, log: Path, env: Mapping[str, str], address_space_bytes: int, mark: str
) -> Program:
    def limit() -> None:
        if address_space_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes,) * 2)

    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=limit,
        )
    return Program(process.pid, log, process.poll, mark)


def _start_warm(
    script: Path, folder: Path, log: Path, env: Mapping[str, str], address_space_bytes: int, mark: str
) -> Program:
    code_file = log.with_suffix(".code")
    request = {
        "script": str(script),
        "folder": str(folder),
        "log": str(log),
        "env": dict(env),
        "code_file": str(code_file),
        "address_space_bytes": address_space_bytes,
    }
    server = warm_server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    pid = next(int(line.split()[1]) for line in server.stdout if line.startswith("pid "))  # not what the imports print
    return Program(pid, log, lambda: int(code_file.read_text()) if code_file.exists() else None, mark)


@cache
def warm_server() -> subprocess.Popen[str]:
    """The one interpreter that programs are forked from. Called before the first test, whose leftover it would be."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.live_warm"],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def stop() -> None:
        server.communicate(timeout=10)

    atexit.register(stop)
    return server
