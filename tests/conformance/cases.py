"""The list of cases. Each names the promise it tests; every backend, dtype and instruction set runs all of them."""

from __future__ import annotations

from conformance.block_cases import BLOCK_TILES, BLOCKS
from conformance.dropout_cases import dropout_cases
from conformance.int8_cases import INT8, INT8_TILES
from conformance.quantized_cases import QUANTIZED
from conformance.ragged_cases import RAGGED
from conformance.wide_cases import LATENT, WIDE
from fastattention.testing.case import CACHE_MEMORIES, Bias, Case, DenseCase, KvCacheCase, Memory, VarlenCase


def pairs(text: str) -> list[tuple[int, int]]:
    """[(5, 2), (1, 9)] from "5x2 1x9"."""
    return [(int(first), int(second)) for first, second in (pair.split("x") for pair in text.split())]


# --- dense ------------------------------------------------------------------------------------------------------------

HEADDIMS = [
    DenseCase(name=f"headdim-{d}", seqlen_q=19, seqlen_k=37, headdim=d)
    for d in (1, 2, 3, 8, 15, 16, 17, 31, 33, 40, 59, 64, 80, 96, 111, 128, 160, 192, 255, 256)
]

VALUE_HEADDIMS = [
    DenseCase(name=f"headdim-{d}-values-{dv}", seqlen_q=9, seqlen_k=70, headdim=d, headdim_v=dv)
    for d, dv in ((64, 32), (32, 64), (192, 128), (16, 1), (1, 16), (59, 111), (111, 59), (128, 256), (256, 7))
]

SEQLENS = [
    DenseCase(name=f"seqlens-{q}x{k}", seqlen_q=q, seqlen_k=k, headdim=24)
    for q, k in pairs(
        "1x1 1x2 2x1 3x3 1x7 5x8 7x1 8x16 9x31 16x15 17x33 32x32 31x64 47x48 48x49 49x47 63x65 64x64 65x127 96x128 "
        "113x203 128x256 129x127 203x113 255x257 256x300 300x1"
    )
]

CAUSAL_SEQLENS = [
    DenseCase(name=f"causal-{q}x{k}", seqlen_q=q, seqlen_k=k, causal=True)
    for q, k in pairs(
        "1x1 1x9 2x4 4x2 5x2 3x3 17x17 16x33 33x16 48x48 50x47 64x64 65x63 47x113 113x47 127x129 129x127 128x300 "
        "300x128 257x257 301x1 1x301"
    )
]

LONG = [
    DenseCase(name="long", seqlen_q=1000, seqlen_k=1031, nheads=1, nheads_k=1, batch_size=1, headdim=40),
    DenseCase(name="long-causal-gqa", seqlen_q=1021, seqlen_k=1021, nheads=2, nheads_k=1, batch_size=1, causal=True),
    # 24 heads of keys and values that take more working memory than backends use at a time.
    DenseCase(name="many-heads", seqlen_q=18, seqlen_k=700, nheads=1, nheads_k=1, batch_size=24, headdim=256,
              memory_k="one_batch_expanded"),
    DenseCase(name="long-window", seqlen_q=999, seqlen_k=1003, nheads=1, nheads_k=1, batch_size=1, window=(130, 17)),
]  # fmt: skip

# Kernels split the keys of few queries, even without a cache.
FEW_QUERIES = [
    DenseCase(name="few-queries-one", seqlen_q=1, seqlen_k=611, nheads=8, nheads_k=2),
    DenseCase(name="few-queries-causal", seqlen_q=3, seqlen_k=300, nheads=6, causal=True, headdim=72, headdim_v=48),
    DenseCase(name="few-queries-window", seqlen_q=5, seqlen_k=1300, nheads_k=1, window=(400, 2),
              memory_k="heads_major"),
    DenseCase(name="few-queries-narrow", seqlen_q=4, seqlen_k=270, window=(3, 0), batch_size=3),
    DenseCase(name="few-queries-scores", seqlen_q=2, seqlen_k=450, nheads=4, causal=True, softcap=3.0,
              alibi="per_sequence", sinks=True, memory_q="sliced_heads", memory_k="every_second_token"),
    DenseCase(name="few-queries-long", seqlen_q=1, seqlen_k=5003, nheads=5, nheads_k=1, batch_size=1, headdim=128),
    DenseCase(name="few-queries-wide", seqlen_q=2, seqlen_k=519, nheads=16, headdim=256, batch_size=1),
    DenseCase(name="few-queries-rows", seqlen_q=7, seqlen_k=333, nheads=8, headdim=64, causal=True, batch_size=3),
    DenseCase(name="few-queries-bias", seqlen_q=2, seqlen_k=333, nheads=4, nheads_k=2, batch_size=3,
              bias=Bias("bhqk", hides="entries")),
    DenseCase(name="few-queries-bias-of-all-rows", seqlen_q=3, seqlen_k=700, causal=True, bias=Bias("qk")),
    DenseCase(name="few-queries-one-sequence-for-all", seqlen_q=1, seqlen_k=400, memory_k="one_batch_expanded",
              batch_size=40),
]  # fmt: skip

