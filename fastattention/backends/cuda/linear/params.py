"""The arguments of the kernels, field by field as in kernels/step_params.h."""

from __future__ import annotations

import torch

from fastattention.backends.common.params import Params, fields, formats

GATE_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, None: 0}  # as kernels/*_params.h have them


class StepParams(Params):
    """Of step.cuh. Pointers are those of LinearInputs in their order, then results."""

    _fields_ = fields(
        Q="q k v g beta initial_state cu_seqlens out final_state",
        q="""q_stride_batch q_stride_token q_stride_head k_stride_batch k_stride_token k_stride_head
        v_stride_batch v_stride_token v_stride_head g_stride_batch g_stride_token g_stride_head
        beta_stride_batch beta_stride_token beta_stride_head
        initial_stride_sequence initial_stride_head initial_stride_row""",
        i="""seqlen nheads group_size headdim_k headdim_v column_tiles g_format beta_format l2norm""",
        f="scale",
    )
    _pointers, _rest = formats(_fields_)
