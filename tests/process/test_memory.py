"""Does it fit: the tightest of machine, container and process limits, on made-up kernel files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from lightning_zenflow.offload.memory import check_host_memory

GIB = 2**30
V1_MOUNT = "30 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V2_MOUNT = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def machine(root: Path, available_gib: float = 64, shmem_gib: float = 0, cgroup: str = "", mount: str = "") -> None:
    write(root / "proc/meminfo", f"MemTotal: {2**27} kB\nMemAvailable: {int(available_gib * 2**20)} kB\n")
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.write(f"Shmem: {int(shmem_gib * 2**20)} kB\n")
    write(root / "proc/self/cgroup", cgroup)
    write(root / "proc/self/mountinfo", f"20 1 0:3 / /proc rw - proc proc rw\n{mount}")
    write(root / "proc/self/statm", "0 0 0\n")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(level: Path, limit_gib: float | None, used_gib: float, cache_gib: float = 0, shmem_gib: float = 0) -> None:
    write(level / "memory.max", "max" if limit_gib is None else str(int(limit_gib * GIB)))
    write(level / "memory.current", str(int(used_gib * GIB)))
    half = int(cache_gib * GIB / 2)
    stat = f"anon 1\nactive_file {half}\ninactive_file {half}\nshmem {int(shmem_gib * GIB)}\n"
    write(level / "memory.stat", stat)


def check(root: Path, need_gib: float, ranks: int = 1) -> None:
    check_host_memory(int(need_gib * GIB), ranks, numel=1_000_000, root=root)


def test_the_machine_itself_is_a_limit(tmp_path: Path) -> None:
    machine(tmp_path, available_gib=8)
    check(tmp_path, 8)
    with pytest.raises(MemoryError) as error:
        check(tmp_path, 9)
    assert str(error.value) == (
        "The host state needs 9.00 GiB for 1,000,000 parameters of this rank, only 8.00 GiB are available under"
        " MemAvailable of this machine. Free host memory, or use more machines: each rank then holds less."
    )


def test_all_ranks_of_the_machine_must_fit(tmp_path: Path) -> None:
    machine(tmp_path, available_gib=8)
    check(tmp_path, 4, ranks=2)
    with pytest.raises(MemoryError, match=r"needs 3.00 GiB .* \(9.00 GiB for the 3 ranks of this machine\), only 8.00"):
        check(tmp_path, 3, ranks=3)


def test_what_other_ranks_have_filled_already_is_not_counted_twice(tmp_path: Path) -> None:
    machine(tmp_path, available_gib=4, shmem_gib=4)
    check(tmp_path, 4, ranks=2)
    with pytest.raises(MemoryError):
        check(tmp_path, 5, ranks=1)


@pytest.mark.parametrize("tight", ["job", "job/step", ""])
def test_every_level_of_a_v2_hierarchy_counts(tight: str, tmp_path: Path) -> None:
    machine(tmp_path, cgroup="0::/job/step", mount=V2_MOUNT)
    top = tmp_path / "sys/fs/cgroup"
    for level in ("", "job", "job/step"):
        v2(top / level, 4 if level == tight else None, used_gib=1)
    check(tmp_path, 3)
    with pytest.raises(
        MemoryError, match=f"3.00 GiB are available under the memory limit of 4.00 GiB in {top / tight}"
    ):
        check(tmp_path, 3.5)


def test_every_level_of_a_v1_hierarchy_counts(tmp_path: Path) -> None:
    machine(tmp_path, cgroup="4:cpu:/x\n3:memory:/job/step\n0::/", mount=V1_MOUNT)
    for level, limit in (("job", 4 * GIB), ("job/step", 2**63 - 4096)):
        folder = tmp_path / "sys/fs/cgroup/memory" / level
        write(folder / "memory.limit_in_bytes", str(limit))
        write(folder / "memory.usage_in_bytes", str(2 * GIB))
        write(folder / "memory.stat", f"total_inactive_file {GIB}\n")
    check(tmp_path, 3)
    with pytest.raises(MemoryError, match=r"3.00 GiB are available under the memory limit of 4.00 GiB"):
        check(tmp_path, 3.5)


def test_a_container_that_sees_its_own_cgroup_as_the_mount_is_understood(tmp_path: Path) -> None:
    mount = "30 25 0:26 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    machine(tmp_path, cgroup="3:memory:/docker/abc/job", mount=mount)
    for level, limit in ((".", 16 * GIB), ("job", 4 * GIB)):
        folder = tmp_path / "sys/fs/cgroup/memory" / level
        write(folder / "memory.limit_in_bytes", str(limit))
        write(folder / "memory.usage_in_bytes", str(GIB))
    with pytest.raises(MemoryError, match=r"3.00 GiB are available .*/memory/job"):
        check(tmp_path, 3.5)


def test_a_checkpoint_in_the_page_cache_does_not_fill_a_container(tmp_path: Path) -> None:
    machine(tmp_path, cgroup="0::/", mount=V2_MOUNT)
    v2(tmp_path / "sys/fs/cgroup", 8, used_gib=7, cache_gib=6)
    check(tmp_path, 7)
    with pytest.raises(MemoryError):
        check(tmp_path, 7.5)


def test_the_address_space_of_this_process_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * GIB, 4 * GIB))
    write(tmp_path / "proc/self/statm", f"{GIB // resource.getpagesize()} 0 0\n")
    check(tmp_path, 3, ranks=8)
    with pytest.raises(MemoryError, match=r"3.00 GiB are available under RLIMIT_AS of 4.00 GiB. Raise it \(`ulimit -v"):
        check(tmp_path, 3.5)


def test_a_system_that_tells_nothing_refuses_nothing(tmp_path: Path) -> None:
    check(tmp_path, 1e6)


def test_this_machine_has_room_for_a_little_and_not_for_everything() -> None:
    check_host_memory(2**20, 1, numel=1)
    with pytest.raises(MemoryError):
        check_host_memory(2**50, 1, numel=1)
