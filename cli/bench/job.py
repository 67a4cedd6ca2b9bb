"""What a measured process is asked, and what it answers: plain values that go through JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WARM_UP_STEPS = 8
"""First steps of a run, which are not counted: memory is fetched from the system, DeepSpeed traces the model."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one mode, in a process of its own for each rank.

    Attributes:
        mode: A key of `modes.MODES`.
        setting: A key of `settings.SETTINGS`.
        depth: Blocks of the model.
        tokens: Tokens of a step and rank.
        steps: Steps, of which the first `WARM_UP_STEPS` are not counted.
        topk_ratio: Share of the columns that ZenFlow keeps on the device.
        update_interval: ZenFlow's fixed update interval, in steps.
        stage: ZeRO stage, 2 or 3; modes that end in `_2` run under 2.
        ranks: Processes that train together.
    """

    mode: str
    setting: str = "two-core"
    depth: int = 8
    tokens: int = 32
    steps: int = 24
    topk_ratio: float = 0.1
    update_interval: int = 4
    stage: int = 2
    ranks: int = 1

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of this mode."""
        return 2 if self.mode.endswith("_2") else self.stage

    @property
    def select_interval(self) -> int:
        """So that after the selection of the first step, one re-selection falls in the middle of the counted steps."""
        return WARM_UP_STEPS + max(1, (self.steps - WARM_UP_STEPS) // 2)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run came to; lists have one entry for each counted step.

    Attributes:
        numel: Parameters of the model.
        step_ms: From before forward to after the optimizer step, in milliseconds.
        passes_ms: Of these, forward and backward.
        stall_ms: Time in which training waited for the host; `None` where nobody measures it.
        selected_at: Positions of the steps with a re-selection.
        to_host_bytes: Counted bytes a step from device to host, on average; `None` where nobody counts them.
        to_device_bytes: The same from host to device.
        from_ranks_bytes: Counted bytes a step that a rank received from others, on average.
        resident_bytes: Proportional set size of the process and its descendants after the last step.
        intervals: Update interval and selection interval at the end; `None` without ZenFlow.
        settling_steps: Steps before the counted ones.
    """

    numel: int
    step_ms: list[float]
    passes_ms: list[float]
    stall_ms: list[float] | None = None
    selected_at: list[int] = dataclasses.field(default_factory=list)
    to_host_bytes: float | None = None
    to_device_bytes: float | None = None
    from_ranks_bytes: float = 0.0
    resident_bytes: int = 0
    intervals: list[int | None] | None = None
    settling_steps: int = WARM_UP_STEPS

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """The run of which `values` is the dictionary."""
        return cls(**values)
