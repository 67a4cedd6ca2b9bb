"""The paper's form: the whole model is updated at once, every `U` steps, while the device goes on.

Gradients are added up on the host at every step, and every `U` steps the sums are handed to an update of everything, which
has until the next hand-over. While it reads one set of sums, a second one takes the next gradients: two things at a time,
which our background process, that does one after the other, is not made for. So two of them share the host's cores, and
the system shares out their time:

- one adds up. Each step it gets `Update` of its first part of `PARTS`, with the gradient and `others`: that is an addition
  to all other parts, and an AdamW step on the first. At each hand-over `Restore` says that it holds nothing, so that the
  first addition of a window is a copy;
- one updates. Each window `Restore` says that the second of its two blocks holds `U` steps, whose sums lie in its lane,
  and `Update` applies them to that block: the whole shard, but for the `U` parts that the other one updates in a window.
  Its first block is never touched, and takes no memory.

So over a window AdamW runs over as many elements as the shard has, from fp32 sums, and as many weights go to the device:
the bytes of our own passes. In favour of this form, nobody waits for the window's last addition before the update begins,
and the sums change hands for nothing.
"""

from __future__ import annotations

from torch import Tensor

from lightning_zenflow.offload.client import HostClient
from lightning_zenflow.offload.protocol import Gradient
from lightning_zenflow.schedule import block_range
from lightning_zenflow.shards import Segment

from .methods import Method
from .pace import Clock
from .workload import GROUPS, Workload

PARTS = 64
"""Into so many the sums are cut, of which one is updated where only an addition is wanted."""

GRADIENT = Gradient(1.0, tuple(hyper.lr for hyper in GROUPS))


class WholeModel(Method):
    """Additions at each step, and an update of everything every `update_interval` steps, at most `PARTS - 1`."""

    def __init__(self, workload: Workload, bandwidth: float, clock: Clock, update_interval: int) -> None:
        super().__init__(workload, bandwidth, clock)
        self._update_interval, self._step = update_interval, 0
        self._part_numel = block_range(workload.numel, PARTS, 0)[1]
        self._weights = workload.device_memory()
        self._clients: list[HostClient] = []
        try:
            self._adding = self._started(workload.launch(PARTS))
            rest = workload.numel - update_interval * self._part_numel
            self._updating = self._started(workload.launch(2, numel=2 * rest))
        except BaseException:
            self.close()
            raise

    def _started(self, client: HostClient) -> HostClient:
        self._clients.append(client)
        return client

    @property
    def update_interval(self) -> int:
        return self._update_interval

    def _receive(self, segment: Segment, grad: Tensor) -> None:
        with self.device.slot_wait():
            self._adding.wait_slot(segment.start, segment.stop)
        self.transfers.to_host(self._adding.arena.slot[segment.start : segment.stop], grad)

    def _finish(self) -> None:
        self._step += 1
        adding = self._adding
        adding.update(0, self._step % 2, self._step, 0.0, GROUPS, GRADIENT, others=True)
        while adding.waiting:  # only what is reported already: nobody waits for a part
            self._copy(adding, self._weights[: self._part_numel], buffer=2)
        if self._step % self._update_interval == 0:
            self._hand_over()
        for client in self._clients:
            client.take_answers()

    def _hand_over(self) -> None:
        updating, half = self._updating, self._step // self._update_interval % 2
        while updating.outstanding:
            # The stall of this form: the update before must be done, and its weights on their way.
            begin_secs = self.clock.now()
            updating.drain()
            self.device.idle(self.clock.now() - begin_secs)
            rest = self._weights[self._update_interval * self._part_numel :]
            self._copy(updating, rest, buffer=1 - half)
        self.transfers.wait_to_device(half)  # it is filled again now
        _hold(updating, [0, self._update_interval])
        updating.update(1, half, self._step, 0.0, GROUPS)
        _hold(self._adding, [0] * PARTS)

    def _copy(self, client: HostClient, weights: Tensor, buffer: int) -> None:
        done = client.collect()
        self.transfers.to_device(weights, client.arena.outboxes[done.half][: weights.numel()], buffer=buffer)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _hold(client: HostClient, held: list[int]) -> None:
    """Says how many steps each block holds, whatever lies in its lane."""
    client.restore(held, [[steps * rate for rate in GRADIENT.lrs] for steps in held])
