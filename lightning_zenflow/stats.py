"""What a step cost: plain numbers, measured and never estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepStats:
    """Figures of the last finished optimizer step of this rank.

    Attributes:
        step: Number of applied steps so far: the one clock.
        skipped_steps: Steps skipped so far because a gradient was not finite.
        step_secs: From the start of the step's first forward to its end.
        update_stall_secs: Time the training process was blocked waiting for a block of deferred updates.
        select_stall_secs: Time it was blocked in a re-selection.
        to_host_bytes: Gradients and state copied to the host.
        to_device_bytes: Weights and state copied to the device.
        worker_accumulate_secs: Busy time of the background process for the last gradient it took in.
        worker_update_secs: Busy time of the background process for the last block it updated.
        deferred_age_steps: Age of the oldest gradient that the device's weights do not contain yet.
        grad_norm: Global gradient norm before clipping.
        grad_norm_clipped: The same after clipping, as applied.
    """

    step: int = 0
    skipped_steps: int = 0
    step_secs: float = 0.0
    update_stall_secs: float = 0.0
    select_stall_secs: float = 0.0
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    worker_accumulate_secs: float = 0.0
    worker_update_secs: float = 0.0
    deferred_age_steps: int = 0
    grad_norm: float = 0.0
    grad_norm_clipped: float = 0.0

    @property
    def stall_ratio(self) -> float:
        """Share of the step during which the training process was blocked on the host, from 0 to 1."""
        stall = self.update_stall_secs + self.select_stall_secs
        return stall / self.step_secs if self.step_secs > 0 else 0.0

    def metrics(self, prefix: str = "zenflow/") -> dict[str, float]:
        """All figures under fixed names, for a logger."""
        return {
            prefix + name: float(value) for name, value in {**asdict(self), "stall_ratio": self.stall_ratio}.items()
        }
