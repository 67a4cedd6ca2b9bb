"""Two ranks under ZeRO-3 and Lightning: whatever they train follows the reference, and none ever holds the whole model."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.cases import relative
from tests.integration.test_trainer_manual import Manual
from tests.integration.test_trainer_parameters import Everything, groups_of_which_one_is_frozen
from tests.modules import (
    CLASSES,
    EXTREMES,
    FEATURES,
    OFTEN,
    FollowsReference,
    Small,
    batches,
    fit,
    strategy_of,
    trainer,
    weights,
)
from tests.stage3 import (
    ChangesIntervals,
    Checkpointed,
    Configured,
    NotEmpty,
    NotEmptyReentrant,
    Sequences,
    Shared,
    Single,
    Uneven,
    WithLeaf,
    cut_strategy,
    fit_cut,
    is_cut,
)

pytestmark = pytest.mark.timeout(240)
TWO: dict[str, Any] = {"devices": 2}


class OneRankFails(Small):
    """On the second rank alone, the gradient of two batches is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        bad = self.global_rank == 1 and batch_idx in (3, 6)
        return super().training_step(batch, batch_idx) * (math.inf if bad else 1.0)


class SettlesOnce(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            trainer.strategy.settle()


def _rank() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return int(os.environ["RANK"])


# -- against the reference ---------------------------------------------------------------------------------------------


def follow(rank: int, module: Small, *callbacks: Callback, accumulate: int = 1, **settings: Any) -> dict[str, Any]:
    """Differences from the reference in a run whose ranks have other batches."""
    follows = FollowsReference()
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.4, **settings}
    fit_cut(module, batches(8 * accumulate, seed=rank), callbacks=[*callbacks, follows], **settings, **TWO)
    return {**follows.worst, "steps": follows.steps, "cut": is_cut(module)}


RUNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "everything, recomputed": lambda rank: follow(rank, Small(NotEmptyReentrant), accumulate=2),
    "sequences": lambda rank: follow(rank, Small(Sequences), accumulate=2),
    "fewer elements than ranks": lambda rank: follow(rank, Configured(Single), place="host", accumulate=2),
    "groups": lambda rank: follow(rank, Small(configure=groups_of_which_one_is_frozen), ChangesIntervals()),
    "uneven": lambda rank: follow(rank, Uneven(), place="host"),
    "some stay whole": lambda rank: follow(
        rank, Small(NotEmpty), ChangesIntervals(), zero={"stage3_param_persistence_threshold": 10}
    ),
    "small limits": lambda rank: follow(
        rank,
        Small(NotEmpty),
        zero={
            "sub_group_size": 1,
            "reduce_bucket_size": 7,
            "stage3_prefetch_bucket_size": 5,
            "stage3_max_live_parameters": 9,
        },
    ),
}
MORE_RUNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "everything": lambda rank: follow(rank, Small(NotEmpty), accumulate=2),
    "everything, offloaded": lambda rank: follow(rank, Configured(NotEmptyReentrant), place="host", accumulate=2),
    "shared": lambda rank: follow(rank, Small(Shared), accumulate=2),
    "recomputed by DeepSpeed": lambda rank: follow(rank, Small(Checkpointed), accumulate=2),
    "with a leaf": lambda rank: follow(rank, Configured(WithLeaf), place="host", accumulate=2),
    "fewer elements than ranks, on the device": lambda rank: follow(rank, Small(Single)),
    "all stay whole": lambda rank: follow(
        rank,
        Small(NotEmpty),
        ChangesIntervals(),
        zero={"stage3_param_persistence_threshold": 10**6, "reduce_scatter": False},
    ),
    "one after the other": lambda rank: follow(rank, Small(NotEmpty), zero={"stage3_allgather_sequential": True}),
    "gathered by sums": lambda rank: follow(
        rank, Small(NotEmpty), zero={"stage3_use_all_reduce_for_fetch_params": True}
    ),
    "overlap": lambda rank: follow(
        rank,
        Small(NotEmptyReentrant),
        zero={"overlap_comm": True, "contiguous_gradients": False, "stage3_prefetch_bucket_size": 10**9},
        place="host",
    ),
}


