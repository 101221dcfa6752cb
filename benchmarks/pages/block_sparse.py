"""The page of block masks: times by density, and the accuracy of each pattern."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .markdown import number, page, ratio, seconds, table, tokens
from .results import Result

CPU, GPU = "block_sparse_cpu", "block_sparse_gpu"
BLOCKS = (128, 64)
DEPTHS = ("start", "middle", "end")
INTRODUCTION = """\
Times by the share of blocks that a mask keeps, its density, come first. Then follows what the patterns of
`fastattention.sparse` lose. Timed calls take turns in one process on a shared virtual machine; **bold** ratios are
losses. How to make a mask and give it to a call is in [a guide](../guides/block-masks.md)."""
TIMES = """\
{seqlen} tokens, {nheads} heads of {headdim}, no causal mask. Masks keep random blocks of {block} x {block} and the
diagonal, others for each head. "Nothing" is a mask that hides every block: reading inputs{packing}, writing results.
"Density x dense" is the time of a call that skips hidden blocks and loses nothing else. FlexAttention is torch's,
compiled, with the same blocks."""
BELOW = "At density {density}, ours takes {over} density x dense."
BELOW_ON_CPU = """\
What is left at densities below 0.1 is the rest of the call, which the row "nothing" shows, and keys that no earlier
tile left in caches."""
BELOW_ON_GPU = """\
What is left is the rest of the call, which the row "nothing" shows, and rows that keep more blocks than others: the
last CTAs run alone. FlexAttention uses Hopper's own matrix instructions, our kernels those of Ampere: its dense call is
faster too, and the ratio is that of dense calls ([decision](../decisions/0064-list-kept-blocks.md))."""
AMX = """\
In bfloat16 FlexAttention's CPU kernel uses AMX as well: our gain there falls short of the gain in float32."""
PAIRS = """\
{seqlen} tokens, {nheads} heads of {headdim}; the mask is the same for all heads. Documents: causal within documents of
200 to 2,000 tokens. Images: three images of {image} tokens each, whose tokens see each other, in causal text. Half at
random: the worst case, every tile is mixed. "With gradients" is forward and backward together. "/ causal" compares with
our causal call. SDPA is torch's, given the bool mask; FlexAttention is torch's, compiled, where that works."""
READING = """\
On the Python side of a call, a mask {adds}. Reading a causal `BlockMask` of {seqlen} tokens takes {first} the first
time, and {later} in later calls."""
TEXT = """\
The demo model (4 layers, 4 heads of 64, byte level) reads {tokens} bytes of a source file that it has not seen. It was
trained without masks. Density is of the blocks that a causal mask shows. Recall is the share of the softmax in kept
blocks: the mean over layers and heads, and the head with the least. Bits per byte are those of the model with the mask
in every layer, in brackets how many more than with dense attention. "Second half" counts only the bytes of that half.
`top_p_blocks` is given p."""
TEXT_FINDINGS = """\
In blocks of {block}, p = 0.9 keeps {chosen[density]:.2f} of the blocks and loses {chosen[lost]:.3f} bits. A window of
1024 with sinks keeps {window[density]:.2f} and loses {window[lost]:.3f}. On average over heads recall reaches p, and
single heads fall below. Recall does not rank patterns: with p = 0.8 it is {low[recall]:.2f} and {low[lost]:.3f} bits
are lost, with a window of 512 and sinks {short[recall]:.2f} and {short[lost]:.3f}."""
IDENTIFIERS = """\
The same model can copy. A name of 12 random letters is defined in a text of {tokens[0]} to {tokens[1]} bytes, and used
at its end, after the given distance or up to 127 bytes more. Three letters of the use are given. A cell has the bits of
each of the other nine, and in brackets the share guessed right, of {letters}. In the row "not defined" the text defines
another name. Blocks are chosen for the whole text, in every layer."""
IDENTIFIER_FINDINGS = """\
A window that holds the definition copies as well as dense attention, even slightly better; one that does not loses the
name. `strided` keeps some names, by where they happen to lie. `top_p_blocks` loses far more here than on a whole text:
with p = 0.9, {distance} bytes and blocks of {block}, {lost:.1f} bits a letter. A mean over a text hides such losses."""
NEEDLES = """\
Made queries and keys, where the answer is known, in {tokens} tokens. A needle is a run of 1, 16 or 64 equal keys with
one value. The last queries look for {count} needles at each depth: within the first tenth, a tenth in the middle, the
last tenth. For each needle 128 queries in a row look, or only the first of them. Dense attention finds every needle:
its outputs differ from the needles' values by {dense} on average. Other keys are random, and near ones score higher."""
KEPT = "The share of a needle's keys that its queries keep, in blocks of {block}: start / middle / end."
ERRORS = """\
The error of the outputs relative to dense attention, in blocks of {block}: start / middle / end. An error of 1 means
that nothing of the answer is left."""
LENGTHS = """\
The share of keys kept by length, in blocks of {block}: the mean of the three depths. In brackets the mask's density."""
NEEDLE_FINDINGS = """\
`streaming` finds what lies in its first tokens or its window, and `strided` about one block in four or eight, however
wide the needle. `top_p_blocks` compares means of blocks. It finds 64 equal keys that whole blocks of queries look for,
with any p here. A single key vanishes in the mean of its block, which is kept about as often as any other. A single
query among others nearly does so too. Blocks of 64 keep more of the needles of 16 keys, at a lower density."""


