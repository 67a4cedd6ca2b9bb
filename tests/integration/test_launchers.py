"""The ways to start one training: as a script, a module, an archive, from standard input, and in odd surroundings.

Each gives the weights of the plain run, bit for bit, ends with code 0, and leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import zipapp
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.launching import CODE, WEIGHTS, ends_well, launched, plain_run, same
from tests.live import REPO, started, warm_server

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    warm_server()
    return plain_run(tmp_path_factory.mktemp("plain"))


def script(folder: Path, code: str = CODE, name: str = "train.py") -> Path:
    """A script in a folder of its own, so that what a run leaves in its working directory can be seen."""
    path = folder / "code" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return path


def empty(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def test_odd_surroundings_all_at_once_change_nothing(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """Spaces, other letters, a locale without them, no `assert`, no docstrings, no byte code, no place to write to."""
    folder = empty(tmp_path, "Übung mit Leerzeichen — 試")
    work, home = empty(folder, "arbeit"), script(folder) / "no home"
    env: dict[str, str | Path | None] = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONOPTIMIZE": "2",
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": folder / "no folder",
        "HOME": home,
        "XDG_CACHE_HOME": home / "cache",
    }
    with launched([script(folder)], folder, cwd=work, env=env) as program:
        ends_well(program, folder, plain)
    assert list(work.iterdir()) == []


@pytest.mark.long
def test_a_module_of_a_package(plain: dict[str, Tensor], tmp_path: Path) -> None:
    package = script(tmp_path, name="__init__.py", code="").parent.rename(tmp_path / "app")
    (package / "train.py").write_text(CODE)
    with launched(["-m", "app.train"], tmp_path) as program:
        ends_well(program, tmp_path, plain)


@pytest.mark.long
def test_code_on_the_command_line(plain: dict[str, Tensor], tmp_path: Path) -> None:
    with launched(["-c", CODE], tmp_path) as program:
        ends_well(program, tmp_path, plain)


@pytest.mark.long
def test_a_script_from_standard_input(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """And the rest of standard input stays the script's: the background process reads none of it."""
    code = "import sys\n" + CODE + "print('then', sys.stdin.read())\n"
    with launched(["-"], tmp_path, stdin=code) as program:
        ends_well(program, tmp_path, plain)
        assert program.has_said("then ")


@pytest.mark.long
def test_an_isolated_interpreter(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """`python -I` takes no PYTHONPATH: what the script puts on the search path holds for the background process too."""
    path = script(tmp_path, f"import sys\nsys.path.insert(0, {str(REPO)!r})\n{CODE}")
    with launched(["-I", path], tmp_path, env={"PYTHONPATH": "/does/not/exist"}) as program:
        ends_well(program, tmp_path, plain)


@pytest.mark.long
@pytest.mark.parametrize("holds_package", [False, True], ids=["of the user's code", "of all code"])
def test_an_archive_of_python_files(holds_package: bool, plain: dict[str, Tensor], tmp_path: Path) -> None:
    """`python app.pyz`: also with this package inside, of which no file exists then."""
    source = empty(tmp_path, "source")
    script(tmp_path, name="__main__.py").rename(source / "__main__.py")
    if holds_package:
        skip = shutil.ignore_patterns("__pycache__", "cli")
        shutil.copytree(REPO / "lightning_zenflow", source / "lightning_zenflow", ignore=skip)
        shutil.copytree(REPO / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__", "test_*"))
    archive = tmp_path / "app.pyz"
    zipapp.create_archive(source, archive)
    shutil.rmtree(source)
    with launched([archive], tmp_path, env={"PYTHONPATH": None if holds_package else REPO}) as program:
        ends_well(program, tmp_path, plain)


def test_a_working_directory_that_was_deleted(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """In mid-run, as by a job's clean-up: what starts afterwards must not need it."""
    work = empty(tmp_path, "work")
    code = f"""
from tests.launched import train
os.chdir({str(work)!r})
os.rmdir({str(work)!r})
train(default_root_dir={str(tmp_path)!r})
"""
    with started(tmp_path, code, env={WEIGHTS: str(tmp_path / "weights.pt")}) as program:
        ends_well(program, tmp_path, plain)


@pytest.mark.long
def test_a_working_directory_and_a_home_that_cannot_be_written_to(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """`/proc` is such a place for root too."""
    place = Path("/proc/self/task")
    with pytest.raises(FileNotFoundError):
        (place / "file").touch()
    with launched([script(tmp_path)], tmp_path, cwd=Path("/proc"), env={"HOME": "/proc"}) as program:
        ends_well(program, tmp_path, plain)


def test_a_thread_and_a_forked_daemon(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """One after the other: a fork of a process that has a background process would be another matter."""
    code = """
from tests.launched import train
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=train, daemon=True)
process.start()
process.join()
assert process.exitcode == 0
os.rename(os.environ["WEIGHTS"], os.environ["WEIGHTS"] + ".daemon")
in_thread(train)
"""
    with started(tmp_path, code, env={WEIGHTS: str(tmp_path / "weights.pt")}) as program:
        ends_well(program, tmp_path, plain)
    assert same(torch.load(tmp_path / "weights.pt.daemon", weights_only=True), plain)


@pytest.mark.long
def test_a_spawned_daemon(plain: dict[str, Tensor], tmp_path: Path) -> None:
    code = """
from tests.launched import train
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train, daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    with launched([script(tmp_path, code)], tmp_path) as program:
        ends_well(program, tmp_path, plain)


@pytest.mark.long
def test_two_trainings_at_once_on_one_machine(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """From one folder, too: neither ports, names nor memory are shared."""
    folders = [empty(tmp_path, name) for name in "ab"]
    path = script(tmp_path)
    with (
        launched([path], folders[0], cwd=tmp_path) as first,
        launched([path], folders[1], cwd=tmp_path) as second,
    ):
        ends_well(first, folders[0], plain)
        ends_well(second, folders[1], plain)
    assert os.listdir(tmp_path / "code") == ["train.py"]
