"""What a step cost: plain numbers, measured and never estimated."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple


class Span(NamedTuple):
    """What was done when, for a picture of a step.

    Attributes:
        lane: `device` for the training process, `host` for the background process.
        name: What it did.
        start_secs: When it began, on the system's monotonic clock, which both processes share.
        secs: How long it took.
    """

    lane: str
    name: str
    start_secs: float
    secs: float


class Timeline:
    """Collects the spans of a step. A span within another one belongs to the outer one."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._is_open = False

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a block of the training process."""
        if self._is_open:
            yield
            return
        self._is_open, start_secs = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_open = False
            self.spans.append(Span("device", name, start_secs, time.perf_counter() - start_secs))

    def fill(self, name: str, start_secs: float, stop_secs: float) -> None:
        """Adds what the training process did from `start_secs` to `stop_secs` whenever none of its spans tells otherwise."""
        gap_start_secs, gaps = start_secs, []
        for span in sorted((span for span in self.spans if span.lane == "device"), key=lambda span: span.start_secs):
            if span.start_secs + span.secs > gap_start_secs and span.start_secs < stop_secs:
                if span.start_secs > gap_start_secs:
                    gaps.append(Span("device", name, gap_start_secs, span.start_secs - gap_start_secs))
                gap_start_secs = span.start_secs + span.secs
        if stop_secs > gap_start_secs:
            gaps.append(Span("device", name, gap_start_secs, stop_secs - gap_start_secs))
        self.spans += gaps

    def total_secs(self, name: str, since_secs: float = -math.inf) -> float:
        """How long all spans of the training process with this name took that began at `since_secs` or later."""
        spans = (span for span in self.spans if span.lane == "device" and span.name == name)
        return sum((span.secs for span in spans if span.start_secs >= since_secs), 0.0)

    def take(self) -> tuple[Span, ...]:
        """All spans since the last call."""
        spans, self.spans = tuple(self.spans), []
        return spans


_TIMES = ("begin_secs", "spans")


@dataclass(frozen=True)
class StepStats:
    """Figures of the last finished optimizer step of this rank.

    Attributes:
        step: Number of applied steps so far: the one clock.
        skipped_steps: Steps skipped so far because a gradient was not finite.
        begin_secs: Start of the step's first forward, on the clock of `time.perf_counter`.
        step_secs: From then to the step's end.
        update_stall_secs: Time the training process was blocked waiting for a block of deferred updates.
        select_stall_secs: Time it was blocked in a re-selection.
        copy_secs: Time it spent copying finished blocks into the weights in this step, outside of barriers. It is no stall.
            Where copies are asynchronous (all accelerators but the CPU) it only starts them, and this is about 0.
        update_interval: `U` of this step.
        select_interval: Steps between selections; `None` if nothing is ever selected.
        to_host_bytes: Gradients and state copied to the host.
        to_device_bytes: Weights and state copied to the device.
        worker_accumulate_secs: Busy time of the background process for adding the last gradient to the blocks that it did
            not update.
        worker_update_secs: Busy time of the background process for the last block it updated, its gradient included.
        deferred_age_steps: Age of the oldest gradient that the device's weights do not contain yet.
        grad_norm: Global gradient norm before clipping.
        grad_norm_clipped: The same after clipping, as applied.
        selection_agreement: Share of the selected columns that a re-selection in this step has kept, from 0 to 1; `None`
            without a re-selection, or for the first one.
        deferred_mass_ratio: Share of the gradient's squared norm that lay in columns not selected, from 0 to 1, over all
            matrices and ranks; `None` without a re-selection.
        spans: What device and host did, and when; those of the host as they were reported since the step before.
    """

    step: int = 0
    skipped_steps: int = 0
    begin_secs: float = 0.0
    step_secs: float = 0.0
    update_stall_secs: float = 0.0
    select_stall_secs: float = 0.0
    copy_secs: float = 0.0
    update_interval: int = 1
    select_interval: int | None = None
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    worker_accumulate_secs: float = 0.0
    worker_update_secs: float = 0.0
    deferred_age_steps: int = 0
    grad_norm: float = 0.0
    grad_norm_clipped: float = 0.0
    selection_agreement: float | None = None
    deferred_mass_ratio: float | None = None
    spans: tuple[Span, ...] = ()

    @property
    def stall_ratio(self) -> float:
        """Share of the step during which the training process was blocked on the host, from 0 to 1."""
        stall = self.update_stall_secs + self.select_stall_secs
        return stall / self.step_secs if self.step_secs > 0 else 0.0

    def metrics(self, prefix: str = "zenflow/") -> dict[str, float]:
        """All figures that this step has, under fixed names, for a logger."""
        figures = {**self.figures(), "stall_ratio": self.stall_ratio}
        return {prefix + name: float(value) for name, value in figures.items() if value is not None}

    def figures(self) -> dict[str, float | None]:
        """All fields but those that tell when something was."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _TIMES}


@dataclass(frozen=True)
class RunFacts:
    """What a rank works on.

    Attributes:
        stage: ZeRO stage.
        shard_numel: Elements of the rank's shard, padding included.
        memory_steps: Steps that AdamW's second moment remembers, 1 / (1 - beta2); the least of all groups.
        select_unit_steps: Steps of which `select_interval` is a multiple: those of an epoch, or 1.
    """

    stage: int
    shard_numel: int
    memory_steps: float
    select_unit_steps: int