def train(names: list[str]) -> dict[str, dict[str, Any]]:
    """What each of the ranks does."""
    rank = _rank()
    return {name: (RUNS | MORE_RUNS)[name](rank) for name in names}


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE_RUNS, marks=pytest.mark.long)], ids=["some", "more"])
def test_whatever_two_ranks_train_follows_the_reference(runs: dict[str, Any], run_ranks: Any) -> None:
    for results in run_ranks(train, timeout=200, names=list(runs)):
        assert list(results) == list(runs)
        for name, worst in results.items():
            assert worst["steps"] == 8 and worst["cut"], name
            assert worst["gradient"] < 1e-5 and worst["norm"] < 1e-6 and worst["weights"] < 1e-6, (name, worst)


# -- against other runs ------------------------------------------------------------------------------------------------


def with_secondary_copies(rank: int, threshold: int, place: str, folder: str) -> list[list[Tensor]]:
    """The same run with parameters gathered from all ranks (hpZ off) and from those of a machine; nobody else gathers."""
    runs = []
    for partition_size in (1, 2):
        zero = {"stage3_param_persistence_threshold": threshold, "zero_hpz_partition_size": partition_size}
        module, saved = Small(NotEmpty), os.path.join(folder, f"{partition_size}-{threshold}.ckpt")
        callbacks: list[Any] = [ChangesIntervals(), SettlesOnce()]
        made = trainer(strategy=cut_strategy(OFTEN, place, zero), callbacks=callbacks, **TWO)
        made.fit(module, batches(10, seed=rank), validation := batches(3, seed=10 + rank))
        losses = [made.callback_metrics["val_loss"]]
        made.save_checkpoint(saved)
        for loaded in (module, Configured(NotEmpty)):
            other = trainer(strategy=cut_strategy(OFTEN, place, zero), **TWO)
            losses.append(
                torch.tensor(other.validate(loaded, validation, ckpt_path=saved, verbose=False)[0]["val_loss"])
            )
        runs.append([weights(module), torch.tensor(module.losses), torch.stack(losses)])
    return runs


def train_in_pairs(folder: str) -> dict[str, Any]:
    """What each of the ranks does."""
    rank = _rank()
    results: dict[str, Any] = {}
    loader, validation = batches(10, seed=rank), batches(3, seed=10 + rank)
    results["secondary copies"] = with_secondary_copies(rank, 10, "device", folder)
    midway: dict[str, Any] = {"validation": validation, "val_check_interval": 3}
    for name, arguments in {"validated": midway, "alone": {}}.items():
        module = Configured(NotEmpty)
        fit_cut(module, loader, place="host", **arguments, **TWO)
        results[name] = weights(module)

    failing = OneRankFails()
    made = fit(failing, loader, strategy=cut_strategy(OFTEN, loss_scale=64.0), precision="16-mixed", **TWO)
    stats = made.strategy.step_stats  # type: ignore[attr-defined]
    results["skipped"] = (stats.step, stats.skipped_steps, torch.isfinite(weights(failing)).all().item())

    module = Configured()
    made = trainer(strategy=cut_strategy(OFTEN, "host"), **TWO)
    made.fit(module, loader, validation)
    first = weights(module)
    losses = [made.validate(module, validation, verbose=False)[0]["val_loss"] for _ in range(2)]
    shapes = [tuple(part.shape) for part in made.predict(module, validation) or []]  # type: ignore[union-attr]
    moved = not torch.equal(first, weights(module))
    made.fit_loop.max_epochs = 2
    made.fit(module, loader, validation)
    results["turns"] = (losses[0] == losses[1], shapes, moved, made.strategy.step_stats.step)  # type: ignore[attr-defined]

    with pytest.raises(
        NotImplementedError, match=r"`net\.empty` must have elements with ZeRO stage 3 on several ranks"
    ):
        fit_cut(Small(Everything), loader, **TWO)
    return results


