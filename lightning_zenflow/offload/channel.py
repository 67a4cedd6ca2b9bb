"""Commands out and answers in, in order, with a time limit on every wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator

from lightning_zenflow.offload.errors import WorkerDied, WorkerTimeout
from lightning_zenflow.offload.process import WorkerProcess
from lightning_zenflow.offload.protocol import (
    Advance,
    Answer,
    Command,
    Failure,
    Read,
    Ready,
    Reply,
    Update,
    Updated,
)
from lightning_zenflow.signals import postponed

LOOK_SECS = 0.5
"""No wait is longer in one piece, so that what passes while this process is stopped is told from what the worker takes."""


class Patience:
    """How long the worker may still take.

    What passes while this process is stopped does not count, as far as it is more than `LOOK_SECS`: its worker is stopped
    as well then, by a scheduler that suspends jobs for example.
    """

    def __init__(self, secs: float) -> None:
        self._left_secs = secs

    def wait(self, ready: Callable[[float], bool]) -> bool:
        """Whether `ready`, which waits for as long as it is told to, says so in time."""
        while True:
            begin, secs = time.monotonic(), min(self._left_secs, LOOK_SECS)
            is_ready = ready(secs)
            self._left_secs -= min(secs, time.monotonic() - begin) if is_ready else secs
            if is_ready or self._left_secs <= 0:
                return is_ready


class Channel:
    """What was sent to the worker, what of it is answered, and why it died if it did.

    Attributes:
        unanswered: Commands that the worker has not finished, oldest first.
        read_from: From which element on the oldest unanswered command has read the slot; `None` for nothing.
        updated: Answers to updates that nobody has collected, oldest first.
        answers: All answers since the last `take_answers`, for whoever draws what the worker did.
        is_closed: No call is accepted any more.
    """

    def __init__(self, process: WorkerProcess, timeout_secs: float) -> None:
        self.unanswered: deque[Update | Advance] = deque()
        self.read_from: int | None = None
        self._is_half_answered = False
        self.updated: deque[Updated] = deque()
        self.answers: list[Answer] = []
        self.is_closed = False
        self._process = process
        self._timeout_secs = timeout_secs
        self._last_clock = 0
        self._death: WorkerDied | None = None
        self._is_busy = False
        self._is_torn = False
        self._owner_pid = os.getpid()

    @property
    def running(self) -> int:
        """Updates whose block is not finished; the oldest command may have the others still to do."""
        return sum(isinstance(command, Update) for command in self.unanswered) - self._is_half_answered

    def wait_ready(self, limit_secs: float) -> Ready:
        """Waits for the answer to `Start`, at most `limit_secs`, and returns it."""
        with self._alone():
            reply = self._receive(Patience(limit_secs))
            if not isinstance(reply, Ready):
                remedy = "Its start takes too long: look at the load of this machine."
                raise WorkerTimeout.after(self._process.pid, limit_secs, self._process.state(), remedy)
            return reply

    def launch(self, command: Command) -> None:
        """Sends `command`. Does not wait, unless hundreds of commands are unanswered."""
        with self._alone():
            self._take_answers()  # so that neither side's socket ever fills up
            self._is_torn = True
            try:
                self._process.send(command)
            except BlockingIOError:
                raise self._timeout() from None
            except OSError:
                self._take_answers()  # there may be a traceback
                raise self._died() from None
            if isinstance(command, (Update, Advance)):
                self.unanswered.append(command)
                self._last_clock = command.clock
            self._is_torn = False

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Takes over answers until `done`, at most for the time limit."""
        with self._alone():
            patience = Patience(self._timeout_secs)
            while not done():
                if self._receive(patience) is None:
                    raise self._timeout()

    def take_over(self) -> None:
        """Takes over the answers that have come. Does not wait."""
        with self._alone():
            self._take_answers()

    def check(self) -> None:
        """Raises `WorkerDied` if the worker has ended. Does not wait."""
        with self._alone():
            self._take_answers()
            if self._process.has_ended():
                self._take_answers()
                raise self._died()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A signal handler or a thread that calls in here in the middle of a call would tear messages apart."""
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                "`HostClient` must be used by the process that made it, got a call in a forked child. Do there what needs no"
                " optimizer."
            )
        if self._is_busy:
            raise RuntimeError(
                "`HostClient` must be used by one call at a time, got a call from inside another (a signal handler or a"
                " thread). Set a flag there and act at the end of the step."
            )
        if self._death is not None:
            raise self._death
        if self._is_torn:
            raise RuntimeError(
                "The background process cannot be used any more: a call was interrupted in the middle of a message, by"
                " Ctrl-C for example. Restart from the last checkpoint."
            )
        if self.is_closed:
            raise RuntimeError("`HostClient` must be open, got a call after `close`. Start a new one.")
        with postponed():  # an interrupt in the middle of a message would tear it apart
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def _take_answers(self) -> None:
        while self._receive(Patience(0)) is not None:
            pass

    def _receive(self, patience: Patience) -> Reply | None:
        """Takes over the next answer, or `None` if there is none in time."""
        if not patience.wait(self._process.wait):
            return None
        # From here to the end an exception from outside, such as Ctrl-C, loses an answer, and nothing adds up any more.
        self._is_torn = True
        try:
            reply: Reply | None = self._process.receive()
        except EOFError:
            raise self._died() from None
        if isinstance(reply, Failure):
            raise self._died(reply)
        if isinstance(reply, Read):
            self.read_from = reply.first
        elif isinstance(reply, Answer):
            self.answers.append(reply)
            oldest = self.unanswered[0]
            if isinstance(reply, Updated):
                self.updated.append(reply)
            self._is_half_answered = isinstance(reply, Updated) and isinstance(oldest, Update) and oldest.others
            if not self._is_half_answered:  # the last answer; they come in order
                self.unanswered.popleft()
                self.read_from = None
        self._is_torn = reply is None  # stopped in the middle of a message
        return reply

    def death_to_tell(self) -> WorkerDied | None:
        """The error of a death that no call has met yet; `None` if one has, or is about to, or nobody asks any more."""
        if self._is_busy or self.is_closed or self._death is not None:
            return None
        return self._died()

    def _died(self, failure: Failure | None = None) -> WorkerDied:
        self._death = WorkerDied.because(self._process.pid, self._process.cause_of_death(), self._last_clock, failure)
        return self._death

    def _timeout(self) -> WorkerTimeout:
        return WorkerTimeout.after(self._process.pid, self._timeout_secs, self._process.state())
