"""What the auto-tuner has measured at the `update_interval` in use: several windows, averaged, until the machine changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_zenflow.tuner.host_model import HostModel
from lightning_zenflow.tuner.windows import Window, typical

HISTORY_WINDOWS = 12
"""Windows that are averaged."""

SURE_WINDOWS = 3
"""Windows before anything is decided that is not urgent: one odd window among them does no harm."""

SETTLED_WINDOWS = 8
"""Windows after which an interval has proven itself, and only clear evidence changes it."""

CHANGE_RATIO = 1.25
"""Two windows in a row that differ by so much from those before mean that the machine has changed."""

SURE_SIGMAS = 2.0
"""Standard errors by which the host must be fast enough before a smaller interval is tried."""

SETTLED_SIGMAS = 3.0
"""The same where an interval has proven itself."""


FASTER_RATIO = 0.85
"""A host that needs no more than this share of what it needed has changed: what failed may be tried again."""

SETTLED_FASTER_RATIO = 0.93
"""The same where an interval has proven itself, since the need is known better then."""


@dataclass(frozen=True)
class Failure:
    """An interval at which the host was too slow, as it would be at all below.

    Attributes:
        interval: The `update_interval`.
        need_ratio: What the host needed there, as a share of the device's time.
        delay_secs: What it took in each step besides its busy times.
    """

    interval: int
    need_ratio: float
    delay_secs: float

    def is_outdated(self, model: HostModel, *, is_settled: bool) -> bool:
        """Whether the host has become so much faster that the interval may be tried again."""
        faster = SETTLED_FASTER_RATIO if is_settled else FASTER_RATIO
        return model.need_secs(self.interval) / model.device_step_secs(self.interval) < faster * self.need_ratio


class HostHistory:
    """The last windows at one `update_interval`."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known yet."""
        return not self._windows

    @property
    def is_sure(self) -> bool:
        """Whether one odd window would not matter."""
        return len(self._windows) >= SURE_WINDOWS

    @property
    def is_settled(self) -> bool:
        """Whether the interval has proven itself."""
        return len(self._windows) >= SETTLED_WINDOWS

    @property
    def stall_secs(self) -> float:
        """Measured update stall per step."""
        return typical([window.update_stall_secs for window in self._windows])

    def clear(self) -> None:
        """Forgets everything: the interval has changed."""
        self._windows = []

    def note(self, window: Window, share: float) -> None:
        """Takes in a usable window; drops what is older if the machine has changed.

        Args:
            window: Measured at the interval in use.
            share: What update stalls may take of the step time; their changes are judged by it.
        """
        times = replace(window, select_stall_secs=None, disagreement=None, deferred_mass_ratio=None)
        self._windows = [*self._windows, times][-HISTORY_WINDOWS:]
        if len(self._windows) >= 4 and _has_changed(self._windows[:-2], self._windows[-2:], share):
            self._windows = self._windows[-2:]

    def model(self, update_interval: int, overlap: bool) -> HostModel:
        """The machine as measured. At least one window must have been noted."""

        def of(name: str) -> float:
            return typical([getattr(window, name) for window in self._windows])

        busy = typical(_busy_secs(self._windows))
        # Over ranks the device's time is the least and the copy's the most: one need not be a part of the other.
        copy = min(of("copy_secs"), of("device_secs"))
        return HostModel(
            device_secs=of("device_secs") - copy,
            accumulate_secs=of("accumulate_secs"),
            adam_secs=of("update_secs") * update_interval,
            device_jitter_secs=of("device_jitter_secs"),
            host_jitter_ratio=min(1.0, of("host_jitter_secs") / busy) if busy > 0 else 0.0,
            overlap=overlap,
            whole_copy_secs=copy * update_interval,
        )

    def margin_secs(self, model: HostModel, update_interval: int, *, careful: bool) -> float:
        """By how much the host may be slower than measured; falls as more steps have been seen."""
        sigmas = SETTLED_SIGMAS if careful or self.is_settled else SURE_SIGMAS
        return sigmas * model.jitter_secs(update_interval) / math.sqrt(self._steps)

    def stall_error_secs(self, model: HostModel, update_interval: int) -> float:
        """Standard error of `stall_secs`."""
        return model.stall_jitter_secs(update_interval) / math.sqrt(self._steps)

    @property
    def _steps(self) -> int:
        return max(1, sum(window.steps for window in self._windows))

    def state(self) -> list[dict[str, Any]]:
        """The windows as plain dicts of numbers."""
        return [asdict(window) for window in self._windows]

    def load_state(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Takes over what `state` returned."""
        self._windows = [Window(**window) for window in state]


def _has_changed(before: Sequence[Window], last: Sequence[Window], share: float) -> bool:
    device = typical([window.device_secs for window in before])
    stall = typical([window.update_stall_secs for window in before])
    copy = typical([window.copy_secs for window in before])

    def moved(values: Sequence[float], usual: float) -> bool:
        return min(values) > CHANGE_RATIO * usual or max(values) * CHANGE_RATIO < usual

    return (
        moved([window.device_secs for window in last], device)
        or moved(_busy_secs(last), typical(_busy_secs(before)))
        or min(window.update_stall_secs for window in last) > stall + 2 * share * (device + stall)
        or min(window.copy_secs for window in last) > copy + 2 * share * device
    )


def _busy_secs(windows: Sequence[Window]) -> list[float]:
    return [window.accumulate_secs + window.update_secs for window in windows]
