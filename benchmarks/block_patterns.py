"""How much of the attention do block patterns keep, and what do they lose?

    python benchmarks/block_patterns.py

The patterns of fastattention/sparse.py, with blocks of 64 and of 128 tokens. Nothing is timed here.

Text: the demo model reads a source file that it has not seen. Density and recall are measured on queries and keys of
the dense model, over all layers and heads. Bits per byte are measured on a model with the mask in every layer.

Identifiers: a name of 12 random letters is defined in that text, and used at the end. The model has seen the first
three letters of the use. Measured are the bits of each of the other nine, and how many of them it would guess.

Needles: synthetic tensors, for which the right answer is known. Queries and keys are normal, plus a vector that both
share and
that changes slowly: scores of near tokens are about LOCAL higher, as in language models. A needle is a run of equal
keys that point in a direction of their own, and have one random value. The queries that look for it have that direction
too, so strongly that the needle gets nearly all of their softmax: the right answer is the needle's value. Each needle
has 128 queries of its own at the end of the sequence, and all of them look for it, or only one. So dense attention
finds every needle; a pattern finds those whose blocks it keeps. "Kept" is a share of a needle's
keys, since a needle may lie in two blocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from demo_model import TEXT, DemoModel, read_text
from harness import RESULTS, publish
from pages import block_sparse
from torch import Tensor
from torch.nn import functional

from fastattention import fast_attn_func
from fastattention.sparse import density, streaming, strided, top_p_blocks
from fastattention.threads import get_num_threads

BLOCKS = (64, 128)
LETTERS, GIVEN = 12, 3  # letters of an identifier, and those that its second use gives
DISTANCES = (768, 1536)  # bytes from the definition to the use; 0 to 127 are added
READ, MORE = 3072, 1024  # tokens of a text with an identifier: READ and fewer than MORE, so that blocks begin anywhere
HEADS, HEADDIM = 4, 128
LOCAL, DECAY = 8.0, 128  # added to the score of a near token; falls to 1/e within DECAY tokens
# A needle adds this to the logarithm of the softmax's sum. Noise and near tokens have 14 to 15 of 16384 tokens.
MATCH = 19.0
BANDS = {"start": 0.0, "middle": 0.45, "end": 0.9}  # each a tenth of the context before the queries that look
PER_BAND, LOOKING = 2, 128  # needles in a band, queries for each needle


class Pattern(NamedTuple):
    """One setting of a pattern."""

    name: str
    choose: Callable[[Tensor, Tensor, int], Tensor]  # (q, k, block size) -> block mask


class Needles(NamedTuple):
    """A kind of needle."""

    name: str
    width: int  # equal keys next to each other
    looking: int  # how many of LOOKING queries look for it


KINDS = (
    Needles("1 key", 1, LOOKING),
    Needles("16 keys", 16, LOOKING),
    Needles("64 keys", 64, LOOKING),
    Needles("64 keys, 1 query", 64, 1),
)


def main(
    tokens: int = 8192, longest: int = 16384, identifiers: int = 16, seeds: int = 4, output: Path = RESULTS
) -> None:
    """Read `tokens` of text; look for needles in 4096 to `longest` tokens; write block_patterns.json into `output`."""
    torch.set_num_threads(get_num_threads())
    model = DemoModel()
    text = text_figures(model, tokens)
    identifier = identifier_figures(model, identifiers)
    lengths = [seqlen for seqlen in (4096, 16384) if seqlen <= longest] or [longest]
    needles = [needle_figures(seqlen, kind, seeds) for seqlen in lengths for kind in KINDS]
    figures = {"text": text, "identifiers": identifier, "needles": needles}
    publish(output / "block_patterns.json", figures, *block_sparse.losses(figures))


def patterns() -> Iterator[Pattern]:
    """All settings, in the order of the tables."""
    for sinks, local in ((0, 1024), (128, 512), (128, 1024), (128, 2048)):
        yield _streaming(sinks, local)
    for stride, by_head in ((4, False), (4, True), (8, False)):
        yield _strided(stride, 512, by_head)
    for p in (0.8, 0.9, 0.95, 0.99):
        yield _top_p(p)


def _streaming(sinks: int, local: int) -> Pattern:
    def choose(q: Tensor, k: Tensor, block: int) -> Tensor:
        return streaming(
            q.shape[2], q.shape[1], k.shape[1], sink_tokens=sinks, local_tokens=local, block_size=block
        )  # fmt: skip

    return Pattern(f"streaming, {sinks} sinks + {local} local", choose)


def _strided(stride: int, local: int, by_head: bool) -> Pattern:
    def choose(q: Tensor, k: Tensor, block: int) -> Tensor:
        nheads = q.shape[2]
        offset = [head % stride for head in range(nheads)] if by_head else 0
        return strided(
            nheads, q.shape[1], k.shape[1], stride=stride, local_tokens=local, offset=offset, block_size=block
        )  # fmt: skip

    offsets = ", an offset a head" if by_head else ""
    return Pattern(f"strided, every {stride}th + {local} local{offsets}", choose)


def _top_p(p: float) -> Pattern:
    def choose(q: Tensor, k: Tensor, block: int) -> Tensor:
        return top_p_blocks(q, k, p, causal=True, block_size=block)

    return Pattern(f"top_p_blocks, {p}", choose)


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None, block: int) -> Tensor:
    """Causal attention, dense or with a pattern."""
    mask, size = (None, None) if pattern is None else (pattern.choose(q, k, block), block)
    out: Tensor = fast_attn_func(q, k, v, causal=True, block_mask=mask, block_size=size)
    return out


def read(
    model: DemoModel, tokens: Tensor, pattern: Pattern | None = None, block: int = BLOCKS[0]
) -> tuple[Tensor, Tensor]:
    """Bits of each token but the first, and whether it was the likeliest. Both (batch_size, seqlen - 1)."""
    logits, targets = model.read(tokens, partial(attend, pattern=pattern, block=block)), tokens[:, 1:]
    bits = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none") / math.log(2)
    return bits, logits.argmax(dim=-1) == targets


def text_figures(model: DemoModel, tokens: int) -> dict[str, Any]:
    """Density, recall and bits per byte of every pattern, on one text."""
    text = read_text(tokens)
    half = text.shape[1] // 2
    dense, _ = read(model, text)
    layers = [(q, k) for q, k, _ in model.layers]
    shares = torch.stack([block_shares(q, k) for q, k in layers])
    records = []
    for block in BLOCKS:
        for pattern in patterns():
            masks = torch.cat([pattern.choose(q, k, block) for q, k in layers])  # (layers, nheads, rows, columns)
            kept = masks.repeat_interleave(block // BLOCKS[0], 2).repeat_interleave(block // BLOCKS[0], 3)
            recalls = (shares * kept[:, :, : shares.shape[2], : shares.shape[3]]).sum(dim=(2, 3)) / text.shape[1]
            bits, _ = read(model, text, pattern, block)
            records.append({
                "pattern": pattern.name, "block": block, "density": causal_density(masks, text.shape[1], block),
                "recall": float(recalls.mean()), "recall_lowest_head": float(recalls.min()),
                "bits": float(bits.mean()), "bits_second_half": float(bits[:, half:].mean()),
            })  # fmt: skip
    return {
        "tokens": text.shape[1], "bits": float(dense.mean()), "bits_second_half": float(dense[:, half:].mean()),
        "records": records,
    }  # fmt: skip


def causal_density(mask: Tensor, seqlen: int, block: int) -> float:
    """The density of a mask of seqlen queries and keys, among the blocks that a causal mask shows."""
    return density(mask, seqlen_q=seqlen, seqlen_k=seqlen, causal=True, block_size=block)


def block_shares(q: Tensor, k: Tensor) -> Tensor:
    """The share of each block of BLOCKS[0] in the softmax, summed over its queries: (nheads, rows, columns).

    `fastattention.sparse.recall` is the sum over kept blocks divided by the number of queries. Many masks share these
    sums here.
    """
    block, seqlen = BLOCKS[0], q.shape[1]
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)[0].movedim(1, 0)
    of_key = functional.one_hot(torch.arange(seqlen) // block).float()  # (seqlen, columns)
    rows = []
    for begin in range(0, seqlen, block):
        queries = q[0, begin : begin + block].movedim(1, 0) * q.shape[3] ** -0.5
        scores = queries @ keys.mT
        future = torch.arange(seqlen) > torch.arange(begin, begin + queries.shape[1])[:, None]
        rows.append((scores.masked_fill_(future, -math.inf).softmax(dim=-1) @ of_key).sum(dim=1))
    return torch.stack(rows, dim=1)


def identifier_figures(model: DemoModel, count: int) -> dict[str, Any]:
    """Bits of a letter that is known from a definition, and the share guessed, by distance and pattern."""
    texts = {distance: identifier_texts(distance, count, defined=True) for distance in DISTANCES}

    def figures(texts: dict[int, list[Tensor]], pattern: Pattern | None, block: int) -> dict[str, Any]:
        bits, guessed = {}, {}
        for distance, tokens in texts.items():
            letters = [[of[0, GIVEN - LETTERS :] for of in read(model, text, pattern, block)] for text in tokens]
            bits[str(distance)] = float(torch.cat([of for of, _ in letters]).mean())
            guessed[str(distance)] = float(torch.cat([of for _, of in letters]).float().mean())
        return {"bits": bits, "guessed": guessed}

    undefined = {distance: identifier_texts(distance, count, defined=False) for distance in DISTANCES}
    return {
        "tokens": [READ, READ + MORE - 1], "texts": count, "dense": figures(texts, None, BLOCKS[0]),
        "undefined": figures(undefined, None, BLOCKS[0]),
        "records": [
            {"pattern": pattern.name, "block": block, **figures(texts, pattern, block)}
            for block in BLOCKS
            for pattern in patterns()
        ],
    }  # fmt: skip


def identifier_texts(distance: int, count: int, defined: bool) -> list[Tensor]:
    """(1, READ and more) tokens that end in the use of an identifier; unless defined, the text defines another one."""
    numbers, text, texts = random.Random(0), TEXT.read_bytes(), []
    for _ in range(count):
        name, other = ("".join(numbers.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS)) for _ in range(2))
        definition = f"\n{name if defined else other} = {numbers.randrange(100, 1000)}\n".encode()
        use = f"\n    print({name}".encode()
        after = distance + numbers.randrange(128) - len(use)
        before = READ + numbers.randrange(MORE) - 1 - len(definition) - after - len(use)
        begin = numbers.randrange(len(text) - before - after)
        around = text[begin : begin + before], text[begin + before : begin + before + after]
        texts.append(torch.tensor([[0, *around[0], *definition, *around[1], *use]]))
    return texts


class MadeNumbers(NamedTuple):
    """q, k, v (1, seqlen, HEADS, HEADDIM); for each needle, in order of depth, its band and its first key by head."""

    q: Tensor
    k: Tensor
    v: Tensor
    bands: list[str]
    first_keys: Tensor  # (needles, HEADS)


def made_numbers(seqlen: int, kind: Needles, seed: int) -> MadeNumbers:
    """Needle i is looked for by the first `kind.looking` of queries seqlen + LOOKING * (i - needles) and on."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, seqlen, HEADS, HEADDIM, generator=generator) for _ in range(3))
    shared = slow_vector(seqlen, generator) * (LOCAL / math.sqrt(HEADDIM)) ** 0.5
    q, k = q + shared, k + shared
    bands = [band for band in BANDS for _ in range(PER_BAND)]
    context = seqlen - len(bands) * LOOKING
    room = context // 10 // PER_BAND  # each needle is in a part of its own
    strength = MATCH - math.log(kind.width)
    first_keys = torch.zeros(len(bands), HEADS, dtype=torch.int64)
    for needle, band in enumerate(bands):
        begin = int(BANDS[band] * context) + needle % PER_BAND * room
        query = context + needle * LOOKING
        for head in range(HEADS):
            first = begin + int(torch.randint(room - kind.width, (), generator=generator))
            direction = functional.normalize(torch.randn(HEADDIM, generator=generator), dim=0)
            q[0, query : query + kind.looking, head] += strength * direction
            k[0, first : first + kind.width, head] = math.sqrt(HEADDIM) * direction
            v[0, first : first + kind.width, head] = torch.randn(HEADDIM, generator=generator)
            first_keys[needle, head] = first
    return MadeNumbers(q, k, v, bands, first_keys)


