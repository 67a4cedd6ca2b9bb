"""What runs in a process of its own, so that memory and threads of one measurement are no matter to the next.

Called with a JSON object of the arguments of `measure`; writes one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .model import UPDATE_INTERVAL, Grown, engine_of

TOKENS = 8
WARM_UP_STEPS = 8
ROUNDS = 3
MOST_STEPS, LEAST_STEPS = 16, 4
ROUND_SECS = 1.0
"""As long as steps, and passes without an optimizer, are timed in turn, unless they are few or many then."""


class Collectives(TorchDispatchMode):
    """Counts what PyTorch hands to its backend between ranks.

    Attributes:
        calls: How many.
        reduced_bytes: Of what is summed up.
        gathered_bytes: Of what is filled by gathering.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.reduced_bytes = self.gathered_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            nbytes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.calls += 1
            if "gather" in func._schema.name:
                self.gathered_bytes += max(nbytes, default=0)
            else:
                self.reduced_bytes += sum(nbytes)
        return func(*args, **(kwargs or {}))


def measure(
    numel: int, tensors: int, trainer_cores: list[int], worker_cores: list[int], ranks: int = 1
) -> dict[str, Any]:
    """Times steps, and forward and backward without an optimizer, in turn.

    Args:
        numel: Parameters, about.
        tensors: In how many matrices.
        trainer_cores: Cores of this process; none leaves it where it is.
        worker_cores: Cores of the background process; none leaves it free.
        ranks: How many processes do this at the same time.
    """
    if trainer_cores:
        os.sched_setaffinity(0, trainer_cores)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Grown(numel, tensors)
    x = torch.randn(TOKENS, model.width).bfloat16()
    plain, steps, stalls, host = [], [], [], []
    with engine_of(model, worker_cores, ranks) as engine:

        def step() -> None:
            engine.backward(engine(x))
            engine.step()

        for _ in range(WARM_UP_STEPS):
            step()
        alone = Grown(numel, tensors).bfloat16()

        def passes() -> None:
            for param in alone.parameters():
                param.grad = None
            alone(x).backward()

        passes()
        count = _count(step, ranks)
        begin_secs, begin_busy_secs = time.perf_counter(), time.thread_time()
        for _ in range(ROUNDS):
            plain += [_secs(passes) for _ in range(count)]
            step()  # the first one after a rest finds the host idle
            for _ in range(count):
                steps.append(_secs(step))
                stats = engine.optimizer.shard.stats
                stalls.append(stats.update_stall_secs)
                host.append(stats.worker_accumulate_secs + stats.worker_update_secs)
        waited_secs = sum(stalls)  # the trainer needs no core then
        wanted_secs = time.perf_counter() - begin_secs - waited_secs
        core_ratio = min(1.0, (time.thread_time() - begin_busy_secs) / wanted_secs)
        with Collectives() as counted:
            step()
    return {
        "numel": model.numel,
        "tensors": tensors,
        "plain_secs": statistics.median(plain),
        "step_secs": statistics.median(steps),
        "stall_secs": statistics.fmean(stalls),
        "host_secs": statistics.fmean(host),
        "core_ratio": core_ratio,
        "calls": counted.calls,
        "reduced_bytes": counted.reduced_bytes,
        "gathered_bytes": counted.gathered_bytes,
    }


def _count(step: Callable[[], None], ranks: int) -> int:
    """How many steps to time in a round: a multiple of the update interval, the same on all ranks."""
    limit = ROUND_SECS / _secs(step)
    if ranks > 1:
        slowest = torch.tensor([limit])
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MIN)
        limit = slowest.item()
    whole = UPDATE_INTERVAL * round(limit / UPDATE_INTERVAL)
    return max(LEAST_STEPS, min(MOST_STEPS, whole))


def _secs(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, which holds the other end of standard input."""
    os.read(0, 1)  # not by `sys.stdin`, whose lock a thread must not hold when Python ends
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found = measure(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(found) + "\n")
