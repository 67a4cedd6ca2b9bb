"""A training that saves after every step, killed again and again in the middle of that: each time the next program resumes.

What kills is drawn with a seed: a point of the save in the program itself, so that all parts of a save have their turn, or
a moment from outside.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_zenflow.checkpoint.directory import remove, removing_path, verify
from tests.live import Program, started, until, warm_server
from tests.patience import patient
from tests.saves import names, save

WORKER_DIED = "lightning_zenflow.offload.errors.WorkerDied"
NOT_SAVED = "lightning_zenflow.checkpoint.errors.CheckpointError"

BOUND_SECS = 40.0
"""From the start of a program to its end: a second or two, and twenty where others compute."""


@pytest.fixture(scope="module")
def programs_start_fast() -> None:
    warm_server()


FAST = pytest.mark.usefixtures("programs_start_fast")


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        victim: As in `tests.killed_saves.Killer`.
        saves: How many saves after the start of the program.
        place: Of the save, from 0 to 1; `None` for a moment chosen from outside.
        rank: Whose trainer or worker it is.
    """

    victim: str
    saves: int
    place: float | None
    rank: int = 0


def draw(chance: random.Random, inside: dict[str, int], outside: dict[str, int], ranks: int = 1) -> list[Kill]:
    """So many kills of each victim, in random order: at points spread evenly over a save, and at any moment."""
    victims = [victim for victim, count in inside.items() for _ in range(count)]
    chance.shuffle(victims)
    places: list[float | None] = [(index + chance.random()) / len(victims) for index in range(len(victims))]
    for victim, count in outside.items():
        victims += [victim] * count
        places += [None] * count
    kills = [
        Kill(victim, chance.randint(1, 3), place, chance.randrange(ranks))
        for victim, place in zip(victims, places, strict=True)
    ]
    chance.shuffle(kills)
    return kills


