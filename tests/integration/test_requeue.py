"""SLURM's auto-requeue, as Lightning does it: a signal, a checkpoint, `scontrol requeue`, and a next run that finds both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.live import Program, started, warm_server

pytestmark = pytest.mark.timeout(300)

CODE = """
import signal
RANK = int(os.environ["SLURM_PROCID"])
FIXED = {{"topk_ratio": 0.25, "update_interval": 3, "select_interval": 5, "select_strategy": "step"}}
class Asked(Tiny):
    '''Gets SIGUSR1 in the batch `at`; batches follow from their number, since the loader begins anew.'''
    at = {at}[RANK]
    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(2 * self.global_step + RANK)
        return super().training_step(torch.randn(4, FEATURES, generator=generator), batch_idx)
    def on_after_backward(self):
        if self.global_step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
module = Asked()
fit(module, devices={ranks}, zenflow=FIXED, train=batches(8), max_steps=20, max_epochs=-1)
if RANK == 0:
    torch.save(module.state_dict(), "weights.pt")
"""

SCONTROL = """#!/bin/sh
echo "$@" >> requeued
kill -TERM $PPID  # SLURM ends the job before it is queued again
"""


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


@contextmanager
def job(folder: Path, at: tuple[int, ...], port: int) -> Iterator[list[Program]]:
    """All tasks of the job 4711, on one node."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(SCONTROL)
    (tools / "scontrol").chmod(0o755)
    ranks = len(at)
    with ExitStack() as stack:
        programs = []
        for task in range(ranks):
            env = {
                "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "train",
                "SLURM_NTASKS": str(ranks),
                "SLURM_NTASKS_PER_NODE": str(ranks),
                "SLURM_NNODES": "1",
                "SLURM_NODELIST": "127.0.0.1",
                "SLURM_NODEID": "0",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            programs.append(stack.enter_context(started(folder, CODE.format(at=at, ranks=ranks), env=env)))
        yield programs


def ends(programs: list[Program]) -> list[int]:
    """The last step of each task, all of which must end well and leave no process behind."""
    outputs = "\n".join(program.output for program in programs)
    assert [program.end() for program in programs] == [0] * len(programs), outputs
    assert [program.errors() for program in programs] == [[]] * len(programs), outputs
    return [program.last_step() for program in programs]


@pytest.mark.parametrize(
    ("at", "saved", "stops"),
    [
        ((5,), 6, 6),
        # The tasks get the signal in different batches, and SLURM's SIGTERM once they have saved.
        pytest.param((5, 6), 6, 7, marks=pytest.mark.long),
        pytest.param((-1, 7), 8, 9, marks=pytest.mark.long),  # one of them has not got it yet
    ],
)
def test_a_job_that_is_requeued_goes_on_as_if_never_stopped(
    at: tuple[int, ...], saved: int, stops: int, tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "whole").mkdir()
    with job(tmp_path / "whole", (-1,) * len(at), free_port) as programs:
        assert ends(programs) == [20] * len(at)
    with job(tmp_path, at, free_port) as programs:
        assert ends(programs) == [stops] * len(at)
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    assert not (tmp_path / "weights.pt").exists()
    with job(tmp_path, (-1,) * len(at), free_port) as programs:
        assert ends(programs) == [20] * len(at)
        assert all(program.has_said(f"step {saved + 1}") for program in programs)
        assert not any(program.has_said(f"step {saved}") for program in programs)
    whole, resumed = (torch.load(folder / "weights.pt") for folder in (tmp_path / "whole", tmp_path))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
