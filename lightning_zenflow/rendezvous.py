"""Whether the other ranks come as well: asked where an exception is handled, before anything that needs all of them.

A rank that fails alone would wait for the others for ever if it saved: they are training, and wait for its gradients. So each
rank that handles an exception leaves a word in the process group's store, which works without the others, and looks for
theirs for a while.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from torch.distributed import DistError, PrefixStore

MEETING_SECS = 10.0
"""How long a rank waits for the others. Ranks that fail for the same reason do so within a part of a step."""

LOOK_SECS = 0.05
"""Between two looks into the store."""

ANSWER_SECS = 5.0
"""How much longer the store itself may take, which lives in one of the ranks: that one may be stopped."""

_ALL, _MISSING = "all", "missing"


def all_come(store: Any, name: str, rank: int, world_size: int, within_secs: float = MEETING_SECS) -> bool:
    """Whether all ranks call this with the same name within a time; the answer is the same for all who get one in time.

    Bounded also if the store does not answer, which counts as no.

    Args:
        store: Of the process group.
        name: Of the meeting; never used before.
        rank: Of this process.
        world_size: Number of ranks.
        within_secs: How long to wait for the others.
    """
    answer: list[bool] = []

    def meet() -> None:
        with suppress(DistError, RuntimeError):  # the rank that holds the store has ended
            answer.append(_meet(PrefixStore(f"lightning_zenflow/{name}", store), rank, world_size, within_secs))

    # A thread, since a store whose rank is stopped answers never. As a daemon it holds up nobody's exit.
    thread = threading.Thread(target=meet, name="zenflow-rendezvous", daemon=True)
    thread.start()
    thread.join(within_secs + ANSWER_SECS)
    return answer == [True]


def _meet(store: Any, rank: int, world_size: int, within_secs: float) -> bool:
    store.set(f"rank {rank}", "here")
    ranks = [f"rank {other}" for other in range(world_size)]
    deadline = time.monotonic() + within_secs
    verdict = None
    while verdict is None:
        if store.check(["verdict"]):
            verdict = store.get("verdict").decode()
        elif store.check(ranks):
            verdict = _decide(store, _ALL)
        elif time.monotonic() > deadline:
            verdict = _decide(store, _MISSING)
        else:
            time.sleep(LOOK_SECS)
    return bool(verdict == _ALL)


def _decide(store: Any, verdict: str) -> str:
    """The first rank that decides does so for all: else one would go while another one, in the same moment, stays."""
    decided: str = store.compare_set("verdict", "", verdict).decode()
    return decided
