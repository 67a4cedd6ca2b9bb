"""Training runs that save, stop and resume, and what the tests of resuming compare of them.

Workers are forked (see `tests.forked`): a run of twenty batches takes a fraction of a second, so that a test can resume at
each of them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.reference import ZenFlowReference, places_of_elements
from tests.cases import relative
from tests.modules import CLASSES, FEATURES, OFTEN, Small, batches, strategy_of, trainer, two_layers

BATCHES = 10
"""Of an epoch."""

SAVED_AT = 7
"""The batch after which `save_both` saves."""


# -- one run -----------------------------------------------------------------------------------------------------------


class Numbered(Small):
    """Makes each batch from its number, since a data loader begins anew where a run resumes in the middle of an epoch.

    Args:
        infinite: Batches (counted over epochs, from 1) whose gradients overflow.
        manual: Batches of a step in manual optimization; 0 for automatic optimization.
    """

    def __init__(
        self,
        make_net: Callable[[], nn.Module] = two_layers,
        configure: Callable[[Small], Any] | None = None,
        infinite: Collection[int] = (),
        manual: int = 0,
    ) -> None:
        super().__init__(make_net, configure)
        self.infinite, self.manual = infinite, manual
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.current_epoch * BATCHES + batch_idx + 1
        generator = torch.Generator().manual_seed(1000 * self.global_rank + number)
        inputs = torch.randn(8, FEATURES, generator=generator)
        targets = (inputs.sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long()
        loss = super().training_step([inputs.to(batch[0].dtype), targets.clamp(max=CLASSES - 1)], batch_idx)
        loss = loss * (math.inf if number in self.infinite else 1.0)
        if not self.manual:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / self.manual)
        if number % self.manual == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return None


@dataclass(frozen=True)
class Case:
    """A run of `epochs` times `BATCHES` batches.

    Attributes:
        zenflow: Settings; `OFTEN` otherwise.
        changes: Batch and the intervals that hold after it.
        settles: Batches after which the strategy settles.
        arguments: Of the strategy.
        settings: Of the Trainer.
        module: Makes the module.
        validates: Whether there are validation batches.
    """

    zenflow: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)
    settles: Collection[int] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    module: Callable[[], Small] = Numbered
    validates: bool = False

    def but(self, **changed: Any) -> Case:
        return replace(self, **changed)


def stage_arguments(stage: int | str) -> dict[str, Any]:
    """Arguments of the strategy for a stage; under ZeRO-3 with small sub-groups, and vectors that stay gathered."""
    if stage in (1, 2):
        return {"stage": stage}
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 40, "stage3_param_persistence_threshold": 10}
    if stage == "3 offload":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return {"config": {"zero_optimization": zero}}


def batches_done(made: Trainer) -> int:
    """Number of the batch that a run is at; 0 before the first."""
    return made.current_epoch * BATCHES + made.fit_loop.epoch_loop.batch_progress.current.ready


def zero_of(made: Trainer) -> Any:
    strategy = made.strategy
    assert isinstance(strategy, ZenFlowStrategy) and strategy._zero is not None
    return strategy._zero


def own_state(made: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's fp32 masters and moments, without padding, by `kind name first_element`."""
    zero = zero_of(made)
    zero.complete()
    return {
        f"{kind} {segment.spec.name} {segment.param_start}": region[segment.start : segment.stop].clone()
        for segment in zero._tables[zero._rank].segments
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for region in [getattr(zero.shard.host.arena, kind)]
    }


def shown(module: Small) -> Tensor:
    """This rank's part of all weights, flat in fp32; where a parameter is gathered, that copy must be the same."""
    found = []
    params: Any = module.net.parameters()
    for param in params:
        flat = param.detach().float().flatten()
        if hasattr(param, "ds_tensor"):
            part = param.ds_tensor.detach().float().flatten()
            start = param.ds_zero_partition_rank * part.numel()
            part = part[: max(0, param.ds_numel - start)]
            assert not flat.numel() or torch.equal(flat[start : start + part.numel()], part)
            flat = part
        found.append(flat)
    return torch.cat(found)


