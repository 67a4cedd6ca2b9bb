"""Where a training may be started from, and what it starts: real programs, watched from outside."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.live import LOOK_SECS, started, until, warm_server

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def programs_start_fast() -> None:
    warm_server()


WITHOUT_GUARD = "say('the script runs')\nmade = fit()\nsay('it is at step', made.global_step)"


def trains_once(output: str) -> bool:
    lines = output.split("\n")
    return [lines.count(line) for line in ("the script runs", "started", "step 20", "it is at step 20")] == [1] * 4


def test_a_script_without_a_main_guard_trains_once(tmp_path: Path) -> None:
    """Z7: nothing runs the user's script again."""
    with started(tmp_path, WITHOUT_GUARD, cold=True) as program:
        worker = program.worker()
        assert program.workers() == [worker]
        assert program.end() == 0
        assert trains_once(program.output)


INTERACTIVE = "import sys; sys.ps1 = '>>> '; exec(open('{script}').read())"


@pytest.mark.parametrize(
    "options",
    [["-c", INTERACTIVE], pytest.param(["-i", "-c", "exec(open('{script}').read())"], marks=pytest.mark.long)],
    ids=["notebook", "python -i"],
)
def test_code_that_is_typed_in_trains_once(options: list[str], tmp_path: Path) -> None:
    """Z7: no `__file__`, no module to import again, and an interpreter that says it is interactive."""
    with started(tmp_path, WITHOUT_GUARD, cold=True, options=options) as program:
        assert program.end() == 0
        assert trains_once(program.output)
        assert program.errors() == []


def test_importing_the_package_imports_no_deepspeed_and_starts_nothing(tmp_path: Path) -> None:
    """39: the import costs a part of what importing Lightning costs."""
    code = """
import os, sys, threading, time
begin = time.perf_counter()
import lightning.pytorch
lightning_secs = time.perf_counter() - begin
def seen():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), dict(os.environ), os.sched_getaffinity(0)
before = seen()
begin = time.perf_counter()
import lightning_zenflow
own_secs = time.perf_counter() - begin
assert seen() == before
assert not [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
children = open(f"/proc/self/task/{os.getpid()}/children").read()
assert not children
assert own_secs < 0.5 * lightning_secs + 0.2, (own_secs, lightning_secs)
"""
    with started(tmp_path, "", cold=True, options=["-c", code]) as program:
        assert program.end() == 0, program.output


