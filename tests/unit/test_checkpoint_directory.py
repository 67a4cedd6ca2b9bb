"""What a save and a removal leave and refuse, and in which order they work: `directory.py` and `disk.py`."""

import ctypes
import errno
import json
import logging
import os
from importlib import metadata
from pathlib import Path

import pytest

from lightning_zenflow import __version__
from lightning_zenflow.checkpoint import directory, disk
from lightning_zenflow.checkpoint.directory import begin, commit, discard, remove, removing_path, staging_path
from tests.saves import PARTS, names, number_in, save, write


@pytest.fixture(params=["swap", "no swap"])
def swap(request, monkeypatch):
    """With renameat2, and on a system without it."""
    if request.param == "no swap":
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    return request.param == "swap"


@pytest.fixture
def target(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "last.ckpt"


# What a save leaves


def test_a_save_puts_all_files_in_place_and_lists_them_with_their_sizes(target):
    staging = begin(target)
    assert staging.parent == target.parent and names(staging) == [] and not target.exists()
    write(staging, 12)
    (staging / "zero_to_fp32.py").write_text("print()\n")
    (staging / "checkpoint" / "more").mkdir()
    (staging / "checkpoint" / "more" / "empty").touch()
    commit(staging, target, {"world_size": 2, "step": 7, "note": "é", "betas": (0.9, 0.95)})
    assert names(target.parent) == ["last.ckpt"]
    assert json.loads((target / "checkpoint" / "zenflow.json").read_text()) == {
        "format": 1,
        "version": __version__,
        "facts": {"world_size": 2, "step": 7, "note": "é", "betas": [0.9, 0.95]},
        "files": {
            "latest": 10,
            "zero_to_fp32.py": 8,
            "checkpoint/more/empty": 0,
            **{f"checkpoint/{part}": 20 for part in PARTS},
        },
    }


def test_a_package_that_is_not_installed_saves_too(target, monkeypatch):
    """As in an archive (`python app.pyz`) or from a checkout on PYTHONPATH: there is nobody to ask for its version."""
    monkeypatch.setattr(metadata.Distribution, "from_name", staticmethod(not_installed))
    save(target, 1)
    assert json.loads((target / "checkpoint" / "zenflow.json").read_text())["version"] == __version__


def not_installed(name):
    raise metadata.PackageNotFoundError(name)


def test_a_save_replaces_the_one_before_and_leaves_nothing_else(target, swap):
    for number in (1, 2, 3):
        save(target, number)
        assert number_in(target) == number
        assert names(target.parent) == ["last.ckpt"]


def test_a_file_of_that_name_is_replaced(target, swap):
    target.write_text("a checkpoint in one file")
    save(target, 1)
    assert number_in(target) == 1 and names(target.parent) == ["last.ckpt"]


def test_a_link_is_replaced_and_what_it_points_to_stays(target, swap):
    save(target.parent / "epoch=1.ckpt", 1)
    target.symlink_to("epoch=1.ckpt")
    save(target, 2)
    assert not target.is_symlink() and number_in(target) == 2
    assert number_in(target.parent / "epoch=1.ckpt") == 1
    assert names(target.parent) == ["epoch=1.ckpt", "last.ckpt"]


def test_a_dangling_link_is_replaced(target, swap):
    target.symlink_to("gone.ckpt")
    save(target, 2)
    assert not target.is_symlink() and number_in(target) == 2 and names(target.parent) == ["last.ckpt"]


def test_relative_paths_and_folders_that_do_not_exist_yet_are_fine(tmp_path, monkeypatch, swap):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        save("a/b/last.ckpt", number)
        save(Path("last.ckpt"), number)
    assert number_in(tmp_path / "a" / "b" / "last.ckpt") == number_in(tmp_path / "last.ckpt") == 2
    remove("a/b/last.ckpt")
    assert names(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("name", ["last.ckpt", "hpc_ckpt_3.ckpt", "epoch=1-step=2.ckpt", "x" * 250 + ".ckpt"])
def test_names_on_the_way_have_nothing_of_the_target_and_differ_between_targets(name):
    paths = [path(Path("runs") / name) for path in (staging_path, removing_path)]
    assert {path.parent for path in paths} == {Path("runs")}
    for path in paths:
        assert not any(word in path.name for word in ("last", "ckpt", "epoch", "hpc", "xx")) and len(path.name) < 30
    assert staging_path(Path("runs/other.ckpt")) not in paths


def test_the_hash_of_a_name_is_the_one_of_sha256sum():
    # printf last.ckpt | sha256sum
    assert staging_path(Path("a/last.ckpt")) == Path("a/.saving-e6f69ff248c8")
    assert removing_path(Path("a/last.ckpt")) == Path("a/.removing-e6f69ff248c8")


def test_leftovers_of_this_name_are_deleted_and_others_left_alone(target):
    save(target, 1)
    other = target.parent / "other.ckpt"
    for path in (target, other):
        (staging_path(path) / "checkpoint").mkdir(parents=True)
        (removing_path(path) / "checkpoint").mkdir(parents=True)
    staging = begin(target)
    assert names(staging) == [] and not removing_path(target).exists()
    assert (staging_path(other) / "checkpoint").exists() and (removing_path(other) / "checkpoint").exists()


def test_the_last_whole_checkpoint_of_a_name_stays_until_the_next_one_is_there(target):
    save(target, 1)
    target.rename(removing_path(target))  # where a kill between the two renames leaves it
    staging = begin(target)
    write(staging, 2)
    assert (removing_path(target) / "checkpoint" / "zenflow.json").exists()
    commit(staging, target, {"number": 2})
    assert number_in(target) == 2 and names(target.parent) == ["last.ckpt"]


# What is refused


@pytest.mark.parametrize("make", [str, Path])
@pytest.mark.parametrize("address", ["s3://bucket/x.ckpt", "gs://b/x.ckpt", "file:///tmp/x.ckpt", "hf://a/b.ckpt"])
def test_addresses_are_refused(make, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for refuse in (begin, remove):
        with pytest.raises(ValueError, match=r"`filepath` must be a path on this machine, got .*Remote storage is not"):
            refuse(make(address))
    assert names(tmp_path) == []


def test_a_folder_with_a_colon_is_no_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:").mkdir()
    save("run:/x.ckpt", 3)
    assert number_in(tmp_path / "run:" / "x.ckpt") == 3


@pytest.mark.parametrize("path", [".", "", "..", "/", "a/.."])
def test_a_path_without_a_name_is_refused(path):
    for refuse in (begin, remove):
        with pytest.raises(ValueError, match=r"`filepath` must end in the checkpoint's name, got '.*'\. Write"):
            refuse(path)


@pytest.mark.parametrize("below", ["x.ckpt", "deep/er/x.ckpt"])
def test_a_file_above_the_target_is_named(tmp_path, below):
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(NotADirectoryError, match=rf"got '.*{below}', but '.*/runs' is a file\. Choose another folder"):
        begin(tmp_path / "runs" / below)


def test_a_folder_that_cannot_be_written_is_named(target, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"`filepath` must be where .*got '.*last.ckpt': Permission denied \('"):
        begin(target)


def test_a_name_that_is_too_long_is_refused_before_anything_is_saved(tmp_path):
    with pytest.raises(OSError, match=r"`filepath` must be where a directory can be written, got .*too long"):
        begin(tmp_path / ("x" * 300))
    assert names(tmp_path) == []


def fill_with_notes(target):
    target.mkdir()
    (target / "notes.txt").write_text("mine")


def fill_with_an_experiment(target):
    save(target, 1)
    (target / "logs").mkdir()
    (target / "notes.txt").write_text("mine")


@pytest.mark.parametrize("fill", [fill_with_notes, fill_with_an_experiment])
def test_a_directory_that_holds_other_things_is_never_replaced(target, fill):
    fill(target)
    before = sorted(target.rglob("*"))
    with pytest.raises(FileExistsError, match=r"got '.*last.ckpt', which is or holds something else\. Choose"):
        begin(target)
    assert sorted(target.rglob("*")) == before and names(target.parent) == ["last.ckpt"]


def test_a_pipe_is_never_replaced(target):
    os.mkfifo(target)
    with pytest.raises(FileExistsError, match="is or holds something else"):
        begin(target)


def test_a_directory_is_replaced_if_it_is_a_plain_checkpoint_or_has_no_files(target):
    (target / "checkpoint" / "empty").mkdir(parents=True)
    save(target, 1)
    assert number_in(target) == 1
    (target / "checkpoint" / "zenflow.json").unlink()
    (target / "checkpoint" / "zenflow_rank_0000.pt").unlink()
    save(target, 2)
    assert number_in(target) == 2


def test_facts_that_json_cannot_hold_are_refused_and_the_old_checkpoint_stays(target):
    save(target, 1)
    staging = begin(target)
    write(staging, 2)
    with pytest.raises(TypeError, match=r"`facts` must hold numbers, strings, lists and mappings, got .*set"):
        commit(staging, target, {"columns": {1, 2}})
    assert number_in(target) == 1


def test_a_commit_can_be_tried_again_after_an_error(target, monkeypatch):
    def fail(*paths):
        raise OSError(errno.EIO, "injected")

    staging = begin(target)
    write(staging, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="injected"):
            commit(staging, target, {"number": 1, "attempt": "a long one"})
    commit(staging, target, {"number": 1})
    assert number_in(target) == 1 and names(target.parent) == ["last.ckpt"]


def test_an_empty_staging_directory_is_not_committed(target):
    save(target, 1)
    with pytest.raises(FileNotFoundError, match="`staging` must hold a folder 'checkpoint', got none"):
        commit(begin(target), target, {})
    assert number_in(target) == 1


# Removing


def test_removing_takes_directories_and_files_and_ignores_what_is_absent(target):
    save(target, 1)
    remove(target)
    assert names(target.parent) == []
    target.write_text("file")
    remove(target)
    remove(target)
    remove(target.parent / "no" / "such.ckpt")
    assert names(target.parent) == []


def test_removing_a_link_leaves_what_it_points_to(target):
    save(target.parent / "epoch=1.ckpt", 1)
    for destination in ("epoch=1.ckpt", "gone.ckpt"):
        target.symlink_to(destination)
        remove(target)
        assert names(target.parent) == ["epoch=1.ckpt"]
    assert number_in(target.parent / "epoch=1.ckpt") == 1


def test_a_leftover_does_not_stand_in_the_way_of_removing(target):
    save(target, 1)
    (removing_path(target) / "checkpoint").mkdir(parents=True)
    remove(target)
    assert names(target.parent) == []


def test_discarding_deletes_the_staging_directory_and_never_raises(target, monkeypatch, caplog):
    staging = begin(target)
    write(staging, 1)
    discard(staging)
    discard(staging)
    assert names(target.parent) == []

    def fail(path):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(directory, "delete", fail)
    with caplog.at_level(logging.DEBUG, logger=directory.__name__):
        discard(staging)
    assert [record.levelname for record in caplog.records] == ["DEBUG"] and "busy" in caplog.text


def test_a_checkpoint_whose_predecessor_cannot_be_deleted_is_saved_all_the_same(target, monkeypatch, caplog):
    save(target, 1)
    staging = begin(target)
    write(staging, 2)

    def busy(path, **kwargs):
        raise OSError(errno.EBUSY, "busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(disk.shutil, "rmtree", busy)
        commit(staging, target, {"number": 2})
        remove(target)
    assert not target.exists() and [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "could not be deleted and takes up space" in caplog.text
    save(target, 3)
    assert number_in(target) == 3 and names(target.parent) == ["last.ckpt"]


# Order


def test_all_is_durable_before_the_move_and_the_move_before_anything_is_deleted(target, monkeypatch):
    save(target, 1)
    staging = begin(target)
    write(staging, 2)
    events = []

    def record(kind, function, argument=lambda path: path):
        def recorded(path, *args):
            events.append((kind, Path(path)))
            return function(path, *args)

        return recorded

    for name in ("sync", "exchange", "delete"):
        monkeypatch.setattr(directory, name, record(name, getattr(disk, name)))
    monkeypatch.setattr(Path, "write_bytes", record("write", Path.write_bytes))
    commit(staging, target, {"number": 2})
    inner = staging / "checkpoint"
    files = {("sync", path) for path in (staging / "latest", *(inner / part for part in PARTS))}
    assert set(events[:4]) == files
    assert events[4:] == [
        ("write", inner / "zenflow.json"),
        ("sync", inner / "zenflow.json"),
        ("sync", inner),
        ("sync", staging),
        ("exchange", staging),
        ("sync", target.parent),
        ("delete", staging),
        ("delete", removing_path(target)),
    ]
    events.clear()
    monkeypatch.setattr(os, "rename", record("rename", os.rename))
    remove(target)
    aside = removing_path(target)
    assert events == [("delete", aside), ("rename", target), ("sync", target.parent), ("delete", aside)]


def test_new_folders_are_made_durable_in_the_one_above(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk, "sync", lambda path: synced.append(path))
    begin(tmp_path / "a" / "b" / "x.ckpt")
    assert synced == [tmp_path, tmp_path / "a"]


# The system


def test_a_swap_works_between_a_directory_a_file_and_a_link(tmp_path):
    (tmp_path / "directory" / "x").mkdir(parents=True)
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("nowhere")
    assert disk.exchange(tmp_path / "directory", tmp_path / "file")
    assert disk.exchange(tmp_path / "directory", tmp_path / "link")
    assert names(tmp_path / "file") == ["x"] and (tmp_path / "link").read_text() == "text"
    assert os.readlink(tmp_path / "directory") == "nowhere"
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*file' -> '.*absent'"):
        disk.exchange(tmp_path / "file", tmp_path / "absent")


@pytest.mark.parametrize(("code", "swaps"), [(errno.ENOSYS, False), (errno.EINVAL, False), (errno.EPERM, False)])
def test_a_file_system_that_cannot_swap_is_no_error_and_others_are(monkeypatch, code, swaps):
    class Library:
        renameat2 = staticmethod(lambda *args: -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Library)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    assert disk.exchange(Path("a"), Path("b")) is swaps
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        disk.exchange(Path("a"), Path("b"))


def test_a_file_system_that_has_nothing_to_make_durable_is_no_error(target, monkeypatch):
    def fsync(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    code = errno.EINVAL
    save(target, 1)
    assert number_in(target) == 1
    code = errno.ENOSPC
    with pytest.raises(OSError, match=r"No space left on device: '.*/checkpoint/mp_rank_00"):
        save(target, 2)
    assert number_in(target) == 1
