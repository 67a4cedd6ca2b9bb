"""However the worker ends or stops, and whenever: the trainer ends soon, with an error that says what happened."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.live import Program, started, warm_server

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


PAUSE_BEFORE = """
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.shard_optimizer import ShardOptimizer
def pause_before(owner, name, from_call=1):
    original, calls = getattr(owner, name), []
    def paused(*args, **kwargs):
        calls.append(name)
        if len(calls) >= from_call:
            say("in", name)
            time.sleep(0.5)
        return original(*args, **kwargs)
    setattr(owner, name, paused)
"""

MOMENTS = {
    "warm-up": ('fit(Tiny(pause_secs=0.05), max_steps=-1, zenflow={"full_warm_up_rounds": 10_000})', "step 3"),
    "training": ("fit(Tiny(pause_secs=0.05), max_steps=-1)", "step 3"),
    "barrier": (
        f"""{PAUSE_BEFORE}
pause_before(ShardOptimizer, "_reselect", from_call=3)
fit(max_steps=-1, zenflow={{"select_strategy": "step", "select_interval": 2}})""",
        "in _reselect",
    ),
    "wait for a block": (f"{PAUSE_BEFORE}\npause_before(HostClient, 'collect', from_call=3)\nfit()", "in collect"),
    "wait for a slot": (
        f"{PAUSE_BEFORE}\npause_before(HostClient, 'slot_is_read', from_call=20)\nfit()",
        "in slot_is_read",
    ),
    "validation": ("fit(Tiny(pause_secs=0.05), val=batches(), limit_val_batches=10_000)", "validating"),
    "end of training": (f"{PAUSE_BEFORE}\npause_before(ShardOptimizer, 'settle')\nfit()", "in settle"),
    "saving": (
        f"""{PAUSE_BEFORE}
pause_before(ShardOptimizer, "complete_host_state")
fit(callbacks=(At(3, lambda trainer: trainer.save_checkpoint("saved")),))""",
        "in complete_host_state",
    ),
    "data": (
        "fit(train=batches(before=lambda number: number == 5 and (say('loading'), time.sleep(1))))",
        "loading",
    ),
    "loader workers": (
        """
