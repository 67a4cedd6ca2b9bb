"""How a worker starts, fails, is stopped, killed and closed, as its trainer sees it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from lightning_zenflow.offload import client as client_module
from lightning_zenflow.offload import process
from lightning_zenflow.offload.client import HostClient, WorkerDied, WorkerTimeout
from lightning_zenflow.offload.layout import ArenaLayout
from lightning_zenflow.offload.protocol import Gradient
from tests.patience import patient
from tests.process.helpers import (
    HYPER,
    SLOW,
    is_gone,
    patch_worker,
    run_trainer,
    running,
    secs_until,
    shared_resident_bytes,
    step,
)

pytestmark = pytest.mark.timeout(60)

GRADIENT = Gradient(1.0, (0.1,))


def launch() -> HostClient:
    layout = ArenaLayout(1024, torch.bfloat16, 1)
    return HostClient.launch(layout, (1024,), cores=None, lr_scale="linear", timeout_secs=20)


def accumulate_forever(client: HostClient) -> None:
    while True:
        client.update(0, 0, 1, 0.0, (HYPER,), GRADIENT)


def check_forever(client: HostClient) -> None:
    while True:
        client.check()


# -- start ------------------------------------------------------------------------------------------------------------


def test_a_worker_starts_within_three_seconds() -> None:
    begin = time.monotonic()
    with running():
        assert time.monotonic() - begin < patient(3)


def test_a_worker_imports_neither_lightning_nor_deepspeed_nor_sees_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    code = f"""
import os, sys
from lightning_zenflow.offload import worker
names = {{name.partition(".")[0] for name in sys.modules}}
open({str(report)!r}, "w").write(" ".join([*names, "devices=" + os.environ["CUDA_VISIBLE_DEVICES"]]))
"""
    patch_worker(monkeypatch, code)
    with running():
        words = report.read_text().split()
    assert "torch" in words and "devices=" in words
    assert not {"lightning", "pytorch_lightning", "deepspeed", "transformers"} & set(words)


def test_modules_of_the_same_name_in_the_working_directory_are_not_picked_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("types", "signal", "struct", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    with running() as client:
        client.check()


def test_a_launch_does_not_wait() -> None:
    begin = time.monotonic()
    client = launch()
    assert time.monotonic() - begin < patient(0.1)
    client.arena.master.fill_(1)
    client.wait_ready()
    client.close()


def test_a_worker_that_does_not_get_ready_is_reported_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "START_TIMEOUT_SECS", 0.5)
    monkeypatch.setattr(process, "EXIT_GRACE_SECS", 0.5)
    patch_worker(monkeypatch, "import time; time.sleep(30)")
    with (
        pytest.raises(WorkerTimeout, match=r"did not answer within 0\.5 seconds; its process state is S \(sleeping\)"),
        running(),
    ):
        pass


def test_a_failing_import_of_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_worker(monkeypatch, "import sys; sys.modules['torch'] = None")
    with pytest.raises(WorkerDied, match=r"failed with ModuleNotFoundError: .*torch(.|\n)*Traceback"), running():
        pass


def test_a_program_that_ends_at_once_is_reported_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BOOTSTRAP", "raise SystemExit(3)")
    with pytest.raises(WorkerDied, match=r"ended with exit code 3; no step was handed over to it yet"), running():
        pass


@pytest.mark.parametrize("ends", [(), (512,), (512, 1000), (700, 512, 1024), (-1, 1024)])
def test_group_ends_that_do_not_fit_the_shard_are_refused(ends: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="`group_ends` must rise to `numel` 1024, got"):
        HostClient.launch(ArenaLayout(1024, torch.bfloat16, 1), ends, cores=None, lr_scale="linear", timeout_secs=20)


def test_too_little_memory_is_said_before_anything_is_started() -> None:
    children = psutil.Process().children()
    with pytest.raises(
        MemoryError, match=r"for 100,000,000,000,000 parameters of this rank, only .* GiB are available under"
    ):
        HostClient.launch(
            ArenaLayout(10**14, torch.bfloat16, 1), (10**14,), cores=None, lr_scale="linear", timeout_secs=20
        )
    assert psutil.Process().children() == children


# -- failure ----------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_worker_reaches_the_trainer_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from lightning_zenflow.offload import worker
def broken(*args, **kwargs):
    raise ArithmeticError("the kernel is broken")
worker.adamw_ = broken
"""
    patch_worker(monkeypatch, code)
    with running() as client:
        step(client, clock=41)
        with pytest.raises(WorkerDied) as error:
            client.collect()
        text = str(error.value)
        assert "failed with ArithmeticError: the kernel is broken and ended with exit code 1" in text
        assert "the last step handed over to it was 41" in text
        assert "Traceback (most recent call last)" in text and "in broken\n" in text
        with pytest.raises(WorkerDied, match="the kernel is broken"):  # told again, not a bare end of file
            client.drain()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("when", ["idle", "busy", "starting"])
