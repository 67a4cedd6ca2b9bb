"""Workers with faults, trainers in processes of their own, and how to see that a process or its memory is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload import process
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Gradient
from tests.patience import patient

REPO = Path(__file__).resolve().parents[2]
HYPER = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)

SLOW = """
import time
from lightning_zenflow.offload import worker
worker.CHUNK_NUMEL, fast = 16, worker.adamw_
def slow(*args, **kwargs):
    time.sleep(0.02)
    fast(*args, **kwargs)
worker.adamw_ = slow
"""
"""Patch that makes an update of 16,384 elements last 20 seconds."""

TRAINER = f"""
import os, sys, time, types
sys.path.insert(0, {str(REPO)!r})
stub = sys.modules["lightning_zenflow"] = types.ModuleType("lightning_zenflow")
stub.__path__ = [{str(REPO / "lightning_zenflow")!r}]  # without lightning, which these trainers do not need
import torch
from lightning_zenflow.adamw import Hyper
from lightning_zenflow.offload import process
from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Gradient

HYPER = {HYPER!r}

def patch(code):
    process.BOOTSTRAP = process.BOOTSTRAP.replace("main(*", f"exec({{code!r}})\\nmain(*")

def start(numel=16384):
    return HostClient.start(
        ArenaLayout(numel, torch.bfloat16, 1), (numel,), cores=None, lr_scale="linear", timeout_secs=20
    )

def step(client, clock=1):
    client.update(0, 0, clock, 0.5, (HYPER,), Gradient(1.0, (0.001,)))
"""
"""Beginning of a trainer's script."""


def patch_worker(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Has the real worker run `code` before it starts."""
    monkeypatch.setattr(process, "BOOTSTRAP", process.BOOTSTRAP.replace("main(*", f"exec({code!r})\nmain(*"))


@contextmanager
def running(
    numel: int = 1024,
    group_ends: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    blocks: int = 1,
    **settings: Any,
) -> Iterator[HostClient]:
    """A client whose worker is ready; closed at the end."""
    settings = {"cores": None, "lr_scale": "linear", "timeout_secs": 20.0, **settings}
    client = HostClient.start(ArenaLayout(numel, dtype, blocks), group_ends or (numel,), **settings)
    try:
        yield client
    finally:
        client.close()


def step(client: HostClient, clock: int = 1) -> None:
    """Launches one step on block 0."""
    client.update(0, 0, clock, 0.5, (HYPER,), Gradient(1.0, (0.001,)))


@contextmanager
def trainer(tmp_path: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer that runs `code` after `TRAINER`, its output in a pipe; killed at the end, with what it started."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER + code)
    running = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        family = psutil.Process(running.pid).children(recursive=True) if running.poll() is None else []
        for member in [running, *family]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        running.communicate(timeout=10)


def run_trainer(tmp_path: Path, code: str) -> list[str]:
    """Lines that a trainer prints; it must end well by itself."""
    with trainer(tmp_path, code) as running:
        output, _ = running.communicate(timeout=50)
        assert running.returncode == 0, output
    return output.split()


def line(running: subprocess.Popen[str]) -> str:
    """The next line that the trainer prints."""
    assert running.stdout is not None
    return running.stdout.readline().strip()


def is_gone(pid: int) -> bool:
    """Whether process `pid` has ended; nobody may have reaped it in a container."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def secs_until(holds: Callable[[], bool], limit: float = patient(5.0)) -> float:
    """How long it takes until `holds`; at least `limit` if it does not."""
    begin = time.monotonic()
    while not holds() and time.monotonic() < begin + limit:
        time.sleep(0.01)
    return time.monotonic() - begin


def arena_bytes(pid: int) -> list[int]:
    """Bytes that are really allocated in each arena of which process `pid` holds a descriptor."""
    sizes = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "lightning-zenflow" in os.readlink(link):
                status = link.stat()
                sizes[status.st_ino] = 512 * status.st_blocks
    return list(sizes.values())


def shared_resident_bytes() -> int:
    """Shared memory that this process has touched and still maps."""
    for entry in Path("/proc/self/status").read_text().splitlines():
        if entry.startswith("RssShmem:"):
            return 1024 * int(entry.split()[1])
    raise LookupError("RssShmem")