# Kernels choose tiles by head dimension and number of queries, and are compiled apart for what is added to scores
# and for pages: every combination that some GPU meets, with lengths that end inside a tile.
TILES = [
    case
    for d in (32, 64, 96, 128, 192, 256, 512)
    for q in ((35, 101, 270) if d < 512 else (35,))
    for case in (
        DenseCase(name=f"tiles-{d}-{q}", seqlen_q=q, seqlen_k=83, headdim=d, nheads=1, nheads_k=1, batch_size=1,
                  causal=q == 35, window=(-1, 60) if q == 270 else (-1, -1)),
        DenseCase(name=f"tiles-{d}-{q}-alibi", seqlen_q=q, seqlen_k=83, headdim=d, nheads=1, nheads_k=1,
                  batch_size=1, alibi="per_head", causal=q == 101),
        VarlenCase(name=f"tiles-{d}-{q}-pages", seqlens_q=(q, 3), seqlens_k=(83, 70), headdim=d, nheads=1, nheads_k=1,
                   page_block_size=16, causal=q == 270),
    )
] + [
    # The last tile of rows that share a key head is not full, and results of several CTAs are merged.
    KvCacheCase(name=f"tiles-{d}-heads-{h}-of-1", cache_seqlens=(1500, 700), nheads=h, nheads_k=1, headdim=d)
    for d, h in ((256, 100), (256, 20))
] + [
    # Gradients with a softcap, and calls with a bias, take tiles of their own. Whole tiles of biases are copied.
    DenseCase(name="tiles-64-softcap", seqlen_q=101, seqlen_k=83, headdim=64, nheads=1, nheads_k=1, batch_size=1,
              softcap=5.0)
] + [
    DenseCase(name=f"tiles-{d}-bias", seqlen_q=101, seqlen_k=88, headdim=d, nheads=1, nheads_k=1, batch_size=1,
              bias=Bias("bhqk", dtype_of_q=True))
    for d in (64, 96, 128, 192, 256)
]  # fmt: skip

# There are enough queries for kernels to take tiles for long sequences. Few keys keep the list quick.
MANY_QUERIES = [
    DenseCase(name="many-queries", seqlen_q=8200, seqlen_k=70, nheads=1, nheads_k=1, batch_size=1, headdim=64,
              window=(20, 8150)),
    DenseCase(name="many-queries-32", seqlen_q=8200, seqlen_k=70, nheads=1, nheads_k=1, batch_size=1),
    VarlenCase(name="varlen-many-queries", seqlens_q=(3, 8200, 193), seqlens_k=(50, 70, 97), nheads=1, nheads_k=1,
               headdim=59),
    *(
        VarlenCase(name=f"varlen-pages-many-queries-{d}", seqlens_q=(8200, 193), seqlens_k=(70, 97), nheads=1,
                   nheads_k=1, headdim=d, page_block_size=16, window=(-1, 8150))
        for d in (32, 64)
    ),
]  # fmt: skip

HEADS = [
    DenseCase(name=f"heads-{h}-of-{hk}", seqlen_q=21, seqlen_k=45, nheads=h, nheads_k=hk, headdim=20, causal=True)
    for h, hk in ((1, 1), (3, 3), (4, 2), (6, 2), (3, 1), (8, 2), (7, 1), (14, 2), (8, 1), (16, 2), (5, 1))
]

WINDOWS = [
    DenseCase(name=f"window-{left}-{right}-{q}x{k}".replace("--1", "-all"), seqlen_q=q, seqlen_k=k,
              window=(left, right))
    for left, right, shapes in (
        (0, 0, "37x37 5x70 70x5"), (0, -1, "33x50"), (-1, 0, "33x50"), (5, -1, "60x60"), (-1, 5, "60x60 60x40"),
        (7, 3, "75x75 20x150 150x20"), (1, 64, "130x130"), (64, 1, "130x130"), (129, 129, "40x300"),
        (300, 300, "31x29"), (16, 0, "257x257"), (40, -1, "1x300"), (3, 2, "1x1"),
    )
    for q, k in pairs(shapes)
] + [
    DenseCase(name="causal-window-left", seqlen_q=80, seqlen_k=100, causal=True, window=(20, -1)),
    DenseCase(name="causal-overrides-window-right", seqlen_q=80, seqlen_k=100, causal=True, window=(20, 5)),
    DenseCase(name="causal-window-0", seqlen_q=50, seqlen_k=50, causal=True, window=(0, -1)),
]  # fmt: skip

