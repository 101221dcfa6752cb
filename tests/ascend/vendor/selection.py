"""npu_lightning_indexer and npu_sparse_flash_attention for tensors on a CPU, as torch_npu documents them.

What the documentation leaves open is chosen to be of no use. The indexer gives keys in no order, and of equal scores
takes the last ones. After the keys that a query sees come others or -1, as FILLS says. Attention of a query without
keys is large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend.vendor.reference import attend, require, require_none

_registered: list[torch.library.Library] = []
UNLIMITED = 2**63 - 1
FILLS = ["minus-one", "hidden-keys"]  # what follows where a query sees fewer than sparse_count keys
fill = FILLS[0]
_LEFT_OPEN = 12345  # indices of queries that belong to no sequence


def register() -> None:
    """Registers the operators under the schemas of the imported torch_npu."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    library.impl("npu_lightning_indexer", npu_lightning_indexer)
    library.impl("npu_sparse_flash_attention", npu_sparse_flash_attention)
    _registered.append(library)  # it unregisters when it is collected


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    require(rest.pop("pre_tokens", UNLIMITED) == rest.pop("next_tokens", UNLIMITED) == UNLIMITED, "pre_tokens")
    require(not rest.pop("return_value", False) and not rest, f"{list(rest)} is not part of these tests")
    _check_tensors(query, key, weights)
    require(1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024), f"sparse_count {sparse_count}")
    require(sparse_mode in (0, 3), f"sparse_mode {sparse_mode}")
    require(layout_key in ("PA_BSND", layout_query), f"{layout_key} keys of {layout_query} queries")
    heads, headdim = query.shape[-2:]
    q, w = query.reshape(-1, heads, headdim), weights.reshape(-1, heads)
    indices = torch.full((q.shape[0], sparse_count), _LEFT_OPEN, dtype=torch.int32)
    spans = spans_of_queries(query, actual_seq_lengths_query, layout_query)
    for rows, keys in zip(
        spans, keys_of_sequences(key, actual_seq_lengths_key, block_table, layout_key, len(spans)), strict=True
    ):
        for row in rows:
            products = (q[row].double() @ keys[:, 0].double().T).clamp(min=0)
            scores = (w[row].double()[:, None] * products).sum(0)
            seen = max(len(keys) - (rows[-1] - row), 0) if sparse_mode == 3 else len(keys)
            indices[row] = _chosen(scores[:seen], sparse_count)
    return indices.view(*query.shape[:-2], 1, sparse_count), query.new_empty(0)


def _check_tensors(query: Tensor, key: Tensor, weights: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("weights", weights)):
        require(tensor.is_contiguous(), f"{name} is not contiguous")
        require(tensor.numel() > 0, f"{name} of shape {tuple(tensor.shape)} is empty")
    require(query.dtype in (torch.float16, torch.bfloat16) and key.dtype == query.dtype, f"{query.dtype}, {key.dtype}")
    require(weights.dtype in (query.dtype, torch.float32), f"weights of {weights.dtype}")
    require(query.shape[-1] == key.shape[-1] == 128, "a headdim other than 128")
    require(query.shape[-2] <= 64 and key.shape[-2] == 1, f"heads {query.shape[-2]}, {key.shape[-2]}")
    require(weights.shape == query.shape[:-1], f"weights of shape {tuple(weights.shape)}")


def spans_of_queries(query: Tensor, lengths: Tensor | None, layout: str) -> list[range]:
    """The rows of each sequence in a query whose batch and sequence axes are one."""
    require(query.dim() == {"BSND": 4, "TND": 3}.get(layout), f"query of shape {tuple(query.shape)} in {layout}")
    if layout == "TND":
        return [range(*span) for span in _from_ends(lengths, query.shape[0])]
    batch, queries = query.shape[:2]
    counts = [queries] * batch if lengths is None else _read(lengths, batch, queries)
    return [range(queries * b, queries * b + count) for b, count in enumerate(counts)]


