"""npu_fusion_attention_grad for tensors on a CPU, as torch_npu and CANN document it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend.vendor.reference import check_common, hidden_keys, require, require_none, spans

_registered: list[torch.library.Library] = []


def register() -> None:
    """Registers the operator under the schema of the imported torch_npu."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    library.impl("npu_fusion_attention_grad", npu_fusion_attention_grad)
    _registered.append(library)  # it unregisters when it is collected


class Sequences(NamedTuple):
    """Tensors of one sequence: (tokens, heads, headdim); statistics: (heads, queries)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    out: Tensor
    maximum: Tensor
    total: Tensor


class Mask(NamedTuple):
    mode: int
    mask: Tensor | None
    pre_tokens: int
    next_tokens: int


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Any, ...]:
    require_none(pse=pse, padding_mask=padding_mask, prefix=prefix, softmax_in=softmax_in)
    require(keep_prob == 1.0 and (seed, offset, numels) == (0, 0, 0), "dropout is not part of these tests")
    require(inner_precise == 0, f"inner_precise {inner_precise}")
    _check(query, key, value, dy, head_num, sink)
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    require(attention_in.dtype is query.dtype and attention_in.shape == query.shape, "attention_in")
    require(attention_in.is_contiguous(), "attention_in is not contiguous")
    tensors = (query, key, value, dy, attention_in)
    if input_layout == "BSND":
        require(actual_seq_qlen is None and actual_seq_kvlen is None, "lengths with BSND")
        require(softmax_layout == "", "softmax_layout is for TND")
        statistics = [_once(each, (query.shape[0], head_num, query.shape[1])) for each in (softmax_max, softmax_sum)]
        sequences = [Sequences(*each) for each in zip(*tensors, *statistics, strict=True)]
    else:
        require(input_layout == "TND", f"input_layout {input_layout}")
        statistics = [_once(each, (query.shape[0], head_num)) for each in (softmax_max, softmax_sum)]
        sequences = _varlen(tensors, statistics, actual_seq_qlen or (), actual_seq_kvlen or (), softmax_layout)
    mask = Mask(sparse_mode, atten_mask, pre_tockens, next_tockens)
    found = [_sequence(each, mask, scale_value, sink, varlen=input_layout == "TND") for each in sequences]
    join = torch.stack if input_layout == "BSND" else torch.cat
    grads = [join(parts).to(query.dtype) for parts in list(zip(*found, strict=True))[:3]]
    grad_sink = torch.empty(0) if sink is None else torch.stack([each[3] for each in found]).sum(0).float()
    return *grads, None, grad_sink


def _check(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, sink: Tensor | None) -> None:
    check_common(query, key, value, query.shape[-2], key.shape[-2], head_num)
    require(query.dtype == key.dtype == value.dtype == dy.dtype, "different dtypes")
    require(query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"{query.dtype}")
    require(key.shape == value.shape, "keys and values of different shapes")
    require(768 >= query.shape[-1] == key.shape[-1] >= 1, "headdims")
    require(dy.shape == query.shape and dy.is_contiguous(), "dy")
    if sink is not None:
        require(sink.dtype == torch.float32 and tuple(sink.shape) == (head_num,), "sink")
        require(query.dtype is not torch.float32, "sink with float32")


def _once(statistic: Tensor, rows: tuple[int, ...]) -> Tensor:
    """A statistic without the axis along which it is eight times the same."""
    require(statistic.dtype is torch.float32 and tuple(statistic.shape) == (*rows, 8), f"statistics {statistic.shape}")
    require(statistic.is_contiguous(), "statistics are not contiguous")
    require(bool((statistic == statistic[..., :1]).all()), "statistics are not eight times the same, or are NaN")
    return statistic[..., 0]


def _varlen(
    tensors: tuple[Tensor, ...],
    statistics: list[Tensor],
    ends_q: Sequence[int],
    ends_k: Sequence[int],
    softmax_layout: str,
) -> list[Sequences]:
    require(softmax_layout in ("", "TND"), f"softmax_layout {softmax_layout}")
    query, key, value, dy, out = tensors
    require(query.dim() == 3, "shapes of TND")
    require(len(ends_q) == len(ends_k) <= 1024, f"{len(ends_q)} and {len(ends_k)} sequences")
    sequences = []
    for q, k in zip(spans(ends_q, len(query)), spans(ends_k, len(key)), strict=True):
        if softmax_layout == "TND":
            of_rows = [each[q].T for each in statistics]
        else:  # each sequence's part lies heads first
            heads = query.shape[1]
            of_rows = [each.flatten()[q.start * heads : q.stop * heads].reshape(heads, -1) for each in statistics]
        sequences.append(Sequences(query[q], key[k], value[k], dy[q], out[q], *of_rows))
    return sequences


def _sequence(
    given: Sequences, mask: Mask, scale: float, sink: Tensor | None, varlen: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, where there is one, the sink of one sequence, in float64."""
    hidden = hidden_keys(len(given.q), len(given.k), *mask)
    empty = hidden.all(dim=-1)
    if varlen:
        require(mask.mode != 3 or len(given.q) <= len(given.k), "more queries than keys in mode 3 of TND")
        require(not empty.any(), "a row without keys in TND")
    q, k, v, dy, out = (each.double().transpose(0, 1) for each in given[:5])  # heads first
    group = len(q) // len(k)
    k, v = (each.repeat_interleave(group, dim=0) for each in (k, v))
    maximum, total = (each.double().unsqueeze(-1) for each in (given.maximum, given.total))
    weights = torch.exp((q @ k.mT * scale).masked_fill(hidden, -torch.inf) - maximum) / total
    delta = (dy * out).sum(-1, keepdim=True)
    grad_scores = weights * (dy @ v.mT - delta) * scale
    grad_q = grad_scores @ k
    # The results of rows without keys are not documented; this value must not occur in our results.
    grad_q[:, empty] = 1e4
    of_heads = (grad_scores.mT @ q, weights.mT @ dy)
    grad_k, grad_v = (each.unflatten(0, (-1, group)).sum(1) for each in of_heads)
    grad_sink = torch.zeros(len(q), dtype=torch.float64)
    if sink is not None:
        grad_sink = -(torch.exp(sink.double()[:, None, None] - maximum) / total * delta).sum((1, 2))
    return grad_q.transpose(0, 1), grad_k.transpose(0, 1), grad_v.transpose(0, 1), grad_sink
