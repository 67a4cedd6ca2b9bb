"""The table of internals is what the source uses, pyproject.toml agrees with it, and what does not fit is one clear error."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_zenflow import ZenFlowStrategy, internals
from lightning_zenflow.internals_table import SUPPORTED, TABLE, Internal
from tests.internals_used import REPO, used, words

DOTTED = {row.name for row in TABLE} | {f"{row.name}.{name}" for row in TABLE for name in row.attributes}
BARE = {part for name in DOTTED for part in name.split(".")}


@pytest.fixture(autouse=True)
def _checked_anew() -> Iterator[None]:
    internals.check.cache_clear()
    yield
    internals.check.cache_clear()


def having(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """The installed version of a package is another one, or there is none."""
    monkeypatch.setattr(
        internals, "installed_version", lambda asked: version if asked == name else metadata.version(asked)
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_internal_that_the_source_uses_is_in_the_table() -> None:
    missing = {name for name in used() if name not in (DOTTED if "." in name else BARE)}
    assert not missing, f"Add to lightning_zenflow/internals_table.py: {', '.join(sorted(missing))}"


def test_everything_in_the_table_is_used() -> None:
    names = {name for row in TABLE for name in row.attributes or [row.name.rpartition(".")[2]]}
    unused = names - words()
    assert not unused, f"Remove from lightning_zenflow/internals_table.py: {', '.join(sorted(unused))}"


def test_the_installed_packages_have_all_of_it() -> None:
    assert [problem for row in TABLE for problem in internals.problems(row)] == []


def test_pyproject_asks_for_the_versions_of_the_table() -> None:
    # Not with a TOML parser, which Python 3.10 has none of.
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", (REPO / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed
    requirements = map(Requirement, re.findall(r'^ *"(.*)",$', listed[1], re.MULTILINE))
    bounds = {requirement.name: requirement.specifier for requirement in requirements}
    assert {name: bounds[name] for name in SUPPORTED} == {name: SpecifierSet(text) for name, text in SUPPORTED.items()}
    oldest = dict(re.findall(r"^(\w+)==(\S+)$", (REPO / ".ci" / "oldest.txt").read_text(), re.MULTILINE))
    assert oldest.keys() >= bounds.keys()
    for name, specifier in bounds.items():
        lowest = [bound.version for bound in specifier if bound.operator in (">=", "==")]
        assert specifier.contains(oldest[name]) and oldest[name].startswith(tuple(lowest))


# -- the check ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "supported"),
    [
        *(("deepspeed", version, False) for version in ("0.18.9", "0.19.7", "0.19.9", "0.20.0")),
        *(("deepspeed", version, True) for version in ("0.19.8", "0.19.8+local")),
        *(("lightning", version, False) for version in ("2.6.0", "2.6.2", "2.6.3", "2.6.7", "2.7.0", "3.0")),
        *(("lightning", version, True) for version in ("2.6.1", "2.6.4", "2.6.6")),
        *(("torch", version, False) for version in ("2.12.1", "2.15.0")),
        *(("torch", version, True) for version in ("2.13.0+cpu", "2.14.1+cu130", "2.14.0.dev20260901")),
    ],
)
def test_a_version_is_accepted_or_named_with_the_range_and_the_remedy(
    name: str, version: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, name, version)
    if supported:
        ZenFlowStrategy()
        return
    with pytest.raises(ImportError) as caught:
        ZenFlowStrategy()
    assert str(caught.value) == (
        f"`{name}` must be a supported version ({SUPPORTED[name]}), got {version}. ZenFlow uses names of it that other"
        f' versions may not have. Install one with `pip install --force-reinstall "{name}{SUPPORTED[name]}"`.'
    )


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, "deepspeed", None)
    with pytest.raises(
        ImportError, match=r"^`deepspeed` must be .* got None. It is not installed. Install one with `pip"
    ):
        ZenFlowStrategy()


def test_names_that_are_gone_are_listed_with_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage_1_and_2

    def renamed(self: Any, folder: str, tag: str) -> None: ...

    monkeypatch.delattr(stage_1_and_2, "INITIAL_MICRO_STEP_ID")
    monkeypatch.setattr(DeepSpeedEngine, "_get_zero_ckpt_name", renamed)
    monkeypatch.setattr(internals, "TABLE", (*TABLE, Internal("deepspeed.runtime.no_such.thing", "test this")))
    with pytest.raises(ImportError) as caught:
        ZenFlowStrategy()
    shown = str(caught.value)
    assert shown.startswith(
        f"`deepspeed` must be a supported version ({SUPPORTED['deepspeed']}), got 0.19.8, without `deep"
    )
    assert "`deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID` (used to begin a step)" in shown
    assert "parameter `checkpoints_path` of `deepspeed.runtime.engine.DeepSpeedEngine._get_zero_ckpt_name`" in shown
    assert "`deepspeed.runtime.no_such.thing` (used to test this)" in shown
    assert "\n" not in shown


class Base:
    def __init__(self) -> None:
        self.set_by_a_base = 1


class Holder(Base):
    member = 2

    def method(self, other: Any) -> None:
        other.given_to_another = 3
        setattr(other, "by_a_string", 4)  # noqa: B010

    @property
    def shown(self) -> Any:
        return self.read_by_a_property  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["set_by_a_base", "member", "given_to_another", "by_a_string", "read_by_a_property"])
def test_an_attribute_counts_as_there_if_the_code_of_its_class_gives_it(name: str) -> None:
    assert not list(internals.problems(Internal(f"{__name__}.Holder", "test", attributes=(name,))))


def test_an_attribute_that_no_code_mentions_is_missing() -> None:
    row = Internal(f"{__name__}.Holder", "test", attributes=("member", "gone"))
    assert list(internals.problems(row)) == [f"`{__name__}.Holder.gone` (used to test)"]


def test_where_this_package_cannot_be_imported_a_version_that_is_not_supported_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = ImportError("cannot import name '_MockOptimizer'")
    assert internals.explained(error) is error
    having(monkeypatch, "lightning", "2.7.0")
    shown = str(internals.explained(error))
    assert (
        shown.startswith("`lightning` must be a supported version (") and "2.7.0, without cannot import name" in shown
    )


_PROGRAM = """
import sys
from importlib import metadata
true = metadata.version
metadata.version = lambda name: "0.19.7" if name == "deepspeed" else true(name)
import lightning_zenflow
assert "deepspeed" not in sys.modules
from lightning.pytorch import Trainer
Trainer(strategy="zenflow", accelerator="cpu")
"""


def test_importing_the_package_needs_no_deepspeed_and_the_trainer_says_what_is_wrong(tmp_path: Path) -> None:
    """FAULTS 39."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: `deepspeed` must be a supported version (==0.19.8), got 0.19.7")
