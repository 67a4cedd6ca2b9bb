"""Everything that a comparison found, with where and how it was found: what `bench.json` holds."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .arguments import Plan
from .figures import Figures, Measured, figures_of

PACKAGES = ("lightning-zenflow", "torch", "lightning", "deepspeed")


@dataclass(frozen=True)
class Result:
    """A finished comparison.

    Attributes:
        plan: What was asked for.
        hardware: Names and values, for people and JSON.
        versions: Of Python and the packages.
        environment: Variables of every run.
        measured: Runs and reasons by mode.
    """

    plan: Plan
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    measured: Mapping[str, Measured]

    @property
    def figures(self) -> dict[str, Figures]:
        """The figures of every mode that has any."""
        return figures_of(self.measured, self.plan.job("compute"))

    def as_dict(self, footnotes: list[str]) -> dict[str, Any]:
        """Everything, for JSON: milliseconds, bytes, steps."""
        figures = self.figures
        arguments = dataclasses.asdict(self.plan)
        arguments.update(
            output=None if self.plan.output is None else str(self.plan.output), modes=list(self.plan.modes)
        )
        return {
            "format": 1,
            "hardware": dict(self.hardware),
            "versions": dict(self.versions),
            "arguments": arguments,
            "environment": dict(self.environment),
            "modes": {
                mode: {
                    "reason": found.reason,
                    "figures": dataclasses.asdict(figures[mode]) if mode in figures else None,
                    "runs": [run.as_dict() for run in found.runs],
                    "memory_runs": [run.as_dict() for run in found.memory],
                }
                for mode, found in self.measured.items()
            },
            "footnotes": footnotes,
        }


def hardware_of(device_title: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """The processor, the cores of this process, and the accelerator."""
    return {"processor": _processor(cpuinfo), "cores": len(os.sched_getaffinity(0)), "device": device_title}


def versions_of() -> dict[str, str]:
    """Versions of Python and of the packages that the figures depend on."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its source
            found[name] = "not installed"
    return found


def _processor(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
