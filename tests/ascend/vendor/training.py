"""npu_fusion_attention for tensors on a CPU, as torch_npu and CANN document it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend.vendor.reference import Rows, attend, check_common, hidden_keys, require, require_none, spans

_registered: list[torch.library.Library] = []


def register() -> None:
    """Registers the operator under the schema of the imported torch_npu."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    library.impl("npu_fusion_attention", npu_fusion_attention)
    _registered.append(library)  # it unregisters when it is collected


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:
    require_none(pse=pse, padding_mask=padding_mask, prefix=prefix, dropout_mask=dropout_mask)
    require(keep_prob == 1.0, f"keep_prob {keep_prob}")
    require(inner_precise in (0, 2), f"inner_precise {inner_precise}")
    _check(query, key, value, head_num, sink)
    mask = (sparse_mode, atten_mask, pre_tockens, next_tockens)
    if input_layout == "BSND":
        require(actual_seq_qlen is None and actual_seq_kvlen is None, "lengths with BSND")
        require(softmax_layout == "", "softmax_layout is for TND")
        require(query.dim() == 4 and query.shape[0] == key.shape[0], "shapes of BSND")
        rows = [_sequence(*each, scale, mask, sink) for each in zip(query, key, value, strict=True)]
        out = torch.stack([each.out for each in rows])
        statistics = [
            torch.stack([_eight_times(getattr(each, name)) for each in rows]) for name in ("maximum", "total")
        ]
    else:
        require(input_layout == "TND", f"input_layout {input_layout}")
        require(actual_seq_qlen is not None and actual_seq_kvlen is not None, "TND without lengths")
        rows = _varlen(query, key, value, actual_seq_qlen or (), actual_seq_kvlen or (), scale, mask, sink)
        out = torch.cat([each.out for each in rows])
        statistics = [_varlen_statistics(rows, name, softmax_layout) for name in ("maximum", "total")]
    return out.to(query.dtype), *statistics, query.new_empty(0), 0, 0, 0


def _check(query: Tensor, key: Tensor, value: Tensor, head_num: int, sink: Tensor | None) -> None:
    check_common(query, key, value, query.shape[-2], key.shape[-2], head_num)
    require(query.dtype == key.dtype == value.dtype, "different dtypes")
    require(query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"{query.dtype}")
    require(key.shape[:-1] == value.shape[:-1], "keys and values of different shapes")
    require(768 >= query.shape[-1] == key.shape[-1] >= value.shape[-1] >= 1, "headdims")
    if sink is not None:
        require(sink.dtype == torch.float32 and tuple(sink.shape) == (head_num,), "sink")


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: tuple[int, Tensor | None, int, int], sink: Tensor | None
) -> Rows:
    mode, atten_mask, pre_tokens, next_tokens = mask
    hidden = hidden_keys(len(q), len(k), mode, atten_mask, pre_tokens, next_tokens)
    rows = attend(q, k, v, scale, hidden, sink)
    # The results of rows without keys are not documented; these values must not occur in our results.
    rows.out[rows.empty] = 1e4
    rows.maximum[:, rows.empty] = 1e4
    return rows


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Sequence[int],
    ends_k: Sequence[int],
    scale: float,
    mask: tuple[int, Tensor | None, int, int],
    sink: Tensor | None,
) -> list[Rows]:
    require(query.dim() == 3, "shapes of TND")
    require(len(ends_q) == len(ends_k) <= 1024, f"{len(ends_q)} and {len(ends_k)} sequences")
    rows = []
    for q, k in zip(spans(ends_q, len(query)), spans(ends_k, len(key)), strict=True):
        if mask[0] == 3:
            require(q.stop - q.start <= k.stop - k.start, "more queries than keys in mode 3 of TND")
        rows.append(_sequence(query[q], key[k], value[k], scale, mask, sink))
        require(not rows[-1].empty.any(), "a row without keys in TND")
    return rows


def _varlen_statistics(rows: list[Rows], name: str, softmax_layout: str) -> Tensor:
    """(tokens, heads, 8), of which each sequence's part lies heads first unless softmax_layout is TND."""
    parts = [_eight_times(getattr(each, name)) for each in rows]  # (heads, queries, 8)
    if softmax_layout == "TND":
        return torch.cat([part.transpose(0, 1) for part in parts])
    require(softmax_layout == "", f"softmax_layout {softmax_layout}")
    return torch.cat([part.reshape(-1, 8) for part in parts]).reshape(-1, parts[0].shape[0], 8)


def _eight_times(statistic: Tensor) -> Tensor:
    return statistic.float().unsqueeze(-1).repeat(1, 1, 8)
