"""BlockMasks of flex_attention: kept blocks, the window and tiles agree with mask_mod pair by pair."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tiers import sampled
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask

from fastattention import fast_attn_func, fast_attn_varlen_func
from fastattention.attention.mask_tiles import visible_pairs
from fastattention.attention.validation import flex_masks
from fastattention.attention.validation.flex_masks import FlexBlocks, is_flex_mask, read_flex_mask
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.sparse import from_pairs
from unit.samples import visible

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

SHAPES = [(300, 300), (129, 400), (400, 129), (1, 257), (257, 1), (64, 128), (50, 50)]
LENGTHS = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SHAPES, ids=[f"{q}x{k}" for q, k in SHAPES])


@pytest.fixture(params=[1, 3, 256], ids=["tile", "tiles", "all"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(flex_masks, "_CHUNK_TILES", request.param)
    return request.param


def window(seqlen_q: int, seqlen_k: int, left: int, right: int) -> MaskMod:
    """A window aligned to the bottom right, inclusive; -1 is unlimited."""

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        beyond = kv_idx - q_idx - (seqlen_k - seqlen_q)
        visible = beyond == beyond
        if left >= 0:
            visible = visible & (beyond >= -left)
        return visible & (beyond <= right) if right >= 0 else visible

    return mod


def blocks(kept: Tensor, block_size: tuple[int, int]) -> MaskMod:
    """A mask_mod that shows the pairs of kept blocks, bool (batch_size, nheads, rows, columns)."""
    block_m, block_n = block_size
    return lambda b, h, q_idx, kv_idx: kept[b, h, q_idx // block_m, kv_idx // block_n]


def made(
    mod: MaskMod, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (64, 64), sizes: tuple[int, int] = (1, 1)
) -> BlockMask:
    """A BlockMask made by torch, which evaluates all of mod."""
    return flex_attention.create_block_mask(
        mod, *sizes, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block_size, _compile=False
    )


def listed(
    partial: Tensor | None,
    full: Tensor | None,
    lengths: tuple[int, int],
    block_size: int | tuple[int, int] = 64,
    mod: MaskMod | None = None,
) -> BlockMask:
    """A BlockMask from blocks, bool (batch_size, nheads, rows, columns), with which mod need not agree."""

    def lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
        return chosen.sum(-1).int(), chosen.int().argsort(dim=-1, descending=True, stable=True).int()

    if partial is None:
        assert full is not None
        partial = torch.zeros_like(full)
    of_full = (None, None) if full is None else lists(full)
    return BlockMask.from_kv_blocks(*lists(partial), *of_full, BLOCK_SIZE=block_size, mask_mod=mod, seq_lengths=lengths)


def pairs(read: FlexBlocks, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Bool (batch_size or 1, nheads or 1, seqlen_q, seqlen_k): visible pairs by the mask that was read."""
    rows, columns = torch.arange(seqlen_q), torch.arange(seqlen_k)
    kept = read.kept[:, :, rows // read.block_size[0]][..., columns // read.block_size[1]]
    kept = kept & visible(seqlen_q, seqlen_k, read.window_left, read.window_right)
    if read.tile_index is None or read.tile_bits is None:
        return kept
    return kept & visible_pairs(read.tile_index, read.tile_bits, rows, columns)


def visible_by(mod: MaskMod, seqlen_q: int, seqlen_k: int, sizes: tuple[int, int] = (1, 1)) -> Tensor:
    """Visible pairs by torch."""
    return flex_attention.create_mask(mod, *sizes, seqlen_q, seqlen_k, device="cpu")


def read_right(
    mod: MaskMod, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (64, 64), sizes: tuple[int, int] = (1, 1)
) -> FlexBlocks:
    """What is read of the mask that torch makes, which shows what mod shows, pair by pair."""
    read = read_flex_mask(made(mod, seqlen_q, seqlen_k, block_size, sizes), seqlen_q, seqlen_k)
    assert torch.equal(pairs(read, seqlen_q, seqlen_k), visible_by(mod, seqlen_q, seqlen_k, sizes))
    return read


@sampled
@pytest.mark.parametrize("block_size", [(64, 64), (128, 64), (64, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    ("left", "right"),
    [(-1, 0), (0, 0), (30, 0), (100, 0), (70, 3), (-1, 20), (10, -1), (-1, -1)],
    ids=["causal", "diagonal", "causal30", "causal100", "window", "right", "left", "none"],
)
@LENGTHS
def test_a_window_is_read_as_that_window(
    seqlen_q: int, seqlen_k: int, left: int, right: int, block_size: tuple[int, int]
) -> None:
    read = read_right(window(seqlen_q, seqlen_k, left, right), seqlen_q, seqlen_k, block_size)
    assert read.kept.shape == (1, 1, -(-seqlen_q // block_size[0]), -(-seqlen_k // block_size[1]))
    assert read.kept.dtype is torch.bool
    assert read.block_size == block_size
    # A side that hides nothing, or where blocks hide everything, is unlimited.
    assert read.window_left in (left, -1)
    assert read.window_right in (right, -1)


@sampled
@pytest.mark.parametrize(
    ("left", "right"), [(-1, 0), (0, 0), (70, 0), (70, 3), (10, -1), (-1, -1)], ids=lambda side: str(side)
)
def test_bounds_that_hide_keys_within_blocks_are_found(left: int, right: int, chunk: int) -> None:
    read = read_flex_mask(made(window(300, 420, left, right), 300, 420, (128, 64)), 300, 420)
    assert (read.window_left, read.window_right) == (left, right)


@st.composite
def windows_of_blocks(draw: st.DrawFn) -> tuple[MaskMod, tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(mod, lengths, block_size, (batch_size, nheads)): some blocks of each head, and a window over them."""
    seqlen_q, seqlen_k = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    block_size = draw(st.sampled_from([(64, 64), (64, 128), (128, 64)]))
    sizes = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shape = (*sizes, -(-seqlen_q // block_size[0]), -(-seqlen_k // block_size[1]))
    kept = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.7, 1.1]))
    bounds = st.one_of(st.just(-1), st.integers(0, 320))
    mod = and_masks(window(seqlen_q, seqlen_k, draw(bounds), draw(bounds)), blocks(kept, block_size))
    return mod, (seqlen_q, seqlen_k), block_size, sizes


@given(windows_of_blocks(), st.booleans())
def test_blocks_of_each_head_under_a_window_are_served(
    case: tuple[MaskMod, tuple[int, int], tuple[int, int], tuple[int, int]], all_listed: bool
) -> None:
    mod, lengths, block_size, sizes = case
    if not all_listed:
        read_right(mod, *lengths, block_size, sizes)
        return
    rows, columns = (-(-length // size) for length, size in zip(lengths, block_size, strict=True))
    mask = listed(torch.ones(*sizes, rows, columns) > 0, None, lengths, block_size, mod)
    assert torch.equal(pairs(read_flex_mask(mask, *lengths), *lengths), visible_by(mod, *lengths, sizes))


@given(windows_of_blocks(), st.data())
def test_a_mask_with_a_pair_changed_is_right(
    case: tuple[MaskMod, tuple[int, int], tuple[int, int], tuple[int, int]], data: st.DataObject
) -> None:
    mod, lengths, block_size, sizes = case
    query, key = (data.draw(st.integers(0, length - 1)) for length in lengths)

    def changed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(b, h, q_idx, kv_idx) ^ ((q_idx == query) & (kv_idx == key))

    read_right(changed, *lengths, block_size, sizes)


def test_every_block_listed_as_partial_gives_the_same(chunk: int) -> None:
    mod = window(300, 300, 100, 0)
    every_block = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    read = read_flex_mask(listed(every_block, None, (300, 300), 64, mod), 300, 300)
    assert torch.equal(read.kept, read_flex_mask(made(mod, 300, 300), 300, 300).kept)
    assert (read.window_left, read.window_right) == (100, 0)


def test_full_blocks_are_kept_whatever_mask_mod_says() -> None:
    kept = torch.rand(2, 3, 4, 5) < 0.5
    for mod in (None, noop_mask, lambda b, h, q_idx, kv_idx: q_idx < 0):
        read = read_flex_mask(listed(None, kept, (250, 310), 64, mod), 250, 310)
        assert torch.equal(read.kept, kept)
        assert read[1:4] == ((64, 64), -1, -1)


def test_a_mask_without_a_mask_mod_keeps_what_it_lists() -> None:
    partial = torch.rand(2, 3, 4, 5) < 0.4
    full = (torch.rand(2, 3, 4, 5) < 0.5) & ~partial
    read = read_flex_mask(listed(partial, full, (250, 310)), 250, 310)
    assert torch.equal(read.kept, partial | full)
    assert read[1:4] == ((64, 64), -1, -1)


def test_lists_broadcast_over_sequences_and_heads() -> None:
    partial, full = torch.zeros(2, 1, 2, 2, dtype=torch.bool), torch.zeros(1, 3, 2, 2, dtype=torch.bool)
    partial[1, 0, 0, 0], full[0, 2, 1, 1] = True, True
    read = read_flex_mask(listed(partial, full, (128, 128)), 128, 128)
    assert torch.equal(read.kept, partial | full)


def test_lists_may_be_shorter_than_a_row_of_blocks() -> None:
    num_blocks, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[4, 99], [0, 3]]]])
    mask = BlockMask.from_kv_blocks(
        num_blocks, indices, BLOCK_SIZE=64, seq_lengths=(128, 320), compute_q_blocks=False
    )  # indices after the first num_blocks are ignored
    assert read_flex_mask(mask, 128, 320).kept[0, 0].nonzero().tolist() == [[0, 4], [1, 0], [1, 3]]


def test_blocks_beyond_the_keys_are_dropped() -> None:
    mask = listed(None, torch.ones(1, 1, 2, 4, dtype=torch.bool), (128, 130))
    assert read_flex_mask(mask, 128, 130).kept.shape == (1, 1, 2, 3)


def test_partial_blocks_that_show_nothing_are_dropped_and_hide_nothing() -> None:
    """The block before the diagonal is hidden. If it were kept, the window would have to end before it."""
    shown = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)[None, None]
    every_block = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    read = read_flex_mask(listed(every_block, None, (190, 180), 64, blocks(shown, (64, 64))), 190, 180)
    assert torch.equal(read.kept, shown)
    assert read[2:4] == (-1, -1)


def test_a_mask_that_shows_nothing_keeps_nothing() -> None:
    nothing = lambda b, h, q_idx, kv_idx: q_idx < 0  # noqa: E731
    for mask in (
        made(nothing, 200, 100),
        listed(torch.ones(1, 1, 4, 2, dtype=torch.bool), None, (200, 100), 64, nothing),
        listed(torch.zeros(1, 1, 4, 2, dtype=torch.bool), None, (200, 100)),
    ):
        read = read_flex_mask(mask, 200, 100)
        assert read.kept.shape == (1, 1, 4, 2)
        assert not read.kept.any()
        assert read[2:4] == (-1, -1)


@pytest.mark.parametrize("size", [192, 512, 1 << 40])
def test_blocks_may_be_larger_than_the_score_matrix(size: int, chunk: int) -> None:
    mask = listed(torch.ones(1, 1, 1, 1, dtype=torch.bool), None, (100, 190), size, window(100, 190, 30, 0))
    assert read_flex_mask(mask, 100, 190)[1:4] == ((size, size), 30, 0)


def test_heads_and_sequences_share_a_window_over_blocks_of_their_own() -> None:
    kept = torch.rand(2, 3, 4, 5) < 0.6
    kept[..., 0] = True
    mod = and_masks(blocks(kept, (64, 64)), window(256, 320, -1, 0))
    assert read_right(mod, 256, 320, sizes=(2, 3))[2:4] == (-1, 0)


def test_documents_that_blocks_divide_are_served() -> None:
    document = torch.arange(320) // 128
    mod: MaskMod = lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]  # noqa: E731
    assert read_right(mod, 320, 320)[2:4] == (-1, -1)
    assert read_right(and_masks(mod, window(320, 320, -1, 0)), 320, 320)[2:4] == (-1, 0)


def test_mask_mod_may_look_up_a_table_row_by_row() -> None:
    """Tables that end with the call, read by one index after the other, as torch lets a mask_mod do."""
    table = visible_by(window(130, 150, 40, 0), 130, 150)[0, 0]
    assert read_right(lambda b, h, q_idx, kv_idx: table[q_idx][kv_idx], 130, 150)[2:4] == (40, 0)


def test_a_causal_mask_aligned_to_the_top_left_is_a_wider_window_or_read_pair_by_pair() -> None:
    top_left: MaskMod = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
    assert read_right(top_left, 300, 200)[2:4] == (-1, 100)
    assert read_right(top_left, 200, 300).tile_index is not None


DOCUMENT = torch.tensor([0] * 100 + [1] * 120 + [2] * 80)
NO_WINDOW: dict[str, MaskMod] = {
    "documents": lambda b, h, q_idx, kv_idx: DOCUMENT[q_idx] == DOCUMENT[kv_idx],
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < 100),
    "sinks": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() * kv_idx < 9,
    "window of a head": lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 70 + h,
    "window of a sequence": lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 70 + b,
    "hole": lambda b, h, q_idx, kv_idx: (q_idx != 201) | (kv_idx != 203),
    "hole on the diagonal": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((q_idx != 201) | (kv_idx != 201)),
    "hole at the left end": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= 30) & ((q_idx != 201) | (kv_idx != 171)),
    "stripes": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0,
    "tile": lambda b, h, q_idx, kv_idx: (q_idx < 64) & (kv_idx < 64),
    "padding": lambda b, h, q_idx, kv_idx: kv_idx < 290,
    "strictly before": lambda b, h, q_idx, kv_idx: kv_idx < q_idx,
    "strictly behind": lambda b, h, q_idx, kv_idx: kv_idx > q_idx,
}


@pytest.mark.parametrize("name", NO_WINDOW)
def test_a_mask_that_no_window_makes_is_read_pair_by_pair(name: str, chunk: int) -> None:
    read = read_right(NO_WINDOW[name], 300, 300, (128, 64), sizes=(2, 2))
    assert (read.window_left, read.window_right) == (-1, -1)
    assert read.tile_index is not None
    assert read.tile_index.shape == (2, 2, 5, 5)


@given(windows_of_blocks(), st.sampled_from([0.02, 0.5, 0.98]))
def test_random_pairs_are_read_pair_by_pair(
    case: tuple[MaskMod, tuple[int, int], tuple[int, int], tuple[int, int]], share: float
) -> None:
    mod, lengths, block_size, sizes = case
    drawn = torch.rand(*sizes, *lengths) < share
    read_right(lambda b, h, i, j: mod(b, h, i, j) & drawn[b, h, i, j], *lengths, block_size, sizes)
    mask = from_pairs(drawn, block_size=block_size)
    read = FlexBlocks(mask.kept, mask.block_size, -1, -1, mask.tile_index, mask.tile_bits)
    assert torch.equal(pairs(read, *lengths), drawn)


def test_a_pair_mask_is_refused_where_it_does_not_fit() -> None:
    q, mask = torch.randn(1, 70, 2, 8), from_pairs(torch.ones(1, 1, 70, 70) > 0)
    offsets = torch.tensor([0, 70], dtype=torch.int32)
    for changed, size, reason in (
        (mask, {"block_size": 64}, "block_size=64 was given with a PairMask"),
        (from_pairs(torch.ones(1, 1, 69, 70) > 0), {}, "for 69 queries and 70 keys, the call has 70 and 70"),
        (mask._replace(tile_index=mask.tile_index.long()), {}, "tile_index must be .*int32"),
        (mask._replace(tile_bits=mask.tile_bits[:, :3]), {}, "tile_bits must be .*int64"),
        (mask._replace(tile_bits=None), {}, "tile_index and tile_bits must be given together"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            fast_attn_func(q, q, q, block_mask=changed, **size)
    with pytest.raises(ArgumentError, match="PairMask, which knows no sequences"):
        fast_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, block_mask=mask)
    with pytest.raises(ArgumentError, match="pairs must be bool"):
        from_pairs(torch.ones(1, 1, 5, 5))


def test_a_pair_mask_serves_compiled_and_mapped_calls() -> None:
    mask = from_pairs(torch.rand(2, 1, 90, 130) < 0.5)
    q, k = torch.randn(2, 90, 4, 8), torch.randn(2, 130, 2, 8)
    expected = fast_attn_func(q, k, k, block_mask=mask)
    compiled = torch.compile(fast_attn_func, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, k, block_mask=mask), expected)
    mapped = torch.vmap(lambda x: fast_attn_func(x, k, k, block_mask=mask))(torch.stack((q, -q)))
    assert torch.equal(mapped[0], expected)


def test_tiles_that_hide_nothing_or_everything_take_no_memory() -> None:
    shown = torch.ones(1, 1, 256, 256, dtype=torch.bool)
    shown[..., :128, :128] = False  # a block: four tiles that show nothing
    shown[..., 128:192, :64] = False  # such a tile in a kept block
    shown[..., 200, 200] = False
    mask = from_pairs(shown)
    assert mask.tile_bits.shape == (2, 64)
    assert mask.kept.tolist() == [[[[False, True], [True, True]]]]
    assert torch.equal(
        pairs(FlexBlocks(mask.kept, mask.block_size, -1, -1, mask.tile_index, mask.tile_bits), 256, 256), shown
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_full_block_is_within_the_window_to_its_corners(side: str) -> None:
    """It ends 127 keys from the diagonal. A partial block further out makes the window binding."""
    partial, full = (torch.zeros(1, 1, 3, 3, dtype=torch.bool) for _ in range(2))
    partial[0, 0, 0, 2], full[0, 0, 0, 1] = True, True
    if side == "left":
        partial, full = partial.mT, full.mT
    for width in (127, 126):
        bounds = (width, -1) if side == "left" else (-1, width)
        mask = listed(partial, full, (192, 192), 64, window(192, 192, *bounds))
        if width == 127:
            assert read_flex_mask(mask, 192, 192)[2:4] == bounds
            continue
        assert read_flex_mask(mask, 192, 192).tile_index is not None


def test_a_full_block_counts_as_far_as_there_are_keys() -> None:
    """The last block holds one query and the key on its diagonal."""
    partial, full = (torch.zeros(1, 1, 2, 2, dtype=torch.bool) for _ in range(2))
    partial[0, 0, 0, 0], full[0, 0, 1, 1] = True, True
    mask = listed(partial, full, (65, 65), 64, window(65, 65, -1, 0))
    assert read_flex_mask(mask, 65, 65)[2:4] == (-1, 0)


def test_a_mask_mod_that_fails_is_refused_with_its_reason() -> None:
    def fails(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise KeyError("table")

    every_block = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="block_mask cannot be read: its mask_mod raised KeyError: 'table'"):
        read_flex_mask(listed(every_block, None, (128, 128), 64, fails), 128, 128)


def test_a_slice_needs_its_mask_mod_back() -> None:
    causal = window(128, 128, -1, 0)
    whole = made(causal, 128, 128, sizes=(2, 3))
    part = whole[:, 1:2]
    with pytest.raises(UnsupportedError, match=r"Cannot use mask_mod from a sliced BlockMask"):
        read_flex_mask(part, 128, 128)
    part.mask_mod = causal
    read = read_flex_mask(part, 128, 128)
    assert read.kept.shape == (2, 1, 2, 2)
    assert read[2:4] == (-1, 0)
    rows = whole[:, :, torch.tensor([1])]
    with pytest.raises(ArgumentError, match="1 rows of blocks in kv_indices; 128 queries in blocks of 64 have 2"):
        read_flex_mask(rows, 128, 128)


@pytest.mark.parametrize("block_size", [(32, 64), (64, 96), (1, 1)], ids=str)
def test_other_block_sizes_are_refused(block_size: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"BLOCK_SIZE={block_size}; both must be multiples of 64")):
        read_flex_mask(made(noop_mask, 128, 192, block_size), 128, 192)


@pytest.mark.parametrize("lengths", [(127, 192), (128, 191), (192, 128)], ids=str)
def test_other_lengths_are_refused(lengths: tuple[int, int]) -> None:
    mask = made(noop_mask, 128, 192)
    read_flex_mask(mask, 128, 192)
    with pytest.raises(ArgumentError, match=f"128 queries and 192 keys, the call has {lengths[0]} and {lengths[1]}"):
        read_flex_mask(mask, *lengths)


def test_lists_that_cannot_be_are_refused() -> None:
    def mask(indices: list[int], full: list[int]) -> BlockMask:
        counts = (torch.tensor([[[len(each)]]], dtype=torch.int32) for each in (indices, full))
        lists = (torch.tensor([[[each]]], dtype=torch.int32) for each in (indices, full))
        (num, num_full), (kv, kv_full) = counts, lists
        return BlockMask.from_kv_blocks(
            num, kv, num_full, kv_full, BLOCK_SIZE=64, seq_lengths=(64, 192), compute_q_blocks=False
        )

    assert read_flex_mask(mask([0, 2], [1]), 64, 192).kept.all()
    for indices, full, reason in (
        ([0, 0], [1], "twice in a row of kv_indices"),
        ([0, 2], [1, 1], "twice in a row of full_kv_indices"),
        ([-1, 2], [1], "or a negative one"),
        ([0, 2], [2], "in kv_indices and in full_kv_indices"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            read_flex_mask(mask(indices, full), 64, 192)


def test_a_mask_is_read_once() -> None:
    calls = []
    causal = window(128, 128, -1, 0)

    def counted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        calls.append(None)
        return causal(b, h, q_idx, kv_idx)

    first, second = made(counted, 128, 128), made(counted, 128, 128)
    calls.clear()
    read = read_flex_mask(first, 128, 128)
    assert len(calls) == 1
    assert read_flex_mask(first, 128, 128) is read
    assert len(calls) == 1
    assert read_flex_mask(second, 128, 128) is not read
    assert len(calls) == 2


def test_what_was_read_goes_with_the_mask() -> None:
    mask = made(window(128, 128, -1, 0), 128, 128)
    alive = weakref.ref(mask)
    kept = weakref.ref(read_flex_mask(mask, 128, 128).kept)
    assert kept() is not None
    del mask
    gc.collect()
    assert alive() is None
    assert kept() is None


def test_a_mask_read_in_inference_mode_serves_training_later() -> None:
    with torch.inference_mode():
        mask = made(window(128, 128, -1, 0), 128, 128)
        kept = read_flex_mask(mask, 128, 128).kept
    assert not kept.is_inference()
    weight = torch.ones(1, 1, 2, 2, requires_grad=True)
    (weight * kept).sum().backward()
    assert torch.equal(weight.grad, kept.float())


def test_a_mask_is_not_read_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = made(noop_mask, 128, 128)
    read_flex_mask(mask, 128, 128)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match=r"block_mask.*while torch traces.*from_pairs"):
        read_flex_mask(mask, 128, 128)


def test_masks_are_told_from_everything_else() -> None:
    mask = made(noop_mask, 64, 64)
    assert is_flex_mask(mask)
    for other in (None, mask.to_dense(), mask.as_tuple(), BlockMask, noop_mask, "BlockMask"):
        assert not is_flex_mask(other)
