"""Brings a fault into a copy of the package, and sees which tests notice it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.line import Break, Line

REPO = Path(__file__).resolve().parents[2]
_IGNORED = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist")


def places(broken_by: Break, package: Path = REPO / "lightning_zenflow") -> list[Path]:
    """The files of the package that hold the line, each as often as they do."""
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    return [path for path, source in sources.items() for _ in range(source.count(broken_by.old))]


def failing(tests: Sequence[str], timeout_secs: float = 1800.0) -> set[str]:
    """Those of the tests that fail as the package is: they would notice anything."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rfE", "-m", "", *(f"tests/{test}" for test in tests)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=timeout_secs)
    reported = (line.split(" ")[1] for line in done.stdout.split("\n") if line.startswith(("FAILED ", "ERROR ")))
    return {name.partition("[")[0].removeprefix("tests/") for name in reported}


def notices(line: Line, tests: Sequence[str], timeout_secs: float = 600.0) -> dict[str, bool]:
    """Whether each of the tests fails in a copy that is broken."""
    assert line.broken_by is not None
    with tempfile.TemporaryDirectory(prefix="zenflow-broken-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPO, copy, ignore=_IGNORED, symlinks=True)
        (place,) = places(line.broken_by, copy / "lightning_zenflow")
        place.write_text(place.read_text().replace(line.broken_by.old, line.broken_by.new))
        return {test: _fails(copy, test, timeout_secs) for test in tests}


def _fails(copy: Path, test: str, timeout_secs: float) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-x",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        f"tests/{test}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_secs)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test} could not be run:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.returncode == 1
