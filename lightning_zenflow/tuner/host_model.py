"""How long the host needs for a step, and how long the trainer waits for it, at any `update_interval`.

Each step the host adds the whole gradient to its accumulator and updates one of `U` blocks, so that it needs
`accumulate + adam / U`. With overlap it has one whole step for that, without it the trainer waits for all of it. The device
copies a finished block into the weights in each step, `copy / U`, where copies are synchronous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_zenflow.wording import in_words, percent


@dataclass(frozen=True)
class HostModel:
    """One machine, as far as intervals are concerned.

    Attributes:
        device_secs: A step without stalls and without copying a block.
        accumulate_secs: Busy time of the host for one gradient.
        adam_secs: Busy time of the host for AdamW on all blocks.
        device_jitter_secs: Standard deviation of `device_secs` from step to step.
        host_jitter_ratio: Standard deviation of the host's time, as a share of it.
        overlap: Whether a block may arrive one step late.
        scale_ratio: Share of its busy times that the host really takes, at most 1.
        delay_secs: What it takes in each step besides its busy times.
        whole_copy_secs: Time of the device for copying all blocks into the weights.
    """

    device_secs: float
    accumulate_secs: float
    adam_secs: float
    device_jitter_secs: float = 0.0
    host_jitter_ratio: float = 0.0
    overlap: bool = True
    scale_ratio: float = 1.0
    delay_secs: float = 0.0
    whole_copy_secs: float = 0.0

    def device_step_secs(self, update_interval: int) -> float:
        """A step without stalls."""
        return self.device_secs + self.whole_copy_secs / update_interval

    def copy_ratio(self, update_interval: int) -> float:
        """Share of a step without stalls that copying its block takes."""
        return self.whole_copy_secs / update_interval / self.device_step_secs(update_interval)

    def need_secs(self, update_interval: int) -> float:
        """Host time for one step."""
        return self.scale_ratio * (self.accumulate_secs + self.adam_secs / update_interval) + self.delay_secs

    def jitter_secs(self, update_interval: int) -> float:
        """Standard deviation of the difference between the host's and the device's time."""
        return math.hypot(self.device_jitter_secs, self.host_jitter_ratio * self.need_secs(update_interval))

    def stall_jitter_secs(self, update_interval: int) -> float:
        """About the standard deviation of the stall from step to step, where it is small."""
        return (
            0.4 * self.jitter_secs(update_interval)
            if self.overlap
            else self.host_jitter_ratio * self.need_secs(update_interval)
        )

    def stall_secs(self, update_interval: int, margin_secs: float = 0.0) -> float:
        """Expected wait per step, if the host needs `margin_secs` more than expected.

        With overlap this is the mean of `max(0, need - device)`, both normally distributed: with jitter the trainer waits
        now and then although the host is fast enough on average.
        """
        need = self.need_secs(update_interval) + margin_secs
        if not self.overlap:
            return need
        late, jitter = need - self.device_step_secs(update_interval), self.jitter_secs(update_interval)
        if jitter <= 1e-6 * abs(late) or jitter == 0:
            return max(0.0, late)
        z = late / jitter
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return max(0.0, late * math.erfc(-z / math.sqrt(2)) / 2 + jitter * density)

    def step_secs(self, update_interval: int) -> float:
        """Expected step, without re-selections."""
        return self.device_step_secs(update_interval) + self.stall_secs(update_interval)

    def corrected(self, update_interval: int, stall_secs: float) -> HostModel:
        """The same machine, so corrected that it explains a measured stall.

        A longer stall than expected comes from what busy times do not show, and such waits do not shrink with the block.
        For a shorter one the busy times are scaled, down to a quarter.
        """
        is_slower = self.stall_secs(update_interval) < stall_secs
        low, high = (0.0, self.device_step_secs(update_interval) + stall_secs) if is_slower else (0.25, 1.0)
        model = self
        for _ in range(40):
            middle = (low + high) / 2
            model = replace(self, delay_secs=middle) if is_slower else replace(self, scale_ratio=middle)
            low, high = (middle, high) if model.stall_secs(update_interval) < stall_secs else (low, middle)
        return model

    def fastest(self, lowest: int, highest: int, tolerance: float) -> int:
        """Smallest interval whose step is within `tolerance` (a ratio) of the shortest, which is that of `highest`."""
        limit = (1 + tolerance) * self.step_secs(highest)
        return next((some for some in range(lowest, highest) if self.step_secs(some) <= limit), highest)

    def about_fastest(self, current: int, lowest: int, highest: int, tolerance: float) -> int:
        """The same, but `current` if that is about as good: what has moved since it was chosen may be noise."""
        least, most = (self.fastest(lowest, highest, share * tolerance) for share in (1.25, 0.75))
        return current if least <= current <= most else self.fastest(lowest, highest, tolerance)

    def stall_in_words(self, update_interval: int, stall_secs: float) -> str:
        """A measured stall as a share of the step that it is part of."""
        step_secs = self.device_step_secs(update_interval) + stall_secs
        return f"update stall {percent(stall_secs / step_secs)} of {in_words(step_secs)}"

    def in_words(self, update_interval: int) -> str:
        """What the host needs at an interval, and what it has."""
        hidden = ""
        if self.delay_secs >= 0.05 * self.need_secs(update_interval):
            hidden = f", and {in_words(self.delay_secs)} that its busy times do not show"
        device = in_words(self.device_step_secs(update_interval))
        return (
            f"the host needs {in_words(self.need_secs(update_interval))} a step (accumulate"
            f" {in_words(self.accumulate_secs)}, AdamW {in_words(self.adam_secs)} / {update_interval}{hidden})"
            f" {f'while the device computes for {device}' if self.overlap else f'after {device} on the device'}"
        )
