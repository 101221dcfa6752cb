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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fastattention import explain, fast_attn_func
from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.timing import interleaved, interleaved_on_device, time_call
from fastattention.cli.bench.workload import DTYPES
from fastattention.cli.console import OUTPUT
from fastattention.threads import get_num_threads

RESULTS = Path(__file__).parent / "results"
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
    show(records)
    figures = {
        "question": "block_sparse", "seqlen": seqlen, "nheads": nheads, "headdim": HEADDIM, "block": BLOCK,
        "records": records, "mask": mask_seconds(device, seqlen, nheads),
    }  # fmt: skip
    name = "block_sparse_cpu" if device == "cpu" else "block_sparse_gpu"
    write_record(output / f"{name}.json", figures)


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
        "seconds": median_seconds(calls, device, seconds),
    }


def median_seconds(calls: dict[str, Callable[[], object]], device: str, seconds: float) -> dict[str, float]:
    """Median seconds of each call, timed in turns."""
    if device != "cpu":
        return interleaved_on_device(calls, GPU_ROUNDS)
    for call in calls.values():
        call()
    return {name: timing.median for name, timing in interleaved(calls, seconds).items()}


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

    def medians_of(calls: Sequence[Callable[[], object]], count: int) -> list[float]:
        taken: list[list[float]] = [[] for _ in calls]
        for _ in range(count):
            for call, seconds in zip(calls, taken, strict=True):
                seconds.append(time_call(call))
        return [statistics.median(seconds) for seconds in taken]

    def short_call(**masked: Any) -> object:
        return fast_attn_func(short, short, short, **masked)

    def explained(**masked: Any) -> object:
        return explain(q, q, q, **masked)

    with_mask, without = medians_of((lambda: short_call(block_mask=one), short_call), 5000)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device=device)
    first = time_call(lambda: explained(block_mask=block_mask))
    later, other = medians_of((lambda: explained(block_mask=block_mask), explained), 200)
    return {"dense_mask": with_mask - without, "block_mask_first": first, "block_mask_later": later - other}


def show(records: list[dict[str, Any]]) -> None:
    """Prints milliseconds, and times relative to density x dense."""
    table = Table("dtype", "density", "ours", "over density x dense", "FlexAttention", "FlexAttention / ours")
    for record in records:
        seconds = record["seconds"]
        for what in ("dense", "nothing"):
            table.add_row(record["dtype"], what, f"{seconds[what] * 1e3:.2f} ms", "", "", "")
        for density, kept in record["densities"].items():
            ours, flex = seconds[f"ours {density}"], seconds[f"flex {density}"]
            over = ours / (kept * seconds["dense"])
            table.add_row(
                record["dtype"], f"{kept:.3f}", f"{ours * 1e3:.2f} ms", f"{over:.2f}x", f"{flex * 1e3:.2f} ms",
                f"{flex / ours:.2f}x",
            )  # fmt: skip
    OUTPUT.print(table)


if __name__ == "__main__":
    typer.run(main)
