"""The argument of every kernel: kernels/params.h, field by field."""

from __future__ import annotations

import ctypes
import struct

_POINTERS = "q k v out lse cu_seqlens_q cu_seqlens_k block_table alibi_slopes sinks attn_bias".split()
_STRIDES = (
    "q_stride_batch q_stride_head k_stride_batch k_stride_head v_stride_batch v_stride_head "
    "out_stride_batch out_stride_head "
    "lse_stride_batch lse_stride_head bias_stride_batch bias_stride_head bias_stride_row bias_stride_key "
    "alibi_stride_batch block_table_stride"
).split()
_INTEGERS = (
    "q_stride_row k_stride_row v_stride_row out_stride_row "
    "batch_size seqlen_q seqlen_k nheads group_size headdim headdim_v page_block_size window_left window_right "
    "bias_is_float num_m_tiles heads_together"
).split()
_FLOATS = "softmax_scale softcap".split()


class ForwardParams(ctypes.Structure):
    """Passed by value to the kernel."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _INTEGERS]
        + [(name, ctypes.c_float) for name in _FLOATS]
    )


_POINTERS_FORMAT = struct.Struct(f"{len(_POINTERS)}Q")
_REST_FORMAT = struct.Struct(f"{len(_STRIDES)}q{len(_INTEGERS)}i{len(_FLOATS)}f")
_BLANK = bytes(ctypes.sizeof(ForwardParams))


def pack_template(*values: float) -> bytes:
    """The structure without its pointers: every other field in order."""
    params = bytearray(_BLANK)
    _REST_FORMAT.pack_into(params, _POINTERS_FORMAT.size, *values)
    return bytes(params)


def make_params(template: bytes, *pointers: int) -> ForwardParams:
    """The structure of a template with its pointers in order, 0 for null. Ten times faster than its constructor."""
    params = ForwardParams.from_buffer_copy(template)
    _POINTERS_FORMAT.pack_into(params, 0, *pointers)
    return params