def build() -> str:
    """block-sparse.md."""
    blocks = [INTRODUCTION, "## Times on a CPU", *_times(Result.load(CPU))]
    blocks += ["## Times on a GPU", *_times(Result.load(GPU))]
    for name, where in (("pair_masks_cpu", "CPU"), ("pair_masks_gpu", "GPU")):
        blocks += [f"## Masks of single pairs on a {where}", *_pairs(Result.load(name))]
    patterns = Result.load("block_patterns")
    return page("Block masks", *blocks, *patterns.sourced(*losses(patterns.data)))


def _times(result: Result) -> list[str]:
    """A section of times: the setup, the table, its source, and findings."""
    data = result.data
    on_gpu = bool(result.machine["gpus"])
    what = TIMES.format_map({**data, "packing": "" if on_gpu else ", packing keys and values"})
    findings = [_below(data["records"]), BELOW_ON_GPU if on_gpu else BELOW_ON_CPU, _flex(data["records"])]
    if not on_gpu and "amx_bf16" in result.machine["cpu_flags"]:
        findings.append(AMX)
    return result.sourced(what, times(data["records"]), " ".join(findings), _reading(data))


def times(records: list[dict[str, Any]]) -> str:
    """By dtype and density."""
    headings = ["dtype, mask", "density", "ours", "ours / (density x dense)", "FlexAttention", "FlexAttention / ours"]
    return table(headings, [row for record in records for row in _rows_of_times(record)])


def _rows_of_times(record: dict[str, Any]) -> Iterable[list[str]]:
    dtype, taken = record["dtype"], record["seconds"]
    yield [f"{dtype}, dense", number(1), seconds(taken["dense"]), "-", "-", "-"]
    for name, density in record["densities"].items():
        ours, flex = taken[f"ours {name}"], taken[f"flex {name}"]
        ideal = f"{ours / (density * taken['dense']):.2f}"
        yield [f"{dtype}, random", number(density), seconds(ours), ideal, seconds(flex), ratio(flex / ours)]
    yield [f"{dtype}, nothing", number(0), seconds(taken["nothing"]), "-", "-", "-"]


