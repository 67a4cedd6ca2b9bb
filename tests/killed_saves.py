"""A training that saves after every step and has itself or its background process killed at a given point of a save.

Imported by programs of `tests.live`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.checkpoint import directory
from lightning_zenflow.offload.watch import NOTICE_SECS
from lightning_zenflow.shard_optimizer import ShardOptimizer
from lightning_zenflow.zero.stage12 import ZenFlowZeroOptimizer
from tests.live_training import FEATURES, Tiny, fit, say

LAST = "last.ckpt"
"""The checkpoint that is saved over and over."""

WRITES = ("save", "write_text", "write_bytes")
CALLS = (
    (ZenFlowStrategy, "save_checkpoint"),
    (ZenFlowStrategy, "remove_checkpoint"),
    (ZenFlowStrategy, "reduce_boolean_decision"),
    (ShardOptimizer, "complete_host_state"),
    (ZenFlowZeroOptimizer, "module_state"),
    (DeepSpeedEngine, "_copy_recovery_script"),
    (directory, "begin"),
    (directory, "commit"),
    (directory, "exchange"),
    (torch, "save"),
    (Path, "write_text"),
    (Path, "write_bytes"),
    (os, "mkdir"),
    (os, "fsync"),
    (os, "rename"),
    (os, "unlink"),
    (os, "rmdir"),
)
"""What a save is made of."""

OFTEN = {"update_interval": 4, "select_strategy": "step", "select_interval": 5, "topk_ratio": 0.3}


class Numbered(Tiny):
    """Makes each batch from its number, since a data loader begins anew where a run resumes in the middle of an epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.global_rank + batch_idx)
        return super().training_step(torch.randn(4, FEATURES, generator=generator), batch_idx)


class Killer(Callback):
    """Kills at a point of the save that follows a step: before one of its calls, in the middle of a file, or after all.

    Says `resumed at N`, then for each step `weights N DIGEST`, `points N NAMES` and `saved N`.

    Args:
        victim: "trainer", "worker", or "worker, noticed": then the trainer waits until it is told of that.
        saves: How many steps after the start; 0 never kills.
        point: Which point, from 0; the end of the save if it has fewer.
        path: What to save to here. Whoever else saves comes later.
    """

    def __init__(self, victim: str = "", saves: int = 0, point: int = 0, path: str | None = LAST) -> None:
        self._victim, self._saves, self._point, self._path = victim, saves, point, path
        self._names: list[str] | None = None  # of the points passed, within a save
        self._step = self._fatal_step = self._worker_pid = 0
        for owner, name in CALLS:
            setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name == "fsync":

            def call(_: int) -> None:
                """No test of a process can tell the difference, and a busy disk takes its time."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._pass(name)
            result = call(*args, **kwargs)
            if name in WRITES:
                self._pass(f"half {name}", args[1]._path if name == "save" else args[0])
            return result

        return watched

    def _pass(self, name: str, file: Any = None) -> None:
        if self._names is None:
            return
        self._names.append(name)
        if self._step == self._fatal_step and len(self._names) > self._point:
            self._kill(name, file)

    def _kill(self, name: str, file: Any = None) -> None:
        self._fatal_step = 0
        say("killed at", name)
        if self._victim == "trainer":
            if file is not None:
                os.truncate(file, os.path.getsize(file) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(self._worker_pid, signal.SIGKILL)
        if self._victim == "worker, noticed" and threading.current_thread() is threading.main_thread():
            time.sleep(NOTICE_SECS + 5)
            say("not noticed")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy) and trainer.strategy._zero is not None
        shard = trainer.strategy._zero.shard
        assert shard.clock == trainer.global_step
        self._fatal_step = trainer.global_step + self._saves if self._saves else 0
        self._worker_pid = shard.host.pid
        say("worker", self._worker_pid)
        say("resumed at", trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._step, self._names = trainer.global_step, []
        say("weights", self._step, digest(pl_module))
        if self._path is not None:
            trainer.save_checkpoint(self._path, weights_only=False)

    def on_train_batch_start(self, *args: Any) -> None:
        self._end_save()

    def on_train_end(self, *args: Any) -> None:
        self._end_save()

    def _end_save(self) -> None:
        if self._names is None:
            return
        say("points", self._step, *self._names)
        say("saved", self._step)
        if self._step == self._fatal_step:
            self._kill("the end")
        self._names = None


def digest(module: LightningModule) -> str:
    """Stands for every bit of the weights."""
    flat = torch.cat([param.detach().flatten() for param in module.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(
    steps: int, saver: str | None = "callback", victim: str = "", saves: int = 0, point: int = 0, **settings: Any
) -> None:
    """Trains up to step `steps`, from the last checkpoint if there is one; says `done DIGEST` with the final weights.

    Args:
        steps: In all programs together.
        saver: Who saves: "callback" over `LAST`, "ModelCheckpoint" under two names, or `None` for nobody.
        victim: As in `Killer`.
        saves: As in `Killer`.
        point: As in `Killer`.
        **settings: Of the Trainer.
    """
    faulthandler.dump_traceback_later(30)  # a test that waits in vain shows where this hangs
    killer = Killer(victim, saves, point, LAST if saver == "callback" else None)
    callbacks: list[Callback] = [killer]
    resume: str | None = LAST if saver and os.path.exists(LAST) else None
    if saver == "ModelCheckpoint":
        # Without counting up names, else a kill before the first state that knows of it leaves it a stranger's.
        callbacks.append(
            ModelCheckpoint(
                os.getcwd(),
                "{step}",
                save_top_k=1,
                save_last=True,
                every_n_train_steps=1,
                enable_version_counter=False,
                save_weights_only=False,
            )
        )
        settings["enable_checkpointing"] = True
        resume = "last"
    module = Numbered()
    fit(module, max_steps=steps, callbacks=tuple(callbacks), zenflow=OFTEN, ckpt_path=resume, **settings)
    say("done", digest(module))
