"""Small checkpoint directories, each file of which tells the number of its save."""

from __future__ import annotations

from pathlib import Path

from lightning_zenflow.checkpoint.directory import begin, commit, verify

PARTS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zenflow_rank_0000.pt")


def write(staging: Path, number: int) -> None:
    """Writes what the ranks of a run would."""
    (staging / "checkpoint").mkdir()
    (staging / "latest").write_text("checkpoint")
    for part in PARTS:
        (staging / "checkpoint" / part).write_bytes(b"%d" % number * 10)


def save(target: Path | str, number: int) -> None:
    """A whole save, in the order of the strategy."""
    staging = begin(target)
    write(staging, number)
    commit(staging, target, {"number": number, "world_size": 1})


def number_in(path: Path) -> int:
    """Which save `path` holds, the whole of it."""
    manifest = verify(path)
    assert manifest is not None
    number: int = manifest.facts["number"]
    assert (path / "latest").read_text() == "checkpoint"
    assert {(path / "checkpoint" / part).read_bytes() for part in PARTS} == {b"%d" % number * 10}
    return number


def names(folder: Path) -> list[str]:
    """What is in a folder, hidden names too."""
    return sorted(entry.name for entry in folder.iterdir())