@contextmanager
def programs(folder: Path, arguments: Sequence[str]) -> Iterator[list[Program]]:
    """A program, or several as ranks of one training, that calls `train` with these arguments."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    count = len(arguments)
    with ExitStack() as stack:
        ranks = []
        for rank, text in enumerate(arguments):
            env = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "TORCHELASTIC_RUN_ID": "live",
            }
            code = f"from tests.killed_saves import train\ntrain({text}, devices={count})"
            ranks.append(stack.enter_context(started(folder, code, env=env if count > 1 else None)))
        yield ranks


def numbers(program: Program, words: str) -> list[int]:
    """The numbers in the lines that begin with `words`."""
    return [int(number) for number in re.findall(rf"^{words} (\d+)\b", program.output, re.MULTILINE)]


def digests(program: Program) -> dict[int, str]:
    """What it has said of its weights, by step; those at the very end by -1."""
    said = re.findall(r"^weights (\d+) (\w+)$", program.output, re.MULTILINE)
    done = re.findall(r"^done (\w+)$", program.output, re.MULTILINE)
    return {int(step): digest for step, digest in [*said, *(("-1", digest) for digest in done)]}


def whole_checkpoints(folder: Path) -> dict[str, int]:
    """The step of each checkpoint by name; fails if one is not whole."""
    steps = {}
    for path in folder.glob("*.ckpt"):
        manifest = verify(path)
        assert manifest is not None
        steps[path.name] = manifest.facts["step"]
    return steps


def strike(ranks: list[Program], kill: Kill, chance: random.Random) -> None:
    """From outside, at any moment of the time that a step and its save take."""
    victim = ranks[kill.rank]
    assert until(lambda: bool(numbers(victim, "resumed at")), 60.0), victim.output
    (begin,) = numbers(victim, "resumed at")
    victim.wait_for(f"saved {begin + kill.saves}")
    time.sleep(chance.uniform(0, 0.06))
    os.kill(victim.pid if kill.victim == "trainer" else numbers(victim, "worker")[0], signal.SIGKILL)


def check_ends(ranks: list[Program], kill: Kill) -> None:
    """All ranks and all they have started end soon, each with an error that says why."""
    in_time = until(lambda: all(program.ended() for program in ranks), patient(BOUND_SECS))
    assert in_time, f"Over {patient(BOUND_SECS)} s after {kill}:\n" + "\n".join(
        program.output[-8000:] for program in ranks
    )
    for rank, program in enumerate(ranks):
        code = program.end()
        errors = program.errors()
        assert not program.has_said("not noticed")
        if rank != kill.rank:
            assert code == 1 and errors[-1] in ("RuntimeError", NOT_SAVED), program.output
            assert "by peer" in program.output or "another rank could not" in program.output, program.output
        elif kill.victim == "trainer":
            assert code == -signal.SIGKILL and not errors, program.output
        else:
            assert code == 1 and errors[-1] in (WORKER_DIED, NOT_SAVED), program.output
            assert "was killed by SIGKILL (exit code -9" in program.error(errors[-1])


def check_chain(folder: Path, saver: str, kills: Sequence[Kill], chance: random.Random, ranks: int = 1) -> list[str]:
    """Trains with a kill in each program, and then to the end. Returns at what points of a save they came."""
    steps = 3 * len(kills) + 8
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    with programs(undisturbed, [f"{steps}, None"] * ranks) as running:
        assert [program.end() for program in running] == [0] * ranks, running[0].output
        expected = digests(running[0])
    assert len(set(expected.values())) == steps + 1

    points, found, killed_at = [50] * ranks, 0, []
    for kill in kills:
        texts = [f"{steps}, {saver!r}"] * ranks
        if kill.place is not None:
            texts[kill.rank] += f", {kill.victim!r}, {kill.saves}, {int(kill.place * points[kill.rank])}"
        with programs(folder, texts) as running:
            if kill.place is None:
                strike(running, kill, chance)
            check_ends(running, kill)
            for program in running:
                assert numbers(program, "resumed at") == [found], program.output
                assert digests(program).items() <= expected.items(), program.output
            victim = running[kill.rank]
            saved = max([found, *numbers(running[0], "saved")])
            counts = [len(passed.split()) for passed in re.findall(r"^points \d+ (.*)$", victim.output, re.MULTILINE)]
            points[kill.rank] = counts[-1] if counts else points[kill.rank]
            killed_at += re.findall(r"^killed at (.*)$", victim.output, re.MULTILINE)
        checkpoints = whole_checkpoints(folder)
        assert saved == 0 or "last.ckpt" in checkpoints, victim.output
        found = checkpoints.get("last.ckpt", 0)
        assert found in (saved, saved + 1)

    with programs(folder, [f"{steps}, {saver!r}"] * ranks) as running:
        assert [program.end() for program in running] == [0] * ranks, running[0].output
        assert numbers(running[0], "resumed at") == [found]
        for program in running:
            ended = digests(program)
            assert ended.items() <= expected.items() and ended[-1] == expected[-1]
    kept = {"last.ckpt"} if saver == "callback" else {"last.ckpt", f"step={steps}.ckpt"}
    assert whole_checkpoints(folder) == dict.fromkeys(kept, steps)
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".saving-", ".removing-"))]
    assert len(killed_at) == sum(kill.place is not None for kill in kills)
    return killed_at


@FAST
def test_a_trainer_or_worker_killed_in_a_save_eight_times_resumes_exactly(tmp_path: Path) -> None:
    chance = random.Random(1)
    kills = draw(chance, {"trainer": 4, "worker": 3}, {"trainer": 1})
    assert len(set(check_chain(tmp_path, "callback", kills, chance))) >= 4


@pytest.mark.parametrize("is_there", [True, False])
def test_a_killed_removal_is_completed_by_the_next_one_of_that_name(is_there: bool, tmp_path: Path) -> None:
    """What ModelCheckpoint does after a resume from before the removal. It never saves under that name again."""
    target = tmp_path / "step=6.ckpt"
    save(target, 6)
    target.rename(removing_path(target))
    if is_there:
        target.write_text("a checkpoint in a file")
    remove(target)
    assert names(tmp_path) == []


@FAST
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saver", ["callback", "ModelCheckpoint"])
def test_a_trainer_or_worker_killed_in_a_save_fifty_times_resumes_exactly(saver: str, tmp_path: Path) -> None:
    chance = random.Random(2)
    kills = draw(chance, {"trainer": 22, "worker": 16, "worker, noticed": 4}, {"trainer": 4, "worker": 4})
    killed_at = check_chain(tmp_path, saver, kills, chance)
    assert len(set(killed_at)) >= 12, sorted(set(killed_at))


@FAST
@pytest.mark.long
@pytest.mark.timeout(240)
def test_one_of_two_ranks_killed_in_a_save_six_times_resumes_exactly(tmp_path: Path) -> None:
    chance = random.Random(3)
    kills = draw(chance, {"trainer": 2, "worker": 2, "worker, noticed": 1}, {"trainer": 1}, ranks=2)
    assert {kill.rank for kill in kills} == {0, 1}
    check_chain(tmp_path, "callback", kills, chance, ranks=2)
