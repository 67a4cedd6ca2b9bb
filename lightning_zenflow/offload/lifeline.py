"""How the worker hears from its trainer, and learns at once that the trainer is gone."""

from __future__ import annotations

import select
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any


class TrainerGone(Exception):
    """The trainer has ended or hung up."""


class Lifeline:
    """The connection to the trainer, and the watch on its life.

    Args:
        connection: To the trainer.
        trainer_fd: pidfd of the trainer, or -1 where the system has none. The connection alone would not do: data
            loader workers that the trainer has forked hold its end open after its death.
    """

    def __init__(self, connection: Connection, trainer_fd: int) -> None:
        self._connection = connection
        self._trainer_fd = trainer_fd
        self._sources: list[Any] = [connection, trainer_fd] if trainer_fd >= 0 else [connection]
        self._poll = select.poll()
        self._poll.register(connection.fileno(), 0)  # no events: reports a hang-up only
        if trainer_fd >= 0:
            self._poll.register(trainer_fd, select.POLLIN)

    def receive(self) -> Any:
        """Waits for the next command.

        Raises:
            TrainerGone: There will be none.
        """
        # Wakes on a command, on the end of file, or on the trainer's end. No timeout: one of them must come.
        ready = mp_connection.wait(self._sources)
        try:
            if self._trainer_fd not in ready:
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        raise TrainerGone

    def send(self, reply: Any) -> None:
        """Answers the trainer, without waiting: the trainer takes over the answers before it sends more commands."""
        try:
            self._connection.send(reply)
        except OSError as error:
            raise TrainerGone from error

    def check(self) -> None:
        """Raises `TrainerGone` if so. Does not wait."""
        if self._poll.poll(0):
            raise TrainerGone

    def trainer_ended(self) -> bool:
        """Whether the trainer's process is known to have ended, and has not only hung up. Does not wait."""
        return any(fd == self._trainer_fd for fd, _ in self._poll.poll(0))
