"""Several ranks that are asked to end, or fail while somebody saves: all end in bounded time, and show the first error."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.live import started, warm_server
from tests.live_ranks import ends_because_of_the_other, two_ranks

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


SAVING = """
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_zenflow import rendezvous
rendezvous.MEETING_SECS = 2.0
class Told(Callback):
    def on_exception(self, trainer, pl_module, exception):
        say("told of", type(exception).__name__, "at", trainer.global_step)
SAVES = (OnExceptionCheckpoint("."), Told())
"""

ENDLESS = f"{SAVING}\nfit(Tiny(width=2000), max_steps=-1, max_epochs=-1, devices=2, callbacks=SAVES, enable_checkpointing=True)"


@pytest.mark.parametrize(
    ("signalled", "seed"),
    [((0, 1), 0), ((1,), 1), *(pytest.param(who, 2, marks=pytest.mark.long) for who in ((0,), (1, 0), (0, 1)))],
)
def test_ranks_that_get_sigterm_end_at_the_same_step(
    signalled: Sequence[int], seed: int, tmp_path: Path, free_port: int
) -> None:
    """30, 31: also if one of them alone gets it; with Lightning's exit code, and what is saved then is whole."""
    chance = random.Random(seed)
    with two_ranks(tmp_path, ENDLESS, free_port) as ranks:
        for rank in ranks:
            rank.wait_for("step 5")
        time.sleep(chance.uniform(0, 0.3))
        for number in signalled:
            ranks[number].send(signal.SIGTERM)
            time.sleep(chance.uniform(0, 0.05))
        assert [rank.end(15) for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
        assert [rank.errors() for rank in ranks] == [[], []]
        told = {line for rank in ranks for line in rank.output.split("\n") if line.startswith("told of")}
        assert len(told) == 1 and "SIGTERMException" in told.pop()
        assert len(list((tmp_path / "on_exception.ckpt").rglob("*optim_states.pt"))) == 2


def test_sigterm_in_the_last_step_ends_all_ranks_after_it(tmp_path: Path, free_port: int) -> None:
    """Not the training that the script begins next."""
    code = """
import signal
def ask(trainer):
    if trainer.global_rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
fit(max_steps=5, devices=2, callbacks=(At(5, ask),))
say("went on")
"""
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
        assert not any(rank.has_said("went on") for rank in ranks)


@pytest.mark.long
@pytest.mark.parametrize("fit", ["fit(Tiny(pause_secs=0.02), val=batches(), limit_val_batches=10_000, devices=2)"])
def test_ranks_that_get_sigterm_in_validation_end(fit: str, tmp_path: Path, free_port: int) -> None:
    with two_ranks(tmp_path, fit, free_port) as ranks:
        for rank in ranks:
            rank.wait_for("validating")
        for rank in ranks:
            rank.send(signal.SIGTERM)
        assert [rank.end(10) for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)


@pytest.mark.parametrize("to_all", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sigterm_to_ranks_that_lightning_launches_ends_them(to_all: bool, tmp_path: Path) -> None:
    """30: to the process that the user started, or to all as a scheduler sends it; the first one passes it on as well."""
    with started(tmp_path, ENDLESS) as program:
        program.wait_for("step 5", times=2)
        (program.send_as_terminal if to_all else program.send)(signal.SIGTERM)
        assert program.end(15) == 0, program.output
        assert program.errors() == []


FAILS_ALONE = f"""{SAVING}
class Failing(Tiny):
    def training_step(self, batch, batch_idx):
        if self.global_rank in {{ranks}} and self.global_step == 5:
            raise ValueError("first")
        return super().training_step(batch, batch_idx)
"""

CHECKPOINTS = {
    "OnExceptionCheckpoint": "fit(Failing(), max_steps=-1, devices=2, callbacks=SAVES, enable_checkpointing=True)",
    "ModelCheckpoint": """
from lightning.pytorch.callbacks import ModelCheckpoint
saves = (ModelCheckpoint(dirpath="kept", save_on_exception=True, save_last=True),)
fit(Failing(), max_steps=-1, devices=2, callbacks=saves, enable_checkpointing=True)""",
}


@pytest.mark.parametrize(
    ("failing", "callback"),
    [
        (1, "OnExceptionCheckpoint"),
        pytest.param(0, "OnExceptionCheckpoint", marks=pytest.mark.long),
        pytest.param(1, "ModelCheckpoint", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_save(
    failing: int, callback: str, tmp_path: Path, free_port: int
) -> None:
    """30, 32: its own error is shown, beside it a warning that nothing was saved, and the other one ends as well."""
    code = FAILS_ALONE.format(ranks=(failing,)) + CHECKPOINTS[callback]
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert ranks[failing].end(30) == 1
        assert ranks[failing].errors() == ["ValueError"], ranks[failing].output
        assert "Nothing was saved after ValueError" in ranks[failing].output
        assert "not all ranks came within 2 seconds" in ranks[failing].output
        ends_because_of_the_other(ranks[1 - failing])
        assert not list(tmp_path.rglob("*optim_states.pt"))


def test_ranks_that_fail_together_save(tmp_path: Path, free_port: int) -> None:
    """29, 32."""
    code = FAILS_ALONE.format(ranks=(0, 1)) + CHECKPOINTS["OnExceptionCheckpoint"]
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert [rank.end() for rank in ranks] == [1, 1]
        assert [rank.errors() for rank in ranks] == [["ValueError"], ["ValueError"]]
        assert len(list((tmp_path / "on_exception.ckpt").rglob("*optim_states.pt"))) == 2


@pytest.mark.long
def test_a_rank_that_fails_while_the_store_is_stopped_ends(tmp_path: Path, free_port: int) -> None:
    """30: the store that ranks meet in lives in the first one, which does not answer here."""
    stopping = """
import signal
from lightning_zenflow import rendezvous
rendezvous.ANSWER_SECS = 1.0
class Stopping(Callback):
    def on_exception(self, trainer, pl_module, exception):
        if trainer.global_rank == 1:
            os.kill(int(open("pid").read()), signal.SIGSTOP)
if os.environ["RANK"] == "0":
    open("pid", "w").write(str(os.getpid()))
"""
    code = (
        FAILS_ALONE.format(ranks=(1,))
        + stopping
        + "fit(Failing(), max_steps=-1, devices=2, callbacks=(Stopping(), *SAVES), enable_checkpointing=True)"
    )
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert ranks[1].end(30) == 1
        assert ranks[1].errors() == ["ValueError"], ranks[1].output
        ranks[0].send(signal.SIGCONT)
        assert ranks[0].end(30) == 1, ranks[0].output
        assert ranks[0].errors()[:1] == ["RuntimeError"], ranks[0].output
