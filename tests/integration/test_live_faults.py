"""A fault in every hook, every signal to every process: what is left of the training, and what was saved before."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from lightning_zenflow.checkpoint import directory
from tests.live import Program, started, warm_server
from tests.live_ranks import two_ranks

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


def checkpoints(folder: Path) -> list[Path]:
    """What was saved there, each of it whole; nothing half written stays beside it."""
    found = sorted((folder / "kept").iterdir()) if (folder / "kept").exists() else []
    for path in found:
        directory.verify(path)
    return found


KEEPING = """
import gc
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
def held():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("lightning-zenflow"), len(workers()), threading.active_count()
def train(module, callbacks=(), **settings):
    keeps = ModelCheckpoint(dirpath="kept", every_n_train_steps=2, save_top_k=-1)
    fit(module, train=batches(6), val=batches(2), max_steps=-1, max_epochs=2, enable_checkpointing=True,
        callbacks=(keeps, *callbacks), **settings)
"""

FAULT = (
    KEEPING
    + """
def fail(self, *args, **kwargs):
    if {early} or self.trainer.global_step >= 4:
        raise ValueError("first")
    return getattr(super(Failing, self), {hook!r})(*args, **kwargs)
class Failing(Tiny):
    pass
setattr(Failing, {hook!r}, fail)
fit(max_steps=2)
before = held()
try:
    train(Failing())
except ValueError:
    if {gone}:
        say("the same as before" if held() == before else f"held before {{before}} and now {{held()}}")
    raise
"""
)

EARLY = ("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start")
LATE = (
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_save_checkpoint",
    "on_train_epoch_end",
)
END = ("on_train_end", "on_fit_end", "teardown")
FAST = ("on_fit_start", "on_after_backward", "optimizer_step", "on_save_checkpoint", "teardown")


@pytest.mark.parametrize(
    "hook", [hook if hook in FAST else pytest.param(hook, marks=pytest.mark.long) for hook in (*EARLY, *LATE, *END)]
)
def test_an_exception_in_a_hook_leaves_nothing_and_no_checkpoint_in_pieces(hook: str, tmp_path: Path) -> None:
    """31, 32: within the process as well, for notebooks. At the end the state is kept for whoever saves."""
    code = FAULT.format(hook=hook, early=hook in (*EARLY, *END), gone=hook not in END)
    if hook == "lr_scheduler_step":
        code = code.replace("    pass\n", SCHEDULED)
    with started(tmp_path, code) as program:
        assert program.end(20) == 1, program.output
        assert program.errors() == ["ValueError"], program.output
        assert program.error("ValueError") == "first"
        assert hook in END or program.has_said("the same as before"), program.output
        assert len(checkpoints(tmp_path)) >= (0 if hook in EARLY else 1)


SCHEDULED = """
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
"""

ENDLESS = KEEPING + "train(Tiny(width=2000, pause_secs=0.005))"
ENDLESS = ENDLESS.replace("max_epochs=2", "max_epochs=-1")
OUTCOMES = {
    ("trainer", signal.SIGKILL): (-signal.SIGKILL,),
    ("trainer", signal.SIGTERM): (0,),
    ("trainer", signal.SIGINT): (1,),
    ("worker", signal.SIGKILL): (1,),
    ("worker", signal.SIGTERM): (1,),
    ("worker", signal.SIGINT): (1,),
}


def strike(program: Program, whom: str, number: signal.Signals, chance: random.Random) -> None:
    program.wait_for("step 4")
    time.sleep(chance.uniform(0, 0.6))
    if whom == "trainer":
        program.send(number)
    else:
        program.workers()[0].send_signal(number)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(("whom", "number"), OUTCOMES)
def test_after_any_signal_the_last_checkpoint_is_whole_and_training_resumes(
    whom: str, number: signal.Signals, seed: int, tmp_path: Path
) -> None:
    """31: while it saves after every second step."""
    with started(tmp_path, ENDLESS) as program:
        strike(program, whom, number, random.Random(seed))
        assert program.end(15) in OUTCOMES[whom, number], program.output
        # In the middle of a save it is the save that says so, with the same cause.
        died = [
            f"lightning_zenflow.{name}" for name in ("offload.errors.WorkerDied", "checkpoint.errors.CheckpointError")
        ]
        assert not program.errors() or program.errors()[-1] in died
    last = max((int(re.findall(r"step=(\d+)", path.name)[0]), path) for path in whole(tmp_path))
    code = (
        f"fit(Tiny(width=2000), train=batches(6), max_steps={last[0] + 4}, max_epochs=-1, ckpt_path={str(last[1])!r})"
    )
    with started(tmp_path, code) as program:
        assert program.end(20) == 0, program.output
        assert program.has_said(f"step {last[0] + 4}")


def whole(folder: Path) -> list[Path]:
    """The checkpoints under their own names; what a killed save was writing lies beside them."""
    found = [path for path in (folder / "kept").iterdir() if path.suffix == ".ckpt" and path.name.startswith("epoch")]
    for path in found:
        directory.verify(path)
    return found


@pytest.mark.long
@pytest.mark.parametrize("whom", ["worker", "trainer"])
def test_who_is_stopped_and_continued_loses_nothing(whom: str, tmp_path: Path) -> None:
    """The weights are those of a run that was never stopped."""
    code = """
module = Tiny(width=200, pause_secs=0.01)
fit(module, max_steps=60)
say("weights", *(float(param.double().sum()) for param in module.parameters()))
"""
    with started(tmp_path, code) as program:
        assert program.end() == 0
        expected = [line for line in program.output.split("\n") if line.startswith("weights")]
    with started(tmp_path, code) as program:
        program.wait_for("step 3")
        (worker,) = program.workers()
        for _ in range(3):
            (worker.suspend if whom == "worker" else lambda: program.send(signal.SIGSTOP))()
            time.sleep(0.3)
            (worker.resume if whom == "worker" else lambda: program.send(signal.SIGCONT))()
            time.sleep(0.05)
        assert program.end() == 0, program.output
        assert [line for line in program.output.split("\n") if line.startswith("weights")] == expected


def test_a_step_that_is_infinite_on_one_rank_is_skipped_on_both(tmp_path: Path, free_port: int) -> None:
    """12, 13: neither waits for the other, and both end with the same weights."""
    code = """
class Infinite(Tiny):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 and batch_idx in (2, 5) else loss
module = Infinite()
made = fit(module, max_steps=10, devices=2)
say("weights", made.strategy.step_stats.skipped_steps, *(float(param.double().sum()) for param in module.parameters()))
"""
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
        first, second = ([line for line in rank.output.split("\n") if line.startswith("weights")] for rank in ranks)
        assert first == second and first[0].startswith("weights 2 ") and "nan" not in first[0]
