"""The Triton kernels for Ascend NPUs: attention by two-level tiling, and the merge of its splits.

First level: a program takes tiles of TILE_M query rows, one after the other, and goes through the keys that they see
in tiles of TILE_N. Both products of a tile are the Cube's. Second level: the Vector units compute the softmax of a
(TILE_M, TILE_N) tile of scores. They cut it by rows into slices that fit their buffers. The compiler makes these
slices; tiling.py chooses how many (compiler_options). With large tiles of the first level there are few hand-overs
between Cube and Vector, which go through global memory.

Masks are windows of one mask tile (mask_tile.py), read only for tiles that an edge of the mask crosses. Tiles without a
visible score are skipped. The functions of common/tile_range.py, compiled, decide both.

The source uses operations that upstream Triton has too, so that it also runs on other chips. It avoids what
Triton-Ascend 3.2 is known to compile wrongly: loops that carry accumulators run at least once, tiles are powers of two
wide, nothing is read that the kernel itself has written, and exponentials are natural.

Rows of a tile are the queries of one head, or, when ROWS_ARE_HEADS, the one query of all heads that share a key head:
a decoded token then reads every key once.
"""

import inspect

import triton
import triton.language as tl

from fastattention.backends.ascend import mask_tile
from fastattention.backends.common import tile_range

first_key = triton.jit(tile_range.first_key)
past_last_key = triton.jit(tile_range.past_last_key)
window_row = triton.jit(mask_tile.window_row)
window_column = triton.jit(mask_tile.window_column)

# A row's maximum before its first key. It is finite, so that the difference to a hidden score, -inf, is not NaN.
LOWEST = tl.constexpr(-1.0e30)

# The least scale of values that a row's maximum follows: 2^-24, below which float16 holds nothing.
LEAST_SCALE = tl.constexpr(2.0**-24)


def _compiled_once(kernel):
    """Compiles `kernel` once for all values of its run-time arguments, without variants for 1 and multiples of 16.

    Ascend's compiler takes seconds for a kernel and gains nothing from such variants.
    """
    parameters = inspect.signature(kernel).parameters.values()
    varying = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=varying)(kernel)


