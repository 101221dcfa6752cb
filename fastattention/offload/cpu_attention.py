"""Prepares attention to keys and values in CPU memory, to be run when its queries have arrived."""

from __future__ import annotations

from torch import Tensor

from fastattention.attention.operators import ATTENTION_KVCACHE
from fastattention.attention.validation import KvCacheArguments, Options
from fastattention.attention.validation.common import as_kernels_read
from fastattention.backends.cpu.attention.backend import CpuBackend
from fastattention.backends.cpu.attention.call import CpuAttentionCall
from fastattention.offload.device import CpuWork


def prepare_attention(
    arguments: KvCacheArguments, options: Options, out: Tensor, lse: Tensor, num_threads: int
) -> CpuWork:
    """A call of fast_attn_with_kvcache that writes out and lse, and reads the values of q only when it is run.

    The tensors of `arguments` are in CPU memory; their lengths and pages are read now. Raises as the call would.

    out: (batch_size, seqlen_q, nheads, headdim_v); lse: float32 (batch_size, nheads, seqlen_q)
    """
    options = options._replace(return_lse=True)
    plan, inputs = ATTENTION_KVCACHE.plan(arguments, options, CpuBackend.name)
    assert isinstance(plan.forward, CpuAttentionCall)
    return plan.forward.prepare(as_kernels_read(plan.problem, inputs), out, lse, num_threads)
