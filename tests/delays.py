"""Copies that arrive as late as an accelerator may deliver them, so that a missing wait shows up on CPU."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

from torch import Tensor

from lightning_zenflow.transfer import Transfers


class LateTransfers(Transfers):
    """What a stream guarantees, and nothing more.

    A copy to the host is read in stream order but lands only when it is waited for. A copy to the device is seen by later
    device work, but reads its host buffer until it is waited for: a buffer that changes before that is an error.
    """

    def __init__(self, seed: int = 0, longest_secs: float = 0.0) -> None:
        super().__init__()
        self._landing: list[tuple[Tensor, Tensor]] = []
        self._reading: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._random, self._longest_secs = random.Random(seed), longest_secs

    def _delay(self) -> None:
        time.sleep(self._random.random() * self._longest_secs)

    def to_host(self, host: Tensor, device: Tensor) -> None:
        self._landing.append((host, device.clone()))
        self.to_host_bytes += host.nbytes

    def wait_to_host(self) -> None:
        self._delay()
        self._random.shuffle(self._landing)
        for host, copy in self._landing:
            host.copy_(copy)
        self._landing.clear()

    def to_device(self, device: Tensor, host: Tensor, *, buffer: int) -> None:
        device.copy_(host)
        self.to_device_bytes += host.nbytes
        self._reading.setdefault(buffer, []).append((host, host.clone()))

    def wait_to_device(self, buffer: int) -> None:
        self._delay()
        for host, copy in self._reading.pop(buffer, []):
            if not host.eq(copy).all():
                raise AssertionError(f"host buffer {buffer} was filled again before its copy to the device was done")


@contextlib.contextmanager
def everything_late(seed: int, longest_secs: float) -> Iterator[None]:
    """Within this context copies of new engines land late, and their background processes sleep around each command."""
    import lightning_zenflow.shard_optimizer as optimizer_module
    from lightning_zenflow.offload import process

    if not longest_secs:
        yield
        return
    patch = f"""
import random, time
from lightning_zenflow.offload import worker
randomly, longest = random.Random({seed}), {longest_secs}
def slowed(original):
    def call(*args, **kwargs):
        time.sleep(randomly.random() * longest)
        result = original(*args, **kwargs)
        time.sleep(randomly.random() * longest)
        return result
    return call
worker.HostAdamW._accumulate = slowed(worker.HostAdamW._accumulate)
worker.HostAdamW._update = slowed(worker.HostAdamW._update)
"""
    transfers, bootstrap = optimizer_module.Transfers, process.BOOTSTRAP
    optimizer_module.Transfers = lambda: LateTransfers(seed, longest_secs)  # type: ignore[assignment, misc]
    process.BOOTSTRAP = bootstrap.replace("main(*", f"exec({patch!r})\nmain(*")
    try:
        yield
    finally:
        optimizer_module.Transfers, process.BOOTSTRAP = transfers, bootstrap  # type: ignore[misc]


@contextlib.contextmanager
def host_that_takes(accumulate_secs: float, adamw_secs: float) -> Iterator[None]:
    """Within this context new background processes take this much longer, for a gradient and for AdamW on all blocks."""
    from lightning_zenflow.offload import process

    patch = f"""
import time
from lightning_zenflow.offload import worker
accumulate, update = worker.HostAdamW._accumulate, worker.HostAdamW._update
def wait(self, blocks, secs):
    pieces = [piece for block in blocks for piece in self._blocks[block]]
    time.sleep(secs * sum(last - first for first, last, _ in pieces) / self._arena.layout.numel)
def slow_accumulate(self, blocks, *rest):
    done = accumulate(self, blocks, *rest)
    wait(self, blocks, {accumulate_secs})
    return tuple((begin, time.perf_counter() - begin) for begin, _ in done)
def slow_update(self, command, *rest):
    wait(self, [command.block], {accumulate_secs} + {adamw_secs})
    return update(self, command, *rest)
worker.HostAdamW._accumulate, worker.HostAdamW._update = slow_accumulate, slow_update
"""
    bootstrap = process.BOOTSTRAP
    process.BOOTSTRAP = bootstrap.replace("main(*", f"exec({patch!r})\nmain(*")
    try:
        yield
    finally:
        process.BOOTSTRAP = bootstrap
