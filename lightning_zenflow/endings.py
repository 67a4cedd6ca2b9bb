"""How a strategy behaves when its run does not end well: on an exception of one rank, and in forked children."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_zenflow import rendezvous
from lightning_zenflow.any_accelerator import _AnyAcceleratorStrategy

_runs = itertools.count()
"""Numbers the runs of this process: all ranks have begun the same ones, so each meeting has a name of its own."""


class EndingStrategy(_AnyAcceleratorStrategy):
    """While callbacks are told of an exception, nothing waits for ranks that do not come."""

    _run = -1
    _all_have_come: bool | None = None
    _process_id = -1

    def setup_environment(self) -> None:
        self._run, self._all_have_come, self._process_id = next(_runs), None, os.getpid()
        super().setup_environment()

    def _exception_of_run(self) -> BaseException | None:
        """What ends the run, as long as the Trainer tells its callbacks about it."""
        trainer: Any = self.lightning_module._trainer if self.lightning_module is not None else None
        # It has no stage any more when the exception has left it.
        is_told = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED and trainer.state.stage
        return sys.exc_info()[1] if is_told else None

    @property
    def _is_forked(self) -> bool:
        """Whether this is a child of the trainer, with copies of all it has: it must not use them."""
        return self._process_id not in (-1, os.getpid())

    @property
    def _is_alone(self) -> bool:
        """Whether nobody answers: other ranks do not handle an exception as this one does, or this is a forked child.

        Waits for the others at most `MEETING_SECS`, once a run.
        """
        if self._is_forked:
            return True
        distributed = torch.distributed
        if self._exception_of_run() is None or not (distributed.is_available() and distributed.is_initialized()):
            return False
        if self._all_have_come is None:
            size = distributed.get_world_size()
            store = distributed.distributed_c10d._get_default_store()
            self._all_have_come = size == 1 or rendezvous.all_come(
                store, f"run {self._run}", distributed.get_rank(), size, rendezvous.MEETING_SECS
            )
        return not self._all_have_come

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return obj if self._is_alone else super().broadcast(obj, src)

    def reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if self._is_alone else super().reduce(tensor, *args, **kwargs)
