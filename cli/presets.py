"""Machines by name: what their data sheets say, and how much of it training usually gets.

Bandwidths are in bytes/s and per direction. Host bandwidth and cores are one device's share of the server that the device
is usually sold in, or of a desktop with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_zenflow.rates import Rates

UTILISATION_RATIO = 0.4
"""Share of the peak that forward and backward reach: 0.3 to 0.5 is usual for transformers of 1e9 parameters and more."""

LINK_RATIO = 0.8
"""Share of PCIe's raw bandwidth that copies from and to page-locked memory reach."""

MEMORY_RATIO = 0.75
"""Share of the peak that passes over memory reach, on the device and on the host (STREAM: 0.75 to 0.85)."""

CORE_BANDWIDTH = 9e9
"""What one core moves in these passes: 8.5e9 to 10.3e9 measured on a Xeon of the year 2023. Some cores then fill the memory."""

PCIE_4, PCIE_5 = 31.5e9, 63.0e9
"""x16, per direction, after 128b/130b encoding (PCI Express Base Specification 4.0 and 5.0)."""

GIB = 2**30

PresetName = Literal["here", "a100", "h100", "h200", "4090", "3090", "l4", "rtx-6000-ada", "cpu-two-cores"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A device and its share of the host, as data sheets have them (peaks).

    Attributes:
        title: For people.
        peak_flops: bf16 matrix products with fp32 sums, dense.
        memory_bytes: Of the device.
        device_bandwidth: Of the device's memory.
        link_bandwidth: Host to device.
        interconnect_bandwidth: Device to device.
        host_bandwidth: Host memory.
        cores: Cores for the background process: half of the device's share, as `pt_reserved_cores_perc` has it.
        measured: Rates that were measured in 16 bit, where there are; else they are derived from the peaks.
    """

    title: str
    peak_flops: float
    memory_bytes: int
    device_bandwidth: float
    link_bandwidth: float
    interconnect_bandwidth: float
    host_bandwidth: float
    cores: int
    measured: Rates | None = None

    def rates(self, wire_bytes: int, cores: int | None = None) -> Rates:
        """Rates of one rank, by the shares above.

        Args:
            wire_bytes: Bytes of a weight or gradient element. Products in fp32 run at half the speed of 16 bit.
            cores: Cores of the background process, instead of the preset's.
        """
        if self.measured is not None and wire_bytes == 2:
            return self.measured
        by_cores = CORE_BANDWIDTH * (cores or self.cores)
        return Rates.from_bandwidths(
            compute_flops=UTILISATION_RATIO * self.peak_flops * 2 / wire_bytes,
            device_bandwidth=MEMORY_RATIO * self.device_bandwidth,
            link_bandwidth=LINK_RATIO * self.link_bandwidth,
            host_bandwidth=min(by_cores, MEMORY_RATIO * self.host_bandwidth),
            interconnect_bandwidth=LINK_RATIO * self.interconnect_bandwidth,
            wire_bytes=wire_bytes,
            link_overlaps=self.measured is None,
        )


PRESETS: dict[str, Preset] = {
    # NVIDIA A100 data sheet (80 GB SXM, 2021): 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways. DGX A100: two EPYC 7742
    # with 64 cores and eight channels of DDR4-3200 (204.8 GB/s) each, for eight devices.
    "a100": Preset(
        title="A100 80 GB SXM",
        peak_flops=312e12,
        memory_bytes=80 * GIB,
        device_bandwidth=2039e9,
        link_bandwidth=PCIE_4,
        interconnect_bandwidth=300e9,
        host_bandwidth=2 * 204.8e9 / 8,
        cores=8,
    ),
    # NVIDIA H100 data sheet (SXM): 989 TFLOPS dense, 3.35 TB/s, NVLink 900 GB/s both ways. DGX H100: two Xeon 8480C with
    # 56 cores and eight channels of DDR5-4800 (307.2 GB/s) each, for eight devices.
    "h100": Preset(
        title="H100 80 GB SXM",
        peak_flops=989e12,
        memory_bytes=80 * GIB,
        device_bandwidth=3350e9,
        link_bandwidth=PCIE_5,
        interconnect_bandwidth=450e9,
        host_bandwidth=2 * 307.2e9 / 8,
        cores=7,
    ),
    # NVIDIA H200 data sheet (SXM): as H100, with 141 GB at 4.8 TB/s. DGX H200: host as DGX H100.
    "h200": Preset(
        title="H200 141 GB SXM",
        peak_flops=989e12,
        memory_bytes=141 * GIB,
        device_bandwidth=4800e9,
        link_bandwidth=PCIE_5,
        interconnect_bandwidth=450e9,
        host_bandwidth=2 * 307.2e9 / 8,
        cores=7,
    ),
    # NVIDIA Ada GPU architecture white paper, appendix A (GeForce RTX 4090): 165.2 TFLOPS with fp32 sums, 1,008 GB/s. Desktop
    # with 16 cores and two channels of DDR5-5600 (89.6 GB/s).
    "4090": Preset(
        title="GeForce RTX 4090 24 GB",
        peak_flops=165.2e12,
        memory_bytes=24 * GIB,
        device_bandwidth=1008e9,
        link_bandwidth=PCIE_4,
        interconnect_bandwidth=PCIE_4,
        host_bandwidth=89.6e9,
        cores=8,
    ),
    # NVIDIA Ampere GA102 white paper, appendix A (GeForce RTX 3090): 71 TFLOPS with fp32 sums, 936 GB/s. Desktop with 16
    # cores and two channels of DDR4-3200 (51.2 GB/s).
    "3090": Preset(
        title="GeForce RTX 3090 24 GB",
        peak_flops=71e12,
        memory_bytes=24 * GIB,
        device_bandwidth=936e9,
        link_bandwidth=PCIE_4,
        interconnect_bandwidth=PCIE_4,
        host_bandwidth=51.2e9,
        cores=8,
    ),
    # NVIDIA L4 data sheet: 242 TFLOPS with sparsity, so 121 dense; 300 GB/s, PCIe 4 x16. Server with two Xeon 8280 with 28
    # cores and six channels of DDR4-2933 (140.8 GB/s) each, for eight devices.
    "l4": Preset(
        title="L4 24 GB",
        peak_flops=121e12,
        memory_bytes=24 * GIB,
        device_bandwidth=300e9,
        link_bandwidth=PCIE_4,
        interconnect_bandwidth=PCIE_4,
        host_bandwidth=2 * 140.8e9 / 8,
        cores=3,
    ),
    # NVIDIA Ada GPU architecture white paper, appendix (RTX 6000 Ada): 364.2 TFLOPS, 960 GB/s, PCIe 4 x16. Workstation with
    # a Xeon w9-3495X, 56 cores and eight channels of DDR5-4800 (307.2 GB/s), for four devices.
    "rtx-6000-ada": Preset(
        title="RTX 6000 Ada 48 GB",
        peak_flops=364.2e12,
        memory_bytes=48 * GIB,
        device_bandwidth=960e9,
        link_bandwidth=PCIE_4,
        interconnect_bandwidth=PCIE_4,
        host_bandwidth=307.2e9 / 4,
        cores=7,
    ),
    # No data sheet: measured on a virtual machine with two cores of an Intel Xeon (AMX), one of which plays the device. The
    # link is a copy within one memory, and its core does nothing else meanwhile.
    "cpu-two-cores": Preset(
        title="two cores of a Xeon",
        peak_flops=1.2e12,
        memory_bytes=12 * GIB,
        device_bandwidth=12e9,
        link_bandwidth=10e9,
        interconnect_bandwidth=10e9,
        host_bandwidth=12e9,
        cores=1,
        measured=Rates(
            compute_flops=0.6e12,
            beside_flops=0.6e12,
            down_secs=1.4e-9,
            up_secs=0.35e-9,
            accumulate_secs=1.6e-9,
            update_secs=4.3e-9,
            device_adamw_secs=3.0e-9,
            write_secs=3.7e-9,
            interim_secs=0.5e-9,  # on an EPYC
            move_secs=55e-9,
            offload_down_secs=7.0e-9,
            offload_step_secs=2.6e-9,
            link_overlaps=False,
            device_bandwidth=4.6e9,
        ),
    ),
}
