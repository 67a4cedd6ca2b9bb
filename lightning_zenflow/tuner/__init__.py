"""The auto-tuner without its callback: from measured stalls to intervals, in plain Python (DESIGN section 2.4)."""

from lightning_zenflow.tuner.controller import Controller, Decision
from lightning_zenflow.tuner.options import Intervals, TunerOptions
from lightning_zenflow.tuner.windows import Observation, Window, WindowCollector

__all__ = ["Controller", "Decision", "Intervals", "Observation", "TunerOptions", "Window", "WindowCollector"]
