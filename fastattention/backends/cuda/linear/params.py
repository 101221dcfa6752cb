"""The arguments of the kernels of linear attention, as kernels/*_params.h declare them."""

from __future__ import annotations

from pathlib import Path

from fastattention.backends.common.c_struct import params_of

_KERNELS = Path(__file__).parent / "kernels"

StepParams = params_of(_KERNELS / "step_params.h", "StepParams")
ChunkParams = params_of(_KERNELS / "chunk_params.h", "ChunkParams")
GradientParams = params_of(_KERNELS / "chunk_params.h", "GradientParams")
