"""Trainings in the cells of a notebook: in a real kernel, which runs them inside of its own event loop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.launching import CODE, launched, plain_run, same, weights
from tests.live import Program, until, warm_server
from tests.patience import patient

jupyter_client = pytest.importorskip("jupyter_client", reason="the extra `test` installs it")
pytest.importorskip("ipykernel", reason="the extra `test` installs it")

pytestmark = [pytest.mark.timeout(300), pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Notebook:
    """Cells of one kernel.

    Attributes:
        kernel: Its process.
        shown: What the cells have written so far, and their errors.
    """

    def __init__(self, kernel: Program, client: Any) -> None:
        self.kernel, self._client, self.shown = kernel, client, ""

    def run(self, cell: str, within_secs: float = 60.0) -> str:
        """Runs a cell to its end, and returns how it ended: `ok` or the name of its exception."""
        reply = self._client.execute_interactive(
            cell, allow_stdin=False, timeout=patient(within_secs), output_hook=self._show
        )
        return _how(reply)

    def begin(self, cell: str) -> str:
        """Has a cell run, without waiting for it; returns its number."""
        return self._client.execute(cell)

    def end(self, number: str, within_secs: float = 60.0) -> str:
        """Waits until the cell that was begun has ended, and returns how."""
        while True:  # until `get_shell_msg` raises
            reply = self._client.get_shell_msg(timeout=patient(within_secs))
            if reply["parent_header"].get("msg_id") == number:
                return _how(reply)

    def shut_down(self) -> None:
        self._client.shutdown()

    def _show(self, message: dict[str, Any]) -> None:
        content = message["content"]
        self.shown += content.get("text", "") + "\n".join(content.get("traceback", []))


def _how(reply: dict[str, Any]) -> str:
    return reply["content"].get("ename", reply["content"]["status"])


@contextmanager
def notebook(folder: Path) -> Iterator[Notebook]:
    """A kernel, started as Jupyter starts it, and its client."""
    file, _ = jupyter_client.connect.write_connection_file(str(folder / "kernel.json"))
    env: dict[str, str | Path | None] = {
        "IPYTHONDIR": folder / "ipython",
        "JUPYTER_RUNTIME_DIR": folder,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with launched(["-m", "ipykernel_launcher", "-f", file], folder, env=env) as kernel:
        client = jupyter_client.BlockingKernelClient(connection_file=file)
        client.load_connection_file()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=patient(30))
            yield Notebook(kernel, client)
        finally:
            client.stop_channels()
            client.context.term()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    warm_server()
    return plain_run(tmp_path_factory.mktemp("plain"))


ENDLESS = """
from pathlib import Path
from tests.launched import train
from tests.live_training import At
train(max_steps=-1, callbacks=(At(5, lambda trainer: Path("trains").touch()),))
"""


def test_cells_train_one_after_the_other_and_the_kernel_ends(plain: dict[str, Tensor], tmp_path: Path) -> None:
    with notebook(tmp_path) as cells:
        for _ in range(2):
            assert cells.run(CODE) == "ok", cells.shown
            assert same(weights(tmp_path), plain)
            assert cells.kernel.workers() == []
            (tmp_path / "weights.pt").unlink()
        cells.shut_down()
        assert cells.kernel.end(10) == 0


def test_an_interrupted_cell_ends_its_training_and_the_next_one_trains(
    plain: dict[str, Tensor], tmp_path: Path
) -> None:
    """The button that interrupts: Lightning ends the run in its own way, and the kernel lives on."""
    with notebook(tmp_path) as cells:
        number = cells.begin(ENDLESS)
        assert until((tmp_path / "trains").exists, patient(60))
        cells.kernel.send(signal.SIGINT)
        assert cells.end(number) == "SystemExit"
        assert cells.kernel.workers() == []
        assert cells.run(CODE) == "ok", cells.shown
        assert same(weights(tmp_path), plain)
        cells.shut_down()
        assert cells.kernel.end(10) == 0


def test_a_killed_kernel_leaves_no_background_process(tmp_path: Path) -> None:
    with notebook(tmp_path) as cells:
        cells.begin(ENDLESS)
        assert until((tmp_path / "trains").exists, patient(60))
        assert len(cells.kernel.workers()) == 1
        cells.kernel.send(signal.SIGKILL)
        assert cells.kernel.end(10) == -signal.SIGKILL
