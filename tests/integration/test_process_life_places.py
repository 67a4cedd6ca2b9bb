"""Odd places to train in: a second time, suspended, forked, without standard streams, among files named as PyTorch's."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.live import started, warm_server

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


DIED = "lightning_zenflow.offload.errors.WorkerDied"


def test_a_worker_killed_in_a_second_fit_is_missed_as_soon_as_in_the_first(tmp_path: Path) -> None:
    """30: while the trainer waits for data, and Lightning has restored the handlers of the first run."""
    code = """
fit(max_steps=2)
fit(train=batches(before=lambda number: number == 5 and (say('loading'), time.sleep(60))))
"""
    with started(tmp_path, code) as program:
        program.wait_for("loading")
        program.workers()[-1].kill()
        assert program.end(10) == 1, program.output
        assert "was killed by SIGKILL" in program.error(DIED)


@pytest.mark.long
def test_two_trainers_in_one_process_miss_the_worker_that_was_killed(tmp_path: Path) -> None:
    """30: a fit within a fit, as of a teacher and its student; each has a watch of its own."""
    code = """
def inner(trainer):
    try:
        fit(train=batches(before=lambda number: number == 3 and (workers()[-1].kill(), time.sleep(30))))
    except RuntimeError as error:
        say("inner", type(error).__name__)
fit(callbacks=(At(5, inner),))
"""
    with started(tmp_path, code) as program:
        assert program.end(30) == 0, program.output
        assert program.has_said("inner WorkerDied") and program.has_said("step 20")


def test_trainer_and_worker_that_are_suspended_for_long_go_on(tmp_path: Path) -> None:
    """A laptop that sleeps, a scheduler that suspends: the time in which the trainer is stopped is nobody's fault."""
    code = """
from lightning_zenflow.offload.channel import Patience
wait = Patience.wait
def told(self, ready):
    say("waits")
    return wait(self, ready)
Patience.wait = told
fit(Tiny(pause_secs=0.02), zenflow={"worker_timeout_secs": 2.5})
"""
    with started(tmp_path, code) as program:
        program.wait_for("step 3")
        (worker,) = program.workers()
        worker.suspend()
        time.sleep(1.0)  # the trainer waits for it by now
        program.send(signal.SIGSTOP)
        time.sleep(4)
        program.send(signal.SIGCONT)
        worker.resume()
        assert program.end() == 0, program.output
        assert program.has_said("step 20")


LEAVES = """
import sys
from lightning.pytorch.callbacks import OnExceptionCheckpoint
def leave(trainer):
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
saves = OnExceptionCheckpoint("kept")
"""

LEAVING = {
    "callback": "fit(enable_checkpointing=True, callbacks=(saves, At(5, leave)), {more})",
    "data": """
loader = batches(before=lambda number: number == 5 and leave(None))
fit(train=loader, callbacks=(saves,), enable_checkpointing=True, {more})""",
    "end of training": """
class Leave(Callback):
    def on_train_end(self, trainer, pl_module):
        leave(trainer)
        trainer.save_checkpoint("after")
fit(enable_checkpointing=True, callbacks=(saves, Leave()), {more})""",
}


@pytest.mark.parametrize(
    "where", ["callback", *(pytest.param(where, marks=pytest.mark.long) for where in ("data", "end of training"))]
)
def test_a_forked_child_that_exits_leaves_its_parent_alone(where: str, tmp_path: Path) -> None:
    """31: `sys.exit` unwinds the child's copy of the training, whose worker and files are the parent's."""
    with started(tmp_path, LEAVES + LEAVING[where].format(more="")) as program:
        assert program.end(20) == 0, program.output
        assert program.has_said("child 3") and program.has_said("step 20"), program.output
        assert not (tmp_path / "kept").exists()


@pytest.mark.long
def test_a_forked_child_of_a_rank_that_exits_leaves_its_parent_alone(tmp_path: Path) -> None:
    """31: nor does it wait for the other ranks, or for threads of the process group that it does not have."""
    code = LEAVES + LEAVING["callback"].format(more="devices=2")
    with started(tmp_path, code) as program:
        assert program.end(30) == 0, program.output
        assert program.has_said("child 3", 2) and program.has_said("step 20", 2), program.output


FORKED = """
import multiprocessing
torch.set_num_threads(2)
{before}
process = multiprocessing.get_context("fork").Process(target=fit, args=(Tiny(width=20_000),))
process.start()
process.join()
assert process.exitcode == 0
"""


@pytest.mark.parametrize("before", ["torch.ones(1 << 22).add_(1)", ""], ids=["threads were used", "not yet"])
def test_a_process_forked_from_one_with_threads_trains_with_one_and_says_so(before: str, tmp_path: Path) -> None:
    """31: it waited for ever for threads that a fork does not copy."""
    with started(tmp_path, FORKED.format(before=before)) as program:
        assert program.end(30) == 0, program.output
        assert program.has_said("step 20")
        assert ("and can use one alone" in program.output) == bool(before)


CLOSED = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, [sys.executable, '{script}'])"

INTO_FILE = """
import tests.live_training as live
def to_file(*words):
    with open("said", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")
live.say = to_file
fit()
"""


@pytest.mark.parametrize("more", ["", pytest.param("devices=2", marks=pytest.mark.long)])
def test_a_program_without_standard_streams_trains(more: str, tmp_path: Path) -> None:
    """As a daemon runs, or `python train.py <&- >&- 2>&-`: sockets and memory get the numbers 0 to 2."""
    code = INTO_FILE.replace("fit()", f"fit({more})")
    with started(tmp_path, code, cold=True, options=["-c", CLOSED]) as program:
        assert program.end() == 0
        assert "step 20\ntrain end\n" in (tmp_path / "said").read_text()


NAMES = (
    "random",
    "signal",
    "socket",
    "select",
    "queue",
    "torch",
    "numpy",
    "typing_extensions",
    "json",
    "sitecustomize",
)

MINE = {
    "on the path": "sys.path.insert(0, 'mine')",
    "in PYTHONPATH": "os.environ['PYTHONPATH'] = os.path.abspath('mine')",
    "working directory": "sys.path.insert(0, ''); os.chdir('mine')",
}


@pytest.mark.parametrize(
    "where", ["on the path", *(pytest.param(name, marks=pytest.mark.long) for name in list(MINE)[1:])]
)
def test_the_worker_imports_no_file_of_the_user(where: str, tmp_path: Path) -> None:
    """Z7: also if it has the name of a module that the worker needs, and comes first on the trainer's path by now."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in NAMES:
        (mine / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\nraise SystemExit(5)\n"
        )
    with started(tmp_path, f"import sys\n{MINE[where]}\nfit()") as program:
        assert program.end() == 0, program.output
        assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


def refusing(given: bool) -> str:
    """A training whose worker gets core 4000, which no system has."""
    if given:
        return 'fit(zenflow={"worker_cores": [0, 4000]})'
    return """
from lightning_zenflow import strategy
strategy.cores_of_worker = lambda *args: [0, 4000]
fit()
"""


@pytest.mark.parametrize("given", [True, False])
def test_refused_cores_are_an_error_if_the_user_gave_them_and_else_a_warning(given: bool, tmp_path: Path) -> None:
    """36: a job's cores may change after they were looked at."""
    with started(tmp_path, refusing(given)) as program:
        assert program.end() == given, program.output
        if given:
            assert "`worker_cores` must be cores that this process may use, got [0, 4000]" in program.error(DIED)
            assert not program.has_said("started")
        else:
            assert program.output.count("may not run on cores [4000], and runs on [0] instead") == 1
            assert program.has_said("step 20")
