"""The first of the benchmark pages."""

from __future__ import annotations

from .markdown import page, table
from .results import SOURCE, Result

PAGES = (
    ("[CPU](cpu.md)", "prefill, decode, varlen, memory, overhead, whole models", ("prefill", "xeon_amx/decode")),
    ("[CPU: threads](cpu-threads.md)", "1 to 16 threads, and a busy core", ("cpu_threads",)),
    ("[GPU: prefill](gpu.md)", "every code path against torch's three kernels", ("gpu", "h100/gpu")),
    ("[GPU: backward](gpu-backward.md)", "gradients, against torch's three kernels", ("gpu_backward",)),
    ("[GPU: decode](gpu-decode.md)", "caches, pages, quantized caches", ("gpu_decode", "h100/gpu_decode")),
    ("[Rules of scores](score-rules.md)", "softcap, ALiBi, a bias, windows, dropout", ("score_rules_gpu",)),
    ("[Wide heads](wide-heads.md)", "heads of 512 and their gradients, latent attention", ("gpu_headdim", "headdim")),
    ("[Whole models](whole-models.md)", "by eager, sdpa and ours",
     ("h100/model_llama-2-7b", "xeon_amx/model_llama-2-7b")),
    ("[Serving](serving.md)", "continuous batching, vLLM, a server under load", ("serving_cpu", "serving_gpu")),
    ("[Long contexts](long-contexts.md)", "caches shared by a GPU and its host", ("long_context",)),
    ("[Tensor parallelism](tensor-parallel.md)", "attention, GEMM and all-reduce in row blocks",
     ("tiled_allreduce_tp2", "tiled_allreduce_tp4")),
    ("[Quantized caches](quantized-caches.md)", "errors and times of int8 and float8", ("quantized_cache",)),
    ("[int8 products](int8-products.md)", "what products of queries and keys in int8 lose", ("int8_errors",)),
    ("[Block masks](block-sparse.md)", "times by density, and what patterns lose",
     ("block_sparse_cpu", "block_sparse_gpu")),
    ("[Latent attention](latents.md)", "indexers, selected latents, layers of DeepSeek",
     ("latents_cpu", "latents_gpu")),
    ("[Linear attention](linear.md)", "GLA, gated delta rules and Mamba-2", ("linear_cpu", "linear_gpu")),
)  # fmt: skip
INTRODUCTION = """\
Every figure here comes from a file in benchmarks/results, which names the device, the versions, the commit and the
command. The line under a table repeats them, and says so where the run did not record its command. One script writes
these pages from those files. Peers take turns with us in one process, and losses are in **bold**. Most machines were
virtual ones that share their host, so expect differences of about 10% between runs."""
NOT_RUN = """\
We have had no V100, T4, P100 or Ascend NPU. What we predict of them is on pages of its own, and is labelled as
predicted: [Ascend](ascend-plan.md), [Volta](volta-model.md) and [64-bit Arm](arm-cycles.md). 64-bit Arm has been run
under emulation only. If you have such hardware, the output of `fastattention bench` on it is welcome."""
MEASURE = """\
```sh
fastattention bench                 # this machine's CPU and its GPU or NPU
fastattention bench gpu gpu_decode gpu_backward  # its GPU only
python benchmarks/pages             # these pages, from the result files
python benchmarks/pages --check     # fails where they differ from the result files
```

Some results name scripts that the command has replaced: what `benchmarks/prefill.py` measured, `fastattention bench
prefill` does."""


def build() -> str:
    """index.md."""
    rows = [[link, what, "; ".join(Result.load(name).device for name in names)] for link, what, names in PAGES]
    predictions = [
        ["[Ascend: predictions](ascend-plan.md)", "a simulator of Ascend chips", "none"],
        ["[Volta: predictions](volta-model.md)", "machine code and a model of an SM", "none"],
        ["[64-bit Arm: predictions](arm-cycles.md)", "machine code and llvm-mca's models of cores", "none"],
    ]
    resources = f"{SOURCE}/benchmarks/results/kernels_resources.md"
    return page(
        "Benchmarks",
        "![Speed against PyTorch's SDPA](../assets/speed.svg)",
        INTRODUCTION,
        table(["page", "what is measured", "devices"], rows + predictions, text_columns=3),
        "## What has not been run",
        NOT_RUN,
        "## Measure yours",
        MEASURE,
        f"Registers, shared memory and code size of every GPU kernel are in [kernels_resources.md]({resources}).",
    )
