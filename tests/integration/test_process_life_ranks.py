"""When one of two ranks fails, the other ends too, in bounded time, and neither leaves its worker behind."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.live import Program, is_worker, started, warm_server
from tests.live_ranks import BOUND_SECS, ends_because_of_the_other, two_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


ENDLESS = "fit(Tiny(pause_secs=0.02), max_steps=-1, devices=2)"
FAILS_ON = """
class Failing(Tiny):
    def training_step(self, batch, batch_idx):
        if self.global_rank == {rank} and self.global_step == 5:
            raise ValueError("first")
        return super().training_step(batch, batch_idx)
fit(Failing(pause_secs=0.02), max_steps=-1, devices=2)
"""


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.long), 1])
def test_an_exception_on_one_rank_ends_both(failing: int, tmp_path: Path, free_port: int) -> None:
    """30, 32: and is the one that its rank shows."""
    with two_ranks(tmp_path, FAILS_ON.format(rank=failing), free_port) as ranks:
        assert ranks[failing].end() == 1
        assert ranks[failing].errors() == ["ValueError"]
        ends_because_of_the_other(ranks[1 - failing])


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 1)])
def test_a_signal_to_one_rank_ends_both(number: signal.Signals, code: int, tmp_path: Path, free_port: int) -> None:
    """30."""
    with two_ranks(tmp_path, ENDLESS, free_port) as ranks:
        for rank in ranks:
            rank.wait_for("step 5")
        ranks[1].send(number)
        assert ranks[1].end(10) == code
        ends_because_of_the_other(ranks[0])


def test_the_killed_worker_of_one_rank_ends_both(tmp_path: Path, free_port: int) -> None:
    """30: its own rank says why, the other one that its peer is gone."""
    with two_ranks(tmp_path, ENDLESS, free_port) as ranks:
        for rank in ranks:
            rank.wait_for("step 5")
        ranks[1].workers()[0].kill()
        assert ranks[1].end(10) == 1, ranks[1].output
        assert "was killed by SIGKILL (exit code -9" in ranks[1].error("lightning_zenflow.offload.errors.WorkerDied")
        ends_because_of_the_other(ranks[0])


@pytest.mark.long
def test_a_rank_without_memory_for_its_state_ends_both_before_training(tmp_path: Path, free_port: int) -> None:
    code = """
from lightning_zenflow.offload import client
def refuse(*args, **settings):
    raise MemoryError("first")
if os.environ["RANK"] == "1":
    client.check_host_memory = refuse
fit(devices=2)
"""
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert ranks[1].end() == 1
        assert ranks[1].errors() == ["MemoryError"]
        ends_because_of_the_other(ranks[0])
        assert not ranks[0].has_said("started")


@pytest.mark.long
def test_an_exception_in_configure_optimizers_on_one_rank_ends_both(tmp_path: Path, free_port: int) -> None:
    code = """
class Failing(Tiny):
    def configure_optimizers(self):
        if self.global_rank == 1:
            raise ValueError("first")
        return super().configure_optimizers()
fit(Failing(), devices=2)
"""
    with two_ranks(tmp_path, code, free_port) as ranks:
        assert ranks[1].end() == 1
        assert ranks[1].errors() == ["ValueError"]
        ends_because_of_the_other(ranks[0], within_secs=5)


def second_rank(program: Program) -> psutil.Process:
    (found,) = [process for process in program.family() if process.ppid() == program.pid and not is_worker(process)]
    return found


@pytest.mark.parametrize(
    "fault", ["exception", *(pytest.param(it, marks=pytest.mark.long) for it in ("rank", "worker"))]
)
def test_ranks_that_lightning_launches_end_together(fault: str, tmp_path: Path) -> None:
    """30: its launcher starts rank 1 by running the script again, looks at it every 5 seconds, and then kills all."""
    program_code = FAILS_ON.format(rank=1) if fault == "exception" else ENDLESS
    with started(tmp_path, program_code) as program:
        program.wait_for("step 5", times=2)
        if fault != "exception":
            rank = second_rank(program)
            (worker,) = [child for child in rank.children() if is_worker(child)]
            (worker if fault == "worker" else rank).kill()
        code = program.end(BOUND_SECS)
        assert code in (1, -signal.SIGKILL), program.output
        shown = {
            "exception": "ValueError",
            "rank": "RuntimeError",
            "worker": "lightning_zenflow.offload.errors.WorkerDied",
        }
        # A killed rank says nothing, and the launcher may kill the other one before it has noticed.
        assert shown[fault] in program.errors() or (fault == "rank" and code == -signal.SIGKILL)


@pytest.mark.long
def test_ranks_that_torchrun_launches_end_together(tmp_path: Path) -> None:
    """30: the agent reports the rank that failed."""
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "{script}"]
    with started(tmp_path, FAILS_ON.format(rank=1), cold=True, options=options) as program:
        program.wait_for("step 5", times=2)
        assert program.end(60) == 1, program.output
        assert program.error("ValueError") == "first"