loader = batches(num_workers=2, persistent_workers=True, multiprocessing_context="fork")
fit(Tiny(pause_secs=0.05), train=loader, max_steps=-1)""",
        "step 3",
    ),
}


CAUSES = {"ConnectionResetError", "EOFError", "BrokenPipeError"}
"""What `WorkerDied` may be raised from."""


def ends_with_cause(program: Program, number: signal.Signals) -> None:
    """Within 5 seconds, with exit code 1 and one error: the cause of the worker's death and the last step."""
    step = program.last_step()
    assert program.end(10) == 1, program.output
    error = program.error("lightning_zenflow.offload.errors.WorkerDied")
    assert error.startswith("The background process of the optimizer (pid ")
    assert f"was killed by {number.name} (exit code {-number.value}" in error
    last = re.search(r"the last step handed over to it was (\d+)\. The state it held is lost", error)
    assert last and int(last[1]) in (program.last_step(), program.last_step() + 1), error
    assert int(last[1]) >= step
    *causes, shown = program.errors()
    assert shown == "lightning_zenflow.offload.errors.WorkerDied" and CAUSES.issuperset(causes), program.output


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("warm-up", signal.SIGTERM),
        ("training", signal.SIGKILL),
        ("barrier", signal.SIGTERM),
        pytest.param("wait for a block", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("wait for a slot", signal.SIGKILL, marks=pytest.mark.long),
        ("validation", signal.SIGKILL),
        ("end of training", signal.SIGTERM),
        pytest.param("saving", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("data", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("loader workers", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_killed_worker_ends_the_trainer_with_its_exit_code_and_last_step(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    code, said = MOMENTS[moment]
    with started(tmp_path, code) as program:
        program.wait_for(said)
        program.workers()[0].send_signal(number)
        ends_with_cause(program, number)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_killed_at_any_moment_ends_the_trainer(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    code = """
settings = {"select_strategy": "step", "select_interval": 2, "full_warm_up_rounds": 3}
fit(Tiny(width=2000), max_steps=-1, max_epochs=-1, val=batches(2), zenflow=settings)
"""
    with started(tmp_path, code) as program:
        program.wait_for("started")
        time.sleep(chance.uniform(0, 0.5))
        number = chance.choice([signal.SIGKILL, signal.SIGTERM])
        program.workers()[0].send_signal(number)
        ends_with_cause(program, number)


@pytest.mark.long
def test_a_worker_killed_after_training_is_no_longer_missed(tmp_path: Path) -> None:
    """When callbacks are told of the end, every gradient is in the weights."""
    code = """
class Kill(Callback):
    def on_train_end(self, trainer, pl_module):
        workers()[0].kill()
fit(callbacks=(Kill(),))
"""
    with started(tmp_path, code) as program:
        assert program.end() == 0, program.output
        assert program.errors() == []


def test_a_worker_killed_while_it_starts_ends_the_trainer(tmp_path: Path) -> None:
    with started(tmp_path, "fit()") as program:
        program.worker().kill()
        assert program.end(10) == 1
        error = program.error("lightning_zenflow.offload.errors.WorkerDied")
        assert "was killed by SIGKILL (exit code -9" in error
        assert "no step was handed over to it yet" in error


def test_a_worker_killed_while_it_is_stopped_ends_the_trainer(tmp_path: Path) -> None:
    with started(tmp_path, MOMENTS["training"][0]) as program:
        program.wait_for("step 3")
        (worker,) = program.workers()
        worker.suspend()
        time.sleep(0.5)
        worker.kill()
        ends_with_cause(program, signal.SIGKILL)


def test_a_stopped_worker_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Within the time that the user has set, and it is killed with the trainer though it cannot react."""
    with started(tmp_path, 'fit(max_steps=-1, zenflow={"worker_timeout_secs": 1.5})') as program:
        program.wait_for("step 3")
        (worker,) = program.workers()
        worker.suspend()
        assert program.end(1.5 + 5 + 3) == 1, program.output  # it is asked to end, and killed 5 seconds later
        error = program.error("lightning_zenflow.offload.errors.WorkerTimeout")
        assert "did not answer within 1.5 seconds; its process state is T (stopped)" in error
        assert f"`kill -CONT {worker.pid}` continues it" in error


@pytest.mark.long
def test_worker_and_trainer_may_be_stopped_and_continued(tmp_path: Path) -> None:
    """As by Ctrl-Z, or by a scheduler that suspends jobs."""
    with started(tmp_path, 'fit(Tiny(pause_secs=0.02), zenflow={"worker_timeout_secs": 5})') as program:
        program.wait_for("step 3")
        (worker,) = program.workers()
        worker.suspend()
        time.sleep(0.5)
        worker.resume()
        program.wait_for("step 6")
        program.send(signal.SIGSTOP)
        time.sleep(0.5)
        program.send(signal.SIGCONT)
        assert program.end() == 0, program.output
        assert program.has_said("step 20")


@pytest.mark.long
def test_a_worker_killed_while_data_is_long_in_coming_ends_the_trainer(tmp_path: Path) -> None:
    code = "fit(train=batches(before=lambda number: number == 5 and (say('loading'), time.sleep(60))))"
    with started(tmp_path, code) as program:
        program.wait_for("loading")
        program.workers()[0].kill()
        ends_with_cause(program, signal.SIGKILL)


@pytest.mark.long
def test_a_worker_that_runs_out_of_memory_is_named_with_the_usual_cause(tmp_path: Path) -> None:
    """SIGKILL from outside is what the kernel's out-of-memory killer sends; two fits later all works again."""
    code = """
from lightning_zenflow.offload.errors import WorkerDied
try:
    fit(callbacks=(At(3, lambda trainer: workers()[0].kill()),))
except WorkerDied as error:
    say("out of memory is the usual cause" in str(error), "workers", len(workers()))
fit(max_steps=3)
say("workers", len(workers()))
"""
    with started(tmp_path, code) as program:
        assert program.end() == 0, program.output
        assert program.has_said("True workers 0") and program.has_said("workers 0")