def test_a_killed_worker_is_reported_at_once_with_signal_exit_code_and_last_step(
    number: signal.Signals, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "busy":
        patch_worker(monkeypatch, SLOW)
    layout = ArenaLayout(16384, torch.bfloat16, 1)
    client = HostClient.launch(layout, (16384,), cores=None, lr_scale="linear", timeout_secs=20)
    try:
        if when != "starting":
            client.wait_ready()
            step(client, clock=7)
            client.drain() if when == "idle" else time.sleep(0.2)
        os.kill(client.pid, number)
        begin = time.monotonic()
        with pytest.raises(WorkerDied) as error:
            {"starting": HostClient.wait_ready, "busy": HostClient.collect, "idle": check_forever}[when](client)
        assert time.monotonic() - begin < patient(1)
        cause = rf"pid {client.pid}\) was killed by {number.name} \(exit code -{int(number)}"
        error.match(cause + ("; out of memory is the usual cause, see dmesg" if number == signal.SIGKILL else r"\)"))
        error.match("no step was handed over" if when == "starting" else "the last step handed over to it was 7")
    finally:
        client.close()
        client.close()


def test_a_launch_notices_a_dead_worker() -> None:
    with running() as client:
        os.kill(client.pid, signal.SIGKILL)
        assert secs_until(lambda: is_gone(client.pid)) < patient(1)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            step(client)


def test_a_stopped_worker_is_a_timeout_that_names_state_seconds_and_setting() -> None:
    with running(timeout_secs=0.5) as client:
        os.kill(client.pid, signal.SIGSTOP)
        step(client)
        with pytest.raises(WorkerTimeout) as error:
            client.collect()
        error.match(rf"pid {client.pid}\) did not answer within 0\.5 seconds; its process state is T \(stopped\)")
        error.match("raise `worker_timeout_secs`")
        client.check()
        os.kill(client.pid, signal.SIGCONT)
        assert client.collect().held_steps == 1  # nothing is lost by waiting in vain


def test_sending_to_a_stopped_worker_never_blocks_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_GRACE_SECS", 0.5)
    with running(timeout_secs=0.5) as client:
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout, match=r"T \(stopped\)"):
            accumulate_forever(client)
        begin = time.monotonic()
        client.close()  # cannot ask a stopped process, so it kills
        assert time.monotonic() - begin < process.EXIT_GRACE_SECS + patient(1)
        assert is_gone(client.pid)


def test_what_schedulers_send_to_whole_jobs_does_not_end_a_worker() -> None:
    client = launch()
    assert secs_until(lambda: _ignores(client.pid, signal.SIGUSR1)) < patient(1)  # long before it is ready
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(client.pid, number)
    client.wait_ready()
    client.check()
    assert os.getsid(client.pid) == client.pid != os.getsid(0)
    client.close()


def _ignores(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(entry.split()[1], 16) for entry in lines if entry.startswith("SigIgn:"))
    return bool(mask >> (number - 1) & 1)