class Trace(Callback):
    """Changes intervals and settles, notes what the device shows and what the run has come to, then saves.

    Attributes:
        began: Masters and moments before the first batch.
        shown: Weights after each batch.
        facts: Steps, skipped steps, loss scale, rates, intervals, selected columns after each batch.
        ended: Masters and moments after the last settle.
    """

    def __init__(self, case: Case, folder: Path | None, saves: Collection[int]) -> None:
        self._case, self._folder, self._saves = case, folder, saves
        self.began: dict[str, Tensor] = {}
        self.shown: dict[int, Tensor] = {}
        self.facts: dict[int, tuple[Any, ...]] = {}
        self.ended: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = own_state(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, Small) and isinstance(trainer.strategy, ZenFlowStrategy)
        number = batches_done(trainer)
        if number in self._case.changes:
            trainer.strategy.change_intervals(*self._case.changes[number])
        if number in self._case.settles:
            trainer.strategy.settle()
        stats, zero = trainer.strategy.step_stats, zero_of(trainer)
        self.shown[number] = shown(pl_module)
        self.facts[number] = (
            (stats.step, stats.skipped_steps, trainer.global_step, zero.loss_scaler.cur_scale),
            [(group["lr"], group["betas"]) for group in zero.optimizer.param_groups],
            trainer.strategy.intervals,
            {index: chosen.tolist() for index, chosen in zero.shard.columns.items()},
        )
        if number in self._saves:
            assert self._folder is not None
            trainer.save_checkpoint(self._folder / f"{number}.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended = own_state(trainer)


@dataclass
class Run:
    """What a run left behind."""

    trace: Trace
    weights: Tensor
    module: Small
    trainer: Trainer


def run(
    case: Case,
    folder: Path | None = None,
    saves: Collection[int] = (),
    resume: Path | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Trains from the start or from the checkpoint `resume`, and saves to `folder` after the batches `saves`."""
    module, trace = case.module(), Trace(case, folder, saves)
    own = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [trace, *callbacks]}
    strategy = strategy_of({**OFTEN, **case.zenflow}, **case.arguments)
    made = trainer(strategy=strategy, **{**own, **case.settings, **settings})
    made.fit(
        module,
        batches(BATCHES),
        batches(2, seed=1) if case.validates else None,
        ckpt_path=None if resume is None else str(resume),
    )
    return Run(trace, shown(module), module, made)


def differences(resumed: Run, whole: Run, after: int = 0) -> list[str]:
    """Where two runs differ in a bit, after batch `after`."""
    expected = {number: shown for number, shown in whole.trace.shown.items() if number > after}
    found = []
    if list(resumed.trace.shown) != list(expected):
        found.append(f"batches {list(resumed.trace.shown)}, not {list(expected)}")
    for number, shown in expected.items():
        if not torch.equal(resumed.trace.shown.get(number, torch.empty(0)), shown):
            found.append(f"weights after batch {number}")
        if resumed.trace.facts.get(number) != whole.trace.facts[number]:
            found.append(f"after batch {number} {resumed.trace.facts.get(number)}, not {whole.trace.facts[number]}")
    if not torch.equal(resumed.weights, whole.weights):
        found.append("weights at the end")
    return found + state_differences(resumed.trace.ended, whole.trace.ended)


def state_differences(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of masters and moments that differ in a bit."""
    if state.keys() != expected.keys():
        return [f"masters and moments {list(state)}, not {list(expected)}"]
    return [name for name, values in expected.items() if not torch.equal(state[name], values)]


def check_resumes(
    case: Case, folder: Path, saves: Collection[int], resumes: Collection[int] | None = None
) -> list[str]:
    """Saves after the batches `saves`, and resumes from the saves `resumes`, or from all of them.

    Returns where these runs differ from one that neither saves nor stops.
    """
    whole = run(case)
    assert torch.isfinite(whole.weights).all() and whole.trace.ended
    found = [f"saving: {text}" for text in differences(run(case, folder, saves), whole)]
    for number in saves if resumes is None else resumes:
        resumed = run(case, resume=folder / f"{number}.ckpt")
        found += [f"resumed after batch {number}: {text}" for text in differences(resumed, whole, number)]
    return found


# -- the reference -----------------------------------------------------------------------------------------------------


class Reference(Callback):
    """Feeds `reference.py` with the gradients of a run, and goes on with it where the run resumes.

    Attributes:
        after: The reference after each batch, for runs that resume there; fill it to begin with another's.
        worst: Largest relative difference of this rank's masters at the end.
    """

    def __init__(self, case: Case, after: Mapping[int, ZenFlowReference] | None = None) -> None:
        self._case = case
        self.after = dict(after or {})
        self.worst = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Small)
        zero, number = zero_of(trainer), batches_done(trainer)
        self.params = {name: param for name, param in pl_module.net.named_parameters() if param.requires_grad}
        if number:
            self.reference = copy.deepcopy(self.after[number])
            # Where weights lie in host memory the device does not move them, whatever the run before did.
            now = zero.shard._schedule.interim
            self.reference.schedule = replace(self.reference.schedule, interim=now)
            return
        # ZeRO's masters begin as the model's weights are, rounded to 16 bits where the model is.
        initial = [(name, weight.to(zero.dtype).float(), group) for name, weight, group in pl_module.initial]
        self.reference = ZenFlowReference(
            initial,
            self._groups(trainer),
            zero.shard._schedule,
            topk_ratio=self._case.zenflow.get("topk_ratio", OFTEN["topk_ratio"]),
            moments_dtype=self._case.zenflow.get("moments_dtype", "fp32"),
            clip_norm=trainer.gradient_clip_val,
            ranks=trainer.world_size,
            stage3=zero.layout.cuts_params,
        )

    def _groups(self, trainer: Trainer) -> list[dict[str, Any]]:
        groups = zero_of(trainer).optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        self.reference.groups = self._groups(trainer)
        self.reference.step({name: trainer.strategy.gradient(param) for name, param in self.params.items()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        number = batches_done(trainer)
        if number in self._case.changes:
            self.reference.change_intervals(*self._case.changes[number])
        if number in self._case.settles:
            self.reference.settle()
        self.after[number] = copy.deepcopy(self.reference)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reference.settle()
        zero = zero_of(trainer)
        zero.complete()
        for segment in zero._tables[zero._rank].segments:
            expected = self.reference.masters(segment.spec.name.removeprefix("net.")).flatten()
            expected = expected[segment.param_start : segment.param_start + segment.numel]
            mine = zero.shard.host.arena.master[segment.start : segment.stop]
            self.worst = max(self.worst, relative(mine, expected))


def recut(reference: ZenFlowReference, ranks: int, stage3: bool) -> ZenFlowReference:
    """The same settled, and cut into blocks for another number of ranks, or another stage."""
    settled = copy.deepcopy(reference)
    settled.settle()
    settled._blocks_of_elements = partial(settled._blocks_of_elements, ranks=ranks, stage3=stage3)
    cuts = settled._blocks_of_elements(blocks=settled.schedule.update_interval)
    places, _ = places_of_elements(*settled._blocks_of_elements.args, ranks=ranks, stage3=stage3)
    for state, cut, place in zip(settled.states.values(), cuts, places, strict=True):
        settled._round_moments(state, state.selected)  # as they went home into the checkpoint, from the places of then
        state.block, state.place = cut.reshape(state.block.shape), place.reshape(state.place.shape)
    return settled


# -- another number of ranks, or stage ---------------------------------------------------------------------------------


def on(case: Case, ranks: int) -> Case:
    return case.but(settings={**case.settings, "devices": ranks})


def save_both(case: Case, folder: Path, ranks: int) -> None:
    """One run that saves with gradients held back, and one that settles first; and the reference at that point."""
    follows = Reference(on(case, ranks))
    run(on(case, ranks), folder / "held", [SAVED_AT], callbacks=[follows])
    run(on(case, ranks).but(settles=[SAVED_AT]), folder / "settled", [SAVED_AT])
    if os.environ.get("RANK", "0") == "0":
        torch.save(follows.after[SAVED_AT], folder / "reference.pt")


def resume_both(case: Case, folder: Path, ranks: int) -> list[str]:
    """Goes on from both on `ranks` ranks; returns what differs between them, and from the reference."""
    reference = torch.load(folder / "reference.pt", weights_only=False)
    follows = Reference(on(case, ranks), {SAVED_AT: recut(reference, ranks, stage3="config" in case.arguments)})
    runs: list[Run] = []
    for name in ("held", "settled"):
        runs.append(
            run(
                on(case, ranks),
                folder / f"{name} again",
                [SAVED_AT + 1],
                resume=folder / name / f"{SAVED_AT}.ckpt",
                callbacks=[follows] if name == "held" else [],
            )
        )
    held, settled = runs
    found = state_differences(held.trace.began, settled.trace.began) + differences(held, settled, SAVED_AT)
    # An error of 1e-7 may decide how a moment is rounded.
    if not follows.worst < (5e-5 if case.zenflow.get("moments_dtype") == "bf16" else 1e-6):
        found.append(f"masters {follows.worst:.1e} from the reference")
    return found


# -- random runs -------------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """A run in plain types, and two batches after which it stops and resumes."""
    accumulate = draw(st.sampled_from([1, 2, 3]))
    ends = [n for n in range(1, 2 * BATCHES) if n % BATCHES == 0 or n % BATCHES % accumulate == 0]
    topk_ratio = draw(st.sampled_from([0.3, 0.3, 0.6, 0, 1]))
    interval = st.integers(1, 7)
    changed = draw(st.lists(st.sampled_from(ends), max_size=3, unique=True))
    return {
        "zenflow": {
            "topk_ratio": topk_ratio,
            "update_interval": draw(interval),
            "select_interval": draw(interval),
            "full_warm_up_rounds": draw(st.sampled_from([0, 0, 2, 5])),
            "overlap_step": draw(st.booleans()),
            "look_ahead": draw(st.booleans()),
            "interim_step": draw(st.booleans()),
            "moments_dtype": draw(st.sampled_from(["fp32", "bf16"])),
        },
        "changes": [[n, draw(interval), draw(interval) if topk_ratio else None] for n in sorted(changed)],
        "infinite": draw(st.lists(st.integers(1, 2 * BATCHES), max_size=2, unique=True)),
        "precision": draw(st.sampled_from(["32-true", "bf16-mixed", "bf16-true", "16-mixed"])),
        "stage": draw(st.sampled_from([1, 2, 3, "3 offload"])),
        "accumulate": accumulate,
        "clip": draw(st.sampled_from([None, 0.3])),
        # Not at the end of an epoch, which Lightning counts in another way: `test_a_run_resumes_after_any_batch` stops there.
        "stops": sorted(
            draw(
                st.lists(st.integers(1, 2 * BATCHES - 1), min_size=2, max_size=2, unique=True).filter(
                    lambda stops: BATCHES not in stops
                )
            )
        ),
    }


def case_of(drawn: Mapping[str, Any], ranks: int = 1) -> Case:
    """What `schedules` drew, as a run."""
    scale = {"initial_scale_power": 6, "loss_scale_window": 3} if drawn["precision"] == "16-mixed" else {}
    return Case(
        zenflow={**drawn["zenflow"], "select_strategy": "step"},
        changes={n: (update_interval, select_interval) for n, update_interval, select_interval in drawn["changes"]},
        arguments={**stage_arguments(drawn["stage"]), **scale},
        settings={
            "precision": drawn["precision"],
            "accumulate_grad_batches": drawn["accumulate"],
            "gradient_clip_val": drawn["clip"],
            "devices": ranks,
        },
        module=partial(Numbered, infinite=drawn["infinite"]),
    )


def check_schedule(drawn: Mapping[str, Any], folder: Path, ranks: int = 1) -> list[str]:
    """Compares a run that stops twice with one that never does, bit for bit, and both with the reference."""
    case, (first, second) = case_of(drawn, ranks), drawn["stops"]
    follows = Reference(case)
    whole = run(case, callbacks=[follows])
    again = Reference(case, follows.after)
    run(case, folder, [first])
    run(case, folder, [second], resume=folder / f"{first}.ckpt")
    resumed = run(case, resume=folder / f"{second}.ckpt", callbacks=[again])
    found = differences(resumed, whole, second)
    if not (follows.worst < 1e-5 and again.worst < 1e-5):
        found.append(f"masters {follows.worst:.1e} and {again.worst:.1e} from the reference")
    return found
