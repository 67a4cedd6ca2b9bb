"""Who computes with how many threads where the CPU is the accelerator."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.modules import EXPECTED_WARNINGS, Small, fit

pytestmark = EXPECTED_WARNINGS


class ThreadsDuringFit(Callback):
    def on_train_start(self, *_: Any) -> None:
        self.threads = torch.get_num_threads()


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("given", [None, "1"])
def test_torch_leaves_the_workers_share_of_cores_alone_until_the_end_of_fit(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    cores = sorted(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    callback = ThreadsDuringFit()
    try:
        fit(Small(), zenflow={"worker_cores": cores[1:] or cores}, max_steps=1, callbacks=[callback])
        assert callback.threads == (len(cores) if given else 1)
        assert torch.get_num_threads() == len(cores)
    finally:
        torch.set_num_threads(before)
