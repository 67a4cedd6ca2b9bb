"""Limits of the system, lowered until a training cannot start or save: it says so, or it trains; nothing in between."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_zenflow.checkpoint import directory
from tests.live import Program, started, warm_server

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


def limited(name: str, value: str, code: str = "fit()") -> str:
    """A training under a limit; `{used}` in the value is what the process holds already."""
    used = {
        "RLIMIT_NOFILE": "len(os.listdir('/proc/self/fd'))",
        "RLIMIT_AS": "int(open('/proc/self/statm').read().split()[0]) * 4096",
    }.get(name, "0")
    value = value.format(used=used)
    return f"""
import resource
resource.setrlimit(resource.{name}, ({value}, resource.getrlimit(resource.{name})[1]))
{code}
"""


def trains_or_says_why(program: Program) -> bool:
    """Whether it has trained; if not, one error says why, with exit code 1, and no worker is left."""
    code = program.end(20)
    if code == 0:
        assert program.has_said("step 20") and program.errors() == []
        return True
    assert code == 1, program.output
    assert program.errors(), program.output
    assert "WorkerTimeout" not in program.output
    return False


@pytest.mark.long
def test_descriptors_run_out_with_an_error_and_not_in_silence(tmp_path: Path) -> None:
    """35: from few that are left until there are enough. With less, PyTorch's own libraries abort."""
    outcomes = []
    for spare in (6, 12, 60):
        with started(tmp_path, limited("RLIMIT_NOFILE", f"{{used}} + {spare}")) as program:
            outcomes.append(trains_or_says_why(program))
    assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[0]


@pytest.mark.long
def test_address_space_runs_out_with_an_error_and_not_in_silence(tmp_path: Path) -> None:
    """35: the host state takes 1.6 MB here; the worker's own libraries take over a gigabyte."""
    outcomes = []
    for megabytes in (5, 300, 3000):
        code = limited("RLIMIT_AS", f"{{used}} + {megabytes} * 2**20", "fit(Tiny(width=6000))")
        with started(tmp_path, code) as program:
            outcomes.append(trains_or_says_why(program))
    assert outcomes[-1] and not outcomes[0]


@pytest.mark.parametrize("name", ["RLIMIT_MEMLOCK", pytest.param("RLIMIT_CORE", marks=pytest.mark.long)])
def test_limits_that_training_on_cpu_does_not_need_may_be_zero(name: str, tmp_path: Path) -> None:
    with started(tmp_path, limited(name, "0")) as program:
        assert trains_or_says_why(program)


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, to whom RLIMIT_NPROC applies")
@pytest.mark.parametrize("spare", [0, 2])
def test_processes_run_out_with_an_error_and_not_in_silence(spare: int, tmp_path: Path) -> None:
    """35: threads count as well."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o755)
    code = f"os.setuid(60123)\n{limited('RLIMIT_NPROC', str(1 + spare))}"
    with started(tmp_path, code) as program:
        trains_or_says_why(program)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_fills_up_while_saving_keeps_the_last_checkpoint(small_disk: Path, tmp_path: Path) -> None:
    """35: the error names the space that is left; the checkpoint before stays whole, and no rest takes its place."""
    code = f"""
from lightning.pytorch.callbacks import ModelCheckpoint
fit(Tiny(width=3000), callbacks=(ModelCheckpoint(dirpath={str(small_disk)!r}, every_n_train_steps=2, save_top_k=-1),),
    enable_checkpointing=True)
"""
    with started(tmp_path, code) as program:
        assert program.end(20) == 1, program.output
        error = program.error("lightning_zenflow.checkpoint.errors.CheckpointError")
        assert f"the disk of '{small_disk}' is full" in error and "MiB are free once this attempt is deleted" in error
        kept = list(small_disk.iterdir())
        assert len(kept) >= 1 and all(path.name.endswith(".ckpt") for path in kept), kept
        for path in kept:
            directory.verify(path)