@_compiled_once
def attention_forward(
    q,  # rows of headdim elements
    k,  # rows of headdim elements, or pages of them
    v,  # rows of headdim_v elements, or pages of them
    k_scale,  # float32, a scale for every row of an int8 cache; None when k and v have the dtype of q
    v_scale,  # as k_scale
    out,  # rows of headdim_v elements; float32 when the keys are split
    lse,  # float32
    mask,  # int8 (MASK_SIZE, MASK_SIZE), the mask tile; None when no edge of a mask is to be drawn
    cu_seqlens_q,  # int32 (batch_size + 1,) when varlen, else None
    cu_seqlens_k,  # int32 (batch_size + 1,) when varlen, else None
    cache_seqlens,  # int32 (batch_size,), tokens in the cache before the call's own; None without a cache
    cache_leftpad,  # int32 (batch_size,) or None
    cache_batch_idx,  # int32 (batch_size,) or None
    block_table,  # int32 (batch_size, ...) or None
    alibi_slopes,  # float32 (nheads,) or (batch_size, nheads), or None
    sinks,  # float32 (nheads,) or None
    # Strides are in elements. The batch stride of varlen calls is the stride of tokens.
    q_stride_batch, q_stride_row, q_stride_head,
    k_stride_batch, k_stride_row, k_stride_head,
    v_stride_batch, v_stride_row, v_stride_head,
    k_scale_stride_batch, k_scale_stride_row, k_scale_stride_head,
    v_scale_stride_batch, v_scale_stride_row, v_scale_stride_head,
    out_stride_split, out_stride_batch, out_stride_row, out_stride_head,
    lse_stride_split, lse_stride_batch, lse_stride_row, lse_stride_head,
    alibi_stride_batch, table_stride_batch,
    num_items,  # batch_size * nheads * num_m_tiles * num_splits
    nheads,  # query heads; key heads when rows are heads
    group_size,  # heads of queries that share a head of keys
    num_m_tiles,
    num_splits,
    seqlen_q,  # queries of every sequence, unless varlen
    seqlen_k,  # keys of every sequence, unless varlen or cached
    seqlen_new,  # tokens that this call appended to the cache
    page_block_size,
    headdim,
    headdim_v,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,  # headdim, padded to a power of two
    TILE_DV: tl.constexpr,
    MASK_SIZE: tl.constexpr,
    ROWS_ARE_HEADS: tl.constexpr,
    HAS_LEFT: tl.constexpr,  # the mask has a left edge
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention of all work items: a tile of query rows of one head, over one split of the keys that it sees."""
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item % num_splits
        # The last rows come first: under a causal mask they see the most keys.
        m_tile = num_m_tiles - 1 - item // num_splits % num_m_tiles
        head = item // (num_splits * num_m_tiles) % nheads
        sequence = item // (num_splits * num_m_tiles * nheads)
        head_k = (head if ROWS_ARE_HEADS else head // group_size).to(tl.int64)

        length_q, length_k, place_q, place_k, first_k = _sequence(
            sequence, seqlen_q, seqlen_k, seqlen_new,
            cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_leftpad, cache_batch_idx,
        )  # fmt: skip
        row = m_tile * TILE_M
        num_rows = length_q * group_size if ROWS_ARE_HEADS else length_q
        if row < num_rows:
            first_query = 0 if ROWS_ARE_HEADS else row
            last_query = 0 if ROWS_ARE_HEADS else min(row + TILE_M, num_rows) - 1
            seen_begin = first_key(first_query, length_q, length_k, window_left)
            seen_end = past_last_key(last_query, length_q, length_k, window_right)
            full_begin = first_key(last_query, length_q, length_k, window_left)
            full_end = past_last_key(first_query, length_q, length_k, window_right)
            diagonal = first_query + length_k - length_q  # the key under which the tile's first row stands

            num_tiles = _count_tiles(seen_begin + first_k, seen_end + first_k, block_table, page_block_size, TILE_N)
            tiles_per_split = tl.cdiv(num_tiles, num_splits)
            first_tile = split * tiles_per_split
            end_tile = min(num_tiles, first_tile + tiles_per_split)

            q_rows = q + place_q.to(tl.int64) * q_stride_batch + row.to(tl.int64) * q_stride_row
            q_tile = _load_rows(
                q_rows + head.to(tl.int64) * q_stride_head, num_rows - row, q_stride_row, headdim, TILE_M, TILE_D
            )
            slopes = _load_slopes(
                alibi_slopes, sequence * alibi_stride_batch, head, row, group_size, num_rows, TILE_M, ROWS_ARE_HEADS
            )
            row_max = tl.full([TILE_M], LOWEST, tl.float32)
            row_sum = tl.zeros([TILE_M], tl.float32)
            acc_o = tl.zeros([TILE_M, TILE_DV], tl.float32)

            # The loop runs at least once: a tile past the end has no keys, and changes nothing.
            for n_tile in range(first_tile, max(end_tile, first_tile + 1)):
                key, num_keys, place, place_row = _locate(
                    n_tile, seen_begin, seen_end, first_k, place_k, sequence * table_stride_batch,
                    block_table, page_block_size, n_tile < end_tile, TILE_N,
                )  # fmt: skip
                k_rows = k + place.to(tl.int64) * k_stride_batch + place_row.to(tl.int64) * k_stride_row
                k_tile = _load_rows(k_rows + head_k * k_stride_head, num_keys, k_stride_row, headdim, TILE_N, TILE_D)
                if k_scale is None:
                    acc_s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * softmax_scale
                else:
                    # int8 values are exact in every dtype of q; the scale of a key multiplies its column of scores.
                    k_tile = k_tile.to(q_tile.dtype)
                    k_scales = _load_scales(k_scale, place, k_scale_stride_batch, place_row, k_scale_stride_row,
                                            head_k * k_scale_stride_head, num_keys, TILE_N)  # fmt: skip
                    acc_s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                    acc_s *= (k_scales * softmax_scale)[None, :]
                if HAS_SOFTCAP:
                    acc_s = softcap * _tanh(acc_s / softcap)
                if alibi_slopes is not None:
                    acc_s = _add_alibi(acc_s, slopes, diagonal - key, TILE_M, TILE_N, ROWS_ARE_HEADS)
                if (num_keys < TILE_N) | (key < full_begin) | (key + TILE_N > full_end):
                    shift = diagonal - key
                    acc_s = _hide(acc_s, num_keys, shift - window_left - 1, shift + window_right, mask, TILE_M, TILE_N,
                                  MASK_SIZE, HAS_LEFT, HAS_RIGHT)  # fmt: skip

                if v_scale is None:
                    new_max = tl.maximum(row_max, tl.max(acc_s, 1))
                else:
                    v_scales = _load_scales(v_scale, place, v_scale_stride_batch, place_row, v_scale_stride_row,
                                            head_k * v_scale_stride_head, num_keys, TILE_N)  # fmt: skip
                    # float16 must hold a weight times its scale, so the maximum is that of their product.
                    log_scales = tl.log(tl.maximum(v_scales, LEAST_SCALE))
                    new_max = tl.maximum(row_max, tl.max(acc_s + log_scales[None, :], 1))
                weights = tl.exp(acc_s - new_max[:, None])
                correction = tl.exp(row_max - new_max)
                row_sum = row_sum * correction + tl.sum(weights, 1)
                v_rows = v + place.to(tl.int64) * v_stride_batch + place_row.to(tl.int64) * v_stride_row
                v_tile = _load_rows(v_rows + head_k * v_stride_head, num_keys, v_stride_row, headdim_v, TILE_N, TILE_DV)
                if v_scale is not None:
                    v_tile = v_tile.to(q_tile.dtype)
                    weights *= v_scales[None, :]
                products = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
                acc_o = acc_o * correction[:, None] + products
                row_max = new_max

            if sinks is not None:
                sink = _load_sinks(sinks, head, row, group_size, num_rows, split, TILE_M, ROWS_ARE_HEADS)
                new_max = tl.maximum(row_max, sink)
                correction = tl.exp(row_max - new_max)
                row_sum = row_sum * correction + tl.exp(sink - new_max)
                acc_o = acc_o * correction[:, None]
                row_max = new_max
            has_keys = row_sum != 0.0  # NaN is no empty row
            divisor = tl.where(has_keys, row_sum, 1.0)
            result = acc_o / divisor[:, None]
            result_lse = tl.where(has_keys, row_max + tl.log(divisor), float("-inf"))
            to = split.to(tl.int64)
            out_rows = out + to * out_stride_split + place_q.to(tl.int64) * out_stride_batch
            out_rows += row.to(tl.int64) * out_stride_row + head.to(tl.int64) * out_stride_head
            _store_rows(out_rows, result, num_rows - row, out_stride_row, headdim_v, TILE_M, TILE_DV)
            rows = tl.arange(0, TILE_M)
            lse_rows = lse + to * lse_stride_split + place_q.to(tl.int64) * lse_stride_batch
            lse_rows += row.to(tl.int64) * lse_stride_row + head.to(tl.int64) * lse_stride_head
            tl.store(lse_rows + rows * lse_stride_row, result_lse, mask=rows < num_rows - row)


@triton.jit
def _sequence(
    sequence, seqlen_q, seqlen_k, seqlen_new,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_leftpad, cache_batch_idx,
):  # fmt: skip
    """How many queries and keys a sequence has, and where they lie.

    Places are indices on the first axis of q and k, whose stride is that of tokens when varlen, and the row of key 0.
    """
    length_q = seqlen_q
    length_k = seqlen_k
    place_q = sequence
    place_k = sequence
    first_k = sequence * 0
    if cu_seqlens_q is not None:
        place_q = tl.load(cu_seqlens_q + sequence)
        length_q = tl.load(cu_seqlens_q + sequence + 1) - place_q
        place_k = tl.load(cu_seqlens_k + sequence)
        length_k = tl.load(cu_seqlens_k + sequence + 1) - place_k
    if cache_seqlens is not None:
        length_k = tl.load(cache_seqlens + sequence) + seqlen_new
    if cache_leftpad is not None:
        first_k = tl.load(cache_leftpad + sequence)
        length_k -= first_k
    if cache_batch_idx is not None:
        place_k = tl.load(cache_batch_idx + sequence)
    return length_q, length_k, place_q, place_k, first_k


@triton.jit
def _count_tiles(begin, end, block_table, page_block_size, TILE_N: tl.constexpr):
    """Tiles over the positions begin to end - 1 of a sequence; none of them lies in two pages."""
    if block_table is None:
        num_tiles = tl.cdiv(max(end - begin, 0), TILE_N)
    else:
        num_pages = tl.cdiv(end, page_block_size) - begin // page_block_size
        num_tiles = max(num_pages, 0) * tl.cdiv(page_block_size, TILE_N)
    return num_tiles


@triton.jit
def _locate(
    n_tile,
    seen_begin,
    seen_end,
    first_k,
    place_k,
    table_row,
    block_table,
    page_block_size,
    exists,
    TILE_N: tl.constexpr,
):
    """First key of a tile, how many keys it has, and where they lie: row of the batch or page, and row in that."""
    if block_table is None:
        key = seen_begin + n_tile * TILE_N
        num_keys = min(seen_end - key, TILE_N)
        place = place_k
        place_row = first_k + key
    else:
        tiles_per_page = tl.cdiv(page_block_size, TILE_N)
        page = (seen_begin + first_k) // page_block_size + n_tile // tiles_per_page
        in_page = n_tile % tiles_per_page * TILE_N
        end_in_page = min(in_page + TILE_N, page_block_size)
        # The first page may begin with positions that no query sees, and the last one may end with them.
        position = max(page * page_block_size + in_page, seen_begin + first_k)
        key = position - first_k
        num_keys = min(page * page_block_size + end_in_page, seen_end + first_k) - position
        # A table may end with the last page of a sequence, so tiles without keys read entry 0. (A mask of one element
        # is ignored.)
        place = tl.load(block_table + table_row + (page if exists & (num_keys > 0) else 0))
        place_row = position - page * page_block_size
    return key, (max(num_keys, 0) if exists else 0), place, place_row


@triton.jit
def _load_rows(base, num_rows, stride_row, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A (ROWS, COLUMNS) tile from `base` on; zeros beyond num_rows and num_columns."""
    block = tl.make_block_ptr(base, (num_rows, num_columns), (stride_row, 1), (0, 0), (ROWS, COLUMNS), (1, 0))
    return tl.load(block, boundary_check=(0, 1), padding_option="zero")


@triton.jit
def _load_scales(scale, place, stride_batch, row, stride_row, head, num_keys, TILE_N: tl.constexpr):
    """The scale of every key of a tile; 0 beyond num_keys, where memory may hold anything."""
    base = scale + place.to(tl.int64) * stride_batch + row.to(tl.int64) * stride_row + head
    keys = tl.arange(0, TILE_N)
    return tl.load(base + keys * stride_row, mask=keys < num_keys, other=0.0)


@triton.jit
def _store_rows(base, tile, num_rows, stride_row, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of _load_rows."""
    block = tl.make_block_ptr(base, (num_rows, num_columns), (stride_row, 1), (0, 0), (ROWS, COLUMNS), (1, 0))
    tl.store(block, tile.to(base.dtype.element_ty), boundary_check=(0, 1))


@triton.jit
def _load_slopes(
    alibi_slopes, first, head, row, group_size, num_rows, TILE_M: tl.constexpr, ROWS_ARE_HEADS: tl.constexpr
):
    """The ALiBi slope of every row."""
    slopes = tl.zeros([TILE_M], tl.float32)
    if alibi_slopes is not None:
        if ROWS_ARE_HEADS:
            rows = row + tl.arange(0, TILE_M)
            slopes = tl.load(alibi_slopes + first + head * group_size + rows, mask=rows < num_rows, other=0.0)
        else:
            slopes += tl.load(alibi_slopes + first + head)
    return slopes


@triton.jit
def _load_sinks(sinks, head, row, group_size, num_rows, split, TILE_M: tl.constexpr, ROWS_ARE_HEADS: tl.constexpr):
    """The sink of every row. With several splits, the first one has it."""
    if ROWS_ARE_HEADS:
        rows = row + tl.arange(0, TILE_M)
        sink = tl.load(sinks + head * group_size + rows, mask=rows < num_rows, other=0.0)
    else:
        sink = tl.zeros([TILE_M], tl.float32) + tl.load(sinks + head)
    return tl.where(split == 0, sink, float("-inf"))


@triton.jit
def _tanh(x):
    """The hyperbolic tangent: near 0, where the formula with the exponential would cancel, an odd polynomial."""
    square = x * x
    small = -5.70498872745e-3
    small = small * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    small = small * square * x + x
    large = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, large)


@triton.jit
def _add_alibi(acc_s, slopes, delta, TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROWS_ARE_HEADS: tl.constexpr):
    """Scores minus slope times distance; column c of row r stands c - r - delta keys to the right of its query."""
    columns = (tl.arange(0, TILE_N) - delta).to(tl.float32)
    if ROWS_ARE_HEADS:
        distance = tl.abs(columns)[None, :]
    else:
        distance = tl.abs(columns[None, :] - tl.arange(0, TILE_M).to(tl.float32)[:, None])
    return acc_s - slopes[:, None] * distance


@triton.jit
def _hide(
    acc_s, num_keys, delta_left, delta_right, mask, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    MASK_SIZE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Scores of a tile that an edge of the mask or the end of the keys crosses: -inf where a key is hidden.

    Column c of row r is seen when r + delta_left < c <= r + delta_right and c < num_keys.
    """
    acc_s = tl.where((tl.arange(0, TILE_N) < num_keys)[None, :], acc_s, float("-inf"))
    if HAS_RIGHT:
        beyond = _window(mask, delta_right, TILE_M, TILE_N, MASK_SIZE)
        acc_s = tl.where(beyond != 0, float("-inf"), acc_s)
    if HAS_LEFT:
        within = _window(mask, delta_left, TILE_M, TILE_N, MASK_SIZE)
        acc_s = tl.where(within == 0, float("-inf"), acc_s)
    return acc_s


@triton.jit
def _window(mask, delta, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASK_SIZE: tl.constexpr):
    """The window of the mask tile that is 1 where column c of row r is greater than r + delta.

    An edge that does not cross the tile may lie far away, so delta is clamped to the width of the tile.
    """
    delta = min(max(delta, -TILE_M), TILE_N)
    block = tl.make_block_ptr(
        mask,
        (MASK_SIZE, MASK_SIZE),
        (MASK_SIZE, 1),
        (window_row(delta), window_column(delta)),
        (TILE_M, TILE_N),
        (1, 0),
    )
    return tl.load(block)


@_compiled_once
def merge_splits(
    partial_out,  # float32 (num_splits, num_rows, headdim_v)
    partial_lse,  # float32 (num_splits, num_rows)
    out,  # (num_rows, headdim_v)
    lse,  # float32 (num_rows,)
    num_rows,
    num_splits,
    headdim_v,
    TILE_M: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Attention over all keys from that over each split of them, weighted by log-sum-exp."""
    for m_tile in range(tl.program_id(0), tl.cdiv(num_rows, TILE_M), tl.num_programs(0)):
        row = m_tile * TILE_M
        rows = row + tl.arange(0, TILE_M)
        row_max = tl.full([TILE_M], LOWEST, tl.float32)
        row_sum = tl.zeros([TILE_M], tl.float32)
        acc_o = tl.zeros([TILE_M, TILE_DV], tl.float32)
        for split in range(max(num_splits, 1)):
            first = split.to(tl.int64) * num_rows
            split_lse = tl.load(partial_lse + first + rows, mask=rows < num_rows, other=float("-inf"))
            base = partial_out + (first + row) * headdim_v
            split_out = _load_rows(base, num_rows - row, headdim_v, headdim_v, TILE_M, TILE_DV)
            new_max = tl.maximum(row_max, split_lse)
            correction = tl.exp(row_max - new_max)
            weight = tl.exp(split_lse - new_max)
            row_sum = row_sum * correction + weight
            acc_o = acc_o * correction[:, None] + split_out * weight[:, None]
            row_max = new_max
        has_keys = row_sum != 0.0  # NaN is no empty row
        divisor = tl.where(has_keys, row_sum, 1.0)
        base = out + row.to(tl.int64) * headdim_v
        _store_rows(base, acc_o / divisor[:, None], num_rows - row, headdim_v, headdim_v, TILE_M, TILE_DV)
        tl.store(lse + rows, tl.where(has_keys, row_max + tl.log(divisor), float("-inf")), mask=rows < num_rows)
