"""The arguments of the kernels of linear attention, as kernels/*_params.h declare them."""

from __future__ import annotations

from pathlib import Path

import torch

from fastattention.backends.common.c_struct import params_of

GATE_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, None: 0}  # as in kernels/*_params.h

_KERNELS = Path(__file__).parent / "kernels"

StepParams = params_of(_KERNELS / "step_params.h", "StepParams")
ChunkParams = params_of(_KERNELS / "chunk_params.h", "ChunkParams")