def test_a_worker_started_where_signals_are_ignored_and_blocked_still_dies_of_sigterm(tmp_path: Path) -> None:
    code = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
client = start()
os.kill(client.pid, signal.SIGTERM)
try:
    while True:
        client.check()
except RuntimeError as error:
    print("SIGTERM" in str(error))
"""
    assert run_trainer(tmp_path, code) == ["True"]


# -- use --------------------------------------------------------------------------------------------------------------


def test_collecting_without_an_update_is_refused() -> None:
    with running() as client, pytest.raises(RuntimeError, match="`collect` must follow an `update`"):
        client.collect()


def test_updates_are_collected_in_order_and_launches_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_worker(monkeypatch, SLOW)
    with running(512, blocks=4) as client:
        begin = time.monotonic()
        for block in range(2):
            client.update(block, block, block + 1, 0.0, (HYPER,), GRADIENT, others=True)
        assert time.monotonic() - begin < 0.1
        assert client.outstanding == 2
        done = [client.collect(), client.collect()]
        assert [answer.block for answer in done] == [0, 1]
        assert client.outstanding == 0 and done[1].secs > 0.1


def test_blocks_are_cut_anew_in_mid_run_and_the_next_update_covers_the_new_block() -> None:
    with running(1000, blocks=2) as client:
        client.arena.master.fill_(1.0)
        client.arena.slot.fill_(1.0)
        client.rebuild(3)
        assert client.arena.outboxes[0].numel() == 334 and client.ledger.held == [0, 0, 0]
        client.update(2, 0, 1, 0.0, (HYPER,), GRADIENT, others=True)
        assert client.collect().held_steps == 1
        master = client.arena.master
        assert (master[:668] == 1.0).all() and (master[668:] < 0.95).all()
        assert torch.equal(client.arena.outboxes[0][:332], master[668:].bfloat16())
        assert client.ledger.held == [1, 1, 0]


def test_blocks_are_not_cut_anew_while_one_holds_steps_or_is_under_way() -> None:
    with running(1000, blocks=4) as client:
        client.update(0, 0, 1, 0.0, (HYPER,), GRADIENT, others=True)
        assert client.collect().block == 0
        with pytest.raises(
            RuntimeError, match=r"`blocks` must be changed when no block holds a step, got \[0, 1, 1, 1\]"
        ):
            client.rebuild(2)
        client.update(1, 0, 1, 0.0, (HYPER,))
        with pytest.raises(RuntimeError, match="`blocks` must be changed with no update under way, got 1"):
            client.rebuild(2)
        assert client.collect().block == 1, "it goes on after a refusal"


def test_no_more_memory_is_asked_for_than_training_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "lightning_zenflow.offload.client.check_host_memory",
        lambda need_bytes, ranks, *, numel: asked.append(need_bytes),
    )
    with running(1_000_000, blocks=4):
        assert 18_000_000 <= asked[0] < 18_100_000


def test_thousands_of_launches_without_a_wait_in_between_block_nobody() -> None:
    with running(blocks=2) as client:
        for _ in range(3000):
            client.update(0, 0, 1, 0.0, (HYPER,), GRADIENT, others=True)
        client.drain()
        assert client.ledger.held == [0, 3000]


def test_a_message_is_received_without_registering_descriptors_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("this takes longer than the message")

    with running(blocks=2) as client:
        monkeypatch.setattr("multiprocessing.connection.wait", refused)  # `Connection.poll` calls it as well
        monkeypatch.setattr("select.poll", refused)
        client.update(0, 0, 1, 0.0, (HYPER,), GRADIENT, others=True)
        assert client.collect().block == 0
        client.drain()
        assert client.slot_is_read(0, 1024)
        monkeypatch.undo()


def test_the_slot_is_waited_for_until_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_worker(monkeypatch, SLOW)
    with running(1024, blocks=2) as client:
        client.wait_slot(0, 1024)  # nobody reads it
        client.update(1, 0, 1, 0.5, (HYPER,))
        client.wait_slot(0, 1024)  # an update without a gradient does not either
        assert not client.take_answers()
        client.update(0, 1, 2, 0.5, (HYPER,), GRADIENT, others=True)
        begin = time.monotonic()
        client.wait_slot(0, 1)  # read by the last piece of the slow update, of 32
        assert time.monotonic() - begin > 31 * 0.02 / 2
        client.drain()
        assert [type(answer).__name__ for answer in client.take_answers()] == ["Updated", "Updated", "Accumulated"]


def test_the_slot_may_be_written_behind_the_worker_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next gradients arrive from the end on, while the worker still adds those before them."""
    patch_worker(
        monkeypatch,
        "import time\nfrom lightning_zenflow.offload import worker\nworker.CHUNK_NUMEL, sweep = 16, worker.HostAdamW._sweep\n"
        "def slow(self, pieces, work):\n    sweep(self, pieces, work)\n    time.sleep(0.1)\nworker.HostAdamW._sweep = slow",
    )
    with running(1024, blocks=2) as client:
        client.update(0, 0, 1, 0.5, (HYPER,), GRADIENT, others=True)
        client.wait_slot(1000, 1024)
        assert not client.take_answers(), "the end is free before the pass is done"
        client.wait_slot(512, 600)
        assert not client.take_answers()
        client.drain()
        assert [type(answer).__name__ for answer in client.take_answers()] == ["Updated", "Accumulated"]


