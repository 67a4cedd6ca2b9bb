"""Any word on the command line, and any YAML: taken, or answered in one line, never with a traceback or a list of types."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zenflow import ZenFlowConfig
from lightning_zenflow.cli import ZenFlowCLI, main
from lightning_zenflow.cli.trainer import _settings
from tests import fuzz
from tests.fuzz import COUNTS, misspelled, nested

SHORT = settings(fuzz.SHORT, max_examples=15)  # a parse takes a tenth of a second
LONG = settings(fuzz.LONG, max_examples=300)
NAMES = [field.name for field in fields(ZenFlowConfig)]
QUIET = ["--seed_everything", "1", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
FIT = ["fit", "--model", "lightning.pytorch.demos.boring_classes.BoringModel", *QUIET]
BY_NAME = ["--trainer.strategy", "zenflow"]
CLASS_PATH = ["--trainer.strategy", "lightning_zenflow.ZenFlowStrategy"]

words = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "0",
                "1",
                "-1",
                "0.5",
                "1e400",
                "-0.0",
                ".nan",
                ".inf",
                "nan",
                "true",
                "yes",
                "null",
                "None",
                "auto",
                "AUTO",
            ),
            *(
                "[]",
                "[0]",
                "[a",
                "{}",
                "{a: 1}",
                "{a: ",
                "'",
                "!!python/object:os.system x",
                "&a [*a]",
                "9" * 5000,
                "0x10",
            ),
            *("1_000", "1,5", "\u0661", "step", "sqrt", "bf16", "/no/such/file.yaml", "class_path: x"),
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6).filter(lambda text: not text.startswith("-")),
)


@pytest.fixture(scope="module", autouse=True)
def _as_a_program() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-zenflow"])
        patch.setattr(sys, "path", list(sys.path))
        yield


@pytest.fixture(scope="module")
def parser(_as_a_program: None) -> Any:
    """One for all words: it takes a second to make."""
    return ZenFlowCLI(BoringModel, run=False, args=QUIET).parser


def parse(parser: Any, *args: str) -> Any:
    """What the words are parsed into, or the one line that answers them."""
    shown: list[str] = []

    def error(self: Any, message: str, ex: Exception | None = None) -> None:
        shown.append(message)
        raise SystemExit(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jsonargparse.ArgumentParser.error", error)  # below ours, which says it in our words
        try:
            config = parser.parse_args([*QUIET, *BY_NAME, *args])
            made = _settings(config.zenflow)
        except SystemExit:
            (line,) = shown
            check_line(line)
            return line
        except (TypeError, ValueError, NotImplementedError) as refused:  # what the program says in these words
            check_line(str(refused))
            return str(refused)
    COUNTS["accepted"] += 1
    return made


def check_line(line: str) -> None:
    COUNTS["refused in words"] += 1
    assert "\n" not in line and "NestedArg" not in line and "Traceback" not in line, line
    assert re.match(r"`[^`]+`( of `\w+`)? (must|has no)|argument --|Unrecognized", line), line


@SHORT
@given(name=st.sampled_from(NAMES), word=words)
@example(name="update_interval", word="9" * 5000)
@example(name="topk_ratio", word="")
@example(name="worker_cores", word="[a]")
def test_any_word_for_a_setting(parser: Any, name: str, word: str) -> None:
    parse(parser, f"--zenflow.{name}={word}")


@pytest.mark.long
@LONG
@given(name=st.sampled_from(NAMES), word=words)
def test_many_words_for_settings(parser: Any, name: str, word: str) -> None:
    parse(parser, f"--zenflow.{name}={word}")


@SHORT
@given(word=words.filter(lambda word: len(word) < 4000))  # of which jsonargparse does not say where it stood
def test_any_word_for_the_section(parser: Any, word: str) -> None:
    parse(parser, f"--zenflow={word}")


@SHORT
@given(section=st.dictionaries(st.sampled_from(NAMES), nested, max_size=3))
def test_any_section_in_yaml(parser: Any, section: dict[str, Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(yaml.safe_dump({"zenflow": section}))
    parse(parser, "--config", str(path))


@SHORT
@given(names=st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), misspelled(name))))
def test_a_misspelled_setting(parser: Any, names: tuple[str, str], tmp_path_factory: Any) -> None:
    right, wrong = names
    if wrong in NAMES or not wrong.isidentifier():
        return
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(yaml.safe_dump({"zenflow": {wrong: getattr(ZenFlowConfig(), right)}}))
    assert str(parse(parser, "--config", str(path))).startswith(f"`zenflow` has no key `{wrong}`")


# -- the program itself ------------------------------------------------------------------------------------------------

CALLBACKS: list[tuple[list[str], str]] = [
    (["AutoTuner", "min_update_interval=x"], "`min_update_interval` of `AutoTuner` must be of type int, got 'x'."),
    (
        ["AutoTuner", "min_update_intervall=3"],
        "`AutoTuner` has no argument `min_update_intervall`. Did you mean `min_up",
    ),
    (["AutoTuner", "max_update_interval=2000"], "`max_update_interval` must be at most 1000, got 2000."),
    (
        ["StallMonitor", "every_n_steps=z"],
        "`StallMonitor` has no argument `every_n_steps`. Did you mean `record_every_n",
    ),
    (["StallMonitor", "progress_bar=maybe"], "`progress_bar` of `StallMonitor` must be of type bool, got 'maybe'."),
    (["StalMonitor"], "`lightning_zenflow` has no class `StalMonitor`. Did you mean `lightning_zenflow.StallMonitor`?"),
]
STRATEGY: list[tuple[list[str], str]] = [
    (["stge=3"], "`ZenFlowStrategy` has no argument `stge`. Did you mean `stage`?"),
    (["stage=x"], "`stage` of `ZenFlowStrategy` must be of type int | None, got 'x'."),
    (["reduce_bucket_size=big"], "`reduce_bucket_size` of `ZenFlowStrategy` must be of type int, got 'big'."),
    (["reduce_bucket_size=-1"], "`zero_optimization.reduce_bucket_size` must be what DeepSpeed takes, got -1: "),
    (
        ["config=/no/such.json"],
        "`config` must be the path of a JSON file with a DeepSpeed config, got '/no/such.json', ",
    ),
]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line with which the program ends."""
    with pytest.raises(SystemExit) as ended:
        main([*FIT, *args])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in shown
    (line,) = re.findall(r"^error: (.*)", shown, re.MULTILINE | re.DOTALL)
    check_line(line.strip())
    return str(line.strip())


