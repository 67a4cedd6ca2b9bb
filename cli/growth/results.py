"""What was measured: plain numbers, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..passes import HostPasses


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """A model on one rank, its trainer and its background process on a core each.

    Attributes:
        numel: Parameters.
        tensors: In how many matrices.
        plain_secs: Forward and backward without an optimizer, median.
        step_secs: A whole step with ZenFlow, median.
        stall_secs: Of which the trainer waited for the host, mean.
        host_secs: The host was busy for a step, mean.
        core_ratio: Share of its core that the trainer had while it wanted it: 1 on an idle machine.
    """

    numel: int
    tensors: int
    plain_secs: float
    step_secs: float
    stall_secs: float
    host_secs: float
    core_ratio: float

    @property
    def overhead_secs(self) -> float:
        """What a step takes beyond forward and backward."""
        return self.step_secs - self.plain_secs

    @property
    def per_parameter_secs(self) -> float:
        """The same for each parameter."""
        return self.overhead_secs / self.numel


@dataclass(frozen=True, kw_only=True)
class CoresPoint(HostPasses):
    """The host's two passes, and a copy, on the same cores.

    Attributes:
        copy_bandwidth: Of a copy, every byte counted as read and as written, bytes/s.
    """

    copy_bandwidth: float

    @property
    def accumulate_share_ratio(self) -> float:
        """Of the bandwidth of a copy."""
        return self.accumulate_bandwidth / self.copy_bandwidth

    @property
    def update_share_ratio(self) -> float:
        """Of the bandwidth of a copy."""
        return self.update_bandwidth / self.copy_bandwidth


@dataclass(frozen=True, kw_only=True)
class RanksPoint:
    """The same model on several ranks of this machine under ZeRO-2.

    Attributes:
        ranks: How many; each has a background process.
        numel: Parameters of the model.
        plain_secs: Forward and backward of a rank while the others do the same, median; the slowest rank's.
        step_secs: A whole step, median; the slowest rank's.
        reduced_bytes: What a rank hands to sums over the ranks in a step: gradients and the norm.
        gathered_bytes: What it holds after gathering in a step: the ranks' blocks and selected values.
        calls: Collectives of a step.
        weights_bytes: All weights, for comparison.
    """

    ranks: int
    numel: int
    plain_secs: float
    step_secs: float
    reduced_bytes: int
    gathered_bytes: int
    calls: int
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """All of it. `available_cores` is how many this process may use, `torch` the version."""

    available_cores: int
    torch: str
    sizes: tuple[StepPoint, ...]
    tensors: tuple[StepPoint, ...]
    cores: tuple[CoresPoint, ...]
    ranks: tuple[RanksPoint, ...]

    @property
    def per_tensor_secs(self) -> float:
        """What one more tensor adds to a step at the same total size: the slope from the fewest to the most."""
        return slope([(point.tensors, point.overhead_secs) for point in self.tensors])

    @property
    def core_ratio(self) -> float:
        """The least share of its core that a trainer had."""
        return min(point.core_ratio for point in (*self.sizes, *self.tensors))

    @property
    def speed_ups(self) -> list[tuple[int, float, float]]:
        """Cores, and how many times faster than on one the accumulating and the updating pass are."""
        one = self.cores[0]
        return [
            (point.cores, one.accumulate_secs / point.accumulate_secs, one.update_secs / point.update_secs)
            for point in self.cores
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was measured, and what follows, in seconds and bytes."""
        found = dataclasses.asdict(self)
        for name in ("sizes", "tensors"):
            for row, point in zip(found[name], getattr(self, name), strict=True):
                row |= {"overhead_secs": point.overhead_secs, "overhead_secs_per_parameter": point.per_parameter_secs}
        rows = zip(found["cores"], self.cores, self.speed_ups, strict=True)
        for row, cores, (_, accumulate_ratio, update_ratio) in rows:
            row |= {
                "accumulate_bytes_per_sec": cores.accumulate_bandwidth,
                "update_bytes_per_sec": cores.update_bandwidth,
                "accumulate_speed_up_ratio": accumulate_ratio,
                "update_speed_up_ratio": update_ratio,
            }
        return {**found, "overhead_secs_per_tensor": self.per_tensor_secs}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line of least squares through `points`; 0 for a single one."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
