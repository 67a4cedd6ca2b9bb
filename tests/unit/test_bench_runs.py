"""`bench`: options that are refused, modes that cannot run, and processes of which none is left."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from examples.quickstart import CharGPT, StandardLibraryText
from lightning_zenflow.cli import bench
from lightning_zenflow.cli.bench import (
    arguments,
    collectives,
    compiling,
    modes,
    processes,
    quickstart,
    settings,
    two_core,
)
from lightning_zenflow.cli.bench.compare import compare
from lightning_zenflow.cli.bench.job import Job, Run
from lightning_zenflow.cli.bench.processes import RunFailed, run_job

FAMILY = """
import subprocess, sys, time
grandchild = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True)
open(sys.argv[-1] + ".begun", "w").close()
"""
"""A child that starts another process in a session of its own, as ours does, and leaves it behind, as DeepSpeed's does."""

ANSWERS = """
import json, sys
job, result = json.loads(sys.argv[-2]), sys.argv[-1]
open(result, "w").write(json.dumps({"numel": job["depth"], "step_ms": [1.5], "passes_ms": [1.0]}))
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def descendants() -> list[psutil.Process]:
    """Everything on the machine that carries the mark of a run, whoever its parent is."""
    return [process for process in psutil.process_iter() if processes.MARK in processes._environment(process)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--steps", "9"], r"`--steps` must be from 10 to 100000, got 9\. The first 8 do not count"),
        (["--repeats", "0"], r"`--repeats` must be from 1 to 100, got 0"),
        (["--depth", "-1"], r"`--depth` must be from 1 to 1000, got -1"),
        (
            ["--tokens", "100", "--setting", "quickstart"],
            r"a multiple of 64 with --setting quickstart, got 100\. Give 128",
        ),
        (["--topk-ratio", "10"], r"`--topk-ratio` must be from 0 to 1, got 10\. 0\.1 means ten percent"),
        (["--topk-ratio", "nan"], r"`--topk-ratio` must be from 0 to 1, got nan"),
        (["--limit-secs", "0"], r"`--limit-secs` must be from 1 to 1e6, got 0"),
        (["--modes", "zero_2"], r"must leave out zero_2 with --stage 2, got it\. Give zero, or --stage 3"),
        (["--output", ""], r"`--output` must be a path, got an empty one"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_its_name_its_value_and_what_to_do(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(args)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_that_cannot_be_written_to_is_found_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_info:
        bench.main(["--output", str(tmp_path / "file" / "below")])
    assert exit_info.value.code == 2
    assert "`--output` must be a folder that can be written to" in capsys.readouterr().err


def test_modes_come_in_the_order_of_the_table_and_by_stage() -> None:
    assert arguments.plan_of(["--modes", "zenflow", "compute"]).modes == ("compute", "zenflow")
    assert arguments.plan_of([]).modes == modes.USUAL_MODES[2]
    under_3 = arguments.plan_of(["--stage", "3"])
    assert {"zero_2", "zenflow_2"} <= set(under_3.modes) and "ds_zenflow" not in under_3.modes
    assert under_3.job("zenflow_2").zero_stage == 2 and under_3.job("zenflow").zero_stage == 3


def test_a_mode_that_cannot_run_here_has_its_reason_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "ninja" else f"/usr/bin/{tool}")
    monkeypatch.setattr(modes, "_is_compiled", lambda: False)
    asked: list[tuple[str, int]] = []

    def answer(job: Job, environment: Mapping[str, str], limit_secs: float) -> Run:
        asked.append((job.mode, job.depth))
        if job.mode == "zenflow":
            raise RunFailed("took longer than 600 s")
        return Run(numel=1, step_ms=[1.0], passes_ms=[1.0])

    told: list[str] = []
    plan = arguments.plan_of(["--repeats", "2", "--modes", "compute", "zero_offload", "zenflow", "zero"])
    found = compare(plan, "cpu", {}, told.append, answer)
    assert found["zero_offload"].reason == "DeepSpeed compiles its CPU Adam, and there is no ninja here"
    assert found["zenflow"].reason == "took longer than 600 s" and not found["zenflow"].runs
    in_turn = [("compute", 8), ("zero", 8), ("zenflow", 8), ("compute", 8), ("zero", 8)]
    assert asked == [*in_turn, ("compute", 4), ("zero", 4), ("compute", 8), ("zero", 8)]
    assert len(found["zero"].runs) == len(found["zero"].memory) == 2
    assert "[1/12] compute" in told[0] and any("took longer" in line for line in told)


HOLDS_THE_BUILD = """
import os, sys, time
from lightning_zenflow.cli.bench import compiling
from deepspeed.ops.op_builder import CPUAdamBuilder
def load(self, verbose):
    place = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
    os.makedirs(place, exist_ok=True)
    open(os.path.join(place, "lock"), "x").close()
    print("builds", flush=True)
    time.sleep(60)
