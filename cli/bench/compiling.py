"""DeepSpeed's compiled optimizers, built where no killed build can stop the next one.

PyTorch builds an extension behind a file `lock`, which a killed process leaves behind: from then on everybody waits for it,
without a limit. So this command builds in a folder of its own, behind a lock that the system takes back when its holder dies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

FOLDER = "lightning_zenflow_bench"


def load_cpu_adam() -> None:
    """Loads DeepSpeed's CPU Adam into this process, compiled anew if need be, which takes a minute or more.

    Sets `TORCH_EXTENSIONS_DIR` of this process, below the value it has.

    Raises:
        RuntimeError: Compiling failed, or DeepSpeed finds what it has built unfit.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    place = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(place)
    with (place / "held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # whoever runs us has a limit
        for left_behind in place.glob("*/lock"):
            left_behind.unlink()
        CPUAdamBuilder().load(verbose=False)
