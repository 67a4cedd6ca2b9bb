"""However a training ends: its worker is gone, its memory too, and the first error is the one shown."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.live import Program, started, until, warm_server
from tests.patience import patient

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


ENDLESS = """
settings = {"select_strategy": "step", "select_interval": 2, "full_warm_up_rounds": 3}
fit(Tiny(width=2000, pause_secs=0.01), max_steps=-1, max_epochs=-1, val=batches(2), zenflow=settings)
"""
"""Barriers, validation and training in quick turn."""

WITH_LOADERS = """
loader = batches(num_workers=2, persistent_workers=True, multiprocessing_context="fork")
fit(Tiny(width=2000, pause_secs=0.01), train=loader, max_steps=-1, max_epochs=-1)
"""


def kill_and_watch(program: Program, number: signal.Signals = signal.SIGKILL) -> float:
    """Kills the trainer; how long its worker outlives it, in seconds."""
    (worker,) = program.workers()
    program.send(number)
    begin = time.monotonic()
    until(lambda: not worker.is_running() or worker.status() == "zombie", patient(2))
    return time.monotonic() - begin


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_a_killed_trainer_takes_its_worker_along(seed: int, tmp_path: Path) -> None:
    """Z6: at any moment."""
    chance = random.Random(seed)
    with started(tmp_path, ENDLESS) as program:
        program.wait_for("started")
        time.sleep(chance.uniform(0, 1.5))
        number = chance.choice([signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT])
        assert kill_and_watch(program, number) < patient(1)
        assert program.end() == -number


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 3))])
def test_a_killed_trainer_takes_its_worker_along_though_loader_workers_live_on(seed: int, tmp_path: Path) -> None:
    """Z6: they have inherited the trainer's end of the connection, and its mapping of the memory."""
    chance = random.Random(seed)
    with started(tmp_path, WITH_LOADERS) as program:
        program.wait_for("step 3")
        time.sleep(chance.uniform(0, 1))
        assert kill_and_watch(program) < patient(1)
        assert until(program.ended, patient(0.5))
        # They look for their parent every 5 seconds, and still map the memory.
        assert len(program.family()) == 2
        assert program.host_state_bytes() == [0]


SLOW_IMPORT = (
    """
from lightning_zenflow.offload import process
slow = """
    + repr("""
import sys, time
class SlowDisk:
    def find_spec(self, name, *args):
        if name == "torch":
            time.sleep(3)
sys.meta_path.insert(0, SlowDisk())
""")
    + """
process.BOOTSTRAP = process.BOOTSTRAP.replace("main(*", f"exec({slow!r})\\nmain(*")
"""
)
"""The worker takes seconds to import PyTorch, as from a network drive."""


def test_a_trainer_killed_while_its_worker_starts_takes_it_along(tmp_path: Path) -> None:
    """Z6: before the worker can listen."""
    with started(tmp_path, SLOW_IMPORT + ENDLESS) as program:
        program.worker()
        assert kill_and_watch(program) < patient(1)
        assert program.end() == -signal.SIGKILL


FAILING = {
    "training_step": """
class Failing(Tiny):
    def training_step(self, batch, batch_idx):
        if self.global_step == 5:
            raise ValueError("first")
        return super().training_step(batch, batch_idx)
fit(Failing())
""",
    "validation_step": """
class Failing(Tiny):
    def validation_step(self, batch, batch_idx):
        raise ValueError("first")
fit(Failing(), val=batches(2))
""",
    "callback": """
def fail(trainer):
    raise ValueError("first")
fit(callbacks=(At(5, fail),))
""",
    "on_train_end": """
class Failing(Tiny):
    def on_train_end(self):
        raise ValueError("first")
fit(Failing())
""",
    "configure_optimizers": """
class Failing(Tiny):
    def configure_optimizers(self):
        raise ValueError("first")
fit(Failing())
""",
    "data loader": """
def fail(number):
    if number == 5:
        raise ValueError("first")
fit(train=batches(before=fail))
""",
    "on_exception": """
class Failing(Callback):
    def on_exception(self, trainer, pl_module, exception):
        say("told of", type(exception).__name__)
def fail(trainer):
    raise ValueError("first")
fit(callbacks=(Failing(), At(5, fail)))
""",
}


FAST = ("training_step", "on_train_end", "configure_optimizers")


@pytest.mark.parametrize(
    "where", [where if where in FAST else pytest.param(where, marks=pytest.mark.long) for where in FAILING]
)
def test_an_exception_ends_the_worker_and_is_the_one_that_is_shown(where: str, tmp_path: Path) -> None:
    """31, 32: wherever it is raised; nothing of ours follows it."""
    with started(tmp_path, FAILING[where]) as program:
        assert program.end() == 1
        assert program.errors() == ["ValueError"]
        assert program.error("ValueError") == "first"
        if where == "on_exception":
            assert program.has_said("told of ValueError")


