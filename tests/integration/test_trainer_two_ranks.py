"""Two ranks under Lightning: found in the environment, and launched by the Trainer itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.cases import relative
from tests.modules import OFTEN, FollowsReference, Small, batches, fit, strategy_of, three_groups, weights

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(180)


class OneRankFails(Small):
    """On the second rank alone, the gradient of two batches is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        bad = self.global_rank == 1 and batch_idx in (3, 6)
        return super().training_step(batch, batch_idx) * (math.inf if bad else 1.0)


class OneShardFails(Small):
    """In two batches, the gradient of a single element is not finite: the last one, which the second rank owns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + math.inf * self.net[3].bias[-1] if batch_idx in (3, 6) else loss  # type: ignore[index]


def train(folder: str) -> dict[str, Any]:
    """What each of the ranks does; they differ in their batches."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    loader, validation = batches(10, seed=rank), batches(3, seed=10 + rank)
    two: dict[str, Any] = {"devices": 2}
    results: dict[str, Any] = {}

    for stage in (1, 2):
        follows, module = FollowsReference(), Small(configure=three_groups)
        strategy = strategy_of({"topk_ratio": 0.3, "select_strategy": "epoch"}, stage=stage)
        made = fit(
            module,
            loader,
            validation,
            strategy=strategy,
            callbacks=[follows],
            max_epochs=2,
            accumulate_grad_batches=4,
            gradient_clip_val=0.4,
            **two,
        )
        counters = (made.global_step, strategy.deepspeed_engine.global_steps, strategy.step_stats.step)
        results[f"stage {stage}"] = {"worst": follows.worst, "counters": counters, "weights": weights(module)}

    module = Small()
    checkpoints = ModelCheckpoint(folder, "saved", every_n_train_steps=7, save_top_k=-1)
    made = fit(module, loader, callbacks=[checkpoints], enable_checkpointing=True, **two)
    plain = Small()
    fit(plain, loader, **two)
    made.validate(Small(), validation, ckpt_path=str(Path(folder) / "saved.ckpt"), verbose=False)
    results["saved"] = {
        "weights": weights(module),
        "unsaved": weights(plain),
        "loss": made.callback_metrics["val_loss"],
    }

    for precision in ("32-true", "16-mixed"):
        module = OneRankFails()
        made = fit(module, loader, strategy=strategy_of(OFTEN, loss_scale=64.0), precision=precision, **two)
        stats = made.strategy.step_stats  # type: ignore[attr-defined]
        results[precision] = {"steps": (stats.step, stats.skipped_steps), "weights": weights(module)}
    return results


def overflow() -> dict[str, Any]:
    """Steps, skipped steps and weights of each of the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module = OneShardFails()
    made = fit(module, batches(10, seed=int(os.environ["RANK"])), zenflow=OFTEN, devices=2)
    stats = made.strategy.step_stats  # type: ignore[attr-defined]
    return {"steps": (stats.step, stats.skipped_steps), "weights": weights(module)}


def test_an_overflow_in_the_shard_of_one_rank_is_skipped_by_both(run_ranks: Any) -> None:
    """FAULTS 13."""
    first, second = run_ranks(overflow, timeout=150)
    assert first["steps"] == second["steps"] == (8, 2)
    assert torch.equal(first["weights"], second["weights"]) and torch.isfinite(first["weights"]).all()


def test_two_ranks_train_clip_skip_and_save_together(run_ranks: Any, tmp_path: Path) -> None:
    """FAULTS 2, 6, 12, 13, 15, 19, Z3, Z9."""
    first, second = run_ranks(train, folder=str(tmp_path), timeout=150)
    for one, other in zip(first.values(), second.values(), strict=True):
        assert torch.equal(one["weights"], other["weights"])
    for results in (first, second):
        for stage in (1, 2):
            worst = results[f"stage {stage}"]["worst"]
            assert worst["gradient"] < 1e-5 and worst["norm"] < 1e-5 and worst["weights"] < 1e-6, worst
            assert results[f"stage {stage}"]["counters"] == (6, 6, 6)
        assert torch.equal(results["saved"]["weights"], results["saved"]["unsaved"])
        assert results["32-true"]["steps"] == results["16-mixed"]["steps"] == (8, 2)
    assert first["saved"]["loss"] == second["saved"]["loss"] < 3
    assert relative(first["16-mixed"]["weights"], first["32-true"]["weights"]) < 1e-2


SCRIPT = """
import torch
import lightning_zenflow
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

torch.set_num_threads(1)
trainer = Trainer(
    strategy="zenflow", accelerator="cpu", devices=2, max_steps=6, limit_val_batches=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
model = Model()
trainer.fit(model)
mine = torch.cat([param.detach().flatten() for param in model.parameters()])
both = trainer.strategy.all_gather(mine)
assert both.shape[0] == 2 and torch.equal(both[0], both[1])
print(f"rank {trainer.global_rank} of {trainer.world_size} made {trainer.strategy.step_stats.step} steps", flush=True)
"""


def test_the_trainer_launches_a_second_rank_by_itself(tmp_path: Path) -> None:
    """FAULTS 42, Z7: without a main guard, which Lightning's launcher does not need either."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank} of 2 made 6 steps" in done.stdout
