"""Does time fall with the share of blocks that a mask keeps?

    python benchmarks/block_sparse.py                  # this CPU
    python benchmarks/block_sparse.py --device cuda

Random masks of 128 x 128 blocks, another one for each head, the diagonal always kept. They take turns with the dense
call, with a mask that keeps nothing, and with torch's compiled FlexAttention on the same blocks. The time with the mask
that keeps nothing is the rest of a call: inputs are read and, on a CPU, keys and values are packed; results are
written. On a GPU a turn is several calls in a row, so that they are enqueued while others run. It also measures the
host time that a mask adds to a call, and that of reading a BlockMask.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import block_sparse
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fastattention import explain, fast_attn_func
from fastattention.cli.bench.timing import in_turns, interleaved_on_device, median_seconds, time_call
from fastattention.cli.bench.workload import DTYPES
from fastattention.threads import get_num_threads

DENSITIES = (0.5, 0.2, 0.1, 0.05)
BLOCK, HEADDIM = 128, 128
GPU_ROUNDS = 25


def main(
    device: str = "cpu",
    seqlen: int = 16384,
    nheads: int = 2,
    dtypes: str = "float32,bfloat16",
    seconds: float = 60.0,
    output: Path = RESULTS,
) -> None:
    """Write block_sparse_cpu.json or block_sparse_gpu.json into `output`. seconds: about, for each dtype on a CPU."""
    torch.set_num_threads(get_num_threads())
    records = [measure(device, seqlen, nheads, dtype, seconds) for dtype in dtypes.split(",")]
    figures = {
        "question": "block_sparse", "seqlen": seqlen, "nheads": nheads, "headdim": HEADDIM, "block": BLOCK,
        "records": records, "mask": mask_seconds(device, seqlen, nheads),
    }  # fmt: skip
    name = "block_sparse_cpu" if device == "cpu" else "block_sparse_gpu"
    publish(output / f"{name}.json", figures, block_sparse.times(records))


def measure(device: str, seqlen: int, nheads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """Seconds of every call in one dtype."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, nheads, HEADDIM, device=device, generator=generator, dtype=torch.float32).to(
            DTYPES[dtype]
        )
        for _ in range(3)
    )
    masks = {density: random_mask(seqlen, nheads, density, generator) for density in DENSITIES}
    nothing = torch.zeros_like(masks[DENSITIES[0]])
    attend = functools.partial(fast_attn_func, q, k, v, backend="cpu" if device == "cpu" else "cuda")
    calls: dict[str, Callable[[], object]] = {"dense": attend, "nothing": functools.partial(attend, block_mask=nothing)}
    for density, mask in masks.items():
        calls[f"ours {density}"] = functools.partial(attend, block_mask=mask)
        calls[f"flex {density}"] = flex_call(q, k, v, mask)
    return {
        "dtype": dtype,
        "densities": {str(density): float(mask.float().mean()) for density, mask in masks.items()},
        "seconds": median_seconds(calls, seconds) if device == "cpu" else interleaved_on_device(calls, GPU_ROUNDS),
    }


def random_mask(seqlen: int, nheads: int, density: float, generator: torch.Generator) -> Tensor:
    """Bool (1, nheads, rows, columns): about `density` of all blocks, and the diagonal."""
    blocks = seqlen // BLOCK
    shape = (1, nheads, blocks, blocks)
    kept = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32) < density
    return kept | torch.eye(blocks, dtype=torch.bool, device=kept.device)


def flex_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Callable[[], object]:
    """Torch's compiled FlexAttention on the same blocks, all of them full: it has no mask to evaluate."""
    attend = torch.compile(flex_attention)
    block_mask = blocks_of_torch(mask, q.shape[1])
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def call() -> object:
        with torch.no_grad():
            return attend(q, k, v, block_mask=block_mask)

    call()
    return call


def blocks_of_torch(mask: Tensor, seqlen: int) -> BlockMask:
    """The same mask as a BlockMask."""
    counts = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.argsort(mask.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    lengths = (seqlen, seqlen)
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(indices), counts, indices, BLOCK_SIZE=BLOCK, seq_lengths=lengths
    )


def mask_seconds(device: str, seqlen: int, nheads: int) -> dict[str, float]:
    """Host time that a mask adds to a call, and that of reading a causal BlockMask, the first time and later."""
    q = torch.randn(1, seqlen, nheads, HEADDIM, device=device, dtype=torch.float32).bfloat16()
    mask = random_mask(seqlen, nheads, 0.1, torch.Generator(device).manual_seed(0))
    short, one = q[:, :64], mask[:, :, :1, :1]

    def longer_by(calls: Mapping[str, Callable[[], object]], count: int) -> float:
        taken = in_turns({name: functools.partial(time_call, call) for name, call in calls.items()}, count)
        with_mask, without = map(statistics.median, taken.values())
        return with_mask - without

    def short_call(**masked: Any) -> object:
        return fast_attn_func(short, short, short, **masked)

    def explained(**masked: Any) -> object:
        return explain(q, q, q, **masked)

    dense = longer_by({"mask": lambda: short_call(block_mask=one), "none": short_call}, 5000)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device=device)
    first = time_call(lambda: explained(block_mask=block_mask))
    later = longer_by({"mask": lambda: explained(block_mask=block_mask), "none": explained}, 200)
    return {"dense_mask": dense, "block_mask_first": first, "block_mask_later": later}


if __name__ == "__main__":
    typer.run(main)