SCORES = [
    DenseCase(name="softmax-scale", seqlen_q=33, seqlen_k=65, softmax_scale=0.5),
    DenseCase(name="softmax-scale-negative", seqlen_q=33, seqlen_k=65, softmax_scale=-0.3),
    DenseCase(name="softmax-scale-negative-causal", seqlen_q=70, seqlen_k=65, softmax_scale=-0.3, causal=True),
    DenseCase(name="softmax-scale-0", seqlen_q=5, seqlen_k=65, softmax_scale=0.0),
    DenseCase(name="softmax-scale-0-causal-bias", seqlen_q=70, seqlen_k=65, softmax_scale=0.0, causal=True,
              bias=Bias("bhqk", hides="entries")),
    DenseCase(name="large-scores", seqlen_q=33, seqlen_k=90, magnitude=20.0),
    DenseCase(name="large-scores-causal", seqlen_q=90, seqlen_k=90, magnitude=20.0, causal=True),
    DenseCase(name="tiny-scores", seqlen_q=33, seqlen_k=90, magnitude=1e-3),
    DenseCase(name="softcap", seqlen_q=33, seqlen_k=65, softcap=1.5),
    DenseCase(name="softcap-saturated", seqlen_q=33, seqlen_k=65, softcap=5.0, magnitude=12.0),
    DenseCase(name="softcap-beyond-all-scores", seqlen_q=33, seqlen_k=65, softcap=1000.0),
    DenseCase(name="softcap-large-causal-gqa", seqlen_q=70, seqlen_k=65, softcap=50.0, causal=True, nheads=4),
    DenseCase(name="alibi-per-head", seqlen_q=33, seqlen_k=65, alibi="per_head"),
    DenseCase(name="alibi-per-sequence", seqlen_q=65, seqlen_k=33, alibi="per_sequence", nheads=4),
    DenseCase(name="alibi-causal", seqlen_q=130, seqlen_k=140, alibi="per_sequence", causal=True, nheads=3, nheads_k=1),
    DenseCase(name="alibi-window", seqlen_q=70, seqlen_k=90, alibi="per_head", window=(20, 9)),
    DenseCase(name="sinks", seqlen_q=33, seqlen_k=65, sinks=True, nheads=4),
    DenseCase(name="sinks-causal-rows-without-keys", seqlen_q=33, seqlen_k=9, sinks=True, causal=True, nheads=4),
    DenseCase(name="sinks-large-scores", seqlen_q=33, seqlen_k=65, sinks=True, magnitude=15.0),
    DenseCase(name="everything", seqlen_q=70, seqlen_k=90, nheads=6, headdim=59, headdim_v=40, window=(40, 12),
              softcap=3.0, alibi="per_sequence", sinks=True, bias=Bias("bhqk", hides="entries"), softmax_scale=0.4,
              memory_q="heads_major", memory_k="sliced_heads"),
]  # fmt: skip