def test_two_ranks_agree_with_other_ways_to_train_the_same(run_ranks: Any, tmp_path: Path) -> None:
    both = run_ranks(train_in_pairs, timeout=200, folder=str(tmp_path))
    for results in both:
        for one, other in zip(*results["secondary copies"], strict=True):
            assert torch.equal(one, other)
        assert torch.equal(results["validated"], results["alone"])
        assert results["skipped"] == (8, 2, True)
        assert results["turns"] == (True, [(4, 5)] * 3, False, 10)
    assert torch.equal(both[0]["alone"], both[1]["alone"])


def train_manually(folder: str) -> dict[str, Any]:
    """What each of the ranks does."""
    rank = _rank()
    results: dict[str, Any] = {}
    for threshold, place in ((0, "host"), (10**6, "device")):
        results[f"secondary copies {threshold}"] = with_secondary_copies(rank, threshold, place, folder)
    for number, zenflow in enumerate(EXTREMES):
        runs = []
        for strategy in (strategy_of(zenflow, stage=2), cut_strategy(zenflow)):
            module = Manual()
            fit(module, batches(12, seed=rank), strategy=strategy, **TWO)
            runs.append(weights(module))
        results[f"manual {number}"] = relative(*runs)
    return results


@pytest.mark.long
def test_two_ranks_agree_with_stage_2_in_manual_optimization(run_ranks: Any, tmp_path: Path) -> None:
    for results in run_ranks(train_manually, timeout=200, folder=str(tmp_path)):
        for threshold in (0, 10**6):
            for one, other in zip(*results[f"secondary copies {threshold}"], strict=True):
                assert torch.equal(one, other)
        assert max(results["manual 0"], results["manual 1"]) < 1e-6


# -- memory ------------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 16
LAYER_BYTES = 4 * WIDTH**2
SHARD_BYTES = LAYERS * LAYER_BYTES // 2


def wide() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))


class Untouched(Configured):
    """Nothing of it is copied by the test."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class UntouchedBefore(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Started(Exception):
    """Everything is built."""


class StopsAtStart(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise Started


SAMPLER = """
import select, sys
peak = 0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    with open(f"/proc/{sys.argv[1]}/status") as status:
        peak = max(peak, next(int(line.split()[1]) for line in status if line.startswith("RssAnon")))
print(1024 * peak)
"""
"""From outside, since a thread of the process itself would be kept from looking while PyTorch holds the interpreter."""


def peak_bytes(run: Callable[[], None]) -> int:
    """The most memory of its own, without what it shares with its background process, that `run` needs at a time."""
    watch = subprocess.Popen(
        [sys.executable, "-c", SAMPLER, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watch.stdout is not None and watch.stdout.readline() == "ready\n"
    gc.collect()
    before = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    run()
    peak, _ = watch.communicate("done\n", timeout=10)
    return int(peak) - 1024 * int(before.split()[1])


def build_wide() -> dict[str, int]:
    """What each of the ranks does."""
    _rank()
    peaks = {}
    zero = {"sub_group_size": 10**9, "reduce_bucket_size": 1000}
    fit_cut(Configured(), batches(1), **TWO)  # what is imported on the way is not counted
    for kind in (Untouched, UntouchedBefore):
        for place in ("device", "host"):

            def build(kind: Any = kind, place: str = place) -> None:
                with pytest.raises(Started):
                    fit_cut(kind(wide), zero=zero, place=place, callbacks=[StopsAtStart()], **TWO)

            peaks[f"{kind.__name__} {place}"] = peak_bytes(build)
    return peaks


@pytest.mark.long
def test_a_rank_that_builds_in_configure_model_holds_hardly_more_than_its_part(run_ranks: Any) -> None:
    """Measured: 1.26 times its part, where a net that is made before needs 2.05 times that, which is the whole of it."""
    freed_at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for peaks in run_ranks(build_wide, timeout=100, env=freed_at_once):
        for place in ("device", "host"):
            assert SHARD_BYTES < peaks[f"Untouched {place}"] < 1.5 * SHARD_BYTES + LAYER_BYTES
            assert peaks[f"UntouchedBefore {place}"] > 2 * SHARD_BYTES  # the figures show a difference
