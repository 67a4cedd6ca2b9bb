"""What happens at which batch of a soak: drawn from the number of the batch alone, so that every process knows it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

EPOCH = 400
"""Batches of an epoch."""


@dataclass(frozen=True)
class Soak:
    """A long run in several processes, one after the other.

    Attributes:
        steps: Optimizer steps, skipped ones included.
        legs: Processes, each of which resumes from a checkpoint of the one before.
        ranks: Ranks, each a process.
        stage: ZeRO stage.
        precision: Of the Trainer.
        accumulate: Micro-batches of a step.
        seed: Of everything that is drawn.
        leak: Bytes that the trainer keeps of every batch: a soak with a leak must fail.
        quiet: The run to compare with: the same course in one process, without pauses, saves and evaluations.
    """

    steps: int = 20_000
    legs: int = 8
    ranks: int = 1
    stage: int = 2
    precision: str = "32-true"
    accumulate: int = 1
    seed: int = 0
    leak: int = 0
    quiet: bool = False

    @property
    def batches(self) -> int:
        return self.steps * self.accumulate

    def _draw(self, what: str, batch: int) -> random.Random:
        return random.Random(f"{self.seed} {what} {batch}")

    # -- the course of the run, which the quiet one shares -----------------------------------------------------------

    def overflows(self, batch: int) -> bool:
        """Whether the gradient of this batch is not finite, so that its step is skipped."""
        return self._draw("overflow", batch).random() < 0.01

    def intervals_after(self, batch: int) -> tuple[int, int] | None:
        """Update and selection interval that hold after this batch, if they change there."""
        draw = self._draw("intervals", batch)
        if batch % self.accumulate or batch % EPOCH == 0 or draw.random() > 0.01:
            return None
        return draw.randint(1, 6), draw.randint(1, 20)

    # -- disturbances --------------------------------------------------------------------------------------------------

    def saves_after(self, batch: int) -> bool:
        return not self.quiet and (self._draw("save", batch).random() < 0.01 or batch in self.ends)

    @property
    def ends(self) -> list[int]:
        """The batches after which all legs but the last one end; never the last of an epoch, which Lightning counts on."""
        found = [leg * self.batches // self.legs for leg in range(1, self.legs)]
        moved = [end + self._draw("end", end).randint(0, 9) for end in found]
        return [end + (end % EPOCH == 0) for end in moved]

    def is_killed_after(self, batch: int) -> bool:
        """Whether a leg that ends here is killed, as by the system; else an exception ends it."""
        return self.ranks == 1 and self._draw("kill", batch).random() < 0.5

    def to_json(self) -> str:
        return json.dumps(asdict(self))
