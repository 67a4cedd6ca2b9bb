"""What is compared, and what of it cannot run here."""

from __future__ import annotations

import os
import shutil

MODES = {
    "compute": "forward and backward alone, 16-bit weights: the limit",
    "zero_2": "as zero, under ZeRO-2",
    "zero": "DeepSpeed's ZeRO without offload, torch's AdamW",
    "zero_offload": "DeepSpeed's ZeRO-Offload with its CPU Adam",
    "ds_zenflow": "DeepSpeed's own ZenFlow, overlapped (speed only: its weights are wrong)",
    "zenflow_2": "as zenflow, under ZeRO-2",
    "zenflow": "this package, fixed intervals",
    "zenflow_auto": "this package under a Lightning Trainer, both intervals auto, once they have settled",
}
"""Name and meaning, in the order of the table."""

USUAL_MODES = {
    2: ("compute", "zero", "zero_offload", "ds_zenflow", "zenflow", "zenflow_auto"),
    3: ("compute", "zero_2", "zero", "zero_offload", "zenflow_2", "zenflow", "zenflow_auto"),
}
"""What is compared if nothing else is asked for, by stage. DeepSpeed's own ZenFlow asks for CUDA under ZeRO-3."""

COMPILED_MODES = ("zero_offload", "ds_zenflow")


def is_ours(mode: str) -> bool:
    """Whether the mode is this package."""
    return mode.startswith("zenflow")


def why_not(mode: str, stage: int, device_type: str) -> str | None:
    """Why `mode` cannot run on this machine, in words; `None` if it can as far as can be told before it runs."""
    if mode == "ds_zenflow" and stage == 3 and device_type != "cuda":
        return "DeepSpeed's own ZenFlow needs CUDA under ZeRO-3"
    if mode in COMPILED_MODES and not _is_compiled():
        missing = [tool for tool in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
        if missing:
            return f"DeepSpeed compiles its CPU Adam, and there is no {' and no '.join(missing)} here"
    return None


def _is_compiled() -> bool:
    """Whether DeepSpeed was installed with its CPU Adam built in."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get("cpu_adam"))
