"""Simulated device and link: when they are done, on a clock whose time is made up."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_zenflow.cli.simulate.pace import PacedDevice, PacedTransfers, RealClock
from tests.fake_host import FakeClock

BANDWIDTH = 100.0
DEVICE, HOST = torch.ones(10), torch.zeros(10)
"""Of 40 bytes, which the link needs 0.4 s for."""


def test_a_copy_does_not_hold_up_the_trainer_and_is_done_when_the_link_would_have_done_it() -> None:
    clock = FakeClock()
    transfers = PacedTransfers(BANDWIDTH, clock)
    transfers.to_host(HOST, DEVICE)
    assert clock.now() == 0
    transfers.wait_to_host()
    assert clock.now() == pytest.approx(0.4)
    transfers.wait_to_host()
    assert clock.now() == pytest.approx(0.4)


def test_copies_of_one_direction_follow_each_other_and_those_of_both_run_beside_each_other() -> None:
    clock = FakeClock()
    transfers = PacedTransfers(BANDWIDTH, clock)
    for _ in range(3):
        transfers.to_host(HOST, DEVICE)
    transfers.to_device(DEVICE, HOST, buffer=0)
    transfers.wait_to_device(0)
    assert clock.now() == pytest.approx(0.4)
    transfers.wait_to_host()
    assert clock.now() == pytest.approx(1.2)
    assert (transfers.to_host_bytes, transfers.to_device_bytes) == (120, 40)


def test_a_link_that_was_idle_begins_when_a_copy_is_launched() -> None:
    clock = FakeClock()
    transfers = PacedTransfers(BANDWIDTH, clock)
    transfers.to_host(HOST, DEVICE)
    clock.sleep_until(5.0)
    transfers.to_host(HOST, DEVICE)
    transfers.wait_to_host()
    assert clock.now() == pytest.approx(5.4)


def test_each_host_buffer_is_waited_for_alone_and_once() -> None:
    clock = FakeClock()
    transfers = PacedTransfers(BANDWIDTH, clock)
    transfers.to_device(DEVICE, HOST, buffer=0)
    transfers.to_device(DEVICE, HOST, buffer=1)
    transfers.wait_to_device(2)
    assert clock.now() == 0
    transfers.wait_to_device(0)
    assert clock.now() == pytest.approx(0.4)
    transfers.wait_to_device(1)
    assert clock.now() == pytest.approx(0.8)


def test_forward_waits_for_the_weights_that_are_on_their_way() -> None:
    clock = FakeClock()
    transfers = PacedTransfers(BANDWIDTH, clock)
    device = PacedDevice(transfers, clock)
    transfers.to_device(DEVICE, HOST, buffer=0)
    device.begin_step()
    device.compute(1.0)
    device.wait_for_gradients()
    cost = device.end_step()
    assert (cost.step_secs, cost.link_wait_secs, cost.host_wait_secs) == pytest.approx((1.4, 0.4, 0.0))


def test_what_computing_does_not_hide_of_the_gradients_is_a_wait_for_the_link() -> None:
    clock = FakeClock()
    transfers = PacedTransfers(BANDWIDTH, clock)
    device = PacedDevice(transfers, clock)
    device.begin_step()
    for _ in range(3):  # a piece each 0.1 s: the link has done the first when the third is launched
        device.compute(0.1)
        transfers.to_host(HOST, DEVICE)
    device.wait_for_gradients()
    cost = device.end_step()
    assert (cost.step_secs, cost.link_wait_secs) == pytest.approx((0.1 + 3 * 0.4, 3 * 0.4 - 0.2))


def test_a_blocked_trainer_costs_the_device_what_is_not_hidden_by_the_piece_launched_ahead() -> None:
    clock = FakeClock()
    device = PacedDevice(PacedTransfers(BANDWIDTH, clock), clock)
    device.begin_step()
    device.compute(1.0)
    with device.slot_wait():
        clock.sleep_until(4.0)  # from 1 to 4; the second piece runs from 1 to 2
    for _ in range(2):  # the third begins at 4
        device.compute(1.0)
        with device.slot_wait():
            pass
    device.wait_for_gradients()
    cost = device.end_step()
    assert (cost.step_secs, cost.host_wait_secs, cost.link_wait_secs) == pytest.approx((5.0, 2.0, 0.0))
    assert device.slot_wait_secs == pytest.approx(3.0)


def test_a_wait_for_the_last_gradients_place_is_the_hosts_and_not_the_links() -> None:
    clock = FakeClock()
    device = PacedDevice(PacedTransfers(BANDWIDTH, clock), clock)
    device.begin_step()
    device.compute(1.0)
    with device.slot_wait():
        clock.sleep_until(3.0)
    device.wait_for_gradients()
    cost = device.end_step()
    assert (cost.step_secs, cost.host_wait_secs, cost.link_wait_secs) == pytest.approx((3.0, 2.0, 0.0))


def test_the_real_clock_sleeps_until_the_deadline_without_a_core() -> None:
    clock = RealClock()
    begin, used = clock.now(), time.process_time()
    clock.sleep_until(begin + 0.2)
    assert clock.now() - begin >= 0.2
    assert time.process_time() - used < 0.1
    before = clock.now()
    clock.sleep_until(begin)
    assert clock.now() - before < 0.1