def test_a_call_from_a_signal_handler_into_a_waiting_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_worker(monkeypatch, SLOW)
    with running(2048) as client:
        step(client)
        signal.signal(signal.SIGRTMIN, lambda *_: client.drain())
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGRTMIN)).start()
        with pytest.raises(RuntimeError, match="must be used by one call at a time"):
            client.collect()
        signal.signal(signal.SIGRTMIN, signal.SIG_DFL)
        assert client.collect().held_steps == 1


def test_a_handler_of_a_usual_signal_runs_when_the_waiting_call_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_worker(monkeypatch, SLOW)
    calls: list[str] = []

    def handle(*_: object) -> None:
        client.drain()
        calls.append("drained")

    with running(2048) as client:
        step(client)
        signal.signal(signal.SIGUSR1, handle)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert client.collect().held_steps == 1 and calls == ["drained"]
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_thread_may_start_and_use_a_worker_that_outlives_it() -> None:
    clients = []

    def start() -> None:
        with_worker = launch()
        with_worker.wait_ready()
        step(with_worker)
        clients.append(with_worker)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (client,) = clients
    assert client.collect().held_steps == 1
    client.close()


# -- end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True])
def test_close_ends_the_process_soon_and_may_be_repeated(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if busy:
        patch_worker(monkeypatch, SLOW)
    with running(16384) as client:
        if busy:
            step(client)
        begin = time.monotonic()
        client.close()
        assert time.monotonic() - begin < patient(1)
        assert not psutil.pid_exists(client.pid)
        client.close()
        with pytest.raises(RuntimeError, match="`HostClient` must be open"):
            client.drain()


def test_a_dropped_client_ends_its_worker() -> None:
    client = launch()
    client.wait_ready()
    pid = client.pid
    del client
    assert not psutil.pid_exists(pid)


def test_starting_and_closing_five_times_leaves_no_memory_and_no_descriptor() -> None:
    numel = 4 * 2**20
    counts = []
    for _ in range(6):
        with running(numel) as client:
            client.arena.master.fill_(1)
            step(client)
            client.collect()
        resident = psutil.Process().memory_info().rss
        counts.append((len(os.listdir("/proc/self/fd")), shared_resident_bytes(), resident))
    descriptors, shared, resident = zip(*counts[1:], strict=True)
    assert len(set(descriptors)) == 1
    assert max(shared) - min(shared) < 2**20
    assert max(resident) - min(resident) < 4 * 2**20