BIASES = [
    DenseCase(name=f"bias-{bias.axes}-hides-{bias.hides}", seqlen_q=35, seqlen_k=67, nheads=4, bias=bias)
    for bias in (
        *(Bias(axes) for axes in ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "b11k", "hqk", "qk", "k", "1")),
        *(Bias(axes) for axes in ("bhq1", "1h11", "q1", "1111")),
        *(Bias(axes, hides="entries") for axes in ("bhqk", "b11k", "qk", "hqk")),
        *(Bias(axes, hides="rows") for axes in ("bhqk", "b1qk", "qk", "bhq1", "q1")),
        *(Bias(axes, hides="columns") for axes in ("bhqk", "b11k", "k")),
    )
] + [
    DenseCase(name="bias-dtype-of-q", seqlen_q=35, seqlen_k=67, bias=Bias("bhqk", dtype_of_q=True)),
    DenseCase(name="bias-dtype-of-q-per-key", seqlen_q=35, seqlen_k=67,
              bias=Bias("b11k", hides="entries", dtype_of_q=True)),
    DenseCase(name="bias-finite-entries", seqlen_q=35, seqlen_k=67, bias=Bias("b1qk", hides="entries", finite=True)),
    DenseCase(name="bias-finite-rows", seqlen_q=35, seqlen_k=67, bias=Bias("b1qk", hides="rows", finite=True)),
    DenseCase(name="bias-finite-rows-one-query", seqlen_q=1, seqlen_k=67,
              bias=Bias("b1qk", hides="rows", finite=True, dtype_of_q=True)),
    DenseCase(name="bias-finite-rows-dtype-of-q", seqlen_q=35, seqlen_k=67,
              bias=Bias("b1qk", hides="rows", finite=True, dtype_of_q=True)),
    DenseCase(name="bias-strided", seqlen_q=35, seqlen_k=67, bias=Bias("bhqk", strided=True)),
    DenseCase(name="bias-strided-dtype-of-q", seqlen_q=35, seqlen_k=67,
              bias=Bias("hqk", strided=True, dtype_of_q=True)),
    DenseCase(name="bias-causal", seqlen_q=67, seqlen_k=60, bias=Bias("bhqk", hides="entries"), causal=True),
    DenseCase(name="bias-softcap", seqlen_q=35, seqlen_k=67, bias=Bias("1hqk"), softcap=2.0),
    DenseCase(name="bias-window-hides-columns", seqlen_q=70, seqlen_k=67, window=(3, 0),
              bias=Bias("k", hides="columns")),
    DenseCase(name="bias-sinks-rows", seqlen_q=35, seqlen_k=67, bias=Bias("qk", hides="rows"), sinks=True),
    DenseCase(name="bias-one-query", seqlen_q=1, seqlen_k=200, nheads=8, nheads_k=1,
              bias=Bias("bh1k", hides="entries")),
    # Lengths are even, so that kernels may read two neighbours at once, but for keys of the last tile.
    DenseCase(name="bias-pairs", seqlen_q=40, seqlen_k=150, bias=Bias("bhqk", dtype_of_q=True), causal=True),
    DenseCase(name="bias-pairs-float", seqlen_q=40, seqlen_k=150, bias=Bias("hqk")),
    DenseCase(name="bias-pairs-of-one-row", seqlen_q=40, seqlen_k=150, bias=Bias("bh1k", dtype_of_q=True), softcap=9.0),
    # Rows of 16 bytes at a time: kernels may copy whole tiles.
    DenseCase(name="bias-copied", seqlen_q=75, seqlen_k=136, bias=Bias("bhqk", dtype_of_q=True), causal=True),
    DenseCase(name="bias-copied-one-row", seqlen_q=150, seqlen_k=200, bias=Bias("bh1k", dtype_of_q=True),
              window=(90, -1)),
    DenseCase(name="bias-wide", seqlen_q=130, seqlen_k=290, bias=Bias("bhqk", hides="entries")),
]  # fmt: skip

MEMORIES: list[tuple[Memory, Memory]] = [
    ("heads_major", "heads_major"),
    ("sliced_heads", "sliced_heads"),
    ("every_second_token", "every_second_token"),
    ("sliced_headdim", "sliced_headdim"),
    ("every_second_element", "every_second_element"),
    ("one_batch_expanded", "one_batch_expanded"),
    ("one_head_expanded", "one_head_expanded"),
    ("contiguous", "heads_major"),
    ("sliced_headdim", "every_second_token"),
]
STRIDES = [
    DenseCase(name=f"memory-{memory_q}-and-{memory_k}", seqlen_q=37, seqlen_k=70, nheads=4, headdim=40, causal=True,
              memory_q=memory_q, memory_k=memory_k)
    for memory_q, memory_k in MEMORIES
]  # fmt: skip

EMPTY = [
    DenseCase(name="empty-batch", seqlen_q=5, seqlen_k=7, batch_size=0),
    DenseCase(name="no-queries", seqlen_q=0, seqlen_k=7),
    DenseCase(name="no-keys", seqlen_q=5, seqlen_k=0),
    DenseCase(name="no-keys-sinks", seqlen_q=5, seqlen_k=0, sinks=True, causal=True),
    DenseCase(name="no-queries-no-keys", seqlen_q=0, seqlen_k=0),
    DenseCase(name="one-batch", seqlen_q=12, seqlen_k=20, batch_size=1),
    DenseCase(name="five-batches", seqlen_q=12, seqlen_k=20, batch_size=5, causal=True),
]

# --- varlen -----------------------------------------------------------------------------------------------------------

UNEVEN_Q, UNEVEN_K = (1, 40, 0, 3, 130, 17), (9, 33, 5, 0, 130, 64)

