"""Does the host state fit? Asked before anything is allocated: later, the out-of-memory killer would answer."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import NamedTuple


class Available(NamedTuple):
    """`nbytes` can still be allocated under the limit `source`; `remedy` says how to raise it.

    `shared_nbytes` is memory that processes under the same limit share already, maybe other ranks' state.
    """

    nbytes: int
    source: str
    remedy: str
    shared_nbytes: int = 0


def check_host_memory(need_bytes: int, ranks_on_machine: int, *, numel: int, root: Path = Path("/")) -> None:
    """Trainer: raises unless the host state of all ranks of this machine fits into what is free.

    Args:
        need_bytes: Host memory of one rank: `ArenaLayout.nbytes`.
        ranks_on_machine: Ranks on this machine, each with the same need.
        numel: Parameters of one rank, for the message.
        root: Where `proc` and `sys` are found.

    Raises:
        MemoryError: It does not fit. The message names the need, the tightest limit and the remedy.
    """
    others = need_bytes * (ranks_on_machine - 1)
    for limit in (*_of_machine(root), *_of_cgroups(root)):
        # Other ranks may have filled their share while this one starts: it must not count as need and as used.
        if need_bytes + others - min(others, limit.shared_nbytes) > limit.nbytes:
            raise _too_little(need_bytes, ranks_on_machine, numel, limit)
    for limit in _of_process(root):
        if need_bytes > limit.nbytes:
            raise _too_little(need_bytes, 1, numel, limit)


def _too_little(need_bytes: int, ranks: int, numel: int, limit: Available) -> MemoryError:
    gib = 2**30
    together = f" ({need_bytes * ranks / gib:.2f} GiB for the {ranks} ranks of this machine)" if ranks > 1 else ""
    return MemoryError(
        f"The host state needs {need_bytes / gib:.2f} GiB for {numel:,} parameters of this rank{together}, only"
        f" {limit.nbytes / gib:.2f} GiB are available under {limit.source}. {limit.remedy}, or use more machines: each"
        " rank then holds less."
    )


def _of_machine(root: Path) -> list[Available]:
    """What the kernel can give out without swapping: free pages and reclaimable caches."""
    kib = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines())
    if "MemAvailable" not in kib:
        return []
    free, shared = (1024 * int(kib.get(name, "0").split()[0]) for name in ("MemAvailable", "Shmem"))
    return [Available(free, "MemAvailable of this machine", "Free host memory", shared)]


def _of_process(root: Path) -> list[Available]:
    """What `ulimit -v` leaves of this process's address space."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return []
    used_pages = int((_read(root / "proc/self/statm") or "0").split()[0])
    free = max(0, soft - used_pages * mmap.PAGESIZE)
    return [Available(free, f"RLIMIT_AS of {soft / 2**30:.2f} GiB", "Raise it (`ulimit -v unlimited`)")]


def _of_cgroups(root: Path) -> list[Available]:
    """Headroom at every level from this process's memory cgroup (v1 or v2) up to the mount point."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, names = "cgroup2", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            version, names = "cgroup", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        for mount, inner in _mounts(root, version):
            found += _up_from(mount, _inside(path, inner), names)
    return found


def _mounts(root: Path, version: str) -> list[tuple[Path, str]]:
    """Mount points of the memory controller's file system, with the cgroup that is mounted there."""
    mounts = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == version and (version == "cgroup2" or "memory" in options.split(",")):
            inner, mount = before.split()[3:5]
            mounts.append((root / mount.lstrip("/"), inner))
    return mounts


def _inside(path: str, inner: str) -> str:
    """`path` below a mount whose root is the cgroup `inner`, as in containers without a cgroup namespace."""
    return os.path.relpath(path, inner) if (path + "/").startswith(inner.rstrip("/") + "/") else "."


def _up_from(mount: Path, path: str, names: tuple[str, str, str]) -> list[Available]:
    limit_name, usage_name, prefix = names
    directory = mount / path.lstrip("/")
    levels = [directory, *directory.parents]
    found = []
    for level in levels[: levels.index(mount) + 1]:
        limit, usage = _read(level / limit_name).strip(), _read(level / usage_name).strip()
        if not limit.isdigit() or not usage.isdigit():  # "max", or a level without the controller
            continue
        # Page cache counts as usage but is given back on demand: a checkpoint that was just read must not look like a
        # full container. Shared memory is not among these two.
        stat = dict(line.split(" ", 1) for line in _read(level / "memory.stat").splitlines() if " " in line)
        cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
        free = max(0, int(limit) - int(usage) + cache)
        remedy = "Raise the memory limit of the container or job"
        source = f"the memory limit of {int(limit) / 2**30:.2f} GiB in {level}"
        found.append(Available(free, source, remedy, int(stat.get(f"{prefix}shmem", 0))))
    return found


def _read(path: Path) -> str:
    """Text of a kernel file; empty if it is not there, since no limit is then known."""
    try:
        return path.read_text()
    except OSError:
        return ""
