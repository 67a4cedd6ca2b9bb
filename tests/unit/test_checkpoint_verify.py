"""What `verify` says to each path that somebody may want to resume from."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from lightning_zenflow.checkpoint.directory import begin, commit, removing_path, staging_path, verify
from lightning_zenflow.checkpoint.errors import CheckpointError
from tests.saves import PARTS, save, write


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def plain(path):
    """A checkpoint of DeepSpeed's own."""
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    (path / "checkpoint" / "mp_rank_00_model_states.pt").write_text("weights")
    return path


def saved(path, number=1, at_secs=None):
    save(path, number)
    if at_secs is not None:
        os.utime(path / "checkpoint" / "zenflow.json", (at_secs, at_secs))
    return path


def complaint(path):
    with pytest.raises(CheckpointError) as raised:
        verify(path)
    return str(raised.value)


def edit(path, **changes):
    file = path / "checkpoint" / "zenflow.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_whole_checkpoint_gives_its_manifest(folder):
    staging = begin(folder / "a.ckpt")
    write(staging, 123)
    commit(staging, folder / "a.ckpt", {"world_size": 4, "step": 10})
    edit(folder / "a.ckpt", version="0.0.9")
    (folder / "last.ckpt").symlink_to("a.ckpt")
    (folder / "a.ckpt" / "weights.bin").write_text("converted later")
    for path in (folder / "a.ckpt", str(folder / "a.ckpt") + "/", folder / "last.ckpt"):
        manifest = verify(path)
        assert manifest is not None
        assert manifest.facts == {"world_size": 4, "step": 10} and manifest.version == "0.0.9"
        assert manifest.files == {"latest": 10, **{f"checkpoint/{part}": 30 for part in PARTS}}


def test_a_path_may_be_relative_or_the_working_directory(folder, monkeypatch):
    saved(folder / "a.ckpt")
    monkeypatch.chdir(folder)
    assert verify("a.ckpt") is not None
    monkeypatch.chdir("a.ckpt")
    assert verify(".") is not None and verify("../a.ckpt") is not None


def test_a_checkpoint_of_plain_deepspeed_has_no_manifest(folder):
    assert verify(plain(folder / "plain.ckpt")) is None
    (folder / "plain.ckpt" / "checkpoint").rename(folder / "plain.ckpt" / "global_step7")
    (folder / "plain.ckpt" / "latest").write_text("global_step7\n")
    assert verify(folder / "plain.ckpt") is None
    (folder / "plain.ckpt" / "latest").rename(folder / "plain.ckpt" / "latest_universal")
    assert verify(folder / "plain.ckpt") is None


# Absent


def test_an_absent_path_is_named_with_what_to_do(folder):
    assert complaint(folder / "x.ckpt") == (
        "`ckpt_path` must be a directory that `Trainer.save_checkpoint` or `ModelCheckpoint` wrote, got"
        f" '{folder}/x.ckpt', which does not exist. Check the path."
    )
    assert "got 'no/such/x.ckpt', which does not exist. Check" in complaint("no/such/x.ckpt")
    (folder / "file").touch()
    assert "which does not exist" in complaint(folder / "file" / "x.ckpt")


def test_the_target_of_a_dangling_link_is_named(folder):
    (folder / "last.ckpt").symlink_to("epoch=3.ckpt")
    assert "last.ckpt', which is a link to 'epoch=3.ckpt', which does not exist." in complaint(folder / "last.ckpt")


def test_the_newest_three_whole_checkpoints_beside_an_absent_one_are_named(folder):
    for number, at_secs in enumerate([3000, 1000, 5000, 4000]):
        saved(folder / f"{number}.ckpt", at_secs=at_secs)
    (saved(folder / "damaged.ckpt", at_secs=9000) / "latest").unlink()
    plain(folder / "plain.ckpt")
    (folder / "file.ckpt").write_text("file")
    saved(folder / "no-suffix", at_secs=9000)
    listed = ", ".join(f"'{folder}/{number}.ckpt'" for number in (2, 3, 0))
    assert complaint(folder / "x.ckpt").endswith(f"exist. Whole checkpoints there, newest first: {listed}.")


