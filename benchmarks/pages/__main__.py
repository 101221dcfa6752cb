"""Write the benchmark pages of the documentation and README's chart from benchmarks/results.

python benchmarks/pages            # write them
python benchmarks/pages --check    # write nothing; fail where a committed page is stale
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import (
    arm_cycles,
    ascend_plan,
    block_sparse,
    cpu,
    cpu_threads,
    gpu,
    index,
    int8_products,
    latents,
    linear,
    long_contexts,
    quantized_caches,
    score_rules,
    serving,
    speed_chart,
    tensor_parallel,
    volta_model,
    whole_models,
    wide_heads,
)

DOCS = Path(__file__).parents[2] / "docs"
BUILDERS = {
    "benchmarks/index.md": index.build,
    "benchmarks/cpu.md": cpu.build,
    "benchmarks/cpu-threads.md": cpu_threads.build,
    "benchmarks/gpu.md": gpu.build_prefill,
    "benchmarks/gpu-backward.md": gpu.build_backward,
    "benchmarks/gpu-decode.md": gpu.build_decode,
    "benchmarks/score-rules.md": score_rules.build,
    "benchmarks/wide-heads.md": wide_heads.build,
    "benchmarks/whole-models.md": whole_models.build,
    "benchmarks/serving.md": serving.build,
    "benchmarks/long-contexts.md": long_contexts.build,
    "benchmarks/tensor-parallel.md": tensor_parallel.build,
    "benchmarks/quantized-caches.md": quantized_caches.build,
    "benchmarks/int8-products.md": int8_products.build,
    "benchmarks/block-sparse.md": block_sparse.build,
    "benchmarks/linear.md": linear.build,
    "benchmarks/latents.md": latents.build,
    "benchmarks/ascend-plan.md": ascend_plan.build,
    "benchmarks/volta-model.md": volta_model.build,
    "benchmarks/arm-cycles.md": arm_cycles.build,
    "assets/speed.svg": speed_chart.build,
    "assets/gpu-prefill.svg": gpu.prefill_chart,
    "assets/gpu-backward.svg": gpu.backward_chart,
    "assets/gpu-decode.svg": gpu.decode_chart,
    "assets/long-contexts.svg": long_contexts.build_chart,
    "assets/tensor-parallel.svg": tensor_parallel.build_chart,
}


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where a file differs.")] = False,
    docs: Annotated[Path, typer.Option(help="The folder of the documentation.")] = DOCS,
) -> None:
    """Write all pages and the chart, or compare them with the committed files."""
    built = {docs / name: build() for name, build in BUILDERS.items()}
    if not check:
        for path, text in built.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return
    stale = [path for path, text in built.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path} differs from benchmarks/results: run `python benchmarks/pages`", file=sys.stderr)
    if stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
