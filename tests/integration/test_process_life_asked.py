"""Several ranks that are asked for a checkpoint by signals, which never reach all of them within the same batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.live import warm_server
from tests.live_ranks import two_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


ASKED = """
import signal
FIXED = {"topk_ratio": 0.25, "update_interval": 3, "select_interval": 5, "select_strategy": "step"}
RANK = int(os.environ["RANK"])
class Asked(Tiny):
    '''Sends itself `number` in the batches `asks` of its rank, `moment` says where; batches follow from their number.'''
    def __init__(self, asks=({}, {}), number=signal.SIGUSR1):
        super().__init__()
        self.asks, self.number = dict(asks[RANK]), number
    def reach(self, moment):
        if self.asks.get(self.global_step) == moment:
            del self.asks[self.global_step]
            os.kill(os.getpid(), self.number)
    def on_train_batch_start(self, batch, batch_idx):
        self.reach("start")
    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(2 * self.global_step + RANK)
        return super().training_step(torch.randn(4, FEATURES, generator=generator), batch_idx)
    def on_after_backward(self):
        self.reach("backward")
    def on_train_batch_end(self, *args):
        self.reach("end")
class Saves(Callback):
    '''A handler as users write it.'''
    def on_train_start(self, trainer, pl_module):
        def save(number, frame):
            trainer.save_checkpoint("asked.ckpt")
            say("saved", trainer.global_step)
        signal.signal(signal.SIGUSR1, save)
def train(module, **settings):
    settings = {"max_steps": 20, "max_epochs": -1, "callbacks": (Saves(),), **settings}
    fit(module, devices=2, zenflow=FIXED, train=batches(8), **settings)
    if RANK == 0:
        torch.save(module.state_dict(), "weights.pt")
"""


def weights(folder: Path, code: str, port: int) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
    """What both ranks say of saves, and the weights that they end with."""
    with two_ranks(folder, ASKED + code, port) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
        said = [[line for line in rank.output.split("\n") if line.startswith("saved")] for rank in ranks]
    return said, torch.load(folder / "weights.pt")


@pytest.mark.parametrize(
    ("asks", "saved"),
    [
        ("({5: 'end'}, {6: 'start'})", 5),  # the one after its batch, the other in the next one
        pytest.param("({}, {5: 'backward'})", 6, marks=pytest.mark.long),  # one alone
        pytest.param("({6: 'backward'}, {7: 'start'})", 7, marks=pytest.mark.long),
        pytest.param("({8: 'end'}, {8: 'start'})", 8, marks=pytest.mark.long),  # between two epochs
    ],
)
def test_ranks_that_are_asked_for_a_checkpoint_save_it_together(
    asks: str, saved: int, tmp_path: Path, free_port: int
) -> None:
    """29: once, and whoever resumes from it goes on as if never stopped."""
    said, whole = weights(tmp_path, f"train(Asked({asks}))", free_port)
    assert said == [[f"saved {saved}"]] * 2
    _, resumed = weights(tmp_path, "train(Asked(), ckpt_path='asked.ckpt')", free_port)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.long
def test_what_is_asked_in_validation_or_in_the_last_step_is_heard_after_it(tmp_path: Path, free_port: int) -> None:
    code = """
class Validated(Asked):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if RANK == batch_idx and self.global_step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
            say("asked in validation")
val = {"val": batches(2), "val_check_interval": 4}
train(Validated(({}, {19: "backward"})), **val)
"""
    with two_ranks(tmp_path, ASKED + code, free_port) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
        for rank in ranks:
            assert rank.has_said("asked in validation")
            assert rank.has_said("saved 4") and rank.has_said("saved 20") and rank.output.count("saved ") == 2


@pytest.mark.long
def test_ranks_save_when_sigterm_has_a_handler_of_the_users_own_and_end(tmp_path: Path, free_port: int) -> None:
    """30: Lightning calls it after its own."""
    code = """
made = []
def save(number, frame):
    made[0].save_checkpoint("asked.ckpt")
    say("saved", made[0].global_step)
signal.signal(signal.SIGTERM, save)
class Kept(Callback):
    def setup(self, trainer, pl_module, stage):
        made[:] = [trainer]
train(Asked(({5: "end"}, {6: "start"}), signal.SIGTERM), callbacks=(Kept(),))
"""
    with two_ranks(tmp_path, ASKED + code, free_port) as ranks:
        assert [rank.end(30) for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
        for rank in ranks:
            assert rank.has_said("saved 5") and rank.errors() == [], rank.output
    assert len(list((tmp_path / "asked.ckpt").rglob("*optim_states.pt"))) == 2