def test_only_the_worker_is_bound_and_loader_workers_keep_all_cores(tmp_path: Path) -> None:
    """Z8: also those that start after the background process."""
    code = """
import os
from pathlib import Path
say("trainer before", sorted(os.sched_getaffinity(0)))
def tell(number):
    if number == 1:
        say("loader", sorted(os.sched_getaffinity(0)))
loader = batches(num_workers=2, multiprocessing_context="fork", before=tell)
fit(train=loader, callbacks=(At(5, lambda trainer: say("trainer", sorted(os.sched_getaffinity(0)))),),
    module=Tiny(pause_secs=0.05))
say("trainer after", sorted(os.sched_getaffinity(0)))
"""
    cores = sorted(psutil.Process().cpu_affinity())
    with started(tmp_path, code) as program:
        worker = program.worker()
        program.wait_for("step 1")
        assert len(worker.cpu_affinity()) == max(1, len(cores) // 2)
        assert program.end() == 0, program.output
        for who, times in (("trainer before", 1), ("loader", 2), ("trainer", 1), ("trainer after", 1)):
            assert program.has_said(f"{who} {cores}", times), (who, program.output)


def test_validate_test_and_predict_alone_start_no_background_process(tmp_path: Path) -> None:
    """34: from outside, and at every batch."""
    code = """
class Watching(Tiny):
    def forward_and_look(self, batch, batch_idx):
        assert workers() == []
        say("looked")
        time.sleep(0.05)
        self.net(batch)
    validation_step = test_step = predict_step = forward_and_look
for run in ("validate", "test", "predict"):
    getattr(trainer(limit_val_batches=None), run)(Watching(), batches(5))
"""
    with started(tmp_path, code) as program:
        seen: list[psutil.Process] = []

        def look() -> bool:
            seen.extend(program.workers())
            return program.ended()

        assert until(look, 60, LOOK_SECS)
        assert program.end() == 0, program.output
        assert seen == []
        assert program.has_said("looked", 15)


def test_fit_and_test_five_times_in_one_process_hold_one_worker_and_no_memory(tmp_path: Path) -> None:
    """33: neither processes, nor memory (the shared one included), nor descriptors pile up."""
    code = """
import gc
from pathlib import Path
def held():
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return {
        "resident": int(status["VmRSS"].split()[0]) // 1024,
        "shared": int(status["RssShmem"].split()[0]) // 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": sum({it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in tensors}.values()),
    }
for _ in range(5):
    module = Tiny(width=100_000)
    made = trainer(max_steps=4, callbacks=(At(2, lambda trainer: say("workers", len(workers()))),))
    made.fit(module, batches())
    say("workers", len(workers()))
    made.test(module, batches(3))
    del made, module
    say("held", *(f"{name}={value}" for name, value in held().items()))
"""
    with started(tmp_path, code) as program:
        assert program.end(90) == 0, program.output
        assert program.has_said("workers 1", 5) and program.has_said("workers 0", 5)
        rounds = [dict(re.findall(r"(\w+)=(\d+)", line)) for line in program.output.split("\n") if line[:5] == "held "]
        held = {name: [int(round_[name]) for round_ in rounds] for name in rounds[0]}
        assert len(rounds) == 5
        assert max(held["shared"]) <= 1, held  # MB; one host state has 36
        assert len(set(held["files"][1:])) == 1, held
        assert len(set(held["tensors"][1:])) == 1, held
        assert max(held["resident"]) - held["resident"][1] < 30, held  # MB; the allocator keeps some, and more or less


@pytest.mark.long
def test_thousands_of_steps_take_no_more_memory(tmp_path: Path) -> None:
    """33: neither in the trainer nor in its worker."""
    code = 'fit(max_steps=4000, zenflow={"select_strategy": "step", "select_interval": 8})'
    with started(tmp_path, code) as program:
        program.wait_for("step 1000")
        both = [psutil.Process(program.pid), program.worker()]
        before = [process.memory_info().rss for process in both]
        program.wait_for("step 3900")
        grown = [process.memory_info().rss - earlier for process, earlier in zip(both, before, strict=True)]
        assert program.end() == 0
        assert max(grown) < 4 * 2**20, grown


@pytest.mark.parametrize(
    "code",
    [
        "in_thread(fit)",
        """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=fit, daemon=True)
process.start()
process.join()
assert process.exitcode == 0
""",
    ],
    ids=["thread", "daemonic process"],
)
def test_a_thread_or_a_daemonic_process_may_train(code: str, tmp_path: Path) -> None:
    """31: where `multiprocessing` itself would refuse to start a process."""
    with started(tmp_path, code) as program:
        assert program.end() == 0, program.output
        assert program.has_said("step 20") and program.has_said("train end")
        assert program.errors() == []


def test_too_little_address_space_is_said_before_training_starts(tmp_path: Path) -> None:
    """35: with the need, the limit and the remedy; nothing was started yet."""
    code = "fit(Tiny(width=3_000_000))"  # 39 million parameters: half a GB for the model, over 1 GB for the host state
    with started(tmp_path, "from pathlib import Path\nsay(Path('/proc/self/statm').read_text().split()[0])") as program:
        assert program.end() == 0
        used_bytes = int(program.output.split()[0]) * 4096
    with started(tmp_path, code, address_space_bytes=used_bytes + 1_500_000_000) as program:
        assert program.end() == 1
        error = program.error("MemoryError")
        assert error.startswith("The host state needs 0.87 GiB for 39,000,006 parameters of this rank, only 0.")
        assert "GiB are available under RLIMIT_AS of" in error
        assert "Raise it (`ulimit -v unlimited`), or use more machines" in error
        assert not program.has_said("started")


def test_refused_pinning_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    """36: pinning is tried on CUDA only, so the runtime that refuses is made up."""
    code = """
from types import SimpleNamespace
from lightning_zenflow.offload.client import HostClient
start = HostClient.start
HostClient.start = lambda *args, **settings: start(*args, **{**settings, "pin": True})
torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *args: 2, cudaHostUnregister=None)
fit()
"""
    with started(tmp_path, code) as program:
        assert program.end() == 0, program.output
        assert program.has_said("step 20")
        assert program.output.count("Could not page-lock") == 1
        assert "(cudaHostRegister returned 2). Training goes on with slower copies." in program.output


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        pytest.param("made = fit(max_steps=2)\nimport sys\nsys.exit(7)", 7, marks=pytest.mark.long),
        ("import sys\nfit(callbacks=(At(3, lambda trainer: sys.exit(7)),))", 7),
        ("fit(callbacks=(At(3, lambda trainer: os._exit(7)),))", 7),
    ],
    ids=["after fit", "in a callback", "without cleaning up"],
)
def test_the_interpreter_may_end_after_fit_and_in_the_middle(code: str, exit_code: int, tmp_path: Path) -> None:
    """31: with its own exit code, without a word."""
    with started(tmp_path, code) as program:
        assert program.end() == exit_code, program.output
        assert program.errors() == []