VARLEN = [
    VarlenCase(name="varlen", seqlens_q=UNEVEN_Q, seqlens_k=UNEVEN_K),
    VarlenCase(name="varlen-causal", seqlens_q=UNEVEN_Q, seqlens_k=UNEVEN_K, causal=True),
    VarlenCase(name="varlen-window-gqa", seqlens_q=UNEVEN_Q, seqlens_k=UNEVEN_K, window=(11, 4), nheads=6),
    VarlenCase(name="varlen-one-sequence", seqlens_q=(77,), seqlens_k=(99,), causal=True),
    VarlenCase(name="varlen-ones", seqlens_q=(1, 1, 1, 1), seqlens_k=(1, 1, 1, 1), causal=True),
    VarlenCase(name="varlen-decode", seqlens_q=(1, 1, 1), seqlens_k=(300, 7, 129), nheads=8, nheads_k=1, headdim=64),
    VarlenCase(name="varlen-long", seqlens_q=(700, 2, 90), seqlens_k=(700, 60, 90), nheads=1, nheads_k=1, causal=True),
    VarlenCase(name="varlen-max-seqlen-slack", seqlens_q=(5, 30), seqlens_k=(9, 33), slack=11, bias=Bias("htk")),
    VarlenCase(name="varlen-max-seqlen-given", seqlens_q=(5, 30), seqlens_k=(9, 33), slack=0),
    VarlenCase(name="varlen-empty-batch", seqlens_q=(), seqlens_k=()),
    VarlenCase(name="varlen-all-empty", seqlens_q=(0, 0), seqlens_k=(0, 0)),
    VarlenCase(name="varlen-no-queries", seqlens_q=(0, 0), seqlens_k=(3, 4)),
    VarlenCase(name="varlen-no-keys", seqlens_q=(3, 4), seqlens_k=(0, 0), sinks=True),
    VarlenCase(name="varlen-softcap-headdim-v", seqlens_q=(20, 33), seqlens_k=(50, 33), softcap=2.0, headdim_v=59),
    VarlenCase(name="varlen-alibi-per-head", seqlens_q=(20, 33), seqlens_k=(50, 33), alibi="per_head", causal=True),
    VarlenCase(name="varlen-alibi-per-sequence", seqlens_q=(20, 33), seqlens_k=(50, 33), alibi="per_sequence"),
    VarlenCase(name="varlen-sinks", seqlens_q=(20, 33), seqlens_k=(50, 0), sinks=True),
    *(
        VarlenCase(name=f"varlen-bias-{bias.axes}-hides-{bias.hides}", seqlens_q=(4, 33), seqlens_k=(50, 31), bias=bias)
        for bias in (*(Bias(axes) for axes in ("htk", "h1k", "ht1", "k")), Bias("1tk", hides="rows"),
                     Bias("tk", hides="entries"))
    ),
    VarlenCase(name="varlen-bias-strided", seqlens_q=(4, 33), seqlens_k=(50, 31), bias=Bias("htk", strided=True)),
    VarlenCase(name="varlen-heads-major", seqlens_q=(20, 33), seqlens_k=(50, 33), memory_q="heads_major",
               memory_k="heads_major", causal=True),
    VarlenCase(name="varlen-sliced", seqlens_q=(20, 33), seqlens_k=(50, 33), memory_q="sliced_heads",
               memory_k="sliced_headdim"),
    VarlenCase(name="varlen-every-second-token", seqlens_q=(20, 33), seqlens_k=(50, 33), memory_q="every_second_token",
               memory_k="every_second_token"),
    *(
        VarlenCase(name=f"varlen-pages-{size}", seqlens_q=UNEVEN_Q, seqlens_k=UNEVEN_K, page_block_size=size,
                   causal=True)
        for size in (1, 3, 16, 64, 256)
    ),
    *(
        VarlenCase(name=f"varlen-pages-{dtype}-{size}", seqlens_q=(5, 0, 130, 1, 20), seqlens_k=(37, 9, 300, 257, 20),
                   page_block_size=size, quantized=dtype, causal=True, nheads=4, nheads_k=2, headdim=d, headdim_v=dv)
        for dtype, size, d, dv in (("int8", 16, 64, 64), ("float8", 16, 96, 59), ("int8", 7, 40, 128))
    ),
    VarlenCase(name="varlen-pages-int8-window-sinks", seqlens_q=(20, 33), seqlens_k=(150, 33), page_block_size=16,
               quantized="int8", window=(50, 0), sinks=True, softcap=9.0, nheads=2, nheads_k=1, memory_k="heads_major"),
    VarlenCase(name="varlen-pages-gqa-window", seqlens_q=(20, 33), seqlens_k=(150, 33), page_block_size=16, nheads=8,
               window=(40, 7), headdim=59, headdim_v=64),
    VarlenCase(name="varlen-pages-slack-bias", seqlens_q=(20, 33), seqlens_k=(50, 33), page_block_size=7, slack=30,
               bias=Bias("htk", hides="entries"), memory_k="heads_major"),
]  # fmt: skip

