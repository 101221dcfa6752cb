"""Codes of dtypes that kernels learn at run time, as kernels/dtype_code.h declares them."""

from __future__ import annotations

from pathlib import Path

import torch

from fastattention.backends.common.c_struct import constants_of

_CODES = constants_of(Path(__file__).parent / "kernels" / "dtype_code.h")
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: _CODES["kFloat32"],
    torch.float16: _CODES["kFloat16"],
    torch.bfloat16: _CODES["kBfloat16"],
}
