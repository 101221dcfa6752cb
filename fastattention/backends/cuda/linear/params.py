"""The arguments of the kernels of linear attention, as kernels/*_params.h declare them."""

from __future__ import annotations

from pathlib import Path

import torch

from fastattention.backends.common.c_struct import constants_of, params_of

_KERNELS = Path(__file__).parent / "kernels"
_FORMATS = constants_of(_KERNELS / "gate_format.h")
GATE_FORMATS = {
    torch.float32: _FORMATS["kFloat32Gates"],
    torch.float16: _FORMATS["kFloat16Gates"],
    torch.bfloat16: _FORMATS["kBfloat16Gates"],
    None: _FORMATS["kFloat32Gates"],
}

StepParams = params_of(_KERNELS / "step_params.h", "StepParams")
ChunkParams = params_of(_KERNELS / "chunk_params.h", "ChunkParams")