def slow_vector(seqlen: int, generator: torch.Generator) -> Tensor:
    """(seqlen, HEADS, HEADDIM): standard normal, tokens at a distance d correlated by exp(-d / DECAY)."""
    steps = torch.randn(seqlen, HEADS, HEADDIM, generator=generator)
    keep = math.exp(-1 / DECAY)
    for token in range(1, seqlen):
        steps[token] = keep * steps[token - 1] + math.sqrt(1 - keep**2) * steps[token]
    return steps


def needle_figures(seqlen: int, kind: Needles, seeds: int) -> dict[str, Any]:
    """How much of the needles each pattern keeps, and how far the answers are from those of dense attention."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    answer_errors = []
    for seed in range(seeds):
        made = made_numbers(seqlen, kind, seed)
        last = len(made.bands) * LOOKING
        dense = answers(fast_attn_func(made.q[:, -last:], made.k, made.v, causal=True), kind)
        right = torch.stack([made.v[0, made.first_keys[:, head], head] for head in range(HEADS)], dim=1)
        answer_errors.append(relative_error(dense, right[:, None]).mean())
        for block in BLOCKS:
            for pattern in patterns():
                found.setdefault((pattern.name, block), []).append(found_by(pattern, block, made, kind, dense))
    names = ("kept", "error")
    records = [
        {
            "pattern": pattern, "block": block, "density": sum(one["density"] for one in all_seeds) / seeds,
            **{name: {band: sum(one[name][band] for one in all_seeds) / seeds for band in BANDS} for name in names},
        }
        for (pattern, block), all_seeds in found.items()
    ]  # fmt: skip
    return {
        "tokens": seqlen, "needle": kind.name, "needles_in_a_band": PER_BAND * HEADS * seeds,
        "dense_error": float(torch.stack(answer_errors).mean()), "records": records,
    }  # fmt: skip


def found_by(pattern: Pattern, block: int, made: MadeNumbers, kind: Needles, dense: Tensor) -> dict[str, Any]:
    """By band: the share of needles' keys that is kept where they are looked for, and the error of the answers."""
    seqlen, last = made.q.shape[1], len(made.bands) * LOOKING
    mask = pattern.choose(made.q, made.k, block)
    rows = mask[:, :, -(last // block) :]
    out = fast_attn_func(made.q[:, -last:], made.k, made.v, causal=True, block_mask=rows, block_size=block)
    errors = relative_error(answers(out, kind), dense).mean(dim=1)  # (needles, HEADS)
    keys = made.first_keys[..., None] + torch.arange(kind.width)  # (needles, HEADS, width)
    # (needles, rows of a needle, HEADS, width)
    queries = torch.arange(len(made.bands) * LOOKING).view(-1, LOOKING)[:, : kind.looking : min(block, kind.looking)]
    heads = torch.arange(HEADS)[None, None, :, None]
    kept = rows[0][heads, queries[:, :, None, None] // block, keys[:, None] // block].float().mean(dim=(1, 3))
    of_band = {band: [needle for needle, name in enumerate(made.bands) if name == band] for band in BANDS}
    return {
        "density": causal_density(mask, seqlen, block),
        "kept": {band: float(kept[needles].mean()) for band, needles in of_band.items()},
        "error": {band: float(errors[needles].mean()) for band, needles in of_band.items()},
    }


def answers(out: Tensor, kind: Needles) -> Tensor:
    """(needles, looking queries, HEADS, HEADDIM) of the last queries' out."""
    return out[0].view(-1, LOOKING, HEADS, HEADDIM)[:, : kind.looking]


def relative_error(out: Tensor, exact: Tensor) -> Tensor:
    """The norm of the difference over that of `exact`, of vectors along the last dimension."""
    errors: Tensor = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
    return errors


if __name__ == "__main__":
    typer.run(main)
