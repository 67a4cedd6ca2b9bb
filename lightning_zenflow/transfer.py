"""Copies between host and device that do not wait, and the waits that make them safe.

One code path for every accelerator: streams and events come from DeepSpeed's accelerator API. On a device whose copies
are synchronous (the CPU) the same calls cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Transfers:
    """Starts copies on the current stream and remembers what has to be waited for.

    Only the training process uses it. `to_host_bytes` and `to_device_bytes` count what was moved since `reset_bytes`.
    """

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        self._accelerator: Any = get_accelerator()
        self._synchronous = self._accelerator.is_synchronized_device()
        self._to_host: dict[Any, Any] = {}
        self._to_device: dict[int, Any] = {}
        self.reset_bytes()

    def reset_bytes(self) -> None:
        self.to_host_bytes = self.to_device_bytes = 0

    def to_host(self, host: Tensor, device: Tensor) -> None:
        """Starts copying `device` into `host`; `host` is valid after `wait_to_host`."""
        host.copy_(device, non_blocking=True)
        self.to_host_bytes += host.nbytes
        self.mark()

    def mark(self) -> None:
        """What has been queued on the current stream so far is part of what `wait_to_host` waits for."""
        if not self._synchronous:
            # One event per stream: backward may hand in gradients from several streams.
            stream = self._accelerator.current_stream()
            event = self._accelerator.Event()
            event.record(stream)
            self._to_host[stream] = event

    def wait_to_host(self) -> None:
        """Blocks until all copies to the host, and everything queued before them on their streams, are done.

        Without it the background process would read a half-written gradient, and the norm would be read too early.
        """
        for event in self._to_host.values():
            event.synchronize()
        self._to_host.clear()

    def to_device(self, device: Tensor, host: Tensor, *, buffer: int) -> None:
        """Starts copying `host` into `device` on the current stream.

        `host` lies in the numbered host buffer and must not be overwritten before `wait_to_device(buffer)`.
        """
        device.copy_(host, non_blocking=True)
        self.to_device_bytes += host.nbytes
        if not self._synchronous:
            event = self._accelerator.Event()
            event.record(self._accelerator.current_stream())
            self._to_device[buffer] = event

    def fetch(self, host: Tensor, device: torch.device, *, buffer: int) -> Tensor:
        """`host` on `device`, copied on the current stream, or itself if it lies there. As with `to_device`."""
        if host.device == device:
            self.to_device_bytes += host.nbytes
            return host
        fetched = torch.empty_like(host, device=device)
        self.to_device(fetched, host, buffer=buffer)
        return fetched

    def wait_to_device(self, buffer: int) -> None:
        """Blocks until the copies out of the numbered host buffer are done, so that it may be filled again."""
        event = self._to_device.pop(buffer, None)
        if event is not None:
            event.synchronize()
