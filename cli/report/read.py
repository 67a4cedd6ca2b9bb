"""Finds and reads the record of a run: one file for each rank, the last run in each."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from .lines import kind_of, read_decision, read_header, read_step
from .record import Decision, RankRecord, RecordError, Run, Step

_FILE = re.compile(r"(?P<stem>.+?)(?:\.rank(?P<rank>\d+))?(?P<suffix>\.[^.]*)?")

_SAME_RUN_SECS = 600.0
"""Ranks of one run start within this time of each other: they wait for each other to begin."""


def find_files(path: Path) -> list[Path]:
    """The files of one run, rank 0 first.

    Args:
        path: A record of any rank, or a folder, in which the record written last is taken, wherever it lies.

    Raises:
        RecordError: There is none.
    """
    if path.is_dir():
        found = [file for file in path.rglob("zenflow*.jsonl") if file.is_file()]
        if not found:
            raise RecordError(
                f"`RUN` must be a record or a folder with a zenflow*.jsonl in it, got {path} without one. Train with the"
                " callback StallMonitor, which writes it."
            )
        path = max(found, key=lambda file: (file.stat().st_mtime_ns, str(file)))
    elif not path.exists():
        raise RecordError(
            f"`RUN` must be a record or a folder, got {path}, which does not exist. Give the log folder of a run."
        )
    name = _name_and_rank(path)[0]
    family = [file for file in path.absolute().parent.iterdir() if _name_and_rank(file)[0] == name and file.is_file()]
    return sorted((path.parent / file.name for file in family), key=_name_and_rank) or [path]


def read_run(files: list[Path]) -> Run:
    """Reads the last run in `files`, all of one run, rank 0 first.

    Raises:
        RecordError: The first file holds no run or no step, or a line is damaged.
        OSError: A file cannot be read.
    """
    main, *others = [read_file(file) for file in files]
    if main is None:
        what = "which is empty" if files[0].stat().st_size == 0 else "no line of which begins a run"
        raise RecordError(
            f"`RUN` must be a record of StallMonitor, got {files[0]}, {what}. Give the zenflow*.jsonl of a run."
        )
    if not main.steps:
        last_of = f", the last of {main.runs} runs," if main.runs > 1 else ""
        raise RecordError(
            f"`RUN` must hold a step, got {files[0]}{last_of} without one. Let the run reach its first optimizer step."
        )
    ranks, notes = [main], []
    for file, other in zip(files[1:], others, strict=True):
        if other is not None and _belongs_to(other, main):
            ranks.append(other)
        else:
            notes.append(f"{file.name} holds no step of this run and is left out.")
    world_size = main.header["world_size"]
    if len(ranks) < world_size:
        notes.append(f"Records of {len(ranks)} of {world_size} ranks were found.")
    first, last = main.steps[0].step, main.steps[-1].step
    if len(main.steps) < last - first + 1:
        notes.append(f"Of the steps {first} to {last}, {len(main.steps)} were recorded.")
    if main.runs > 1:
        notes.append(f"The file holds {main.runs} runs; this is the last.")
    for rank in ranks:
        if rank.torn:
            notes.append(f"The last line of {rank.path.name} is cut off, as a killed run leaves it; it is not used.")
    return Run(tuple(ranks), tuple(notes))


def read_file(path: Path) -> RankRecord | None:
    """Reads the last run in `path`; `None` if the file holds no run.

    Raises:
        RecordError: A line of the last run is damaged, or its format is another one.
        OSError: The file cannot be read.
    """
    runs, offset, first_line = _last_run(path)
    if runs == 0:
        return None
    header: dict[str, Any] = {}
    steps: list[Step] = []
    decisions: list[Decision] = []
    changes, torn = 0, False
    with path.open("rb") as file:
        file.seek(offset)
        for number, raw in enumerate(file, first_line):
            try:
                line = _parse(raw)
            except ValueError:
                if raw.endswith(b"\n"):
                    raise _damaged(path, number, "is no JSON") from None
                torn = True
                break
            try:
                match kind_of(line):
                    case "run":
                        header = read_header(line)
                    case "step":
                        steps.append(read_step(line, steps[-1].step if steps else 0))
                    case "decision":
                        decisions.append(read_decision(line, changes))
                        changes = decisions[-1].number or changes
            except ValueError as error:
                raise _damaged(path, number, f"is not as the record has it ({error})") from None
    return RankRecord(path, header, runs, torn, tuple(steps), tuple(decisions))


def _last_run(path: Path) -> tuple[int, int, int]:
    """Number of runs in `path`, byte offset of the last one's first line, and the number of that line (from 1)."""
    runs, found, line_number, offset = 0, 0, 0, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if b'"run"' in raw:  # spares the parser the steps of earlier runs, at which nobody looks
                try:
                    line = _parse(raw)
                except ValueError:
                    line = None
                if isinstance(line, dict) and line.get("kind") == "run":
                    runs, found, line_number = runs + 1, offset, number
            offset += len(raw)
    return runs, found, line_number


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _damaged(path: Path, number: int, what: str) -> RecordError:
    return RecordError(f"`RUN` must be undamaged, got {path}, whose line {number} {what}. Mend or remove that line.")


def _name_and_rank(file: Path) -> tuple[str, int]:
    """The name that the file of rank 0 has, and the rank."""
    match = _FILE.fullmatch(file.name)
    return (match["stem"] + (match["suffix"] or ""), int(match["rank"] or 0)) if match else (file.name, 0)


def _belongs_to(other: RankRecord, main: RankRecord) -> bool:
    """Whether two ranks recorded the same run: files of an earlier run with more ranks may lie beside this one's."""
    if other.rank >= main.header["world_size"] or other.rank == main.rank:
        return False
    try:
        starts = [datetime.fromisoformat(str(record.header.get("started"))) for record in (other, main)]
        if abs((starts[0] - starts[1]).total_seconds()) > _SAME_RUN_SECS:
            return False
    except (ValueError, TypeError):
        pass  # without two comparable times, the steps decide
    return not {step.step for step in main.steps}.isdisjoint(step.step for step in other.steps)
