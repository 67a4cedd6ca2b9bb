"""`doctor`: a row for everything, a verdict that follows from it, and never a traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zenflow.cli import checks, doctor, measure
from lightning_zenflow.cli.checks import Check
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.memory import Available

MEASURED = ("background_process", "host_bandwidth", "host_adamw", "link")
GIB = 2**30


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MEASURED:
        monkeypatch.setattr(doctor, name, lambda name=name: Check(name, "ok", "not measured in this test"))


def rows(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, Any]]:
    """The rows that `doctor --json` prints, by name, if it exits with `code`."""
    assert doctor.main(["--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["will_run"] is (code == 0)
    return {row["name"]: row for row in shown["checks"]}


@pytest.mark.usefixtures("_unmeasured")
def test_this_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, code=0)
    assert found["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == {
        "name": "torch",
        "verdict": "ok",
        "found": metadata.version("torch"),
        "remedy": "",
        "numbers": {},
    }
    assert {found[name]["verdict"] for name in ("lightning", "deepspeed", "System", "Accelerator")} == {"ok"}


def having(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """Lets the distribution `name` be installed as `version`."""
    true = metadata.version

    def version_of(asked: str) -> str:
        if asked != name:
            return true(asked)
        if version is None:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "version", version_of)


@pytest.mark.usefixtures("_unmeasured")
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_the_malicious_releases_of_lightning_fail(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    having(monkeypatch, "lightning", version)
    row = rows(capsys, code=1)["lightning"]
    assert (row["verdict"], row["found"]) == ("fail", f"{version}, a malicious release")
    assert "credentials" in row["remedy"]


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("torch", "2.12.1", "fail"),
        ("torch", "2.13.0+cu130", "ok"),
        ("torch", "2.14.0.dev20260901", "ok"),
        ("torch", "2.15.0", "fail"),
        ("lightning", "2.6.0", "fail"),
        ("lightning", "2.6.1", "ok"),
        ("lightning", "3.0.0", "fail"),
        ("deepspeed", "0.18.0", "fail"),
        ("deepspeed", "0.20.1", "fail"),
        ("deepspeed", None, "fail"),
    ],
)
def test_versions_are_held_against_the_ranges_of_our_metadata(
    name: str, version: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, name, version)
    row = checks.distribution(name)
    assert row.verdict == verdict
    assert (f"pip install '{name}" in row.remedy) == (verdict != "ok")


def test_another_python_or_system_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    assert checks.python().verdict == "fail"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert checks.system().verdict == "fail"


def test_an_old_kernel_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError("Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert checks.system().verdict == "warn"


class Accelerator:
    """Enough of DeepSpeed's accelerator for one row."""

    def __init__(self, name: str) -> None:
        self.name = name

    def device_name(self) -> str:
        return self.name

    def device_count(self) -> int:
        return 2

    def total_memory(self) -> int:
        return 80 * GIB


@pytest.mark.parametrize(
    ("name", "verdict", "shown"),
    [("xpu", "ok", "2 x xpu, 80.0 GiB each"), ("mps", "fail", "MPS"), ("cpu", "ok", "CPU")],
)
def test_the_accelerator_is_named(name: str, verdict: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checks, measure):
        monkeypatch.setattr(module, "accelerator", lambda: Accelerator(name))
    row = checks.device()
    assert row.verdict == verdict
    assert shown in row.found
    assert row.numbers["device_memory_bytes"] == 80 * GIB or name == "mps"


@pytest.mark.parametrize(("blocks", "verdict"), [(16384, "warn"), (16385, "ok")])
def test_the_shared_memory_of_a_container_is_a_warning(
    blocks: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_bavail=blocks))
    row = checks.shared_memory()
    assert (row.verdict, row.numbers) == (verdict, {"shm_free_bytes": 4096.0 * blocks})


def test_no_shared_memory_at_all_is_a_warning(tmp_path: Path) -> None:
    assert checks.shared_memory(tmp_path / "none").verdict == "warn"


def test_locked_memory_matters_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    assert (checks.locked_memory().verdict, checks.locked_memory().found) == ("ok", "8.0 MiB, enough without CUDA")
    monkeypatch.setattr(checks, "accelerator", lambda: Accelerator("cuda"))
    row = checks.locked_memory()
    # bf16, U = 4: two slots 4, two outbox halves 1, and with offloaded parameters the weights, 2.
    assert row.verdict == "warn"
    assert row.numbers["params_whose_exchange_fits"] == pytest.approx(8 * 2**20 / 3, rel=1e-4)
    assert row.numbers["params_whose_exchange_and_weights_fit"] == pytest.approx(8 * 2**20 / 5, rel=1e-4)
    assert row.found == (
        "8.0 MiB; 2.8 million parameters' gradients and blocks, or with parameters offloaded under ZeRO-3 1.68 million and"
        " their weights"
    )
    assert "ulimit -l unlimited" in row.remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (checks.locked_memory().verdict, checks.locked_memory().found) == ("ok", "unlimited")


