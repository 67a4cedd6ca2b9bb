"""A process that is killed, and a disk that fails, at any step of saving and removing a checkpoint directory."""

import ctypes
import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_zenflow.checkpoint import directory, disk
from lightning_zenflow.checkpoint.directory import discard, remove, removing_path, staging_path
from tests.saves import names, number_in, save

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["swap", "no swap"])
def swap(request, monkeypatch):
    """With renameat2, and on a system without it."""
    if request.param == "no swap":
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    return request.param == "swap"


@pytest.fixture
def target(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "last.ckpt"


class Killed(BaseException):
    """Nothing that is called afterwards does anything: a dead process."""


STEPS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")


@pytest.fixture
def fast_disk(monkeypatch):
    """Durable at once: no test of a process can tell the difference, and a busy disk takes its time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def fail_at(patch, step, error, forever):
    """Lets the `step`-th change of the file system fail (from 0), or that and all later ones; counts them."""
    count = [0]

    def failing(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == step + 1 or (forever and count[0] > step):
                raise error
            return function(*args, **kwargs)

        return call

    for name in STEPS:
        patch.setattr(os, name, failing(getattr(os, name)))
    patch.setattr(Path, "write_bytes", failing(Path.write_bytes))
    patch.setattr(directory, "exchange", failing(directory.exchange))
    return count


def absent(target):
    return None


def a_directory(target):
    save(target, 1)


def a_file(target):
    target.write_text("file")


def a_link(target):
    save(target.parent / "epoch=1.ckpt", 1)
    target.symlink_to("epoch=1.ckpt")


def state_of(target):
    """0: absent, "file": the file, else the number of a whole checkpoint."""
    if not os.path.lexists(target):
        return 0
    return target.read_text() if target.is_file() else number_in(target)


BEFORE = [(absent, 0), (a_directory, 1), (a_file, "file"), (a_link, 1)]


def clear(folder):
    for path in folder.iterdir():
        disk.delete(path)


def finish(target, make):
    """Shows that the next save works and cleans up."""
    save(target, 9)
    assert number_in(target) == 9
    kept = ["epoch=1.ckpt"] if make is a_link else []
    assert names(target.parent) == [*kept, "last.ckpt"]
    if kept:
        assert number_in(target.parent / "epoch=1.ckpt") == 1


@pytest.mark.parametrize(("make", "before"), BEFORE)
def test_a_process_that_ends_at_any_step_leaves_the_old_or_the_new(target, monkeypatch, fast_disk, swap, make, before):
    seen, step = [], 0
    while True:
        clear(target.parent)
        make(target)
        with monkeypatch.context() as patch:
            fail_at(patch, step, Killed(), forever=True)
            try:
                save(target, 2)
            except Killed:
                done = False
            else:
                done = True
        state = state_of(target)
        if state == 0 and before != 0:
            # Without a swap there is one such moment, and then both are there under their other names.
            assert not swap
            (staging_path(target)).rename(target.parent / "new")
            (removing_path(target)).rename(target)
            assert state_of(target) == before and number_in(target.parent / "new") == 2
            disk.delete(target.parent / "new")
        else:
            assert state in (before, 2)
        seen.append(state)
        finish(target, make)
        if done:
            break
        step += 1
    assert step > 20 and seen[0] == before and seen[-1] == 2 and 2 in seen[:-1]
    assert sorted(seen, key=[before, 0, 2].index) == seen
    assert before == 0 or seen.count(0) == (0 if swap else 1)


@pytest.mark.parametrize(("make", "before"), BEFORE)
def test_an_error_at_any_step_of_a_save_leaves_the_old_or_the_new(target, monkeypatch, fast_disk, swap, make, before):
    step, raised, error = 0, 0, None
    while True:
        clear(target.parent)
        make(target)
        with monkeypatch.context() as patch:
            count = fail_at(patch, step, OSError(errno.ENOSPC, "injected", "somewhere"), forever=False)
            try:
                save(target, 2)
            except OSError as caught:
                error = caught
            else:
                error = None
        if error is None:
            assert state_of(target) == 2
        else:
            assert error.errno == errno.ENOSPC and "injected" in str(error)
            raised += 1
        assert state_of(target) in (before, 2)
        discard(staging_path(target))
        assert state_of(target) in (before, 2)
        finish(target, make)
        if count[0] <= step:
            break
        step += 1
    assert raised > 15


def test_a_process_that_ends_at_any_step_of_removing_leaves_all_or_nothing(target, monkeypatch, fast_disk):
    seen, step = [], 0
    while True:
        clear(target.parent)
        save(target, 1)
        with monkeypatch.context() as patch:
            fail_at(patch, step, Killed(), forever=True)
            try:
                remove(target)
            except Killed:
                done = False
            else:
                done = True
        seen.append(state_of(target))
        finish(target, absent)
        if done:
            break
        step += 1
    assert step > 8 and seen[0] == 1 and seen == sorted(seen, reverse=True) and seen.count(0) > 4


# Real processes

CHILD = f"""
import resource, sys, types
from pathlib import Path
sys.path.insert(0, {str(REPO)!r})
stub = sys.modules["lightning_zenflow"] = types.ModuleType("lightning_zenflow")
stub.__path__ = [{str(REPO / "lightning_zenflow")!r}]  # without lightning, which saving does not need
from lightning_zenflow.checkpoint import directory
assert "torch" not in sys.modules and "deepspeed" not in sys.modules
from tests.saves import save
target, first, swap = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "swap"
if not swap:
    directory.exchange = lambda *paths: False
"""

SAVE_ON_AND_ON = """
print(first - 1, flush=True)
for number in range(first, 10**6):
    save(target, number)
    print(number, flush=True)
"""

SAVE_WITHOUT_SPACE = """
save(target, first)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # the manifest is longer
try:
    save(target, first + 1)
except OSError as error:
    print(type(error).__name__, error.errno)
"""


def start(target, number, swap, script):
    command = [sys.executable, "-c", CHILD + script, str(target), str(number), "swap" if swap else "no"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)


@pytest.mark.parametrize(("kills", "swap"), [(30, True), (10, False)])
def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(target, kills, swap):
    delays, found, leftovers = random.Random(7), 0, 0
    for kill in range(kills):
        child = start(target, found + 1, swap, SAVE_ON_AND_ON)
        try:
            assert child.stdout is not None
            committed = int(child.stdout.readline())
            assert committed == found
            if kill % 2 == 1:  # however slow the disk is, there is progress
                committed = int(child.stdout.readline())
            time.sleep(delays.uniform(0, 0.12))
        finally:
            os.kill(child.pid, 9)
            lines, _ = child.communicate(timeout=20)
        committed = int(([str(committed)] + lines.split())[-1])
        if not os.path.lexists(target):
            assert committed == 0 or (not swap and os.path.lexists(removing_path(target)))
            if committed > 0:
                removing_path(target).rename(target)
        if os.path.lexists(target):
            found = number_in(target)
            assert found in (committed, committed + 1)
        leftovers += len(names(target.parent)) > os.path.lexists(target)
    assert found >= kills // 2 and leftovers > 0
    save(target, found + 1)
    assert number_in(target) == found + 1 and names(target.parent) == ["last.ckpt"]


def test_a_full_disk_leaves_the_checkpoint_before(target):
    child = start(target, 1, True, SAVE_WITHOUT_SPACE)
    output, _ = child.communicate(timeout=20)
    assert output == f"OSError {errno.EFBIG}\n" and child.returncode == 0
    assert number_in(target) == 1
    save(target, 3)
    assert number_in(target) == 3 and names(target.parent) == ["last.ckpt"]
