"""Callbacks: what training with ZenFlow costs, and intervals that follow from it."""

from lightning_zenflow.callbacks.auto_tuner import AutoTuner
from lightning_zenflow.callbacks.stall_monitor import StallMonitor

__all__ = ["AutoTuner", "StallMonitor"]