# --- kvcache ----------------------------------------------------------------------------------------------------------

CACHE = [
    *(
        KvCacheCase(name=f"cache-seqlen-q-{q}", seqlen_q=q, cache_seqlens=(1, 70, 133), causal=True, nheads=4)
        for q in (1, 2, 5, 17, 64)
    ),
    KvCacheCase(name="cache-not-causal", seqlen_q=5, cache_seqlens=(0, 1, 90), nheads=4),
    KvCacheCase(name="cache-empty", cache_seqlens=(0, 0)),
    KvCacheCase(name="cache-empty-batch", cache_seqlens=()),
    KvCacheCase(name="cache-no-queries", seqlen_q=0, cache_seqlens=(3, 4), seqlen_new=2),
    KvCacheCase(name="cache-full", cache_seqlens=(40, 40), spare=0, lengths="full"),
    KvCacheCase(name="cache-int-length", cache_seqlens=(40, 40), lengths="int", seqlen_new=1, causal=True),
    *(
        KvCacheCase(name=f"cache-heads-{h}-of-{hk}", cache_seqlens=(300, 45), nheads=h, nheads_k=hk, headdim=64)
        for h, hk in ((1, 1), (4, 2), (6, 2), (8, 2), (7, 1), (16, 2), (8, 1), (40, 1), (17, 17), (34, 17))
    ),
    KvCacheCase(name="cache-heads-17-of-17-in-pages", cache_seqlens=(300, 45), nheads=17, nheads_k=17, headdim=64,
                page_block_size=16),
    *(
        KvCacheCase(name=f"cache-headdim-{d}-{dv}", cache_seqlens=(100, 45), nheads=4, headdim=d, headdim_v=dv)
        for d, dv in ((1, 1), (3, 3), (59, 111), (96, 96), (111, 59), (128, 128), (192, 128), (256, 256))
    ),
    KvCacheCase(name="cache-many-rows", seqlen_q=20, cache_seqlens=(300, 45), nheads=4, nheads_k=1, headdim=192,
                causal=True),
    KvCacheCase(name="cache-prefill", seqlen_q=256, cache_seqlens=(300,), nheads=5, nheads_k=5, causal=True),
    KvCacheCase(name="cache-prefill-in-pages", seqlen_q=256, cache_seqlens=(0, 44), seqlen_new=256, nheads=5,
                nheads_k=5, window=(100, 0), page_block_size=16),
    KvCacheCase(name="cache-window-left", cache_seqlens=(100, 45, 3), window=(16, 0), nheads=4),
    KvCacheCase(name="cache-window-both", seqlen_q=6, cache_seqlens=(100, 45, 3), window=(16, 2), nheads=4),
    KvCacheCase(name="cache-softcap", cache_seqlens=(100, 45), softcap=2.0),
    KvCacheCase(name="cache-large-scores", cache_seqlens=(100, 45), magnitude=20.0, num_splits=4),
    KvCacheCase(name="cache-alibi", seqlen_q=3, cache_seqlens=(100, 45), alibi="per_sequence", causal=True, nheads=4),
    KvCacheCase(name="cache-sinks", cache_seqlens=(100, 0), sinks=True, nheads=4),
    KvCacheCase(name="cache-sinks-splits", cache_seqlens=(600, 9), sinks=True, nheads=4, num_splits=5),
    *(
        KvCacheCase(name=f"cache-bias-{bias.axes}-hides-{bias.hides}", seqlen_q=3, cache_seqlens=(100, 45), bias=bias)
        for bias in (Bias("bhqk"), Bias("b11k", hides="entries"), Bias("q1"), Bias("k"), Bias("b1qk", hides="rows"))
    ),
    KvCacheCase(name="cache-bias-splits", cache_seqlens=(500,), bias=Bias("bh1k", hides="columns"), num_splits=7),
    *(
        KvCacheCase(name=f"cache-memory-{memory}", seqlen_q=2, cache_seqlens=(100, 45), memory_k=memory, seqlen_new=2)
        for memory in CACHE_MEMORIES
    ),
    KvCacheCase(name="cache-query-strides", seqlen_q=5, cache_seqlens=(100, 45), memory_q="heads_major", seqlen_new=5,
                causal=True),
    KvCacheCase(name="cache-query-every-second-element", seqlen_q=2, cache_seqlens=(100, 45), seqlen_new=2,
                memory_q="every_second_element"),
]  # fmt: skip