def _pairs(result: Result) -> list[str]:
    """A section of masks of single pairs."""
    data = result.data
    making = max(one["making"] for one in data["records"])
    made = f"Making a mask by `from_pairs` took at most {seconds(making)}, once for all layers."
    return result.sourced(PAIRS.format(image=data["seqlen"] // 8, **data), pair_times(data["records"]), made)


def pair_times(records: list[dict[str, Any]]) -> str:
    """By dtype and mask."""
    headings = ["dtype, mask", "visible", "mixed tiles", "ours", "/ causal", "SDPA / ours", "FlexAttention / ours"]
    return table(headings, [row for record in records for row in _rows_of_pairs(record)])


def _rows_of_pairs(record: dict[str, Any]) -> Iterable[list[str]]:
    taken, visible = record["seconds"], number(record["visible"], 2)
    for suffix, words in (("", ""), (" with gradients", ", with gradients")):
        ours, flex = taken[f"ours{suffix}"], taken.get(f"flex{suffix}")
        yield [
            f"{record['dtype']}, {record['mask']}{words}", visible, str(record["tiles"] - 1), seconds(ours),
            f"{ours / taken[f'causal{suffix}']:.2f}", ratio(taken[f"sdpa{suffix}"] / ours),
            "-" if flex is None else ratio(flex / ours),
        ]  # fmt: skip


def _below(records: list[dict[str, Any]]) -> str:
    """The loss at the lowest density."""
    lowest = min(records[0]["densities"], key=float)
    over = " and ".join(
        f"{one['seconds'][f'ours {lowest}'] / (one['densities'][lowest] * one['seconds']['dense']):.2f} times"
        f" ({one['dtype']})"
        for one in records
    )
    return BELOW.format(density=number(records[0]["densities"][lowest], 2), over=over)


def _flex(records: list[dict[str, Any]]) -> str:
    """The range of how many times as long FlexAttention takes, by dtype."""
    ranges = []
    for one in records:
        slower = [one["seconds"][f"flex {name}"] / one["seconds"][f"ours {name}"] for name in one["densities"]]
        ranges.append(f"{min(slower):.2f} to {max(slower):.2f} times as long in {one['dtype']}")
    return f"FlexAttention takes {', and '.join(ranges)}."


def _reading(data: dict[str, Any]) -> str:
    mask = data["mask"]
    added = mask["dense_mask"]
    adds = f"adds {seconds(added)}" if added >= 1e-6 else "adds less than a microsecond"
    if added <= -1e-6:
        adds = f"adds nothing that can be told from noise: calls with one were {seconds(-added)} shorter in the median"
    return READING.format(
        adds=adds, seqlen=data["seqlen"], first=seconds(mask["block_mask_first"]),
        later=seconds(max(mask["block_mask_later"], 0.0)),
    )  # fmt: skip


def losses(data: dict[str, Any]) -> list[str]:
    """What patterns lose of a text, of a name and of needles."""
    return [*_text(data["text"]), *_identifiers(data["identifiers"]), *_needles(data["needles"])]


def _text(text: dict[str, Any]) -> list[str]:
    """The attention of the demo model that patterns keep, one table for each block size."""
    blocks = ["## What patterns lose of a text", TEXT.format_map(text)]
    headings = ["pattern", "density", "recall", "lowest head", "bits per byte", "second half"]
    for block in BLOCKS:
        rows = [["dense", number(1), number(1), number(1), *_bits(text, text)]]
        for one in _of_block(text["records"], block):
            shares = (f"{one[name]:.3f}" for name in ("density", "recall", "recall_lowest_head"))
            rows.append([one["pattern"], *shares, *_bits(one, text)])
        blocks += [f"Blocks of {block} tokens:", table(headings, rows)]
    return [*blocks, _text_findings(text, BLOCKS[0])]


def _text_findings(text: dict[str, Any], block: int) -> str:
    """Findings for a block size."""
    of = {one["pattern"]: {**one, "lost": one["bits"] - text["bits"]} for one in _of_block(text["records"], block)}
    return TEXT_FINDINGS.format(
        block=block, chosen=of["top_p_blocks, 0.9"], window=of["streaming, 128 sinks + 1024 local"],
        low=of["top_p_blocks, 0.8"], short=of["streaming, 128 sinks + 512 local"],
    )  # fmt: skip


def _bits(one: dict[str, Any], dense: dict[str, Any]) -> list[str]:
    """Bits per byte, and in brackets the increase over dense attention."""
    names = ("bits", "bits_second_half")
    return [f"{one[name]:.3f}" + (f" ({one[name] - dense[name]:+.3f})" if one is not dense else "") for name in names]


def _identifiers(data: dict[str, Any]) -> list[str]:
    """How well the demo model copies, one row for each pattern."""
    what = IDENTIFIERS.format(**data, letters=9 * data["texts"])
    distances = list(data["dense"]["bits"])
    by_name = {
        name: [one for block in BLOCKS for one in _of_block(data["records"], block) if one["pattern"] == name]
        for name in dict.fromkeys(one["pattern"] for one in data["records"])
    }
    rows = {"dense": [data["dense"]] * 2, "not defined": [data["undefined"]] * 2, **by_name}
    headings = [
        "pattern",
        *(f"blocks of {block}, {distance} bytes before" for block in BLOCKS for distance in distances),
    ]
    cells = [
        [name, *(f"{one['bits'][at]:.2f} ({one['guessed'][at]:.0%})" for one in of_blocks for at in distances)]
        for name, of_blocks in rows.items()
    ]
    far = distances[-1]
    lost = by_name["top_p_blocks, 0.9"][0]["bits"][far] - data["dense"]["bits"][far]
    return [
        "## What patterns lose of a name", what, table(headings, cells),
        IDENTIFIER_FINDINGS.format(distance=far, block=BLOCKS[0], lost=lost),
    ]  # fmt: skip


def _needles(every: list[dict[str, Any]]) -> list[str]:
    """The needles that are found, and the errors of the output."""
    longest = max(one["tokens"] for one in every)
    kinds = [one for one in every if one["tokens"] == longest]
    what = NEEDLES.format(
        tokens=longest, count=kinds[0]["needles_in_a_band"],
        dense=f"{min(one['dense_error'] for one in kinds):.1%} to {max(one['dense_error'] for one in kinds):.1%}",
    )  # fmt: skip
    blocks = ["## Which needles are found", what]
    for text, name, sizes in ((KEPT, "kept", BLOCKS), (ERRORS, "error", BLOCKS[:1])):
        for block in sizes:
            blocks += [text.format(block=block), _by_depth(kinds, block, name)]
    return [*blocks, LENGTHS.format(block=BLOCKS[0]), _by_length(every, BLOCKS[0]), NEEDLE_FINDINGS]


def _by_depth(kinds: list[dict[str, Any]], block: int, name: str) -> str:
    rows: dict[str, list[str]] = {}
    for kind in kinds:
        for one in _of_block(kind["records"], block):
            cell = " / ".join(f"{one[name][depth]:.2f}" for depth in DEPTHS)
            rows.setdefault(one["pattern"], [one["pattern"]]).append(cell)
    return table(["pattern", *(kind["needle"] for kind in kinds)], rows.values())


def _by_length(every: list[dict[str, Any]], block: int) -> str:
    rows: dict[str, list[str]] = {}
    chosen = [one for one in every if one["needle"] in ("1 key", "64 keys")]
    for one in chosen:
        for record in _of_block(one["records"], block):
            kept = sum(record["kept"].values()) / len(DEPTHS)
            cell = f"{kept:.2f} ({record['density']:.3f})"
            rows.setdefault(record["pattern"], [record["pattern"]]).append(cell)
    return table(["pattern", *(f"{one['needle']}, {tokens(one['tokens'])}" for one in chosen)], rows.values())


def _of_block(records: list[dict[str, Any]], block: int) -> list[dict[str, Any]]:
    return [one for one in records if one["block"] == block]
