"""Ranks as launchers start them, and trainings that a launcher starts again: with the weights, bit for bit, of a script whose
ranks Lightning starts.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from tests.launching import ends_well, launched, plain_run, same, weights
from tests.live import Program, warm_server

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

RANKS = "from tests.launched import train\ntrain(devices={ranks})\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """By the number of ranks, each of which has its own part of the deferred elements."""
    warm_server()
    return {ranks: plain_run(tmp_path_factory.mktemp("plain"), RANKS.format(ranks=ranks)) for ranks in (1, 2)}


def torchrun(ranks: int, *options: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]


def script(folder: Path, code: str) -> Path:
    path = folder / "train.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun(ranks: int, plain: dict[int, dict[str, Tensor]], tmp_path: Path) -> None:
    path = script(tmp_path, RANKS.format(ranks=ranks))
    with launched([*torchrun(ranks), path], tmp_path) as program:
        ends_well(program, tmp_path, plain[ranks])
        for rank in range(ranks):
            assert program.has_said(f"saved by rank {rank}")


def test_torchrun_starts_a_failed_training_again(plain: dict[int, dict[str, Tensor]], tmp_path: Path) -> None:
    """The rank that does not fail is ended by the agent, in the middle of its training, and so is its worker.

    The second attempt meets in the store of the first, and may not find its addresses there.
    """
    code = """
import os
from tests.launched import train
from tests.live_training import At, workers, say
def fail(trainer):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.global_rank == 1:
        say("fails")
        os._exit(3)
train(devices=2, callbacks=(At(5, fail),))
"""
    with launched([*torchrun(2, "--max-restarts=1"), script(tmp_path, code)], tmp_path) as program:
        program.wait_for("fails", within_secs=60)
        assert program.end(90) == 0, program.output
        assert [program.output.split("\n").count(words) for words in ("started", "fails", "train end")] == [4, 1, 2]
    assert same(weights(tmp_path), plain[2])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def slurm(folder: Path, code: str, tasks: int = 2) -> Iterator[list[Program]]:
    """As `srun --ntasks=2 --ntasks-per-node=2 python train.py` starts it on one node."""
    path = script(folder, code)
    port = str(free_port())
    with ExitStack() as stack:
        programs = []
        for task in range(tasks):
            env = {
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "train",
                "SLURM_NTASKS": str(tasks),
                "SLURM_NTASKS_PER_NODE": str(tasks),
                "SLURM_NNODES": "1",
                "SLURM_NODELIST": "127.0.0.1",
                "SLURM_NODEID": "0",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "MASTER_PORT": port,
                "MASTER_ADDR": "127.0.0.1",
            }
            programs.append(stack.enter_context(launched([path], folder, env=env)))
        yield programs


def test_slurm(plain: dict[int, dict[str, Tensor]], tmp_path: Path) -> None:
    with slurm(tmp_path, RANKS.format(ranks=2)) as programs:
        for program in programs:
            ends_well(program, tmp_path, plain[2])


def test_a_rank_that_slurm_has_bound_to_cores_has_all_of_them(tmp_path: Path) -> None:
    """`srun` gives each task cores of its own, which must not be divided by the tasks of the machine once more."""
    code = """
import os
from lightning_zenflow.offload.client import HostClient
from tests.launched import train
from tests.live_training import say
rank = int(os.environ["SLURM_PROCID"])
os.sched_getaffinity = lambda pid: set(range(8 * rank, 8 * rank + 8))  # this machine may have fewer
launch = HostClient.launch.__func__
def tell(cls, *args, cores, **settings):
    say("the worker gets", cores)
    return launch(cls, *args, **settings, cores=None)
HostClient.launch = classmethod(tell)
train(devices=2, max_steps=2)
"""
    with slurm(tmp_path, code) as programs:
        for program, cores in zip(programs, ([4, 5, 6, 7], [12, 13, 14, 15]), strict=True):
            assert program.end(90) == 0, program.output
            assert program.has_said(f"the worker gets {cores}"), program.output