APPEND = [
    KvCacheCase(name="append-one", cache_seqlens=(0, 1, 77), seqlen_new=1, causal=True, nheads=4),
    KvCacheCase(name="append-many", seqlen_q=19, cache_seqlens=(0, 1, 77), seqlen_new=19, causal=True, nheads=4),
    KvCacheCase(name="append-more-than-queries", seqlen_q=2, cache_seqlens=(0, 1, 77), seqlen_new=9, causal=True),
    KvCacheCase(name="append-fewer-than-queries", seqlen_q=9, cache_seqlens=(0, 1, 77), seqlen_new=2, causal=True),
    KvCacheCase(name="append-to-the-last-slot", cache_seqlens=(31, 31), seqlen_new=1, spare=0, causal=True),
    KvCacheCase(name="append-nothing", seqlen_q=3, cache_seqlens=(20, 9), seqlen_new=0, causal=True),
    KvCacheCase(name="append-not-causal", seqlen_q=4, cache_seqlens=(20, 9), seqlen_new=3, headdim_v=59),
    *(
        KvCacheCase(
            name=f"rotary-{'interleaved' if interleaved else 'halves'}-{rotary_dim}-of-{headdim}{'-causal' * causal}",
            seqlen_q=q, seqlen_new=q, cache_seqlens=(0, 40, 77), nheads=4, headdim=headdim, rotary_dim=rotary_dim,
            rotary_interleaved=interleaved, causal=causal,
        )
        for interleaved in (True, False)
        for q, rotary_dim, headdim, causal in (
            (1, 32, 32, True), (5, 16, 40, True), (5, 64, 64, False), (3, 2, 59, False)
        )
    ),
    KvCacheCase(name="rotary-window-only", seqlen_q=5, seqlen_new=5, cache_seqlens=(3, 40), rotary_dim=16,
                window=(9, 2)),
    KvCacheCase(name="rotary-window-left-only", seqlen_q=5, seqlen_new=5, cache_seqlens=(3, 40), rotary_dim=16,
                window=(9, -1)),
    KvCacheCase(name="rotary-window-right-only", seqlen_q=5, seqlen_new=5, cache_seqlens=(3, 40), rotary_dim=16,
                window=(-1, 2)),
    KvCacheCase(name="rotary-more-queries-than-new", seqlen_q=5, seqlen_new=2, cache_seqlens=(3, 40), rotary_dim=16,
                causal=True),
    KvCacheCase(name="rotary-strided-cache", seqlen_q=2, seqlen_new=2, cache_seqlens=(3, 40), rotary_dim=16,
                rotary_interleaved=False, memory_k="heads_major", memory_q="sliced_headdim", causal=True),
    KvCacheCase(name="batch-idx", seqlen_q=2, cache_seqlens=(3, 40, 77), batch_idx=True),
    KvCacheCase(name="batch-idx-append", seqlen_q=2, cache_seqlens=(3, 40, 77), batch_idx=True, seqlen_new=2,
                causal=True),
    KvCacheCase(name="leftpad", seqlen_q=3, cache_seqlens=(30, 40, 77), leftpad=(0, 7, 76), causal=True),
    KvCacheCase(name="leftpad-all", cache_seqlens=(30, 40), leftpad=(30, 40)),
    KvCacheCase(name="leftpad-alibi-window-bias", seqlen_q=3, cache_seqlens=(30, 40, 77), leftpad=(1, 7, 20),
                window=(12, 0), alibi="per_head", bias=Bias("bhqk")),
    KvCacheCase(name="leftpad-append-rotary-batch-idx", seqlen_q=2, seqlen_new=2, cache_seqlens=(30, 40),
                leftpad=(3, 17), batch_idx=True, rotary_dim=16, causal=True),
]  # fmt: skip

