"""Hardware: the bandwidths, in bytes per second, of a GPU, its link and its host, for plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastattention.errors import ArgumentError


@dataclass(frozen=True)
class Hardware:
    """One GPU and its share of the host, by bandwidths in bytes per second.

    Raises ArgumentError for impossible values.
    """

    name: str
    gpu_bandwidth: float  # reading GPU memory
    link_bandwidth: float  # uploads from pinned host memory
    cpu_bandwidth: float  # keys and values that the CPU's attention kernel reads
    dram_bandwidth: float  # host memory: uploads and the CPU's kernel together
    handover_seconds: float  # for a layer on the CPU: queries down, waking threads, the result up
    layer_overhead_seconds: float  # for any layer, beyond reading its weights and its cache

    def __post_init__(self) -> None:
        for field in ("gpu_bandwidth", "link_bandwidth", "cpu_bandwidth", "dram_bandwidth"):
            if not getattr(self, field) > 0:
                raise ArgumentError(f"{field}={getattr(self, field)} of {self.name} is not positive")
        for field in ("handover_seconds", "layer_overhead_seconds"):
            if not getattr(self, field) >= 0:
                raise ArgumentError(f"{field}={getattr(self, field)} of {self.name} is negative")
        for field in ("link_bandwidth", "cpu_bandwidth"):  # both read host memory
            if getattr(self, field) > self.dram_bandwidth:
                raise ArgumentError(
                    f"{field}={getattr(self, field):.4g} of {self.name} is more than "
                    f"dram_bandwidth={self.dram_bandwidth:.4g}, from which it reads"
                )

    def shared(self, num_gpus: int) -> Hardware:
        """The share of one of `num_gpus` equal GPUs in a host: its own link, and an even part of the host."""
        if num_gpus < 1:
            raise ArgumentError(f"num_gpus={num_gpus} is not positive")
        dram_bandwidth = self.dram_bandwidth / num_gpus
        return replace(
            self,
            link_bandwidth=min(self.link_bandwidth, dram_bandwidth),
            cpu_bandwidth=self.cpu_bandwidth / num_gpus,
            dram_bandwidth=dram_bandwidth,
        )


# Handovers and overheads are assumed for all presets: tens of microseconds, for the launches of a dozen kernels, and
# for two small copies with a wake-up between them. All other values are assumed too, unless marked as measured.
PRESETS = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            "h200",
            gpu_bandwidth=4.26e12,  # measured: a copy within the GPU, reading and writing (gpu_decode.json)
            link_bandwidth=52e9,  # PCIe 5; measured once: pinned copies reach 55 either way
            cpu_bandwidth=150e9,
            dram_bandwidth=200e9,  # measured once: 16 threads of a part of such a host read 171
            handover_seconds=30e-6,
            layer_overhead_seconds=20e-6,
        ),
        Hardware(
            "v100",
            gpu_bandwidth=800e9,  # of 900 published
            link_bandwidth=11e9,  # PCIe 3
            cpu_bandwidth=100e9,
            dram_bandwidth=128e9,  # six channels of DDR4-2666
            handover_seconds=50e-6,
            layer_overhead_seconds=30e-6,
        ),
        Hardware(
            "t4",
            gpu_bandwidth=240e9,  # of 320 published
            link_bandwidth=11e9,  # PCIe 3
            cpu_bandwidth=40e9,  # about eight cores, which clouds sell with one T4
            dram_bandwidth=60e9,
            handover_seconds=50e-6,
            layer_overhead_seconds=30e-6,
        ),
        Hardware(
            "desktop",
            gpu_bandwidth=900e9,  # of 1008 published of a GeForce RTX 4090
            link_bandwidth=25e9,  # PCIe 4
            cpu_bandwidth=60e9,
            dram_bandwidth=70e9,  # two channels of DDR5-5600, 90 on paper
            handover_seconds=40e-6,
            layer_overhead_seconds=20e-6,
        ),
    )
}


def find_hardware(name: str) -> Hardware:
    """The preset with this name. Raises ArgumentError for an unknown one."""
    if name not in PRESETS:
        raise ArgumentError(f"hardware={name!r} is not known; choose from {', '.join(PRESETS)}")
    return PRESETS[name]
