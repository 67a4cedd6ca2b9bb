from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import lightning_zenflow

REPO = Path(__file__).resolve().parents[2]


def test_the_package_and_its_distribution_have_the_same_version() -> None:
    assert version("lightning-zenflow") == lightning_zenflow.__version__


def test_every_folder_with_code_is_a_package_of_the_distribution() -> None:
    # tomllib comes with Python 3.11 only.
    (packages,) = re.findall(r"^packages = (\[.*?\])$", (REPO / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    folders = {path.parent for root in ("lightning_zenflow", "cli") for path in (REPO / root).rglob("*.py")}
    found = {".".join(folder.relative_to(REPO).parts) for folder in folders}
    assert set(ast.literal_eval(packages)) == {re.sub(r"^cli\b", "lightning_zenflow.cli", name) for name in found}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_wheel_and_source_distribution_hold_everything_and_nothing_else(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "dist", "lightning_logs", "__pycache__")
    shutil.copytree(REPO, checkout, ignore=skip)
    # The wheel is made from the source distribution, so whatever the latter lacks is missing in both.
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == f"lightning_zenflow-{lightning_zenflow.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"lightning_zenflow", info}
    code = {f"lightning_zenflow/{path.relative_to(REPO / 'lightning_zenflow')}" for path in source("lightning_zenflow")}
    code |= {f"lightning_zenflow/cli/{path.relative_to(REPO / 'cli')}" for path in source("cli")}
    assert {name for name in names if name.endswith(".py")} == code
    assert {"lightning_zenflow/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert "lightning-zenflow = lightning_zenflow.cli:main" in scripts
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.MULTILINE)
    assert re.search(r"^Requires-Python: <3\.14,>=3\.10$", metadata, re.MULTILINE)

    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive_of_source:
        inside = {name.partition("/")[2] for name in archive_of_source.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "cli/main.py", "lightning_zenflow/py.typed"} <= inside


def source(folder: str) -> list[Path]:
    return sorted((REPO / folder).rglob("*.py"))