@pytest.mark.parametrize(("limit", "verdict"), [(256, "warn"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_a_warning(limit: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert checks.open_files().verdict == verdict


def test_host_memory_says_how_many_parameters_fit_under_the_tightest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [Available(64 * GIB, "the machine", "Free memory"), Available(18 * GIB, "the container", "Raise it")]
    monkeypatch.setattr(checks, "host_limits", lambda: limits)
    row = checks.host_memory()
    assert row.verdict == "ok"
    # bf16: master and moments 12, the slot 2, outbox halves and accumulators 4 for any U.
    assert row.numbers["params_that_fit"] == pytest.approx(GIB, rel=1e-5)
    assert row.numbers["offloaded_params_that_fit"] == pytest.approx(18 / 20 * GIB, rel=1e-5)
    assert row.found == (
        "18.0 GiB free (the container): 1.1 billion parameters at 18 bytes, 0.97 billion at 20 if offloaded under ZeRO-3"
    )
    monkeypatch.setattr(checks, "host_limits", lambda: [Available(10**6, "the container", "Raise it")])
    assert (checks.host_memory().verdict, checks.host_memory().remedy) == ("fail", "Raise it.")
    monkeypatch.setattr(checks, "host_limits", list)
    assert checks.host_memory().verdict == "warn"


def test_cores_and_numa_nodes_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("node0", "node1", "possible"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(checks, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    row = checks.cores()
    assert row.numbers == {"cores": 8.0, "worker_cores": 4.0, "numa_nodes": 2.0}
    assert (row.verdict, row.found) == ("ok", "8, 2 NUMA nodes; 4 of them for the background process")
    assert "bind each rank" in row.remedy
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert checks.cores().verdict == "warn"


@pytest.mark.usefixtures("_unmeasured")
def test_a_check_that_breaks_is_a_row_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Check:
        raise OSError("no such\n file")

    monkeypatch.setattr(checks, "open_files", broken)
    row = rows(capsys, code=0)["Open files"]
    assert (row["verdict"], row["found"]) == ("warn", "could not be checked: OSError: no such file")
    monkeypatch.setattr(checks, "device", broken)
    assert rows(capsys, code=1)["Accelerator"]["verdict"] == "fail"


@pytest.mark.usefixtures("_unmeasured")
def test_without_a_background_process_zenflow_will_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise MemoryError("memfd_create was refused")

    monkeypatch.undo()
    for name in MEASURED[1:]:
        monkeypatch.setattr(doctor, name, lambda: Check("", "ok", ""))
    monkeypatch.setattr(HostClient, "start", dies)
    assert "memfd_create was refused" in rows(capsys, code=1)["Background process"]["found"]
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.endswith("ZenFlow will not run here: Background process.\n")


def test_the_real_background_process_is_started_timed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    row = doctor.background_process()
    assert 0.1 < row.numbers["start_secs"] < 60  # importing PyTorch takes longer than 0.1 s anywhere
    monkeypatch.setattr(doctor, "START_SECS", 0.0)
    assert doctor.background_process().verdict == "warn"


def test_measured_rows_show_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = doctor.host_passes(torch.bfloat16, measure.split_cores()[1], numel=1000)
    fixed = type(passes)(accumulate_secs=1e-9, update_secs=4e-9, wire_bytes=2, cores=1)
    monkeypatch.setattr(doctor, "host_passes", lambda *_: fixed)
    row = doctor.host_adamw()
    assert (
        "1.00e9 gradients/s (10.0 GB/s) and 0.25e9 updates/s (8.0 GB/s); 1.75 s a step for 1e9 parameters" in row.found
    )
    monkeypatch.setattr(measure, "host_bandwidth", lambda cores: measure.HostBandwidth(3e9 * len(cores), len(cores)))
    monkeypatch.setattr(measure, "split_cores", lambda: ([0], [1, 2]))
    row = doctor.host_bandwidth()
    assert (row.verdict, row.found) == ("warn", "3.0 GB/s on one core, 6.0 GB/s on 2")
    monkeypatch.setattr(measure, "link", lambda _: measure.Link(25e9, 24e9, is_pinned=False))
    assert doctor.link().found == "25.0 GB/s to the host, 24.0 GB/s to the device (a copy within host memory)"
    monkeypatch.setattr(measure, "device", lambda: torch.device("cuda"))
    assert doctor.link().verdict == "warn"


@pytest.mark.usefixtures("_unmeasured")
@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_and_has_no_colour_codes(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(checks, "open_files", lambda: Check("Open files", "warn", "[red]few[/red] " * 20, "Raise it."))
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("\x1b" in line for line in lines)
    assert any("[red]few[/red]" in line for line in lines)  # what was found is no markup
    assert any(line.split()[:2] == ["->", "Raise"] for line in lines)
    assert lines[-1] == "ZenFlow will run here, with 1 warning."


@pytest.mark.long
@pytest.mark.timeout(120)
def test_all_of_it_takes_under_twenty_seconds_and_prints_json_only() -> None:
    program = "import sys; from lightning_zenflow.cli.doctor import main; sys.exit(main(['--json']))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert found["Host AdamW"]["numbers"]["update_bytes_per_sec"] > 1e8
    assert found["Host bandwidth"]["numbers"]["one_core_bytes_per_sec"] > 1e8
    assert "could not be checked" not in done.stdout
