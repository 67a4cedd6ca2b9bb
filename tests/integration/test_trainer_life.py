"""A run from its start to its end and beyond: evaluation, checkpoints, further fits, exceptions, other callbacks."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.offload.client import HostClient
from tests.cases import relative
from tests.forked import FORKED
from tests.modules import (
    EXPECTED_WARNINGS,
    OFTEN,
    FollowsReference,
    Small,
    batches,
    fit,
    schedule_of,
    trainer,
    weights,
)

REPO = Path(__file__).resolve().parents[2]
pytestmark = [*EXPECTED_WARNINGS, pytest.mark.usefixtures("own_process_group")]


def children() -> list[int]:
    """The background processes of this one."""
    own = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [
        child.pid for child in own if child.pid in FORKED or "lightning_zenflow.offload" in " ".join(child.cmdline())
    ]


class Watches(Callback):
    """Weights at each step, masters at the end, and how many workers there are meanwhile."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.workers: set[int] = set()
        self.before = len(children())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.append(weights(pl_module).clone())
        self.workers.add(len(children()) - self.before)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.final = weights(pl_module).clone()
        trainer.strategy._zero.shard.complete_host_state()
        self.masters = torch.cat(
            [part.detach().clone() for part in trainer.strategy._zero.single_partition_of_fp32_groups]
        )


# -- the end of training -----------------------------------------------------------------------------------------------


def test_fit_ends_with_the_masters_as_weights_before_anybody_reads_them() -> None:
    module, watches = Small(), Watches()
    fit(module, zenflow={**OFTEN, "select_interval": 100}, precision="bf16-true", callbacks=[watches])
    masters = watches.masters[: len(watches.final)]
    assert torch.equal(watches.final, masters.to(torch.bfloat16).float())
    assert not torch.equal(watches.final, masters)
    assert torch.equal(weights(module), watches.final)
    assert not torch.equal(watches.seen[-1], watches.final)  # gradients had been held back
    assert watches.workers == {1}


def test_averaged_weights_of_a_callback_survive_the_end_of_fit() -> None:
    """Settling after the callback would replace them by the masters."""
    watches, average, module = Watches(), EMAWeightAveraging(decay=0.8, update_starting_at_step=0), Small()
    fit(module, validation=batches(2), callbacks=[watches, average], max_epochs=2)
    assert average._average_model is not None
    expected = torch.cat(
        [
            param.detach().flatten()
            for param in average._average_model.module.net.parameters()  # type: ignore[union-attr]
        ]
    )
    assert torch.equal(weights(module), expected)
    assert relative(watches.final, expected) > 1e-2


def test_callbacks_that_cannot_work_are_refused_by_lightning_in_words() -> None:
    with pytest.raises(MisconfigurationException, match="SWA does not currently support sharded models"):
        fit(Small(), callbacks=[StochasticWeightAveraging(1e-3)])


# -- several runs of one Trainer -----------------------------------------------------------------------------------------


def test_fit_evaluation_and_fit_again_take_turns() -> None:
    """FAULTS 33: one worker at a time, none in between; a second fit starts from the weights of the first."""
    watches, module = Watches(), Small()
    made = trainer(callbacks=[watches], max_epochs=1)
    made.fit(module, batches(10), batches(2))
    first = weights(module).clone()
    assert children() == []
    loss = made.validate(module, batches(3), verbose=False)[0]["val_loss"]
    assert made.test(module, batches(3), verbose=False)[0]["val_loss"] == loss
    predicted = made.predict(module, batches(3))
    assert predicted is not None and [part.shape for part in predicted] == [(4, 5)] * 3  # type: ignore[union-attr]
    assert torch.equal(weights(module), first)
    made.fit_loop.max_epochs = 2
    made.fit(module, batches(10), batches(2))
    assert made.global_step == 20 and made.strategy.step_stats.step == 10  # type: ignore[attr-defined]
    assert watches.workers == {1} and children() == []
    other = Small()
    other.net.load_state_dict(dict(zip(other.net.state_dict(), split(first, other), strict=True)))
    fit(other)
    assert torch.equal(weights(other), weights(module))


def split(flat: torch.Tensor, module: Small) -> list[torch.Tensor]:
    values = module.net.state_dict().values()
    parts = flat.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


def test_a_module_is_an_ordinary_one_again_after_fit() -> None:
    """FAULTS 26, 33: it trains with plain PyTorch, can be pickled and holds on to no engine."""
    module = Small()
    module.net[0].weight.remark = "mine"  # type: ignore[index]
    module.register_forward_hook(lambda *args: None)
    made = fit(module)
    engine = weakref.ref(made.strategy.deepspeed_engine)  # type: ignore[attr-defined]
    assert len(module._forward_hooks) == 1 and not module._forward_pre_hooks
    (batch,) = batches(1)
    loss = module.loss(module.net, batch)
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert module.loss(module.net, batch) < loss
    assert torch.equal(pickle.loads(pickle.dumps(module.net))[0].bias, module.net[0].bias)  # type: ignore[index]
    assert vars(module.net[0].weight) == {"remark": "mine"}  # type: ignore[index]
    del made
    module._trainer = None
    gc.collect()
    assert engine() is None


