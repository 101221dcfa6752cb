"""The arguments of the kernels of attention, as kernels/params.h declares them."""

from __future__ import annotations

from pathlib import Path

from fastattention.backends.common.c_struct import constants_of, params_of

_HEADER = Path(__file__).parent / "kernels" / "params.h"

AttentionParams = params_of(_HEADER, "AttentionParams")
BackwardParams = params_of(_HEADER, "BackwardParams")
QuantizeParams = params_of(_HEADER, "QuantizeParams")
AppendParams = params_of(_HEADER, "AppendParams")
MergeParams = params_of(_HEADER, "MergeParams")

MOST_PARTS = constants_of(_HEADER)["kMostParts"]  # parts of a launch of merge.cuh
