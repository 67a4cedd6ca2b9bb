"""A store that outlives the ranks which have met in it."""

from __future__ import annotations

import pytest
import torch.distributed
from torch.distributed import TCPStore

from lightning_zenflow.restarted import store_of_this_attempt


def store() -> torch.distributed.Store:
    """As `init_process_group` gets it, in this process alone."""
    with store_of_this_attempt():
        found: torch.distributed.Store = next(torch.distributed.rendezvous("env://"))[0]
    return found


@pytest.mark.parametrize(
    ("machines", "shared", "sees"), [("1", "True", False), ("2", "True", True), ("1", "False", True)]
)
def test_ranks_that_are_started_again_do_not_see_what_the_ones_before_have_left(
    machines: str, shared: str, sees: bool, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False, multi_tenant=True)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": machines,
        "TORCHELASTIC_USE_AGENT_STORE": shared,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first = store()
    first.set("address", "old")
    assert agents.check(["address"]), "the first attempt meets where PyTorch has it meet"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = store()
    assert again.check(["address"]) is sees
    again.set("address", "new")
    assert store().get("address") == b"new", "all ranks of an attempt meet in the same place"
