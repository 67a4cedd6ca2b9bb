"""Two ranks of one training as programs of `tests.live`, and how one ends because of the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.live import Program, started

BOUND_SECS = 15.0
"""Gloo notices at once that a peer is gone; Lightning's launcher looks every 5 seconds."""


@contextmanager
def two_ranks(folder: Path, code: str, port: int) -> Iterator[tuple[Program, Program]]:
    """Both ranks, started from outside as `torchrun` starts them."""
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "TORCHELASTIC_RUN_ID": "live",
            }
            ranks.append(stack.enter_context(started(folder, code, env=env)))
        yield ranks[0], ranks[1]


def ends_because_of_the_other(rank: Program, within_secs: float = BOUND_SECS) -> None:
    assert rank.end(within_secs) == 1, rank.output
    assert rank.errors() == ["RuntimeError"], rank.output
    assert "by peer" in rank.error("RuntimeError")
