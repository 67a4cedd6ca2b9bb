"""However the trainer ends, its worker ends with it and the memory goes. Trainers here are processes of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.patience import patient
from tests.process.helpers import SLOW, TRAINER, arena_bytes, is_gone, line, run_trainer, secs_until, trainer

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("without_pidfd", [False, True])
def test_a_killed_trainer_takes_its_worker_along(busy: bool, without_pidfd: bool, tmp_path: Path) -> None:
    code = f"""
if {without_pidfd}:
    del os.pidfd_open
if {busy}:
    patch({SLOW!r})
client = start()
if {busy}:
    step(client)
print(client.pid, flush=True)
time.sleep(60)
"""
    with trainer(tmp_path, code) as running:
        pid = int(line(running))
        time.sleep(0.3)
        assert not is_gone(pid)
        running.kill()
        assert secs_until(lambda: is_gone(pid)) < patient(1)


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_of_a_killed_trainer_keeps_neither_worker_nor_memory(busy: bool, tmp_path: Path) -> None:
    code = f"""
if {busy}:
    patch({SLOW!r})
client = start(2**22)
client.arena.master.fill_(1)
if {busy}:
    step(client)
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
print(client.pid, child, flush=True)
time.sleep(60)
"""
    with trainer(tmp_path, code) as running:
        pid, child = map(int, line(running).split())
        time.sleep(0.3)
        try:
            assert arena_bytes(child)[0] >= 2**24
            running.kill()
            assert secs_until(lambda: is_gone(pid)) < patient(1)
            assert not is_gone(child) and arena_bytes(child) == [0]
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_trainer_that_dies_while_its_worker_starts_leaves_none(tmp_path: Path) -> None:
    code = """
client = HostClient.launch(ArenaLayout(64, torch.bfloat16, 1), (64,), cores=None, lr_scale="linear", timeout_secs=20)
print(client.pid, flush=True)
time.sleep(60)
"""
    with trainer(tmp_path, code) as running:
        pid = int(line(running))
        running.kill()
        assert secs_until(lambda: is_gone(pid)) < patient(4)  # once PyTorch is imported


@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_a_trainer_that_ends_by_itself_leaves_no_process(end: str, tmp_path: Path) -> None:
    (pid,) = run_trainer(tmp_path, f"client = start()\nstep(client)\nprint(client.pid, flush=True)\n{end}\n")
    assert secs_until(lambda: is_gone(int(pid))) < patient(1)


WAITING = """
import os, time
from lightning_zenflow.offload import worker
fast, calls = worker.adamw_, []
def waiting(*args, **kwargs):
    calls.append(time.monotonic() + 20)
    while time.monotonic() < calls[-1] and (len(calls) > 1 or not os.path.exists({go!r})):
        time.sleep(0.01)
    fast(*args, **kwargs)
worker.adamw_ = waiting
"""
"""Patch with which the first update lasts until a file is there, and the second 20 seconds."""


def test_a_trainer_interrupted_twice_leaves_no_process(tmp_path: Path) -> None:
    """Once while it waits for an update, then while it waits for its worker to end."""
    go = tmp_path / "go"
    code = f"""
patch({WAITING.format(go=str(go))!r})
client = start()
step(client)
client.update(0, 1, 2, 0.5, (HYPER,), Gradient(1.0, (0.001,)))
print(client.pid, flush=True)
try:
    client.collect()
finally:
    print("closing", flush=True)
    client.close()
"""
    with trainer(tmp_path, code) as running:
        pid = int(line(running))
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        time.sleep(0.3)
        go.touch()  # no interrupt is heard in the middle of a message
        assert line(running) == "closing"
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        assert running.wait(patient(5)) == -signal.SIGINT
        assert is_gone(pid)


def test_a_forked_child_that_exits_leaves_the_worker_to_its_parent(tmp_path: Path) -> None:
    code = """
client = start()
for leave in (sys.exit, lambda: client.close() or os._exit(0), os._exit):
    if not (child := os.fork()):
        leave(0) if leave in (sys.exit, os._exit) else leave()
    os.waitpid(child, 0)
step(client)
print(client.collect().held_steps)
"""
    assert run_trainer(tmp_path, code) == ["1"]


def test_memory_is_returned_on_close_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    code = """
client = start(2**22)
client.arena.master.fill_(1)
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
client.close()
print(child, flush=True)
time.sleep(60)
"""
    with trainer(tmp_path, code) as running:
        child = int(line(running))
        try:
            assert arena_bytes(child) == [0]
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_daemonic_process_of_multiprocessing_may_have_a_worker(tmp_path: Path) -> None:
    code = """
import multiprocessing
def train():
    client = start()
    step(client)
    print(client.collect().held_steps, client.pid, flush=True)
process = multiprocessing.get_context("fork").Process(target=train, daemon=True)
process.start()
process.join()
"""
    held, pid = run_trainer(tmp_path, code)
    assert held == "1" and secs_until(lambda: is_gone(int(pid))) < patient(1)


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """Counted in a file, since what the worker prints is not seen."""
    runs = tmp_path / "runs"
    code = (
        f"open({str(runs)!r}, 'a').write('run ')\nclient = start()\nstep(client)\nprint(client.collect().held_steps)\n"
    )
    assert run_trainer(tmp_path, code) == ["1"]
    assert runs.read_text() == "run "


def test_code_without_a_file_as_in_a_notebook_may_have_a_worker(tmp_path: Path) -> None:
    source = TRAINER + "client = start()\nstep(client)\nprint(client.collect().held_steps)\nclient.close()\n"
    code = f"del __file__\nexec({source!r}, {{'__name__': '__main__'}})"
    assert run_trainer(tmp_path, code) == ["1"]


def test_a_trainer_with_a_thousand_open_files_may_have_a_worker(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
files = [open(os.devnull) for _ in range(1100)]
client = start()
step(client)
print(client.collect().held_steps)
"""
    assert run_trainer(tmp_path, code) == ["1"]


@pytest.mark.parametrize("closed", [(0, 1, 2), (2,)])
def test_a_trainer_without_standard_streams_may_have_a_worker(closed: tuple[int, ...], tmp_path: Path) -> None:
    """The lowest free numbers are given to the next files, and the worker's standard streams are put over 0 to 2."""
    code = f"""
for fd in {closed}:
    os.close(fd)
if 2 in {closed}:
    sys.stderr = sys.__stderr__ = None
client = start()
step(client)
with open("result", "w") as file:
    print(client.collect().held_steps, client.arena.fd > 2, client._process._connection.fileno() > 2, file=file)
os._exit(0)
"""
    run_trainer(tmp_path, f"os.chdir({str(tmp_path)!r})\n{code}")
    assert (tmp_path / "result").read_text() == "1 True True\n"
