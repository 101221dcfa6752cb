"""Facts of the code paths that kernels are compiled for, and the folders of headers that families share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

COMMON_FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", Path(__file__).parents[2] / "common")

MAX_REGISTERS = 255  # of a thread, on every GPU


class ArchFacts(NamedTuple):
    """What kernels/arch/sm*.cuh are written for."""

    step_rows: int  # query rows that a warp's matrix instruction takes
    element_bytes: int  # in shared memory

    @property
    def elements(self) -> int:
        """Floats that a lane holds of step_rows x 8 accumulators."""
        return self.step_rows * 8 // 32


ARCH_FACTS = {60: ArchFacts(16, 4), 70: ArchFacts(32, 2), 75: ArchFacts(16, 2), 80: ArchFacts(16, 2)}