PAGES = [
    *(
        KvCacheCase(name=f"pages-{size}-seqlen-q-{q}", seqlen_q=q, cache_seqlens=(0, 130, 77), page_block_size=size,
                    causal=True)
        for size, q in ((1, 1), (3, 2), (16, 1), (16, 17), (64, 1), (64, 5), (256, 1), (256, 64))
    ),
    *(
        KvCacheCase(name=f"pages-{size}-append-{q}-rotary", seqlen_q=q, seqlen_new=q, cache_seqlens=(0, 63, 77),
                    rotary_dim=16, page_block_size=size, nheads=4, causal=True, rotary_interleaved=size % 2 == 0)
        for size, q in ((1, 1), (3, 5), (16, 1), (16, 17), (64, 2), (256, 5))
    ),
    KvCacheCase(name="pages-full", cache_seqlens=(48, 48), spare=0, lengths="full", page_block_size=16),
    KvCacheCase(name="pages-leftpad", seqlen_q=3, cache_seqlens=(30, 40, 77), leftpad=(0, 17, 33), page_block_size=16,
                causal=True),
    # A table ends with the pages in use, so kernels that look up one more page read beyond it.
    KvCacheCase(name="pages-leftpad-all", cache_seqlens=(32, 32), leftpad=(32, 32), page_block_size=16, spare=0),
    KvCacheCase(name="pages-fewer-than-splits", cache_seqlens=(20, 5), page_block_size=16, num_splits=16, spare=0),
    KvCacheCase(name="pages-leftpad-append", seqlen_q=3, cache_seqlens=(30, 40), leftpad=(5, 17), page_block_size=16,
                seqlen_new=3, causal=True),
    KvCacheCase(name="pages-shared-prefix", seqlen_q=2, cache_seqlens=(70, 40, 77), page_block_size=16, shared_pages=2,
                seqlen_new=2, causal=True, nheads=8, nheads_k=1),
    KvCacheCase(name="pages-window-splits", cache_seqlens=(700, 40), page_block_size=16, window=(99, 0), num_splits=3),
    KvCacheCase(name="pages-bias-sinks", seqlen_q=2, cache_seqlens=(70, 40), page_block_size=3, sinks=True,
                bias=Bias("bhqk")),
    KvCacheCase(name="pages-heads-major", seqlen_q=2, cache_seqlens=(70, 40), page_block_size=16, causal=True,
                memory_k="heads_major", seqlen_new=2),
    KvCacheCase(name="pages-sliced", cache_seqlens=(70, 40), page_block_size=16, headdim_v=59,
                memory_k="sliced_headdim"),
] + [
    # Kernels take blocks of rows in place where they are equally spaced: not across pages, nor where headdim is odd.
    KvCacheCase(name=f"pages-heads-major-group-{group}-headdim-{d}", cache_seqlens=(530, 0, 77), leftpad=(5, 0, 0),
                page_block_size=size, nheads=2 * group, headdim=d, headdim_v=d_v, memory_k="heads_major")
    for group in (1, 2, 3, 4, 6, 8, 16)
    for d, d_v, size in ((128, 128, 48), (47, 160, 7))
]  # fmt: skip

SPLITS = [
    KvCacheCase(name=f"splits-{n}-{'pages' if size else 'dense'}-seqlen-q-{q}", seqlen_q=q, cache_seqlens=(1500, 3),
                num_splits=n, page_block_size=size, nheads=4, headdim=16, causal=True)
    for n in (0, 1, 3, 7)
    for size, q in ((None, 1), (64, 2))
] + [
    KvCacheCase(name="splits-more-than-keys", cache_seqlens=(2, 5), num_splits=16),
    KvCacheCase(name="splits-many", cache_seqlens=(640, 600), nheads=16, nheads_k=1, headdim=16, headdim_v=256,
                num_splits=40),
    KvCacheCase(name="splits-5000-keys", cache_seqlens=(5000,), nheads=8, nheads_k=1, headdim=16),
    KvCacheCase(name="splits-5000-keys-append", cache_seqlens=(4999, 1200), nheads=4, headdim=16, seqlen_new=1,
                causal=True, rotary_dim=8),
    KvCacheCase(name="splits-5000-keys-pages-window", cache_seqlens=(5000,), nheads=4, headdim=16, page_block_size=64,
                window=(3000, 0)),
]  # fmt: skip

CASES: list[Case] = [
    *HEADDIMS, *VALUE_HEADDIMS, *SEQLENS, *CAUSAL_SEQLENS, *LONG, *FEW_QUERIES, *TILES, *MANY_QUERIES, *HEADS,
    *WINDOWS, *SCORES, *BIASES, *STRIDES, *EMPTY, *VARLEN, *CACHE, *APPEND, *PAGES, *SPLITS, *QUANTIZED, *RAGGED, *WIDE,
    *LATENT, *BLOCKS, *BLOCK_TILES, *INT8, *INT8_TILES,
]  # fmt: skip
DROPOUT = dropout_cases(CASES)
CASES += DROPOUT
# Chosen for the tiles of kernels for GPUs: kernels of CPUs have one tile for all of them.
FOR_GPUS: list[Case] = [*TILES, *MANY_QUERIES, *BLOCK_TILES, *INT8_TILES]
assert len({case.name for case in CASES}) == len(CASES), "the names of cases are their ids and must differ"