@pytest.mark.parametrize("aside", [staging_path, removing_path])
def test_what_an_interrupted_save_left_is_named_if_it_is_whole(folder, aside):
    left = aside(folder / "x.ckpt")
    saved(folder / "x.ckpt").rename(left)
    saved(folder / "old.ckpt", at_secs=1000)
    text = complaint(folder / "x.ckpt")
    assert f"first: '{left}' (of an interrupted save of this name: rename it to use it), '{folder}/old.ckpt'." in text
    assert str(left) not in complaint(folder / "y.ckpt")
    (left / "latest").unlink()
    assert str(left) not in complaint(folder / "x.ckpt")


def test_names_beside_a_relative_path_are_found(folder, monkeypatch):
    saved(folder / "a.ckpt")
    monkeypatch.chdir(folder)
    assert f"newest first: '{folder}/a.ckpt'." in complaint("x.ckpt")


def test_an_address_is_refused():
    for path in ("s3://bucket/x.ckpt", Path("s3://bucket/x.ckpt")):
        assert "an address. Copy it to a local disk and pass that path." in complaint(path)


# Something else


def test_a_file_is_refused_with_what_reads_it(folder):
    (folder / "x.ckpt").write_text("a checkpoint in one file")
    text = complaint(folder / "x.ckpt")
    assert "x.ckpt', which is a file. `fit` resumes from directories" in text and "`load_from_checkpoint`" in text


@pytest.mark.parametrize("aside", [staging_path, removing_path])
def test_a_staging_directory_is_refused_whole_or_not(folder, aside, monkeypatch):
    left = aside(folder / "x.ckpt")
    saved(folder / "x.ckpt").rename(left)
    expected = (
        f"`ckpt_path` must be a finished checkpoint, got '{left}', which an interrupted save or removal left behind."
    )
    assert complaint(left) == f"{expected} All its files are there: rename it to use it."
    saved(folder / "y.ckpt")
    (left / "checkpoint" / "zenflow.json").unlink()
    hint = f" Use another checkpoint. Whole checkpoints there, newest first: '{folder}/y.ckpt'."
    assert complaint(left) == expected + hint
    monkeypatch.chdir(left)
    assert "must be a finished checkpoint, got '.'" in complaint(".")


def test_a_directory_that_is_no_checkpoint_is_refused_with_what_it_holds(folder):
    assert complaint(folder) == (
        "`ckpt_path` must be a checkpoint directory, which holds a file 'latest' and the folder named in it, 'checkpoint',"
        f" got '{folder}', which holds nothing. Check the path."
    )
    for name in "gfedcba":
        (folder / name).touch()
    assert "which holds 'a', 'b', 'c', 'd', 'e' and 2 more. Check" in complaint(folder)


@pytest.mark.parametrize("missing", ["latest", "checkpoint"])
def test_half_of_a_plain_checkpoint_is_refused(folder, missing):
    plain(folder / "x.ckpt")
    (folder / "x.ckpt" / missing).rename(folder / "elsewhere")
    (left,) = {"latest", "checkpoint"} - {missing}
    assert f"which holds '{left}'. Check the path." in complaint(folder / "x.ckpt")


@pytest.mark.parametrize("make", [plain, saved])
def test_the_only_checkpoint_in_a_directory_is_suggested(folder, make):
    make(folder / "x.ckpt")
    (folder / "logs").mkdir()
    assert complaint(folder).endswith(f"which holds 'logs', 'x.ckpt'. Did you mean '{folder}/x.ckpt'?")


def test_of_several_checkpoints_in_a_directory_the_newest_are_suggested(folder):
    saved(folder / "a.ckpt", at_secs=1000)
    saved(folder / "b.ckpt", at_secs=2000)
    listed = f"newest first: '{folder}/b.ckpt', '{folder}/a.ckpt'."
    assert complaint(folder).endswith(f"Pass one of the checkpoints in it. Whole checkpoints there, {listed}")


