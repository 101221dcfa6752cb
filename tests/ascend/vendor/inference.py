"""npu_fused_infer_attention_score for tensors on a CPU, as torch_npu documents it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend.vendor.reference import attend, check_common, check_compressed, hidden_keys, require, require_none

_registered: list[torch.library.Library] = []
_UNUSED = ("pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2",
           "antiquant_scale", "antiquant_offset", "key_antiquant_offset", "value_antiquant_offset",
           "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix",
           "actual_shared_prefix_len", "query_rope", "key_rope", "key_rope_antiquant_scale",
           "actual_seq_lengths")  # fmt: skip


def register() -> None:
    """Registers the operator under the schema of the imported torch_npu."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    library.impl("npu_fused_infer_attention_score", npu_fused_infer_attention_score)
    _registered.append(library)  # it unregisters when it is collected


class _Shape(NamedTuple):
    batch: int
    queries: int
    heads: int
    headdim: int


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    key_antiquant_scale: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    require_none(**{name: rest.pop(name, None) for name in _UNUSED})
    require(not rest, f"unknown arguments {list(rest)}")
    require(input_layout in ("BSND", "BNSD"), f"input_layout {input_layout}")
    shape = _shape(query, input_layout)
    heads_k = num_key_value_heads or num_heads
    check_common(query, key, value, shape.heads, heads_k, num_heads)
    require(num_heads // heads_k <= 64, f"{num_heads} heads over {heads_k}")
    _check_shape(shape, input_layout, query.dtype, key, value)
    if block_table is None:
        k, v = (_tokens_first(each, input_layout) for each in (key, value))
        require(k.shape[0] == shape.batch and k.shape[2:] == (heads_k, shape.headdim), "shapes of key and query")
    else:
        _check_pages(shape, input_layout, key, block_table, block_size, actual_seq_lengths_kv)
        k, v = (_pages_in_order(each, input_layout, block_table, heads_k) for each in (key, value))
    lengths = list(actual_seq_lengths_kv or [k.shape[1]] * shape.batch)
    require(len(lengths) == shape.batch and min(lengths) >= 0 and max(lengths) <= k.shape[1], f"lengths {lengths}")
    if key.dtype == torch.int8:
        _check_int8_cache(query, key, shape, block_table)
        modes = (key_antiquant_mode, value_antiquant_mode)
        require(modes[0] == modes[1], f"modes {modes}")
        k, v = (
            each.double() * _expanded(given, modes[0], shape, k.shape, block_table)
            for each, given in ((k, key_antiquant_scale), (v, value_antiquant_scale))
        )
    else:
        require(key_antiquant_scale is None and value_antiquant_scale is None, "scales without an int8 cache")
    queries = _tokens_first(query, input_layout)
    parts = []
    for index, length in enumerate(lengths):
        hidden = _hidden(shape, index, length, k.shape[1], sparse_mode, atten_mask, pre_tokens, next_tokens)
        parts.append(_rows(queries[index], k[index, :length], v[index, :length], scale, hidden, inner_precise))
    out = torch.stack([part[0] for part in parts]).to(query.dtype)
    lse = torch.stack([part[1] for part in parts]).float().unsqueeze(-1)
    out = out if input_layout == "BSND" else out.transpose(1, 2).contiguous()
    return out, lse if softmax_lse_flag else torch.zeros(1)


def _shape(query: Tensor, layout: str) -> _Shape:
    require(query.dim() == 4, f"query of shape {tuple(query.shape)}")
    sizes = dict(zip(layout, query.shape, strict=True))
    return _Shape(sizes["B"], sizes["S"], sizes["N"], sizes["D"])


def _tokens_first(tensor: Tensor, layout: str) -> Tensor:
    require(tensor.dim() == 4, f"a tensor of shape {tuple(tensor.shape)} without pages")
    return tensor if layout == "BSND" else tensor.transpose(1, 2)


def _check_shape(shape: _Shape, layout: str, dtype: torch.dtype, key: Tensor, value: Tensor) -> None:
    require(dtype in (torch.float16, torch.bfloat16), f"{dtype}")
    require(key.dtype == value.dtype and key.dtype in (dtype, torch.int8), "dtype of key and value")
    require(key.shape == value.shape, "key and value of different shapes")
    require(shape.headdim <= 512 and shape.batch <= 65536, f"{shape}")
    if shape.queries > 1:
        require(shape.headdim % (32 if key.dtype == torch.int8 else 16) == 0, f"headdim {shape.headdim}")
        require(layout != "BSND" or shape.heads * shape.headdim < 65535, "rows of BSND")


def _check_pages(
    shape: _Shape, layout: str, key: Tensor, table: Tensor, block_size: int, lengths: Sequence[int] | None
) -> None:
    require(lengths is not None, "pages without lengths")
    require(table.dtype == torch.int32 and table.dim() == 2 and len(table) == shape.batch, "block_table")
    require(table.is_contiguous(), "block_table is not contiguous")
    step = 128 if shape.queries > 1 else (32 if key.dtype == torch.int8 else 16)
    require(0 < block_size <= 512 and block_size % step == 0, f"block_size {block_size}")
    require(key.dim() == (3 if layout == "BSND" else 4), f"pages of shape {tuple(key.shape)} with {layout}")
    require(key.shape[1 if key.dim() == 3 else 2] == block_size, f"pages of shape {tuple(key.shape)}")
    require(key.dim() == 4 or key.shape[2] <= 65535, f"pages of shape {tuple(key.shape)}")
    require(max(lengths or [0]) <= table.shape[1] * block_size, "block_table is too narrow")


def _pages_in_order(pages: Tensor, layout: str, table: Tensor, heads_k: int) -> Tensor:
    """(batch, tokens, heads, headdim); entries of the table that name no page become page 0, to be cut off later."""
    tokens_first = pages.unflatten(2, (heads_k, -1)) if layout == "BSND" else pages.transpose(1, 2)
    return tokens_first[_pages(table, len(pages))].flatten(1, 2)


def _pages(table: Tensor, count: int) -> Tensor:
    return torch.where((table >= 0) & (table < count), table, 0).long()


def _check_int8_cache(query: Tensor, key: Tensor, shape: _Shape, table: Tensor | None) -> None:
    if shape.queries > 1:
        require(query.dtype == torch.bfloat16 and shape.queries <= 16 and table is None, "int8 cache, many queries")
    require(key.shape[-1] % 32 == 0, "int8 rows")


def _expanded(scale: Tensor | None, mode: int, shape: _Shape, cache: torch.Size, table: Tensor | None) -> Tensor:
    """A scale that broadcasts to (batch, tokens, heads, headdim)."""
    require(scale is not None, "an int8 cache without scales")
    assert scale is not None
    require(scale.is_contiguous() and scale.dtype == torch.float32, f"scale of {scale.dtype}")
    batch, tokens, heads_k, _ = cache
    told = f"mode {mode}, scale {tuple(scale.shape)}"
    if shape.queries > 1:
        require(mode == 1 and tuple(scale.shape) == (batch, tokens), told)
        return scale[:, :, None, None].double()
    require(mode in (3, 5), f"mode {mode} is not part of these tests")
    require((mode == 5) == (table is not None), f"mode {mode} with pages")
    if table is None:
        require(tuple(scale.shape) == (batch, heads_k, tokens), told)
        return scale.transpose(1, 2)[..., None].double()
    require(scale.dim() == 3 and scale.shape[1] == heads_k, told)
    paged = scale[_pages(table, len(scale))]  # (batch, pages, heads, page size)
    return paged.transpose(2, 3).flatten(1, 2)[..., None].double()


def _hidden(
    shape: _Shape,
    index: int,
    length: int,
    capacity: int,
    mode: int,
    mask: Tensor | None,
    pre_tokens: int,
    next_tokens: int,
) -> Tensor:
    """bool (queries, length). One query ignores sparse_mode and its tokens, and takes a mask of a row of keys."""
    if shape.queries == 1:
        if mask is None:
            return torch.zeros(1, length, dtype=torch.bool)
        require(mask.dtype == torch.bool and tuple(mask.shape) == (shape.batch, 1, 1, capacity), f"{tuple(mask.shape)}")
        return mask[index, 0, :, :length]
    require(mode in (0, 3, 4), f"sparse_mode {mode} is not part of these tests")
    require(mode == 0 or mask is not None, f"sparse_mode {mode} without a mask")
    if mode == 0:
        require(mask is None, "a full mask, which nobody should store")
    elif mask is not None:
        check_compressed(mask)
    return hidden_keys(shape.queries, length, mode, mask, pre_tokens, next_tokens)


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor, inner_precise: int) -> tuple[Tensor, Tensor]:
    """out (queries, heads, headdim) and lse (heads, queries): inf where a row has no keys."""
    require(inner_precise in ((0, 1) if len(q) == 1 else (0, 1, 2, 3)), f"inner_precise {inner_precise}")
    rows = attend(q, k, v, scale, hidden)
    out, lse = rows.out, rows.maximum + rows.total.log()
    corrected = inner_precise in (2, 3) and len(q) > 1
    out[rows.empty] = 0.0 if corrected else 1e4
    lse[:, rows.empty] = torch.inf if corrected else 1e4
    return out, lse
