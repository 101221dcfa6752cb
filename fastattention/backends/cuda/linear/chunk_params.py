"""The arguments of the kernels of chunked linear attention, field by field as in kernels/chunk_params.h."""

from __future__ import annotations

from fastattention.backends.common.params import Params, fields, formats


class ChunkParams(Params):
    """Of prepare.cuh, prepare_keys.cuh, states.cuh and outputs.cuh."""

    _fields_ = fields(
        Q="""q k v g beta initial_state cu_seqlens out final_state scores inverse factors q_scaled k_scaled
        states updates""",
        q="""q_stride_batch q_stride_head k_stride_batch k_stride_head v_stride_batch v_stride_head
        g_stride_batch g_stride_row g_stride_head beta_stride_batch beta_stride_row beta_stride_head
        state_stride_sequence state_stride_head state_stride_key""",
        i="""q_stride_row k_stride_row v_stride_row num_sequences seqlen num_slots nheads group_size headdim_k headdim_v
        columns_k columns_v gate_format beta_format normalizes""",
        f="scale",
    )
    _pointers, _rest = formats(_fields_)
