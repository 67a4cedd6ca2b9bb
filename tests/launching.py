"""Trainings started in all the ways in which people start Python, and what each must leave behind: its weights alone."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tests.live import MARK, REPO, Program, started

CODE = "from tests.launched import train\ntrain()\n"
WEIGHTS = "WEIGHTS"

OF_OTHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "MASTER_", "PYTHON")
"""Variables of launchers and interpreters, of which a program gets those alone that its test gives it."""


@contextmanager
def launched(
    command: Sequence[str | Path],
    folder: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str | Path | None] | None = None,
    stdin: str = "",
) -> Iterator[Program]:
    """A program started by `command`, whose output goes into `folder`; killed at the end if it still runs.

    Args:
        command: Words of the command line after those of the interpreter.
        folder: Gets its output, and its weights as `weights.pt` unless `env` says otherwise.
        cwd: Its working directory, `folder` if left out.
        env: Added to the environment; `None` takes a variable out.
        stdin: What it reads from standard input.
    """
    mark = uuid.uuid4().hex
    log = folder / f"{mark[:6]}.log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}
    settings: dict[str, str | Path | None] = {
        **clean,
        "PYTHONPATH": os.pathsep.join(
            [str(REPO), *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        ),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        WEIGHTS: folder / "weights.pt",
        **(env or {}),
        MARK: mark,
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd or folder,
            env={name: str(value) for name, value in settings.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    program = Program(process.pid, log, process.poll, mark)
    try:
        assert process.stdin is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        yield program
    finally:
        program.kill()


def weights(folder: Path) -> dict[str, Tensor]:
    """What the program in `folder` has trained."""
    return torch.load(folder / "weights.pt", weights_only=True)


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two trainings ended with the same weights, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def plain_run(folder: Path, code: str = CODE) -> dict[str, Tensor]:
    """The weights of a script that is run as usual."""
    with started(folder, code, env={WEIGHTS: str(folder / "weights.pt")}) as program:
        assert program.end() == 0, program.output
    return weights(folder)


def ends_well(program: Program, folder: Path, expected: Mapping[str, Tensor]) -> None:
    """It must end with code 0, without an error, with these weights, and with nothing else of it on this machine."""
    assert program.end(90) == 0, program.output
    assert program.errors() == [], program.output
    assert program.has_said("train end"), program.output
    assert same(weights(folder), expected)
