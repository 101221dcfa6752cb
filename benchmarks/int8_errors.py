"""How far off is attention whose queries and keys are multiplied in int8?

    python benchmarks/int8_errors.py

Errors of out against exact attention in float64, causal, head by head: the cosine similarity of all its elements, and
the sum of absolute differences over that of absolute values (relative L1). Inputs are float32, so that only int8
products round. Attention that rounds q, k, v to 16 bits and computes in that dtype is shown for comparison. "Not
smoothed" is the same formula without subtracting the mean of the keys. Inputs are

- normal values, also with outlier channels as in language models: an offset of OFFSET standard deviations that all keys
  share, the same in queries, or channels that are WIDE times as wide in keys (and as much narrower in queries);
- tensors of every layer of the demo model, which reads a source file that it has not seen.

The demo model: its loss on that text and its most likely next bytes, with int8 products in every layer.

No timings: int8 products come from `fast_attn_func` where a backend serves them, else from the reference formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from demo_model import TEXT, DemoModel, read_text
from harness import RESULTS, publish
from pages import int8_products
from torch import Tensor
from torch.nn import functional

from fastattention import explain, fast_attn_func
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.cli.bench.workload import DTYPES
from fastattention.quantized import KEYS_OF_SCALE, dequantize, quantize, quantize_keys
from fastattention.threads import get_num_threads

EXACT, INT8, NOT_SMOOTHED = "exact", "int8", "int8, not smoothed"
METHODS = (INT8, NOT_SMOOTHED, "bfloat16", "float16")
HEADS, HEADDIMS = 4, (128, 64)
OUTLIERS, OFFSET, WIDE = 4, 10.0, 10.0  # outlier channels of a head; the offset added to them; their factor
FORMULA = "formula in plain torch"


class Numbers(NamedTuple):
    """q, k, v of one call or more, each (1, seqlen, heads, headdim) in float32."""

    name: str
    calls: list[tuple[Tensor, Tensor, Tensor]]


def main(seqlen: int = 4096, tokens: int = 8192, output: Path = RESULTS) -> None:
    """Attend to `seqlen` random tokens, and read `tokens` of text; write int8_errors.json into `output`."""
    torch.set_num_threads(get_num_threads())
    model, text = DemoModel(), read_text(tokens)
    logits = model.read(text, partial(attend, method=EXACT))
    sets = [*made_numbers(seqlen), Numbers("demo model", list(model.layers))]
    figures = {
        "int8_by": serving(*sets[0].calls[0]),
        "outliers": {"channels": OUTLIERS, "offset": OFFSET, "wide": WIDE},
        "errors": [record for numbers in sets for record in errors_of(numbers)],
        "model": model_figures(model, text, logits),
    }
    publish(output / "int8_errors.json", figures, *int8_products.losses(figures))


def serving(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend, or the formula, that computes attention of these tensors with int8 products."""
    backend = explain(q, k, v, causal=True, qk_dtype="int8").backend
    return FORMULA if backend is None else f"backend {backend}"


