"""fp16 in tests on every CPU.

DeepSpeed refuses fp16 on CPUs without instructions for it, and so does the strategy. PyTorch computes it there all the same,
slowly, which is fast enough to test loss scaling and skipped steps.
"""

from __future__ import annotations

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


def allow_fp16_on_any_cpu() -> None:
    """Until the end of this process."""
    CPU_Accelerator.is_fp16_supported = lambda self: True
