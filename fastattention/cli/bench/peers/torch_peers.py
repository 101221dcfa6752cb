"""PyTorch as peers: scaled_dot_product_attention, and workarounds for the calls it is slow at."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from fastattention.cli.bench.peers.base import Peer, PreparedPeer, is_backward, is_decode, is_varlen, prepare_backward
from fastattention.cli.bench.workload import BenchWorkload, Tensors, make_gradient, sequences

# A long prefill is not measured with eager attention; benchmarks/memory.py shows the memory that it takes.
LONGEST_EAGER = 256


def prepare_sdpa(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """scaled_dot_product_attention on contiguous (batch_size, heads, seqlen, headdim); groups through enable_gqa."""
    inputs = Tensors(*(heads_first(tensor) for tensor in tensors))
    # SDPA aligns its mask to the top left: the single query of a decode would see one key. Without a mask it sees all.
    options: dict[str, Any] = {"is_causal": workload.causal and not is_decode(workload)}
    if is_grouped(workload):
        options["enable_gqa"] = True
    path = sdpa_path(*inputs, **options)
    if is_backward(workload):
        forward = functools.partial(scaled_dot_product_attention, **options)
        with torch.enable_grad():
            return prepare_backward(forward, inputs, heads_first(make_gradient(workload)), heads_last, path)
    call = functools.partial(scaled_dot_product_attention, *inputs, **options)
    return PreparedPeer(call, heads_last, path)


def prepare_folded_sdpa(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """A workaround for grouped heads: the query heads of a group become the queries of one head."""
    inputs = folded(workload, tensors)
    call = functools.partial(scaled_dot_product_attention, *inputs)
    return PreparedPeer(call, functools.partial(unfolded, workload), sdpa_path(*inputs))


def prepare_matmul(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """Matmul, softmax, matmul on folded heads: in some dtypes the fastest decode that can be written by hand."""
    call = functools.partial(by_matmul, *folded(workload, tensors))
    return PreparedPeer(call, functools.partial(unfolded, workload))


def prepare_eager(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """Matmul, mask, softmax, matmul over the whole square: the "eager" attention of a model."""
    inputs = Tensors(*(heads_first(tensor) for tensor in tensors))
    return PreparedPeer(functools.partial(by_matmul, *inputs, causal=workload.causal), heads_last)


def prepare_sdpa_loop(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """Variable-length sequences one at a time, with results written back to back, as the next layer reads them."""
    batch = [[heads_first(part[None]) for part in parts] for parts in sequences(workload, tensors)]

    def call() -> Tensor:
        outs = [scaled_dot_product_attention(q, k, v, is_causal=workload.causal) for q, k, v in batch]
        return torch.cat([heads_last(out)[0] for out in outs])

    return PreparedPeer(call, lambda out: out, sdpa_path(*batch[0], is_causal=workload.causal))


def prepare_padded_sdpa(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """Variable-length sequences padded to the longest, with a mask. Padding happens outside the timing."""
    parts = zip(*sequences(workload, tensors), strict=True)
    q, k, v = (heads_first(pad_sequence(list(part), batch_first=True)) for part in parts)
    mask = torch.stack([_padded_mask(workload, index) for index in range(workload.batch_size)])[:, None]

    def output(out: Tensor) -> Tensor:
        return torch.cat([row[:seqlen] for row, seqlen in zip(heads_last(out), workload.seqlens_q, strict=True)])

    return PreparedPeer(lambda: scaled_dot_product_attention(q, k, v, mask), output, sdpa_path(q, k, v, attn_mask=mask))


def is_grouped(workload: BenchWorkload) -> bool:
    """Whether query heads share key heads."""
    return workload.nheads != workload.nheads_k


def heads_first(tensor: Tensor) -> Tensor:
    """(batch_size, seqlen, heads, headdim) -> contiguous (batch_size, heads, seqlen, headdim)."""
    return tensor.transpose(1, 2).contiguous()


def heads_last(tensor: Tensor) -> Tensor:
    """(batch_size, heads, seqlen, headdim) -> (batch_size, seqlen, heads, headdim), a view."""
    return tensor.transpose(1, 2)


def folded(workload: BenchWorkload, tensors: Tensors) -> Tensors:
    """One query a sequence -> q (batch_size, nheads_k, group, headdim), and k and v with heads first."""
    group = workload.nheads // workload.nheads_k
    q = tensors.q.reshape(workload.batch_size, workload.nheads_k, group, workload.headdim)
    return Tensors(q.contiguous(), heads_first(tensors.k), heads_first(tensors.v))


def unfolded(workload: BenchWorkload, out: Tensor) -> Tensor:
    """(batch_size, nheads_k, group, headdim) -> (batch_size, 1, nheads, headdim)."""
    return out.reshape(workload.batch_size, 1, workload.nheads, workload.headdim)


def by_matmul(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """softmax(q @ k^T * headdim ** -0.5) @ v with heads first, in the dtype of q, softmax in float32."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        hidden = ones.triu(1 + k.shape[-2] - q.shape[-2])
        scores.masked_fill_(hidden, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)


def sdpa_path(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Which of its implementations SDPA takes for this call, e.g. "flash"."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, **options)).name.lower().split("_")[0]


def _why_not_grouped(workload: BenchWorkload) -> str | None:
    if is_grouped(workload) and "enable_gqa" not in (scaled_dot_product_attention.__doc__ or ""):
        return f"grouped heads need enable_gqa of torch 2.5, this is {torch.__version__}"
    return None


def _padded_mask(workload: BenchWorkload, index: int) -> Tensor:
    """Bool (max_seqlen_q, max_seqlen_k), True where attention is allowed."""
    seqlen_q, seqlen_k = workload.seqlens_q[index], workload.seqlens_k[index]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cpu")
    if workload.causal:
        mask = mask.tril(seqlen_k - seqlen_q)
    return pad(mask, (0, max(workload.seqlens_k) - seqlen_k, 0, max(workload.seqlens_q) - seqlen_q))


def _applies_eager(workload: BenchWorkload) -> bool:
    return workload.kind == "prefill" and not is_grouped(workload) and max(workload.seqlens_k) <= LONGEST_EAGER


def _applies_ungrouped_varlen(workload: BenchWorkload) -> bool:
    return is_varlen(workload) and not is_grouped(workload)


def _version() -> str:
    return str(torch.__version__)


SDPA = Peer("torch SDPA", lambda workload: not is_varlen(workload), prepare_sdpa, _version, why_not=_why_not_grouped)
FOLDED_SDPA = Peer(
    "torch SDPA folded", lambda workload: is_decode(workload) and is_grouped(workload), prepare_folded_sdpa, _version
)
MATMUL = Peer("torch matmul", is_decode, prepare_matmul, _version)
EAGER = Peer("torch eager", _applies_eager, prepare_eager, _version)
SDPA_LOOP = Peer("torch SDPA loop", _applies_ungrouped_varlen, prepare_sdpa_loop, _version)
PADDED_SDPA = Peer("torch SDPA padded", _applies_ungrouped_varlen, prepare_padded_sdpa, _version)