def test_a_limit_changed_between_two_fits_is_obeyed() -> None:
    """FAULTS 6."""
    made, module = trainer(gradient_clip_val=0.1), Small()
    made.fit(module, batches(2))
    assert made.strategy.step_stats.grad_norm_clipped == pytest.approx(0.1, rel=1e-3)  # type: ignore[attr-defined]
    made.gradient_clip_val = 0.2
    made.fit_loop.max_epochs = 2
    made.fit(module, batches(2))
    assert made.strategy.step_stats.grad_norm_clipped == pytest.approx(0.2, rel=1e-3)  # type: ignore[attr-defined]


def test_evaluation_alone_starts_no_background_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 34."""

    def launched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a background process was started")

    monkeypatch.setattr(HostClient, "launch", launched)
    module, made = Small(), trainer(precision="bf16-mixed")
    for evaluate in (made.validate, made.test):
        assert evaluate(module, batches(2), verbose=False)[0]["val_loss"] > 0
    assert len(made.predict(module, batches(2)) or []) == 2
    assert made.strategy.step_stats.step == 0  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="a background process was started"):
        made.fit(module, batches(2))


def test_data_loader_workers_and_the_trainer_keep_their_cores() -> None:
    """FAULTS Z8."""
    cores: list[set[int]] = []

    class Cores(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            cores.append({int(core) for core in batch[2].flatten() if core >= 0})
            return super().training_step(batch[:2], batch_idx)

    def with_cores(samples: list[Any]) -> list[torch.Tensor]:
        mine = sorted(os.sched_getaffinity(0))
        return [*torch.utils.data.default_collate(samples), torch.tensor(mine)]

    loader = DataLoader(batches(4).dataset, 4, num_workers=1, persistent_workers=True, collate_fn=with_cores)
    fit(Cores(), loader, max_epochs=2)
    assert len(cores) == 8
    assert all(seen == os.sched_getaffinity(0) for seen in cores)


# -- exceptions ------------------------------------------------------------------------------------------------------------


class Fails(Small):
    """Raises in one of its hooks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError(f"in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self._fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._fail("validation_step")

    def on_train_end(self) -> None:
        self._fail("on_train_end")

    def teardown(self, stage: str) -> None:
        self._fail("teardown")


@pytest.mark.parametrize("where", ["training_step", "validation_step", "on_train_end", "teardown"])
def test_an_exception_in_a_hook_is_the_one_shown_and_leaves_no_process(where: str) -> None:
    """FAULTS 31, 32."""
    with pytest.raises(ZeroDivisionError, match=f"^in {where}$"):
        fit(Fails(where), validation=batches(2), num_sanity_val_steps=0)
    assert children() == []


def test_a_checkpoint_on_an_exception_is_written_and_the_exception_shown(tmp_path: Path) -> None:
    """FAULTS 31, 32."""
    saves = ModelCheckpoint(tmp_path, "failed", save_on_exception=True)
    with pytest.raises(ZeroDivisionError, match="in training_step"):
        fit(Fails("training_step"), callbacks=[saves], enable_checkpointing=True)
    assert (tmp_path / "failed.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt").exists()
    assert children() == []


def test_an_engine_that_cannot_be_built_leaves_no_process() -> None:
    """FAULTS 31: DeepSpeed looks at the schedule last."""
    strategy = ZenFlowStrategy(stage=2)
    # Later than here, since the strategy refuses it.
    strategy.config["scheduler"] = {"type": "NoSuchSchedule", "params": {}}  # type: ignore[index]
    with pytest.raises(AssertionError, match="NoSuchSchedule"):
        fit(Small(), strategy=strategy)
    try:
        assert children() == []
    finally:
        for child in map(psutil.Process, children()):
            child.terminate()
            child.wait(5)


# -- what is printed and built -------------------------------------------------------------------------------------------


def test_nothing_is_printed_while_training(capfd: pytest.CaptureFixture[str]) -> None:
    """FAULTS Z12."""
    made, module = trainer({**OFTEN, "update_interval": 2}, max_epochs=2), Small()

    class Forgets(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            capfd.readouterr()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.shown = capfd.readouterr()

    forgets = Forgets()
    made.callbacks.append(forgets)  # type: ignore[attr-defined]
    made.fit(module, batches(10))
    assert schedule_of(made).update_interval == 2
    assert forgets.shown.out == forgets.shown.err == ""


SCRIPT = """
import lightning_zenflow, torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

trainer = Trainer(strategy="zenflow", accelerator="cpu", devices=1, max_steps=6, logger=False, enable_checkpointing=False)
trainer.fit(Model())
print("steps", trainer.strategy.step_stats.step)
"""


@pytest.mark.parametrize("compiler", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_needs_no_compiler_and_uses_none(compiler: bool, tmp_path: Path) -> None:
    """FAULTS Z13, 42."""
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    path = os.environ["PATH"] if compiler else str(tmp_path)
    environment = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": str(extensions), "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "steps 6" in done.stdout
    assert list(extensions.iterdir()) == []


def test_a_run_of_all_trainer_conveniences_follows_the_reference() -> None:
    follows = FollowsReference()
    fit(
        Small(),
        validation=batches(4),
        callbacks=[follows],
        max_epochs=3,
        overfit_batches=4,
        val_check_interval=2,
        detect_anomaly=True,
        profiler="simple",
    )
    follows.assert_equal(steps=12)
