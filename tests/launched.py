"""What the programs of `tests.launching` run, however they are started: a training whose weights can be compared."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Trainer

from tests.live_training import Tiny, fit, say

FIXED = {"topk_ratio": 0.25, "update_interval": 3, "select_interval": 5, "select_strategy": "step"}
"""Automatic intervals follow measured times, which are never the same twice."""


def train(**settings: Any) -> Trainer:
    """Trains with fixed intervals, and leaves the weights in the file that `WEIGHTS` names, on rank 0."""
    module = Tiny()
    made = fit(module, **{"zenflow": FIXED, **settings})
    if made.is_global_zero:
        torch.save(module.state_dict(), os.environ["WEIGHTS"])
    say("saved by rank", made.global_rank)
    return made
