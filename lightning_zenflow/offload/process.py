"""The background process as the trainer sees it: start, messages with a time limit, causes of death, end.

Started with `subprocess`, neither forked nor spawned by `multiprocessing`: it never runs the user's script again and
works from notebooks, threads and daemonic parents.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_zenflow.offload.descriptors import off_standard_streams

EXIT_GRACE_SECS = 5.0
"""How long an ending worker may take until the system reports its exit code, or until it is killed."""

BOOTSTRAP = """\
import sys
fds, package, sys.path[:] = sys.argv[1:4], sys.argv[4], [entry for entry in sys.path if entry] + sys.argv[5:]
import types
stub = types.ModuleType("lightning_zenflow")
stub.__path__ = [package]
sys.modules["lightning_zenflow"] = stub
from lightning_zenflow.offload.child import main
main(*map(int, fds))
"""
"""Program of the child. Started with `-S` and without `PYTHONPATH`, its own search path holds the standard library alone, and
the current directory as an empty string: the first stays in front, the second goes. The stub stands for
`lightning_zenflow/__init__.py`, which would import lightning."""

_PACKAGE = str(Path(__file__).resolve().parent.parent)
"""Asked for when this is imported: a relative path means something else once the working directory has changed."""

_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_PATH_VARIABLES = ("PYTHONPATH", "PYTHONINSPECT")
"""`search_path` tells the child where things are, only after Python itself has started."""

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or for memory",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
}

_HINTS = {
    "SIGKILL": "; out of memory is the usual cause, see dmesg",
    "SIGBUS": "; the system had no memory left for its state",
}


class WorkerProcess:
    """One child process and the connection to it.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, popen: subprocess.Popen[bytes], connection: Connection) -> None:
        self._popen = popen
        self._connection = connection
        # Registered once: `multiprocessing.connection.wait` does it anew at each call, which takes longer than the message.
        self._incoming, self._anything = select.poll(), select.poll()
        self._incoming.register(connection.fileno(), select.POLLIN)
        self._anything.register(connection.fileno(), select.POLLIN)
        self._pidfd = _pidfd(popen.pid)
        if self._pidfd >= 0:
            # A child that another thread forks during our start may hold the worker's end: no end of file then.
            self._anything.register(self._pidfd, select.POLLIN)
        self.pid = popen.pid

    @classmethod
    def start(cls, memory_fd: int, timeout_secs: float) -> WorkerProcess:
        """Starts the child, which inherits `memory_fd`. Does not wait for it.

        Args:
            memory_fd: Descriptor of the shared memory.
            timeout_secs: No message may take longer to be sent or received than this.
        """
        ours, theirs = (socket.socket(fileno=off_standard_streams(end.detach())) for end in socket.socketpair())
        trainer_fd = _pidfd(os.getpid())
        inherited = [fd for fd in (theirs.fileno(), memory_fd, trainer_fd) if fd >= 0]
        numbers = map(str, (theirs.fileno(), memory_fd, trainer_fd))
        try:
            popen = subprocess.Popen(
                [sys.executable, "-S", "-c", BOOTSTRAP, *numbers, _PACKAGE, *search_path()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None
                if sys.__stderr__ is not None
                else subprocess.DEVNULL,  # closed: the number is somebody else's
                pass_fds=inherited,
                cwd="/",  # the trainer's may be deleted, and PyTorch cannot be imported in a deleted directory
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer, which then ends the worker
                env=_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # so that the death of the worker is seen as an end of file, at once
            if trainer_fd >= 0:
                os.close(trainer_fd)
        _limit_waits(ours, timeout_secs)
        return cls(popen, Connection(ours.detach()))

    def send(self, message: Any) -> None:
        """Sends `message`. Returns at once unless the socket is full, and then within the time limit.

        Raises:
            BlockingIOError: The socket stayed full.
            OSError: The worker is gone.
        """
        self._connection.send(message)

    def wait(self, timeout_secs: float) -> bool:
        """Whether there is something to `receive` within `timeout_secs`. An exception in here loses nothing."""
        # Wakes on a message, on the end of file, or on the worker's end; never later than the timeout.
        return bool(self._anything.poll(math.ceil(1e3 * timeout_secs)))

    def receive(self) -> Any | None:
        """The message that `wait` has announced, or `None` if it is not whole.

        Raises:
            EOFError: The worker is gone, and all it has sent was received.
        """
        try:
            if self._incoming.poll(0):
                return self._connection.recv()
        except BlockingIOError:
            return None  # stopped in the middle of a message
        except OSError as error:
            raise EOFError from error
        raise EOFError

    def cause_of_death(self) -> str:
        """How the child ended, in words. Waits at most `EXIT_GRACE_SECS` for the exit code."""
        try:
            code = self._popen.wait(EXIT_GRACE_SECS)  # the socket closes a moment before the exit code is there
        except subprocess.TimeoutExpired:
            return f"hung up but lives on, process state {self.state()}"
        if code >= 0:
            return f"ended with exit code {code}"
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        return f"was killed by {name} (exit code {code}{_HINTS.get(name, '')})"

    @property
    def pidfd(self) -> int:
        """Becomes readable when the child ends; -1 where the system has none. Closed by `stop`."""
        return self._pidfd

    def has_ended(self) -> bool:
        """Whether the child has ended. Does not wait."""
        return self._popen.poll() is not None

    def state(self) -> str:
        """Process state as the system shows it, such as "T (stopped)"."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "unknown"
        return f"{letter} ({_STATES.get(letter, 'unknown')})"

    def stop(self) -> None:
        """Ends the child: asks, waits, kills. Bounded by twice `EXIT_GRACE_SECS`; fine if it is dead already."""
        try:
            self._hang_up()
            if not self.state().startswith("T"):  # a stopped process sees nothing
                self._popen.wait(EXIT_GRACE_SECS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also after a second Ctrl-C during the wait
            if not self.has_ended():
                self._popen.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done
                    self._popen.wait(EXIT_GRACE_SECS)
            self._connection.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)

    def _hang_up(self) -> None:
        """Lets the worker see an end of file now, even if forked children of the trainer hold copies of this socket.

        Unlike a message, this cannot block on a full socket.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` ends; -1 where the system has none (Linux before 5.3)."""
    try:
        return off_standard_streams(os.pidfd_open(pid))
    except (AttributeError, OSError):
        return -1


def search_path() -> list[str]:
    """Where the child finds PyTorch, after the standard library: where the trainer has found it, then the trainer's path.

    So a `random.py` or `torch.py` that the user has beside the script, or in a directory put on the path later, is not
    imported by the child unless the trainer has imported it itself.
    """
    homes = [_home(sys.modules[name]) for name in ("torch", "numpy", "typing_extensions") if name in sys.modules]
    return list(dict.fromkeys(_absolute(entry) for entry in (*homes, *sys.path) if isinstance(entry, str)))


def _absolute(entry: str) -> str:
    """What the child, which starts elsewhere, finds under the same name."""
    try:
        return os.path.abspath(entry)
    except FileNotFoundError:  # the working directory was deleted, and what was in it
        return "/nowhere"


def _home(module: ModuleType) -> str:
    """The directory on the search path that holds a module."""
    file = Path(module.__file__ or "").absolute()
    return str(file.parent.parent if hasattr(module, "__path__") else file.parent)


def _environment() -> dict[str, str]:
    """The trainer's environment, without devices and without thread settings meant for the trainer's own cores."""
    left_out = (*_BINDING_VARIABLES, *_PATH_VARIABLES)
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**inherited, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _limit_waits(ours: socket.socket, timeout_secs: float) -> None:
    """Has the kernel bound every send and receive, which `Connection` itself cannot."""
    limit = struct.pack("ll", int(timeout_secs), int(timeout_secs % 1 * 1e6) or 1)  # two zeros would mean: no limit
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, limit)
