"""Limits of each GPU, from the table of compute capabilities in NVIDIA's CUDA C++ programming guide."""

from __future__ import annotations

from typing import NamedTuple

KIB = 1024


class Limits(NamedTuple):
    """Limits of one GPU, or of all GPUs of one compute capability."""

    target: int  # compute capability: 10 * major + minor, e.g. 75
    shared_per_cta: int  # bytes a CTA may have, opted in
    shared_per_sm: int  # bytes all CTAs of a multiprocessor share
    num_sms: int
    l2_bytes: int
    registers_per_sm: int = 65536

    @property
    def arch(self) -> int:
        """The code path for this GPU."""
        return arch_of(self.target)

    @property
    def on_chip_bytes(self) -> int:
        """All memory on the chip: the L2 cache, and shared memory and registers of all multiprocessors."""
        return self.l2_bytes + self.num_sms * (self.shared_per_sm + 4 * self.registers_per_sm)


# Every code path, newest first, with the oldest GPUs it serves.
ARCHS = (80, 75, 70, 60)

# The chips that are planned for. The runtime reads a device's own figures instead.
CHIPS: dict[str, Limits] = {
    "P100": Limits(60, 48 * KIB, 64 * KIB, 56, 4 * KIB * KIB),
    "GTX 1080": Limits(61, 48 * KIB, 96 * KIB, 20, 2 * KIB * KIB),
    "V100": Limits(70, 96 * KIB, 96 * KIB, 80, 6 * KIB * KIB),
    "T4": Limits(75, 64 * KIB, 64 * KIB, 40, 4 * KIB * KIB),
    "A100": Limits(80, 163 * KIB, 164 * KIB, 108, 40 * KIB * KIB),
    "RTX 3090": Limits(86, 99 * KIB, 100 * KIB, 82, 6 * KIB * KIB),
    "RTX 4090": Limits(89, 99 * KIB, 100 * KIB, 128, 72 * KIB * KIB),
    "H100": Limits(90, 227 * KIB, 228 * KIB, 132, 50 * KIB * KIB),
}

# Newer GPUs, for which nothing is built ahead: compute capability -> the chip with the same multiprocessors by that
# table. Multiprocessors decide which kernels fit; their number and the L2 cache do not.
LIKE = {100: "H100", 103: "H100", 110: "H100", 120: "RTX 4090", 121: "RTX 4090"}


def limits_of(target: int) -> Limits | None:
    """Limits to choose a kernel by for GPUs of a compute capability; None for one that is not listed here."""
    if target in LIKE:
        return CHIPS[LIKE[target]]._replace(target=target)
    return next((limits for limits in CHIPS.values() if limits.target == target), None)


def targets_of(arch: int) -> list[int]:
    """Compute capabilities that a code path can be compiled for."""
    return sorted(target for target in {*LIKE, *(limits.target for limits in CHIPS.values())} if target >= arch)


def arch_of(target: int) -> int:
    """The code path for a compute capability: the newest that is not newer. Raises ValueError below 60."""
    for arch in ARCHS:
        if target >= arch:
            return arch
    raise ValueError(f"compute capability {target / 10:.1f} is not supported; Pascal (6.0) is the oldest that is")
