"""`ZenFlowConfig`: every setting of the algorithm, documented and validated in this one place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from lightning_zenflow.shown import shown

AUTO_UPDATE_INTERVAL_STEPS = 4
"""Where `update_interval="auto"` begins, before anything is measured."""

AUTO_SELECT_INTERVAL_STEPS = 64
"""Where `select_interval="auto"` begins (in steps), before anything is measured."""


MAX_UPDATE_INTERVAL_STEPS = 1000
"""More blocks than that only cost time: the host gets a message for each."""

MAX_SELECT_INTERVAL_STEPS = 10**9

MAX_WARM_UP_STEPS = 10**9

MAX_CORES = 1 << 16
"""Linux numbers far fewer."""


def check_interval(name: str, value: Any, rule: str = "a whole number") -> None:
    """Refuses what is no interval in steps.

    Args:
        name: `update_interval` or `select_interval`, for its limit and for the message.
        value: Not `auto`.
        rule: What to call it.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of range.
    """
    limit = MAX_UPDATE_INTERVAL_STEPS if name == "update_interval" else MAX_SELECT_INTERVAL_STEPS
    message = f"`{name}` must be {rule}, got {shown(value)}. It counts steps, from 1 to {limit}."
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(message)
    if not 1 <= value <= limit:
        raise ValueError(message)


def _plain(value: Any) -> Any:
    """A number of NumPy as Python's; a list with a copy of its own."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class ZenFlowConfig:
    """Settings of ZenFlow; the keys of DeepSpeed's `"zenflow"` block keep their names and meaning.

    Raises:
        TypeError: A field has the wrong type. The message names field, value and remedy.
        ValueError: A field is out of range, or two fields contradict each other. Likewise.
    """

    topk_ratio: float = 0.1
    """Share of each matrix's columns that live on the device and are updated there at every step, from 0 (none) to 1
    (all). Costs 14 bytes of device memory per selected element. With 0, what is said of selections has no use. Measured from
    0.01 to 0.3, accuracy differs by no more than between seeds (`examples/accuracy.md`): take less where memory is scarce."""

    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """Unit of `select_interval`: `step`, or `epoch` (length taken from the Trainer). `auto` leaves the choice to the
    package and needs `select_interval: auto`."""

    select_interval: int | Literal["auto"] = "auto"
    """How often columns are selected anew, in the unit of `select_strategy`. `auto` begins with 64 steps (with
    `select_strategy: epoch`, 1 epoch) and is tuned while training, see `stall_budget`."""

    update_interval: int | Literal["auto"] = "auto"
    """Every deferred element is updated once in this many steps. `auto` begins with 4 and is tuned while training: the
    smallest for which the host keeps up, 16 at most. Up to 8 no loss of accuracy was measured, and with 16 only from scratch at
    a rate above its best (`examples/accuracy.md`)."""

    stall_budget: float = 0.05
    """Share of a step, from above 0 to 1, that automatic intervals let the device wait for the host: half of it for blocks
    that are late, half for selections."""

    overlap_step: bool = True
    """Let the host update one block while the device computes the next step. `false` waits for the host at every
    step."""

    offload: bool = False
    """Keep the optimizer state of the selected columns on the host too. Not supported yet: must be `false`."""

    auto_ratio: float = 0.99
    """Upper bound for an automatic `update_interval`: of the gradient (squared norm) that AdamW's second moment remembers,
    1 / (1 - beta2) steps, this share must have reached the weights, from 0 (no bound) to 1 (update at every step)."""

    full_warm_up_rounds: int = 0
    """First steps in which every weight is updated synchronously and nothing is selected. 0, since nothing that was measured
    needs it; the schedulers of those runs warm the rate up."""

    pt_reserved_cores_perc: float = 0.5
    """Share of this process's cores left to PyTorch, from 0 to 1; the background process runs on the others. The
    trainer's own affinity is never changed."""

    look_ahead: bool = True
    """Show the device each deferred weight extrapolated along its last move, to the middle of the time it stays
    visible. The fp32 master is never extrapolated. `false` costs accuracy from scratch."""

    interim_step: bool = True
    """Let the device move deferred weights itself at each step, along the gradient, until the host's update arrives, and give
    second moments the spread of gradients. What keeps AdamW's accuracy at high learning rates and long update
    intervals (`examples/accuracy.md`). Costs a pass over the weights, and with several ranks under ZeRO-1 and 2 the gathering
    of all weights that plain ZeRO has. Weights then move during backward: hooks between backward and step see them moved. Not
    done where weights lie in host memory."""

    deferred_lr_scale: Literal["linear", "sqrt", "none"] = "linear"
    """Learning rate of one update that stands for n steps: the sum of their n rates (`linear`), that sum divided by
    the square root of n (`sqrt`), or their mean (`none`). The latter two train as with a lower rate, and were worse in all that
    was measured (`examples/accuracy.md`)."""

    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    """What the host keeps AdamW's two moments in. `bf16` saves 4 bytes of host memory per parameter (14 instead of 18 with
    16-bit weights). They are computed in fp32 and rounded stochastically, the same on every run, so that small changes of
    the second moment are not lost. Weights are not those of an fp32 run, and an update takes the host up to twice as long
    where arithmetic and not memory limits it. Masters and accumulated gradients stay in fp32, and so does the state of
    selected columns, whose moments are rounded when a column is no longer selected. Checkpoints go both ways between the
    two."""

    worker_cores: list[int] | None = None
    """Cores of the background process of this rank, as the system numbers them; overrides
    `pt_reserved_cores_perc`. Only for one rank per machine."""

    worker_timeout_secs: float = 300.0
    """How long the trainer waits for the background process before it gives up with an error, in seconds."""

    def __post_init__(self) -> None:
        for field in fields(self):  # numbers of NumPy are fine, but must not get into checkpoints and JSON
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        for name in ("topk_ratio", "auto_ratio", "pt_reserved_cores_perc", "stall_budget"):
            self._check_ratio(name)
        self._require("stall_budget", self.stall_budget > 0, "above 0", remedy="0.05 means five percent of a step.")
        for name in ("overlap_step", "offload", "look_ahead", "interim_step"):
            remedy = "Write true or false, without quotes."
            self._require(name, isinstance(getattr(self, name), bool), "true or false", TypeError, remedy)
        self._check_word("select_strategy", ("auto", "step", "epoch"), "It is the unit of `select_interval`.")
        self._check_word("deferred_lr_scale", ("linear", "sqrt", "none"), "linear is what has been measured best.")
        remedy = "bf16 takes 4 bytes less per parameter; fp16 has too few exponents for a second moment."
        self._check_word("moments_dtype", ("fp32", "bf16"), remedy)
        for name in ("select_interval", "update_interval"):
            self._check_interval(name)
        self._check_count("full_warm_up_rounds")
        self._check_worker()
        self._check_contradictions()

    def _require(
        self, name: str, holds: bool, rule: str, error: type[Exception] = ValueError, remedy: str = ""
    ) -> None:
        if not holds:
            hint = f" {remedy}" if remedy else ""
            raise error(f"`{name}` must be {rule}, got {shown(getattr(self, name))}.{hint}")

    def _check_word(self, name: str, words: tuple[str, ...], remedy: str) -> None:
        value, rule = getattr(self, name), f"{', '.join(words[:-1])} or {words[-1]}"
        self._require(name, isinstance(value, str) and value in words, rule, remedy=remedy)

    def _check_ratio(self, name: str) -> None:
        value, remedy = getattr(self, name), "0.1 means ten percent."
        self._require(name, _is_number(value), "a number from 0 to 1", TypeError, remedy)
        self._require(name, 0 <= value <= 1, "a number from 0 to 1", remedy=remedy)

    def _check_interval(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value != "auto":
            check_interval(name, getattr(self, name), 'a whole number of at least 1, or "auto"')

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        rule, remedy = f"a whole number of steps, from 0 to {MAX_WARM_UP_STEPS}", "0 means none."
        self._require(name, isinstance(value, int) and not isinstance(value, bool), rule, TypeError, remedy)
        self._require(name, 0 <= value <= MAX_WARM_UP_STEPS, rule, remedy=remedy)

    def _check_worker(self) -> None:
        seconds, rule, remedy = self.worker_timeout_secs, "a number of seconds above 0, at most 1e6", "300 is usual."
        self._require("worker_timeout_secs", _is_number(seconds), rule, TypeError, remedy)
        self._require("worker_timeout_secs", 0 < seconds <= 1e6, rule, remedy=remedy)
        cores = self.worker_cores
        if cores is None:
            return
        rule, remedy = (
            "a list of different core numbers, 0 or more",
            "For example [0, 1]; leave it out to have them chosen.",
        )
        whole = isinstance(cores, (list, tuple)) and all(type(core) is int for core in cores)
        self._require("worker_cores", whole, rule, TypeError, remedy)
        holds = len(cores) > 0 and 0 <= min(cores) <= max(cores) < MAX_CORES and len(set(cores)) == len(cores)
        self._require("worker_cores", holds, rule, remedy=remedy)

    def _check_contradictions(self) -> None:
        remedy = "Leave it out."
        self._require("offload", not self.offload, "false (true is not supported yet)", NotImplementedError, remedy)
        automatic = self.select_strategy != "auto" or self.select_interval == "auto"
        self._require(
            "select_interval",
            automatic,
            '"auto" while `select_strategy` is "auto"',
            remedy='Set `select_strategy` to "step" or "epoch" to give the interval yourself.',
        )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> ZenFlowConfig:
        """Builds a config from a mapping such as DeepSpeed's `"zenflow"` block.

        Raises:
            TypeError: `settings` is no mapping, or a field has the wrong type.
            ValueError: A key is unknown (the message names it and the closest known one), or a field is refused.
        """
        if not isinstance(settings, Mapping):
            raise TypeError(
                f"`zenflow` must be a mapping of settings, got {shown(settings)}. Write `zenflow: {{...}}`."
            )
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key == "steps_per_epoch":
                raise ValueError(
                    "`zenflow.steps_per_epoch` must be left out: it comes from the Trainer. Remove the key."
                )
            if key not in known:
                name = key if isinstance(key, str) else shown(key)
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean `{close[0]}`?" if close else f"Known keys: {', '.join(known)}."
                raise ValueError(f"`zenflow` has no key `{name}`. {hint}")
        return cls(**settings)

    @property
    def is_automatic(self) -> bool:
        """Whether an interval is tuned while training; a selection interval is not where nothing is selected."""
        return self.update_interval == "auto" or (self.select_interval == "auto" and self.topk_ratio > 0)

    def update_interval_steps(self) -> int:
        """The update interval `U` in steps; where it begins, if it is `auto`."""
        return AUTO_UPDATE_INTERVAL_STEPS if self.update_interval == "auto" else self.update_interval

    def select_interval_steps(self, steps_per_epoch: int | None) -> int:
        """The selection interval in steps, with epochs resolved; where it begins, if it is `auto`.

        Args:
            steps_per_epoch: Optimizer steps in one epoch of this run, or `None` if the data loader has no length.

        Raises:
            ValueError: The interval is in epochs and an epoch has no length.
        """
        if self.select_strategy != "epoch":
            return AUTO_SELECT_INTERVAL_STEPS if self.select_interval == "auto" else self.select_interval
        if steps_per_epoch is None:
            raise ValueError(
                "`select_strategy` must be step for a data loader without a length, got 'epoch'. Set `select_strategy: step`"
                " and `select_interval` to a number of steps."
            )
        epochs = 1 if self.select_interval == "auto" else self.select_interval
        return max(1, epochs * steps_per_epoch)
