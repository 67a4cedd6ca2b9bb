"""Whether a quantity stays where it is: a robust slope over a run, which neither noise nor a few jumps move."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

MIN_SAMPLES = 20
MAX_SAMPLES = 200

LIMITS = {"bytes": 4 * 2**20, "files": 1.0, "threads": 1.0}
"""What may be gained over the samples: allocators keep some memory, by and by less; nothing else may grow at all."""

BYTES_PER_STEP = 512
"""Growth below this is no fault in any number of steps that anybody trains: what a run tells of itself takes as much."""

Sample = tuple[int, Mapping[str, float]]
"""A step, and by name what was measured there: names begin with a key of `LIMITS`."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs of points."""
    slopes = [
        (other[1] - one[1]) / (other[0] - one[0])
        for index, one in enumerate(points)
        for other in points[index + 1 :]
        if other[0] != one[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Slope per step of a quantity, and what it makes over all samples; the first third, which warms up, is left out."""
    settled = samples[len(samples) // 3 :]
    thinned = settled[:: max(1, len(settled) // MAX_SAMPLES)]
    points = [(float(step), float(found[name])) for step, found in thinned]
    if len(points) < 2:
        return 0.0, 0.0
    each = slope(points)
    return each, each * (points[-1][0] - points[0][0])


def grown(samples: Sequence[Sample]) -> list[str]:
    """What has grown, in words. Of too few samples nothing can be said."""
    if len(samples) < MIN_SAMPLES:
        return []
    found = []
    for name in samples[0][1]:
        each, total = growth(samples, name)
        kind = name.split(" ")[0]
        if total >= LIMITS[kind] and (kind != "bytes" or each > BYTES_PER_STEP):
            found.append(f"{name}: {each:+.3g} a step, {total:+.3g} in all")
    return found
