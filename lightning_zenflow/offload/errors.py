"""What the trainer raises when the background process fails it."""

from __future__ import annotations

from lightning_zenflow.offload.protocol import Failure


class WorkerDied(RuntimeError):
    """The background process has ended, and the state it held is lost."""

    @classmethod
    def because(cls, pid: int, cause: str, last_clock: int, failure: Failure | None) -> WorkerDied:
        """Says how process `pid` ended, after which step (0: none), and with which exception if it reported one."""
        step = (
            f"the last step handed over to it was {last_clock}" if last_clock else "no step was handed over to it yet"
        )
        what = f"failed with {failure.message} and " if failure else ""
        trace = f"\n\nIts traceback:\n{failure.traceback}" if failure else ""
        return cls(
            f"The background process of the optimizer (pid {pid}) {what}{cause}; {step}. The state it held is lost:"
            f" restart from the last checkpoint.{trace}"
        )


class WorkerTimeout(RuntimeError):
    """The background process lives but did not answer in time."""

    @classmethod
    def after(cls, pid: int, secs: float, state: str, remedy: str = "") -> WorkerTimeout:
        """Says how long the trainer waited for process `pid` and what that process was doing."""
        remedy = (
            remedy or f"If it is stopped, `kill -CONT {pid}` continues it; if it is slow, raise `worker_timeout_secs`."
        )
        return cls(
            f"The background process of the optimizer (pid {pid}) did not answer within {secs:g} seconds; its process"
            f" state is {state}. {remedy}"
        )
