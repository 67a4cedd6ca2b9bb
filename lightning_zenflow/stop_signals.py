"""Signals with several ranks: noted where they arrive, heard by all ranks at the same batch.

Lightning's own handler of SIGTERM broadcasts, and handlers that save wait for all ranks as well, whatever these are doing at
that moment: if one of them is within another collective, the two are taken for each other, and all wait for ever.
"""

from __future__ import annotations

import datetime
import logging
import signal
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import distributed

from lightning_zenflow.rendezvous import MEETING_SECS
from lightning_zenflow.shared_hold import SharedHold
from lightning_zenflow.signals import ASKING

_log = logging.getLogger(__name__)


class StopSignals(_SignalConnector):
    """Lightning's signal connector of a Trainer with several ranks.

    In training a signal takes effect at the start of the next batch, on all ranks, if one of them has got it: also one with a
    handler of the user's own. In validation, whose batches have no such point in common, handlers wait for the training batch
    behind it; for SIGTERM each rank ends at its own next batch, as with Lightning.

    Attributes:
        held: Of the run.
    """

    def __init__(self, trainer: Any) -> None:
        self.held = SharedHold(self._arrives)
        self._is_noted = self._is_agreed = self._is_requeued = False
        super().__init__(trainer)

    @classmethod
    def install(cls, trainer: Any) -> None:
        """Has a Trainer with several ranks hear signals in this way. Idempotent; before Lightning sets its handlers."""
        loop = trainer.fit_loop.epoch_loop
        # Lightning asks all ranks at the start of a batch as well, but only whether the first one has got SIGTERM.
        if not isinstance(trainer._signal_connector, cls) and hasattr(loop, "_broadcast_sigterm_tensor"):
            trainer._signal_connector = cls(trainer)
            loop._broadcast_sigterm_tensor = trainer._signal_connector.agree

    def begin_run(self) -> SharedHold:
        """The hold of the run that begins."""
        self.held = SharedHold(self._arrives)
        return self.held

    @property
    def received_sigterm(self) -> bool:
        """Whether Lightning's loops are to end now."""
        return self._is_agreed or (self._is_noted and not self.trainer.training)

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:
        self._is_noted = self._is_agreed = value

    def _sigterm_notifier_fn(self, signum: Any, _: FrameType | None) -> None:
        _log.info("Received SIGTERM: training ends at the next batch.")
        if not self._is_noted and self.trainer.strategy.launcher is not None:
            self.trainer.strategy.launcher.kill(signum)
        self._is_noted = True

    def _slurm_sigusr_handler_fn(self, signum: Any, _: FrameType | None) -> None:
        self._is_requeued = True

    def _arrives(self, number: int, handler: Any) -> None:
        """Notes SIGTERM at once, which validation looks for at each of its batches."""
        if number == signal.SIGTERM and isinstance(handler, _HandlersCompose):
            self._sigterm_notifier_fn(number, None)

    def agree(self) -> None:
        """Every rank calls this at the start of each batch, and once training is over.

        Raises:
            SIGTERMException: A rank has got SIGTERM; raised on all of them.
        """
        asking = [*ASKING, *{self._requeue_signal()}.difference(ASKING, [None])]
        self.held.hold(asking)  # from here on no rank hears anything alone
        ends, requeues, *asked = self._on_any_rank([self._is_noted, self._is_requeued, *map(self.held.has, asking)])
        self._is_requeued = False
        self.held.hear([number for number, has_come in zip(asking, asked, strict=True) if has_come])
        if requeues or self._is_requeued:
            self._is_requeued = False
            super()._slurm_sigusr_handler_fn(self._requeue_signal(), None)  # type: ignore[arg-type]
        if ends:
            self._is_agreed = True
            raise SIGTERMException

    def _on_any_rank(self, flags: list[bool]) -> list[bool]:
        """Which of these are true on a rank; the first one is that it has to end."""
        noted = torch.tensor(flags, dtype=torch.int32, device=self.trainer.strategy.root_device)
        work: Any = distributed.all_reduce(noted, distributed.ReduceOp.MAX, async_op=True)
        if not flags[0]:
            work.wait()
        else:
            try:
                # Bounded: a rank that got the signal in validation has left already.
                work.wait(datetime.timedelta(seconds=MEETING_SECS))
            except RuntimeError as error:
                _log.info("SIGTERM: another rank has ended first (%s).", error)
                return [True, *(False for _ in flags[1:])]
        return [bool(flag) for flag in noted.tolist()]

    def _requeue_signal(self) -> Any:
        return getattr(self.trainer._accelerator_connector.cluster_environment, "requeue_signal", None)