@pytest.mark.parametrize("make", [plain, saved])
def test_the_inside_of_a_checkpoint_is_refused_with_its_parent(folder, make, monkeypatch):
    make(folder / "x.ckpt")
    hint = f"This is the inside of a checkpoint: pass '{folder}/x.ckpt'."
    assert complaint(folder / "x.ckpt" / "checkpoint").endswith(hint)
    monkeypatch.chdir(folder / "x.ckpt" / "checkpoint")
    assert complaint(".").endswith(hint)


# Damaged


def test_a_missing_file_is_named_and_whole_checkpoints_beside_it(folder):
    saved(folder / "x.ckpt")
    saved(folder / "y.ckpt")
    (folder / "x.ckpt" / "checkpoint" / PARTS[1]).unlink()
    assert complaint(folder / "x.ckpt") == (
        f"`ckpt_path` must be a whole checkpoint, got '{folder}/x.ckpt': its file 'checkpoint/{PARTS[1]}' is missing. Copy it"
        " again from where it came from, or use another checkpoint. Whole checkpoints there, newest first:"
        f" '{folder}/y.ckpt'."
    )


@pytest.mark.parametrize("size_bytes", [0, 19, 21])
def test_a_file_of_another_size_is_named_with_both(folder, size_bytes):
    saved(folder / "x.ckpt", 12)
    os.truncate(folder / "x.ckpt" / "checkpoint" / PARTS[2], size_bytes)
    text = complaint(folder / "x.ckpt")
    assert f"its file 'checkpoint/{PARTS[2]}' has {size_bytes} bytes and was saved with 20. Copy" in text


def test_more_than_one_damage_is_counted(folder):
    saved(folder / "x.ckpt")
    for part in PARTS:
        (folder / "x.ckpt" / "checkpoint" / part).unlink()
    (folder / "x.ckpt" / "latest").write_text("check")
    assert "(and 3 more)" in complaint(folder / "x.ckpt")


def test_files_of_ours_without_a_manifest_are_an_interrupted_save(folder):
    saved(folder / "x.ckpt")
    (folder / "x.ckpt" / "checkpoint" / "zenflow.json").unlink()
    text = complaint(folder / "x.ckpt")
    assert "'checkpoint/zenflow.json', which is written last, is missing. The save or a copy of it was inter" in text


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(folder):
    edit(saved(folder / "x.ckpt"), format=2, version="3.1.4")
    text = complaint(folder / "x.ckpt")
    assert "must be at most 1, got 2, written by lightning-zenflow 3.1.4. Install that version or a newer one." in text


@pytest.mark.parametrize(
    "text", ["", '{"format": 1, "facts": {}, "fil', "\udcff", "[]", "{}", '{"format": 1, "files": {}}']
)
def test_a_damaged_manifest_is_refused(folder, text):
    saved(folder / "x.ckpt")
    (folder / "x.ckpt" / "checkpoint" / "zenflow.json").write_bytes(text.encode(errors="surrogateescape"))
    assert re.search(r"zenflow.json' must .*The checkpoint is damaged: use another\.", complaint(folder / "x.ckpt"))
    assert complaint(folder / "y.ckpt").endswith("Check the path.")


@pytest.mark.parametrize("method", ["stat", "glob"])
def test_a_directory_that_cannot_be_read_is_refused(folder, monkeypatch, method):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    plain(folder / "x.ckpt")
    monkeypatch.setattr(Path, method, refuse)
    assert re.search(
        r"x.ckpt'(, which cannot be read)?: Permission denied\. Check its perm", complaint(folder / "x.ckpt")
    )


def test_a_manifest_that_cannot_be_read_is_not_called_damaged(folder):
    saved(folder / "x.ckpt")
    (folder / "x.ckpt" / "checkpoint" / "zenflow.json").unlink()
    (folder / "x.ckpt" / "checkpoint" / "zenflow.json").mkdir()
    assert "zenflow.json' must be a file that can be read, got: Is a directory. Check its" in complaint(
        folder / "x.ckpt"
    )
