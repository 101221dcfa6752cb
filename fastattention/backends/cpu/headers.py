"""What the headers of the native library declare for Python: structs of arguments, and codes of dtypes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import torch

from fastattention.backends.common.c_struct import Params, constants_of, params_of, structs_of

_KERNELS = Path(__file__).parent / "kernels"
_CODES = constants_of(_KERNELS / "common" / "dtype.h")

DTYPE_CODES = {
    torch.float32: _CODES["FA_FLOAT32"],
    torch.bfloat16: _CODES["FA_BFLOAT16"],
    torch.float16: _CODES["FA_FLOAT16"],
    torch.int8: _CODES["FA_INT8"],
    torch.float8_e4m3fn: _CODES["FA_FLOAT8"],
    torch.int32: _CODES["FA_INT32"],
    torch.int64: _CODES["FA_INT64"],
}

# Every struct that Python hands to the library, by its name in C.
STRUCTS: dict[str, type[Params]] = {
    name: params_of(header, name) for header in sorted(_KERNELS.glob("*/params.h")) for name in structs_of(header)
}


def pointer_packer(params: type[Params], *names: str) -> Callable[..., bytes]:
    """Packs the addresses of these pointers, given in order, into the fields that begin `params`; others are null.

    Raises TypeError for names that are unknown or not in the header's order.
    """
    params.maker(*names)  # compares the names with the header
    return struct.Struct("".join("Q" if name in names else "8x" for name in params.pointer_names)).pack