CPUAdamBuilder.load = load
compiling.load_cpu_adam()
"""


def test_a_killed_build_of_cpu_adam_does_not_stop_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_BUILD], stdout=subprocess.PIPE, text=True) as building:
        assert building.stdout is not None and "builds\n" in building.stdout  # behind what DeepSpeed prints
        building.kill()
    (lock,) = tmp_path.rglob("lock")
    found: list[bool] = []
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self, verbose: found.append(lock.exists()))
    compiling.load_cpu_adam()
    assert found == [False] and os.environ["TORCH_EXTENSIONS_DIR"] == str(lock.parents[1])


def test_deepspeeds_zenflow_asks_for_cuda_under_zero_3() -> None:
    assert "needs CUDA" in (modes.why_not("ds_zenflow", 3, "cpu") or "")
    assert modes.why_not("zenflow", 3, "cpu") is None and modes.why_not("zero", 2, "cpu") is None


def test_a_result_comes_back_and_what_was_left_behind_is_ended() -> None:
    found = run_job(Job(mode="compute", depth=7), {}, 20, python(FAMILY + ANSWERS))
    assert found == Run(numel=7, step_ms=[1.5], passes_ms=[1.0])
    assert not descendants()


def test_a_time_limit_ends_all_descendants() -> None:
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=r"took longer than 2 s"):
        run_job(Job(mode="compute"), {}, 2, python(FAMILY + "time.sleep(600)"))
    assert time.monotonic() - begin < 12
    assert not descendants()


def test_a_failure_is_told_by_its_last_error_and_leaves_nothing() -> None:
    with pytest.raises(RunFailed, match=r"^failed with exit code 1: ValueError: no such thing$"):
        run_job(Job(mode="compute"), {}, 20, python(FAMILY + "raise ValueError('no such thing')"))
    with pytest.raises(RunFailed, match=r"^failed with signal 9: no output$"):
        run_job(Job(mode="compute"), {}, 20, python("import os; os.kill(os.getpid(), 9)"))
    assert not descendants()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_request_to_end_leave_nothing(number: signal.Signals, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    child = FAMILY + f"open({str(begun)!r}, 'w').close(); time.sleep(600)"
    source = f"""
import sys
from lightning_zenflow.cli.bench import main, processes
processes.CHILD = {python(child)!r}
sys.exit(main(["--modes", "compute", "--no-memory"]))
"""
    popen = subprocess.Popen(python(source), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline and popen.poll() is None:
            time.sleep(0.05)
        assert begun.exists() and len(descendants()) == 2
        popen.send_signal(number)
        said = popen.communicate(timeout=30)[1]
    finally:
        popen.kill()
        popen.wait(10)
    assert popen.returncode == 130 and "Interrupted: nothing is left running." in said
    assert not descendants()


def test_every_rank_gets_its_number_and_a_group_in_common() -> None:
    first, second = processes._of_ranks(2, {"RANK": "9", "HOME": "/"})
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["HOME"] == "/"
    assert processes._of_ranks(1, {"RANK": "9", "HOME": "/"}) == [{"HOME": "/"}]


def test_a_rank_receives_all_but_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    received, filled = collectives.Received(), torch.zeros(8)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    received.add("all_gather_into_tensor", (filled, filled[:2]), {})
    assert received.nbytes == 24
    received.add("reduce_scatter_tensor", (), {"output": filled[:2], "input": filled})
    assert received.nbytes == 48
    received.add("all_reduce", (), {"tensor": filled, "group": None})
    assert received.nbytes == 96
    received.add("all_gather", ([filled[:2]] * 4, filled[:2]), {})
    assert received.nbytes == 120
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    received.add("all_reduce", (filled,), {})
    assert received.nbytes == 120


def test_collectives_are_as_they_were_after_counting() -> None:
    before = torch.distributed.all_reduce
    with collectives.counting():
        assert torch.distributed.all_reduce is not before
    assert torch.distributed.all_reduce is before


def test_the_two_core_model_has_67_million_parameters() -> None:
    with torch.device("meta"):
        model = two_core.build_model()
    assert sum(param.numel() for param in model.parameters()) == 8 * (2 * 1024 * 4096 + 4096 + 1024)


def test_the_quickstart_setting_is_the_size_of_the_quickstart() -> None:
    with torch.device("meta"):
        theirs = {name: param.shape for name, param in CharGPT().named_parameters()}
        ours = {name: param.shape for name, param in quickstart.build_model().named_parameters()}
    assert ours == theirs
    setting = settings.SETTINGS["quickstart"]
    data = inspect.signature(StandardLibraryText.__init__).parameters
    assert setting.tokens == data["batch_size"].default * data["context"].default
    loss = setting.loss_of(setting.build(1), setting.make_batch(128))
    loss.backward()
    assert 3 < loss.item() < 7  # log(128) is 4.9


def test_two_cores_are_needed_where_one_plays_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    emulated = settings.cores_of(settings.SETTINGS["two-core"], "cpu")
    assert (emulated.trainer, emulated.worker, emulated.every) == ([3], [5], [3, 5])
    real = settings.cores_of(settings.SETTINGS["two-core"], "cuda")
    assert (real.trainer, real.worker, real.every) == ([], [7], [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(ValueError, match=r"`--setting two-core` must have 2 cores, got 1"):
        settings.cores_of(settings.SETTINGS["two-core"], "cpu")


def test_all_modes_keep_freed_memory_and_one_thread_plays_the_device() -> None:
    found = settings.environment_of(settings.SETTINGS["two-core"], "cpu")
    assert found == {
        "OMP_NUM_THREADS": "1",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
    }
    assert "OMP_NUM_THREADS" not in settings.environment_of(settings.SETTINGS["two-core"], "cuda")
    assert settings.environment_of(settings.SETTINGS["two-core"], "cpu", keeps_memory=False) == {"OMP_NUM_THREADS": "1"}