@pytest.mark.long
def test_after_an_exception_the_same_process_trains_again(tmp_path: Path) -> None:
    """31: a notebook lives on after an error; the old worker does not."""
    code = (
        FAILING["callback"].replace("fit(", "try:\n    fit(")
        + "except ValueError:\n    pass\n"
        + """
say("workers", len(workers()))
fit(max_steps=3)
say("workers", len(workers()))
"""
    )
    with started(tmp_path, code) as program:
        assert program.end() == 0, program.output
        assert program.has_said("workers 0", 2) and program.has_said("started", 2)


@pytest.mark.parametrize(
    ("times", "code"),
    [
        (1, WITH_LOADERS),
        (2, ENDLESS),
        pytest.param(1, ENDLESS, marks=pytest.mark.long),
        pytest.param(2, WITH_LOADERS, marks=pytest.mark.long),
    ],
    ids=["once, loaders", "twice", "once", "twice, loaders"],
)
def test_ctrl_c_ends_everything(times: int, code: str, tmp_path: Path) -> None:
    """31: once and twice. Lightning makes exit code 1 of it, and says so."""
    with started(tmp_path, code) as program:
        program.wait_for("step 5")
        for _ in range(times):
            program.send_as_terminal(signal.SIGINT)
            time.sleep(0.05)
        assert program.end(10) == 1, program.output
        assert "Detected KeyboardInterrupt, attempting graceful shutdown" in program.output
        assert "lightning_zenflow.offload.errors.WorkerDied" not in program.errors()


SAVING = """
class Save(Callback):
    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint("saved")
        say("saved after", type(exception).__name__, "with workers:", len(workers()))
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_a_checkpoint_can_be_saved_after_ctrl_c(seed: int, tmp_path: Path) -> None:
    """31, 29: the worker does not hear of it, and serves until the trainer has finished."""
    code = SAVING + "fit(Tiny(width=2000), max_steps=-1, max_epochs=-1, callbacks=(Save(),))"
    with started(tmp_path, code) as program:
        program.wait_for("step 5")
        time.sleep(random.Random(seed).uniform(0, 0.5))
        program.send_as_terminal(signal.SIGINT)
        assert program.end(10) == 1, program.output
        assert program.has_said("saved after KeyboardInterrupt with workers: 1") and program.errors() == []
        assert list((tmp_path / "saved").rglob("*optim_states.pt"))


@pytest.mark.long
def test_ctrl_c_twice_between_reading_an_answer_and_accounting_for_it_is_no_long_wait(tmp_path: Path) -> None:
    """31, 32: whatever is called afterwards ends at once, well or with an error."""
    interrupt = """
import signal
from lightning_zenflow.offload.process import WorkerProcess
from lightning_zenflow.offload.protocol import Accumulated
receive, answers = WorkerProcess.receive, []
def interrupted(self):
    answer = receive(self)
    if isinstance(answer, Accumulated):
        answers.append(answer)
        if len(answers) == 5:
            for _ in range(2):  # the first one waits for the end of the step
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)  # Python raises KeyboardInterrupt here at the latest
    return answer
WorkerProcess.receive = interrupted
"""
    code = interrupt + SAVING + 'fit(callbacks=(Save(),), zenflow={"worker_timeout_secs": 20})'
    with started(tmp_path, code) as program:
        program.wait_for("step 3")
        assert program.end(10) == 1
        assert "interrupted in the middle of a message" in program.output


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_twice_at_any_moment_ends_everything(seed: int, tmp_path: Path) -> None:
    """31: before Lightning listens, and before it has told the second one to be ignored, Python's own code is kept."""
    chance = random.Random(seed)
    with started(tmp_path, ENDLESS) as program:
        program.worker()
        time.sleep(chance.uniform(0, 2))
        program.send_as_terminal(signal.SIGINT)
        time.sleep(chance.uniform(0, 0.1))
        if not program.ended():
            program.send_as_terminal(signal.SIGINT)
        assert program.end(10) in (1, -signal.SIGINT), program.output
        assert "lightning_zenflow.offload.errors.WorkerDied" not in program.errors()


def test_ctrl_c_while_the_worker_starts_ends_both(tmp_path: Path) -> None:
    """31: the trainer waits for it at that moment."""
    with started(tmp_path, ENDLESS) as program:
        program.worker()
        program.send_as_terminal(signal.SIGINT)
        assert program.end(10) == 1, program.output
        assert not program.has_said("started")


def test_sigterm_ends_everything(tmp_path: Path) -> None:
    """31: Lightning ends training at the next batch, and leaves exit code 0 to `SystemExit`."""
    with started(tmp_path, ENDLESS) as program:
        program.wait_for("step 5")
        program.send(signal.SIGTERM)
        assert program.end(10) == 0, program.output
        assert program.errors() == []