def keys_of_sequences(
    key: Tensor, lengths: Tensor | None, table: Tensor | None, layout: str, batch: int
) -> Iterator[Tensor]:
    """(tokens, 1, headdim) of each sequence. Reads no other memory."""
    require((table is not None) == (layout == "PA_BSND"), f"a block table with {layout}")
    require(key.dim() == (3 if layout == "TND" else 4), f"key of shape {tuple(key.shape)} in {layout}")
    if layout == "TND":
        spans = _from_ends(lengths, key.shape[0])
        require(len(spans) == batch, f"lengths of {len(spans)} sequences, not of {batch}")
        return (key[first:last] for first, last in spans)
    size = key.shape[1]
    if table is None:
        require(key.shape[0] == batch, f"keys of {key.shape[0]} sequences, not of {batch}")
        counts = [size] * batch if lengths is None else _read(lengths, batch, size)
        return (key[b, :count] for b, count in enumerate(counts))
    require(size % 16 == 0 and size <= 1024, f"pages of {size}")
    require(table.dtype == torch.int32 and table.is_contiguous() and table.shape[0] == batch, "block_table")
    pages = [table[b, : -(-count // size)] for b, count in enumerate(_read(lengths, batch, size * table.shape[1]))]
    require(all(0 <= page < key.shape[0] for page in torch.cat(pages).tolist()), "a page that there is not")
    return (key[page.long()].flatten(0, 1)[:count] for page, count in zip(pages, _read(lengths, batch), strict=True))


def _from_ends(ends: Tensor | None, tokens: int) -> list[tuple[int, int]]:
    assert ends is not None, "TND without lengths"
    last = _read(ends, len(ends), tokens)
    spans = list(zip([0, *last[:-1]], last, strict=True))
    require(all(first <= end for first, end in spans), f"ends {last} must not decrease")
    return spans


def _read(lengths: Tensor | None, batch: int, most: int | None = None) -> list[int]:
    assert lengths is not None, "pages without lengths"
    require(lengths.dtype == torch.int32 and lengths.is_contiguous(), f"lengths of {lengths.dtype}")
    read: list[int] = lengths.tolist()
    require(len(read) == batch, f"{len(read)} lengths of {batch} sequences")
    require(all(length >= 0 and (most is None or length <= most) for length in read), f"lengths {read} beyond {most}")
    return read


def _chosen(scores: Tensor, count: int) -> Tensor:
    """The keys of the greatest scores in no order, then the others."""
    last_first = scores.flip(0).sort(descending=True, stable=True).indices[:count]
    best = len(scores) - 1 - last_first
    best = best[torch.randperm(len(best), generator=torch.Generator().manual_seed(len(scores)))]
    others = torch.arange(len(scores), len(scores) + count) if fill == "hidden-keys" else torch.full((count,), -1)
    return torch.cat((best, others))[:count].int()


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    require(rest.pop("pre_tokens", UNLIMITED) == rest.pop("next_tokens", UNLIMITED) == UNLIMITED, "pre_tokens")
    require_none(**rest)  # pages, and sinks, which an A2 or A3 does not take
    require((layout_query, layout_kv) == ("TND", "TND"), "layouts that are not part of these tests")
    require((sparse_mode, attention_mode, sparse_block_size) == (0, 2, 1), "modes that are not part of these tests")
    require(value.data_ptr() == key.data_ptr(), "a value that is not key")
    assert query_rope is not None
    assert key_rope is not None
    _check_latents({"query": query, "query_rope": query_rope}, {"key": key, "key_rope": key_rope}, query.dtype)
    require(sparse_indices.dtype == torch.int32 and sparse_indices.is_contiguous(), "sparse_indices")
    require(sparse_indices.shape[:2] == (query.shape[0], 1), f"sparse_indices of {tuple(sparse_indices.shape)}")
    q, k = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    out = torch.full(query.shape, 1e4, dtype=query.dtype)
    row_max, row_sum = torch.full((2, 1, *query.shape[:2]), 1e4)
    spans = spans_of_queries(query, actual_seq_lengths_query, layout_query)
    for rows, keys in zip(spans, keys_of_sequences(k, actual_seq_lengths_kv, None, layout_kv, len(spans)), strict=True):
        for row in rows:
            # As the kernel does: it reads no more indices than there are keys, and stops at the first that is none.
            given = sparse_indices[row, 0, : len(keys)].tolist()
            places = given[: given.index(-1)] if -1 in given else given
            require(all(0 <= place < len(keys) for place in places), f"indices {places} of {len(keys)} keys")
            if places:
                found = keys[places]
                hidden = torch.zeros(1, len(places), dtype=torch.bool)
                result = attend(q[row, None], found, found[..., :512], scale_value, hidden)
                out[row] = result.out[0].to(out.dtype)
                row_max[0, row], row_sum[0, row] = result.maximum[:, 0].float(), result.total[:, 0].float()
    nothing = torch.empty(0)
    return (out, row_max, row_sum) if return_softmax_lse else (out, nothing, nothing)


def _check_latents(queries: dict[str, Tensor], keys: dict[str, Tensor], dtype: torch.dtype) -> None:
    require(dtype in (torch.float16, torch.bfloat16), f"{dtype}")
    heads = queries["query"].shape[1]
    require(heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{heads} heads")
    for tensors, of_heads in ((queries, heads), (keys, 1)):
        for (name, tensor), width in zip(tensors.items(), (512, 64), strict=True):
            require(tensor.dtype == dtype and tensor.is_contiguous() and tensor.numel() > 0, name)
            require(tensor.shape[1:] == (of_heads, width), f"{name} of shape {tuple(tensor.shape)}")
