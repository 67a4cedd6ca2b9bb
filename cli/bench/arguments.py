"""The options of `lightning-zenflow bench`, and what is refused before anything runs."""

from __future__ import annotations

import argparse
import reprlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..console import HelpfulParser
from .job import WARM_UP_STEPS, Job
from .modes import MODES, USUAL_MODES
from .settings import SETTINGS, Setting

DESCRIPTION = """Measures ZenFlow side by side with what you would pick instead, in some ten minutes; an idle machine is needed.

Each mode runs in a process of its own, in turn. Compare figures of one call only. Where there is no accelerator, the setting
two-core has one core play it, and another one the host. All modes get the same environment: OMP_NUM_THREADS, and two variables
that let glibc keep freed memory (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_). With --malloc default it gives gradients back
to the system at each step and fetches them again, which costs 10 to 150 ms, in `compute` too.

modes:
""" + "\n".join(f"  {name:13} {what}" for name, what in MODES.items())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked for.

    Attributes:
        setting: A key of `SETTINGS`.
        modes: In the order of the table.
        depth: Blocks of the model.
        tokens: Tokens of a step and rank.
        steps: Steps of a run.
        repeats: Runs of each mode.
        topk_ratio: Share of the columns on the device.
        update_interval: Of the fixed intervals.
        stage: ZeRO stage.
        ranks: Processes that train together.
        memory: Whether bytes per parameter are measured.
        keeps_memory: Whether glibc is told to keep what is freed.
        limit_secs: How long a run may take.
        output: Folder for the two files, or `None`.
        json: Whether JSON is printed instead of tables.
    """

    setting: str
    modes: tuple[str, ...]
    depth: int
    tokens: int
    steps: int
    repeats: int
    topk_ratio: float
    update_interval: int
    stage: int
    ranks: int
    memory: bool
    keeps_memory: bool
    limit_secs: float
    output: Path | None
    json: bool

    @property
    def of(self) -> Setting:
        """The setting itself."""
        return SETTINGS[self.setting]

    def job(self, mode: str, depth: int | None = None, steps: int | None = None) -> Job:
        """A run of `mode`, at other depths and steps where given."""
        return Job(
            mode=mode,
            setting=self.setting,
            depth=depth or self.depth,
            tokens=self.tokens,
            steps=steps or self.steps,
            topk_ratio=self.topk_ratio,
            update_interval=self.update_interval,
            stage=self.stage,
            ranks=self.ranks,
        )


def parser() -> argparse.ArgumentParser:
    """The parser of the subcommand."""
    made = HelpfulParser(
        prog="lightning-zenflow bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--setting", choices=SETTINGS, default="two-core", help="model and cores (default: two-core)")
    add("--modes", nargs="+", choices=MODES, metavar="MODE", help="modes to compare (default: all that fit the stage)")
    add("--stage", type=int, choices=USUAL_MODES, default=2, help="ZeRO stage (default: 2)")
    add("--depth", type=int, help="blocks of the model (default: 8, quickstart 3)")
    add("--tokens", type=int, help="tokens of a step (default: 32, quickstart 1024)")
    add("--steps", type=int, default=24, help=f"steps of a run; the first {WARM_UP_STEPS} do not count (default: 24)")
    add("--repeats", type=int, default=3, help="runs of each mode (default: 3)")
    add("--topk-ratio", type=float, default=0.1, help="share of each matrix's columns on the device (default: 0.1)")
    add("--update-interval", type=int, default=4, help="of the modes with fixed intervals (default: 4)")
    add("--ranks", type=int, default=1, help="processes on this machine that train together (default: 1)")
    add("--no-memory", action="store_true", help="do not measure bytes per parameter, which takes two runs a mode")
    add(
        "--malloc",
        choices=("keep", "default"),
        default="keep",
        help="whether glibc is told to keep freed memory, or left as it is (default: keep)",
    )
    add("--limit-secs", type=float, default=600.0, help="how long one run may take (default: 600)")
    add("--output", metavar="DIR", help="folder for bench.json and bench.png")
    add("--json", action="store_true", help="print JSON: everything, with every step")
    return made


def plan_of(args: list[str] | None) -> Plan:
    """Parses and checks `args`.

    Raises:
        SystemExit: With status 2 and a message, where an option cannot be used.
    """
    reader = parser()
    given = reader.parse_args(args)
    try:
        return _checked(given)
    except ValueError as error:
        reader.error(str(error))


def _checked(given: argparse.Namespace) -> Plan:
    setting = SETTINGS[given.setting]
    depth = setting.depth if given.depth is None else given.depth
    tokens = setting.tokens if given.tokens is None else given.tokens
    _whole("depth", depth, 1, 1000)
    _whole("tokens", tokens, 1, 10**6)
    _whole("steps", given.steps, WARM_UP_STEPS + 2, 10**5, f"The first {WARM_UP_STEPS} do not count. ")
    _whole("repeats", given.repeats, 1, 100)
    _whole("update-interval", given.update_interval, 1, 1000)
    _whole("ranks", given.ranks, 1, 64)
    if tokens % setting.token_unit:
        raise ValueError(
            f"`--tokens` must be a multiple of {setting.token_unit} with --setting {given.setting}, got {tokens}. Give"
            f" {max(1, round(tokens / setting.token_unit)) * setting.token_unit}."
        )
    if not 0 <= given.topk_ratio <= 1:
        raise ValueError(f"`--topk-ratio` must be from 0 to 1, got {given.topk_ratio:g}. 0.1 means ten percent.")
    if not 1 <= given.limit_secs <= 10**6:
        raise ValueError(f"`--limit-secs` must be from 1 to 1e6, got {given.limit_secs:g}. 600 means ten minutes.")
    modes = given.modes or list(USUAL_MODES[given.stage])
    for mode in modes:
        if mode.endswith("_2") and given.stage == 2:
            raise ValueError(
                f"`--modes` must leave out {mode} with --stage 2, got it. Give {mode.removesuffix('_2')}, or --stage 3."
            )
    return Plan(
        setting=given.setting,
        modes=tuple(mode for mode in MODES if mode in modes),
        depth=depth,
        tokens=tokens,
        steps=given.steps,
        repeats=given.repeats,
        topk_ratio=given.topk_ratio,
        update_interval=given.update_interval,
        stage=given.stage,
        ranks=given.ranks,
        memory=not given.no_memory,
        keeps_memory=given.malloc == "keep",
        limit_secs=given.limit_secs,
        output=None if given.output is None else _folder(given.output),
        json=given.json,
    )


def _whole(name: str, value: int, least: int, most: int, why: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(
            f"`--{name}` must be from {least} to {most}, got {reprlib.repr(value)}. {why}Give a number in between."
        )


def _folder(text: str) -> Path:
    """The folder, made and tried now: minutes of measuring must not end in an error that was there from the start."""
    if not text:
        raise ValueError("`--output` must be a path, got an empty one. Write . for the current folder.")
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"`--output` must be a folder that can be written to, got {text} ({error.strerror}). Give another one."
        ) from error
    return folder
