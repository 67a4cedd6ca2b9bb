"""Whether a quantity stays where it is: a robust slope over a run, which neither noise nor a few jumps move.

Memory is judged by its slowest part, since allocators take more for a while, ever less of it: seen were 0.2 to 0.8 MiB in the
first thousand batches, and 12 KiB in 2,000 saves behind the first 2,000. What leaks grows in all parts alike.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

MIN_SAMPLES = 20
MAX_SAMPLES = 200

PARTS = 3
"""Each of which must have grown before memory counts as growing."""

LIMITS = {"bytes": 256 * 2**10, "files": 1.0, "threads": 1.0}
"""What may be gained over the samples."""

NOISE = 4.0
"""Growth below so many times the usual distance from the line is none."""

BYTES_PER_STEP = 128
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
    """Slope per step of a quantity, and what it makes over all samples; the first third, which warms up, is left out.

    Of bytes the slope of the part with the lowest one, and nothing if noise explains it.
    """
    settled = samples[len(samples) // 3 :]
    thinned = settled[:: max(1, len(settled) // MAX_SAMPLES)]
    points = [(float(step), float(found[name])) for step, found in thinned]
    if len(points) < 2 * PARTS:
        return 0.0, 0.0
    each, span = slope(points), points[-1][0] - points[0][0]
    if name.startswith("bytes"):
        each = min(each, *(slope(part) for part in _parts(points)))
        if abs(each * span) < NOISE * _noise(points):
            return 0.0, 0.0
    return each, each * span


def _parts(points: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    ends = [len(points) * part // PARTS for part in range(PARTS + 1)]
    return [points[start:end] for start, end in itertools.pairwise(ends)]


def _noise(points: Sequence[tuple[float, float]]) -> float:
    """Median distance from the line through the points."""
    each = slope(points)
    rests = [value - each * step for step, value in points]
    middle = statistics.median(rests)
    return statistics.median(abs(rest - middle) for rest in rests)


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