def attend(q: Tensor, k: Tensor, v: Tensor, method: str) -> Tensor:
    """Causal attention by one of METHODS, or EXACT: (1, seqlen, nheads, headdim)."""
    if method == INT8 and serving(q, k, v) != FORMULA:
        served: Tensor = fast_attn_func(q, k, v, causal=True, qk_dtype="int8")
        return served
    group = q.shape[2] // k.shape[2]
    heads = []
    for head in range(q.shape[2]):  # one at a time, because all matrices of scores would need gigabytes
        of_keys = slice(head // group, head // group + 1)
        heads.append(_attend_head(q[:, :, head : head + 1], k[:, :, of_keys], v[:, :, of_keys], method))
    return torch.cat(heads, dim=2)


def _attend_head(q: Tensor, k: Tensor, v: Tensor, method: str) -> Tensor:
    if method in DTYPES:
        q, k, v = (x.to(DTYPES[method]) for x in (q, k, v))
        return reference_attention(*prepare_dense(q, k, v, Options(causal=True)), compute_dtype=None).out
    if method == NOT_SMOOTHED:
        q, k = dequantize(*quantize(q, torch.int8)), without_smoothing(k[0]).unsqueeze(0)
    options = Options(causal=True, qk_dtype="int8" if method == INT8 else None)
    return reference_attention(*prepare_dense(q, k, v, options)).out


def without_smoothing(k: Tensor) -> Tensor:
    """Dequantized int8 keys (seqlen, nheads_k, headdim) without subtracting a mean: with their negatives it is 0."""
    whole = functional.pad(k, (0, 0, 0, 0, 0, -len(k) % KEYS_OF_SCALE))
    stored, scale, _ = quantize_keys(torch.cat((whole, -whole)), torch.int8)
    return dequantize(stored, scale)[: len(k)]


def made_numbers(seqlen: int) -> Iterator[Numbers]:
    """Normal values of HEADS heads, without and with outlier channels."""
    for headdim in HEADDIMS:
        for name in ("normal", "offset in keys", "offset in queries", "wide channels in keys"):
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(1, seqlen, HEADS, headdim, generator=generator) for _ in range(3))
            if name == "offset in keys":
                k[..., :OUTLIERS] += OFFSET
            elif name == "offset in queries":
                q[..., :OUTLIERS] += OFFSET
            elif name == "wide channels in keys":
                k[..., :OUTLIERS] *= WIDE
                q[..., :OUTLIERS] /= WIDE
            yield Numbers(name, [(q, k, v)])


def errors_of(numbers: Numbers) -> Iterator[dict[str, Any]]:
    """For each method the mean over all heads, and the worst head."""
    exact = [attend(*call, EXACT) for call in numbers.calls]
    q = numbers.calls[0][0]
    for method in METHODS:
        outs = [attend(*call, method).double() for call in numbers.calls]
        pairs = list(zip(outs, exact, strict=True))
        cosines = torch.stack([cosine(out, right) for out, right in pairs])  # (calls, heads)
        l1 = torch.stack([relative_l1(out, right) for out, right in pairs])
        yield {
            "numbers": numbers.name, "headdim": q.shape[3], "seqlen": q.shape[1], "heads": cosines.numel(),
            "method": method,
            "cosine": float(cosines.mean()), "cosine_worst_head": float(cosines.min()),
            "relative_l1": float(l1.mean()), "relative_l1_worst_head": float(l1.max()),
        }  # fmt: skip


def cosine(out: Tensor, exact: Tensor) -> Tensor:
    """Cosine similarity of all elements of a head: (heads,)."""
    return functional.cosine_similarity(_by_head(out), _by_head(exact), dim=1)


def relative_l1(out: Tensor, exact: Tensor) -> Tensor:
    """Relative L1 error of all elements of a head: (heads,)."""
    return _by_head(out - exact).abs().sum(dim=1) / _by_head(exact).abs().sum(dim=1)


def _by_head(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1).flatten(1)


def model_figures(model: DemoModel, text: Tensor, exact: Tensor) -> dict[str, Any]:
    """Bits per byte of every method, and how often the likeliest next byte is that of exact attention."""
    targets, likeliest = text[:, 1:], exact.argmax(dim=-1)
    records = []
    for method in METHODS:
        logits = model.read(text, partial(attend, method=method))
        agreement = float((logits.argmax(dim=-1) == likeliest).double().mean())
        records.append({"method": method, "bits": bits_per_byte(logits, targets), "agreement": agreement})
    return {
        "text": TEXT.name, "tokens": targets.shape[1], "layers": len(model.layers),
        "exact_bits": bits_per_byte(exact, targets), "records": records,
    }  # fmt: skip


def bits_per_byte(logits: Tensor, targets: Tensor) -> float:
    """The mean cross-entropy in bits."""
    return float(functional.cross_entropy(logits.double().transpose(1, 2), targets)) / math.log(2)


if __name__ == "__main__":
    typer.run(main)
