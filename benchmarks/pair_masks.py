"""What do masks of single pairs cost?

    python benchmarks/pair_masks.py                    # this CPU
    python benchmarks/pair_masks.py --device cuda

Three masks of one sequence, the same for all heads: causal documents of random lengths; text with three images, whose
tokens see each other while text is causal; and half of the pairs at random, which is the worst case, since every tile
is mixed. They take turns with the causal call, with torch's SDPA given the same mask as a bool tensor, and with
torch's compiled FlexAttention. Forward and backward together are timed as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from harness import RESULTS, heads_first, publish, with_gradients, without_grad
from pages import block_sparse
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fastattention import fast_attn_func, sparse
from fastattention.cli.bench.timing import interleaved_on_device, median_seconds, time_call
from fastattention.cli.bench.workload import DTYPES
from fastattention.threads import get_num_threads

HEADDIM, GPU_ROUNDS = 128, 25
SEED = 0

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def main(
    device: str = "cpu",
    seqlen: int = 8192,
    nheads: int = 2,
    dtypes: str = "float32,bfloat16",
    seconds: float = 60.0,
    output: Path = RESULTS,
) -> None:
    """Write pair_masks_cpu.json or pair_masks_gpu.json into `output`. seconds: about, for each mask on a CPU."""
    torch.set_num_threads(get_num_threads())
    records = [
        measure(device, seqlen, nheads, dtype, name, mod, seconds)
        for dtype in dtypes.split(",")
        for name, mod in masks(seqlen, device).items()
    ]
    figures = {
        "question": "pair_masks", "seqlen": seqlen, "nheads": nheads, "headdim": HEADDIM, "records": records,
    }  # fmt: skip
    name = "pair_masks_cpu" if device == "cpu" else "pair_masks_gpu"
    publish(output / f"{name}.json", figures, block_sparse.pair_times(records))


def masks(seqlen: int, device: str) -> dict[str, MaskMod]:
    """What each mask shows, as a mask_mod."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    lengths = torch.randint(200, 2000, (seqlen // 200,), generator=generator)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:seqlen].to(device)
    image = torch.zeros(seqlen, dtype=torch.int64)
    for number, begin in enumerate((seqlen // 16, seqlen * 5 // 16, seqlen * 11 // 16), 1):
        image[begin : begin + seqlen // 8] = number
    image = image.to(device)
    drawn = (torch.rand(seqlen, seqlen, generator=generator) < 0.5).to(device)

    def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    def images(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) | ((image[i] == image[j]) & (image[i] > 0))

    def half(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return drawn[i, j]

    return {"documents": documents, "images": images, "half at random": half}


def measure(
    device: str, seqlen: int, nheads: int, dtype: str, name: str, mod: MaskMod, seconds: float
) -> dict[str, Any]:
    """Seconds of every call with one mask in one dtype."""
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (1, seqlen, nheads, HEADDIM)
    q, k, v, grad = (
        torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(DTYPES[dtype]) for _ in range(4)
    )
    rows = torch.arange(seqlen, device=device)
    pairs = mod(rows, rows, rows[:, None], rows[None])[None, None]
    mask = sparse.from_pairs(pairs)
    flex_mask = create_block_mask(mod, None, None, seqlen, seqlen, device=device)
    backend = "cpu" if device == "cpu" else "cuda"
    torch._dynamo.reset()  # it compiles a function a limited number of times, and then runs it as it is
    flex = torch.compile(flex_attention)
    forwards: dict[str, Callable[..., Tensor]] = {
        "causal": lambda q, k, v: fast_attn_func(q, k, v, causal=True, backend=backend),
        "ours": lambda q, k, v: fast_attn_func(q, k, v, block_mask=mask, backend=backend),
        "sdpa": lambda q, k, v: _sdpa(q, k, v, pairs),
        "flex": lambda q, k, v: heads_first(functools.partial(flex, block_mask=flex_mask), q, k, v),
    }
    calls: dict[str, Callable[[], object]] = {}
    for key, forward in forwards.items():
        calls[key] = without_grad(forward, q, k, v)
        # FlexAttention has no backward on CPUs.
        if device != "cpu" or key != "flex":
            calls[f"{key} with gradients"] = with_gradients(forward, q, k, v, grad=grad)
    if not _compiles(calls["flex"]):
        del calls["flex"]
    for call in calls.values():
        call()
    return {
        "dtype": dtype,
        "mask": name,
        "visible": float(pairs.float().mean()),
        "tiles": len(mask.tile_bits),
        "making": min(time_call(lambda: _made(pairs)) for _ in range(3)),
        "seconds": median_seconds(calls, seconds) if device == "cpu" else interleaved_on_device(calls, GPU_ROUNDS),
    }


def _compiles(call: Callable[[], object]) -> bool:
    """Whether FlexAttention compiles: on CPUs, torch 2.13 makes C++ of some masks that no compiler takes."""
    try:
        call()
    except torch._inductor.exc.InductorError:
        return False
    return True


def _made(pairs: Tensor) -> None:
    """Makes a mask, and waits for it."""
    sparse.from_pairs(pairs).tile_bits[:1].tolist()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
    return heads_first(functools.partial(F.scaled_dot_product_attention, attn_mask=pairs), q, k, v)


if __name__ == "__main__":
    typer.run(main)
