"""What do softcap, ALiBi, a bias, a window and dropout cost?

    python benchmarks/score_rules.py --device cuda
    python benchmarks/score_rules.py --seqlen 1024     # this CPU

One causal sequence, forward alone and with gradients, each rule beside the plain call and beside torch's compiled
FlexAttention, which has no dropout. All calls take turns. On a GPU the decode of 16 sequences is timed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, heads_first, publish, with_gradients, without_grad
from pages import score_rules
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fastattention import fast_attn_func, fast_attn_with_kvcache
from fastattention.cli.bench.timing import interleaved_on_device, median_seconds
from fastattention.threads import get_num_threads

SOFTCAP, WINDOW, DROPOUT = 50.0, 1024, 0.1
SEED, GPU_ROUNDS, CPU_SECONDS = 0, 25, 120.0
DECODED = {"batch_size": 16, "tokens": 8000, "nheads": 32, "nheads_k": 8, "headdim": 128}

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def main(
    device: str = "cpu", seqlen: int = 8192, hidden: int = 2048, headdims: str = "64,128,256", output: Path = RESULTS
) -> None:
    """Write score_rules_cpu.json or score_rules_gpu.json into `output`."""
    torch.set_num_threads(get_num_threads())
    # FlexAttention is compiled once for each rule, width and need of gradients. Beyond the limit it would run as it is.
    torch._dynamo.config.recompile_limit = 256
    records = [measure(device, seqlen, hidden, int(headdim)) for headdim in headdims.split(",")]
    figures: dict[str, Any] = {"question": "score_rules", "seqlen": seqlen, "hidden": hidden, "records": records}
    if device != "cpu":
        figures["decode"] = {**DECODED, "seconds": decode(device)}
    name = "score_rules_cpu" if device == "cpu" else "score_rules_gpu"
    publish(output / f"{name}.json", figures, score_rules.times(records))


def rules_of(device: str, seqlen: int, nheads: int) -> dict[str, tuple[dict[str, Any], ScoreMod | None]]:
    """Arguments of our call by rule, and the score_mod of FlexAttention that does the same."""
    slopes = 2.0 ** -torch.linspace(1, 8, nheads, device=device)
    generator = torch.Generator(device).manual_seed(SEED)
    bias = torch.randn(1, nheads, seqlen, seqlen, device=device, dtype=torch.bfloat16, generator=generator)

    def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[0, h, i, j]

    windowed = {"window_size": (WINDOW, 0)}
    return {
        "plain": ({}, None),
        "softcap": ({"softcap": SOFTCAP}, softcap),
        "ALiBi": ({"alibi_slopes": slopes}, alibi),
        "bias": ({"attn_bias": bias}, biased),
        "window": (windowed, None),
        "window and softcap": ({**windowed, "softcap": SOFTCAP}, softcap),
        "window and ALiBi": ({**windowed, "alibi_slopes": slopes}, alibi),
        "window and bias": ({**windowed, "attn_bias": bias}, biased),
        "dropout": ({"dropout_p": DROPOUT}, None),
    }


def measure(device: str, seqlen: int, hidden: int, headdim: int) -> dict[str, Any]:
    """Seconds of every rule for heads of one width."""
    nheads = hidden // headdim
    generator = torch.Generator(device).manual_seed(SEED)
    q, k, v, grad = (
        torch.randn(1, seqlen, nheads, headdim, device=device, generator=generator).bfloat16() for _ in range(4)
    )
    masks = {
        windowed: create_block_mask(functools.partial(_visible, windowed), None, None, seqlen, seqlen, device=device)
        for windowed in (False, True)
    }
    backend = "cpu" if device == "cpu" else "cuda"
    calls: dict[str, Callable[[], object]] = {}
    for rule, (arguments, score_mod) in rules_of(device, seqlen, nheads).items():
        attend: Callable[..., Any] = fast_attn_func
        forwards: dict[str, Callable[..., Any]] = {
            "ours": functools.partial(attend, causal=True, backend=backend, **arguments)
        }
        if rule != "dropout":
            flex = functools.partial(
                torch.compile(flex_attention, dynamic=False), score_mod=score_mod, block_mask=masks["window" in rule]
            )
            forwards["flex"] = functools.partial(heads_first, flex)
        for who, forward in forwards.items():
            calls[f"{who} {rule}"] = without_grad(forward, q, k, v)
            # FlexAttention has no backward on CPUs.
            if device != "cpu" or who != "flex":
                calls[f"{who} {rule} with gradients"] = with_gradients(forward, q, k, v, grad=grad)
    for call in calls.values():
        call()
    timed = median_seconds(calls, CPU_SECONDS) if device == "cpu" else interleaved_on_device(calls, GPU_ROUNDS)
    return {"headdim": headdim, "nheads": nheads, "seconds": timed}


def _visible(windowed: bool, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j <= WINDOW) if windowed else i >= j


def decode(device: str) -> dict[str, float]:
    """Seconds of a decode, plain and with a softcap."""
    generator = torch.Generator(device).manual_seed(SEED)
    batch_size, tokens, headdim = DECODED["batch_size"], DECODED["tokens"], DECODED["headdim"]

    def tensor(tokens: int, nheads: int) -> Tensor:
        return torch.randn(batch_size, tokens, nheads, headdim, device=device, generator=generator).bfloat16()

    q, k, v = tensor(1, DECODED["nheads"]), *(tensor(tokens, DECODED["nheads_k"]) for _ in range(2))
    lengths = torch.full((batch_size,), tokens, dtype=torch.int32, device=device)
    call_cache: Callable[..., Any] = fast_attn_with_kvcache
    attend = functools.partial(call_cache, cache_seqlens=lengths, backend="cuda")
    calls = {
        "plain": without_grad(attend, q, k, v),
        "softcap": without_grad(functools.partial(attend, softcap=SOFTCAP), q, k, v),
    }
    for call in calls.values():
        call()
    return interleaved_on_device(calls, GPU_ROUNDS)


if __name__ == "__main__":
    typer.run(main)
