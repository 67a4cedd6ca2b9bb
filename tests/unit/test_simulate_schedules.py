"""The simulated schedules: what is sent when, and what a step takes, with a background process whose times are made up."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from lightning_zenflow.cli.simulate import workload as workload_module
from lightning_zenflow.cli.simulate.experiment import METHODS, SYNCHRONOUS, ZENFLOW, simulate
from lightning_zenflow.cli.simulate.methods import Method, ShardMethod
from lightning_zenflow.cli.simulate.whole_model import PARTS, WholeModel
from lightning_zenflow.cli.simulate.workload import SEGMENTS, Workload
from lightning_zenflow.offload.protocol import Restore, Update
from tests.fake_host import FakeClock, FakeHosts

NUMEL = 64_000
FAST_LINK = 1e15
COMPUTE_SECS = 3.0
LOAD = Workload(NUMEL, (0,))

Hosts = Callable[..., FakeHosts]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    def fake(*update_secs: float) -> FakeHosts:
        made = FakeHosts(FakeClock(), list(update_secs))
        monkeypatch.setattr(workload_module, "HostClient", made)
        return made

    return fake


def step_secs(method: Method, steps: int, warm_up: int = 0) -> list[float]:
    return [method.train(COMPUTE_SECS).step_secs for _ in range(warm_up + steps)][warm_up:]


def test_the_pieces_of_the_shard_cover_it_once_and_nothing_is_selected() -> None:
    for numel in (NUMEL, 8, 1_000_003):
        segments = Workload(numel, (0,)).table.segments
        assert [segment.start for segment in segments] == [0, *(segment.stop for segment in segments[:-1])]
        assert (segments[-1].stop, len(segments)) == (numel, SEGMENTS)
        assert all(segment.spec.is_matrix for segment in segments)


@pytest.mark.parametrize("update_interval", [1, 4])
def test_with_an_instant_host_and_link_a_step_of_zenflow_takes_what_computing_takes(
    hosts: Hosts, update_interval: int
) -> None:
    clock = hosts(0.0).clock
    method = ShardMethod.zenflow(LOAD, FAST_LINK, clock, update_interval)
    assert step_secs(method, 8) == pytest.approx([COMPUTE_SECS] * 8)


def test_zenflow_hides_a_block_that_is_ready_before_the_next_gradient_needs_its_place(hosts: Hosts) -> None:
    clock = hosts(4 * 0.9).clock  # a block takes 0.9 s, forward 1 s
    method = ShardMethod.zenflow(LOAD, FAST_LINK, clock, 4)
    assert step_secs(method, 8) == pytest.approx([COMPUTE_SECS] * 8)


def test_a_synchronous_step_is_computing_and_updating_and_copying_one_after_the_other(hosts: Hosts) -> None:
    update_secs, copy_secs = 5.0, 0.5
    clock = hosts(update_secs).clock
    method = ShardMethod.synchronous(LOAD, 2 * NUMEL / copy_secs, clock)
    # Gradients travel while the rest of backward runs, but for the last piece; the weights come up before the next forward.
    expected = COMPUTE_SECS + copy_secs / SEGMENTS + update_secs + copy_secs
    assert step_secs(method, 4, warm_up=1) == pytest.approx([expected] * 4)


def test_zenflow_brings_up_a_block_a_step_where_the_synchronous_schedule_brings_all(hosts: Hosts) -> None:
    fake = hosts(0.0, 0.0)
    zenflow = ShardMethod.zenflow(LOAD, FAST_LINK, fake.clock, 4)
    synchronous = ShardMethod.synchronous(LOAD, FAST_LINK, fake.clock)
    for _ in range(3):
        zenflow.train(COMPUTE_SECS)
        synchronous.train(COMPUTE_SECS)
    assert zenflow.stats.to_device_bytes == 2 * NUMEL // 4
    assert synchronous.stats.to_device_bytes == zenflow.stats.to_host_bytes == 2 * NUMEL


def test_zenflow_sends_one_command_a_step_and_collects_it_a_step_later(hosts: Hosts) -> None:
    fake = hosts(0.0)
    method = ShardMethod.zenflow(LOAD, FAST_LINK, fake.clock, 4)
    for _ in range(5):
        method.train(COMPUTE_SECS)
        assert fake.started[0].outstanding == 1
    sent: list[Any] = fake.started[0].commands
    assert [command.block for command in sent] == [1, 2, 3, 0, 1]
    assert all(command.others and command.gradient is not None for command in sent)
    assert all(command.look_ahead == pytest.approx((1 + 1.5) / 4) for command in sent)


def test_the_synchronous_schedule_leaves_nothing_under_way(hosts: Hosts) -> None:
    fake = hosts(1.0)
    method = ShardMethod.synchronous(LOAD, FAST_LINK, fake.clock)
    method.train(COMPUTE_SECS)
    assert fake.started[0].outstanding == 0
    assert (fake.started[0].commands[0].block, method.update_interval) == (0, 1)  # type: ignore[union-attr]


def test_the_whole_model_is_updated_once_a_window_behind_its_additions(hosts: Hosts) -> None:
    fake = hosts(0.0, 0.0)
    method = WholeModel(LOAD, FAST_LINK, fake.clock, 4)
    for _ in range(8):
        method.train(COMPUTE_SECS)
    adding, updating = (client.commands for client in fake.started)
    additions = [command for command in adding if isinstance(command, Update)]
    assert len(additions) == 8
    assert all(command.others and command.block == 0 for command in additions)
    restored = [number for number, command in enumerate(adding) if isinstance(command, Restore)]
    assert restored == [4, 9]  # behind the additions of steps 1 to 4, and 5 to 8
    assert [type(command) for command in updating] == [Restore, Update] * 2
    holds, update = updating[0], updating[1]
    assert isinstance(holds, Restore) and isinstance(update, Update)
    assert (holds.held, update.block, update.gradient, update.clock) == ((0, 4), 1, None, 4)


def test_over_a_window_the_whole_model_is_updated_once_and_brought_up_once(hosts: Hosts) -> None:
    fake = hosts(0.0, 0.0)
    method = WholeModel(LOAD, FAST_LINK, fake.clock, 4)
    part_numel, rest_numel = NUMEL // PARTS, fake.started[1].arena.layout.block_numel
    assert 4 * part_numel + rest_numel == NUMEL
    for step in range(12):
        if step == 8:
            method.transfers.reset_bytes()
        method.train(COMPUTE_SECS)
    assert method.transfers.to_device_bytes == 2 * NUMEL
    assert method.transfers.to_host_bytes == 4 * 2 * NUMEL


@pytest.mark.parametrize(("update_secs", "window_secs"), [(2.0, 12.0), (12.0, 12.0), (17.0, 17.0)])
def test_the_whole_model_stalls_once_a_window_if_its_update_takes_longer_than_that(
    hosts: Hosts, update_secs: float, window_secs: float
) -> None:
    clock = hosts(0.0, 2 * update_secs).clock  # its shard is one of two blocks
    method = WholeModel(LOAD, FAST_LINK, clock, 4)
    taken = step_secs(method, 8, warm_up=8)
    assert sum(taken) == pytest.approx(2 * window_secs)
    assert taken[:3] == pytest.approx([COMPUTE_SECS] * 3)


def test_a_whole_model_that_cannot_start_leaves_nothing_running(hosts: Hosts) -> None:
    fake = hosts(0.0)  # the second has no time given: its start fails
    with pytest.raises(IndexError):
        WholeModel(LOAD, FAST_LINK, fake.clock, 4)
    assert [client.is_closed for client in fake.started] == [True]


def test_all_methods_are_measured_at_all_ratios_from_low_to_high_and_closed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_zenflow.cli.simulate import experiment

    monkeypatch.setattr(experiment, "_host_update_secs", lambda method: 6.0)
    monkeypatch.setattr(experiment.TunedZenFlow, "tune", lambda self, compute_secs: None)
    fake = hosts(6.0, 0.0, 6.0, 6.0, 6.0)
    told: list[str] = []
    found = simulate(LOAD, FAST_LINK, 4, [2.0, 0.5], 5, fake.clock, told.append)
    assert [(point.ratio, point.method) for point in found.points] == [(r, m) for r in (0.5, 2.0) for m in METHODS]
    slow = found.point(SYNCHRONOUS, 2.0)
    assert (slow.compute_secs, slow.step_secs) == pytest.approx((3.0, 9.0))
    assert slow.stall_ratio == pytest.approx(2 / 3)
    quick = found.point(ZENFLOW, 0.5)
    assert (quick.step_secs, quick.update_interval) == (pytest.approx(12.0), 4)
    assert found.speedup(quick) == pytest.approx(18 / 12)
    assert len(fake.started) == 5 and all(client.is_closed for client in fake.started)
    assert [line.partition(" (")[0] for line in told[-2:]] == ["Ratio 0.5", "Ratio 2"]


def test_a_failure_closes_what_was_started(hosts: Hosts) -> None:
    fake = hosts(0.0, 0.0, 0.0)
    with pytest.raises(IndexError):
        simulate(LOAD, FAST_LINK, 4, [1.0], 5, fake.clock, lambda line: None)
    assert len(fake.started) == 3 and all(client.is_closed for client in fake.started)
    assert statistics.fmean([client.outstanding for client in fake.started]) == 0
