"""The host side: shared memory, the background process that owns the AdamW state, and the trainer's handle on it.

Imports PyTorch, the standard library, `adamw` and `schedule` only, so that the background process starts fast. This
file imports nothing, for the same reason: take `HostClient` from `client`, `ArenaLayout` from `layout`, `worker_cores`
from `affinity`.
"""