@pytest.mark.parametrize(
    ("form", "words", "message"),
    [*(("--trainer.callbacks=", *case) for case in CALLBACKS), ("--trainer.callbacks+=", *CALLBACKS[0])],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_argument_of_a_callback_is_one_line(
    form: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--trainer.callbacks.{word}" for word in words[1:]]
    shown = answer(capsys, *BY_NAME, f"{form}lightning_zenflow.{words[0]}", *given)
    assert shown.startswith(message)


@pytest.mark.parametrize(("words", "message"), STRATEGY, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_wrong_argument_of_the_strategy_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = answer(capsys, *CLASS_PATH, *[f"--trainer.strategy.{word}" for word in words])
    assert shown.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zenflow:\n  topk_ratio: 2\n", "`topk_ratio` must be a number from 0 to 1, got 2"),
        ("zenflow: 5\n", "`zenflow` must be a mapping of settings, got 5"),
        ("zenflow:\n  nope: {deep: 1}\n", "`zenflow` has no key `nope`"),
        ("zenflow:\n  topk_ratio: 0.1\n  topk_ratio: [\n", None),
        ("\x00", None),
        ("- 1\n- 2\n", None),
    ],
)
def test_yaml_that_is_wrong_is_answered(
    text: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    if message is not None:
        assert answer(capsys, *BY_NAME, "--config", str(path)).startswith(message)
        return
    with pytest.raises(SystemExit) as ended:  # jsonargparse's own words about a file that is no YAML, which name it
        main([*FIT, *BY_NAME, "--config", str(path)])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in shown and "config" in shown
