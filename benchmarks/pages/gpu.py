"""The pages of one GPU: prefill and decode."""

from __future__ import annotations

from typing import Any

from .line_chart import LineChart, Panel, Style
from .markdown import number, page, ratio, table, tokens
from .results import Result

NOT_MEASURED = "Nothing has been measured on a V100, T4 or P100."
PREFILL_INTRODUCTION = f"""\
16384 tokens in all, hidden size 2048, float16. Figures are useful TFLOPS (a causal mask counts half), medians of rounds
in which all kernels take turns in one process, timed by the GPU. `sm80` is our code path for Ampere and newer.
`sm75` is our path for Turing, run on the same GPU, and does not predict a T4. FlashAttention-2, cuDNN and CUTLASS are
the three kernels of torch's SDPA ("flash", "cudnn", "efficient"); CUTLASS is what Turing and Volta owners have.
**Bold** ratios are losses: cuDNN uses Hopper's own matrix instructions, and our kernels do not.
{NOT_MEASURED}"""
BACKWARD_INTRODUCTION = f"""\
Gradients of q, k and v: 16384 tokens in all, hidden size 2048, float16. Figures are useful TFLOPS: 2.5 times the
operations of the forward, of which a causal mask counts half. Medians of rounds in which all kernels take turns in
one process, timed by the GPU. `sm80` is our code path for Ampere and newer. `sm75` is our path for Turing, run on the
same GPU, and does not predict a T4: with a T4's shared memory the default is the faster of both
([0074](../decisions/0074-sum-gradients-of-queries-in-memory.md)). FlashAttention-2, cuDNN and CUTLASS are the three
kernels of torch's SDPA. They add in any order, as ours do by default. "Det." is `deterministic=True`: the same bits in
every run, from seven products where five would do
([0062](../decisions/0062-compute-gradients-by-two-kernels-on-gpus.md)). **Bold** ratios are losses. cuDNN uses
Hopper's own matrix instructions, and plain calls with gradients go to it by themselves from Hopper on.
{NOT_MEASURED}"""
DECODE_INTRODUCTION = f"""\
One query a sequence against its cache, heads of 128, float16, calls replayed from a CUDA graph. GB/s count the keys and
values that are read; the limit is memory, shown as the rate of a copy within the GPU. Small problems have too little
work for the whole GPU. The paths for Turing, Volta and Pascal were run on the same GPU, which says nothing about
those cards: Hopper emulates Volta's matrix instruction, and Pascal has none. **Bold** ratios are losses.
{NOT_MEASURED}"""
PATHS = ("fastattention sm80", "SDPA flash", "SDPA cudnn", "fastattention sm75", "SDPA efficient")
STYLES = {
    "fastattention sm80": Style("#1f7a8c", ours=True),
    "fastattention sm75": Style("#1f7a8c", ours=True, dashed=True),
    "cuDNN": Style("#7b5ea7"),
    "FlashAttention-2": Style("#d1603d"),
    "CUTLASS": Style("#8a96a1", dashed=True),
}
GRADIENT_PATHS = (
    "fastattention sm80", "fastattention sm80 deterministic", "SDPA flash", "SDPA cudnn",
    "fastattention sm75", "fastattention sm75 deterministic", "SDPA efficient",
)  # fmt: skip
PEERS = {"SDPA flash": "FlashAttention-2", "SDPA cudnn": "cuDNN", "SDPA efficient": "CUTLASS"}
VARIATIONS = ("pages of 1", "pages of 16", "pages of 64", "pages of 256", "int8 cache", "float8 cache", "sm75 path",
              "sm70 path", "sm60 path")  # fmt: skip


def build_prefill() -> str:
    """gpu.md."""
    blocks = [
        PREFILL_INTRODUCTION,
        "![Prefill by length, beside cuDNN, FlashAttention-2 and CUTLASS](../assets/gpu-prefill.svg)",
    ]
    for name in ("gpu", "h100/gpu"):
        result = Result.load(name)
        measurements = result.data["measurements"]
        dense = [one for one in measurements if one["tokens"] != "packed"]
        varlen = [one for one in measurements if one["tokens"] == "packed"]
        blocks += result.sourced(
            f"## {result.gpu}",
            _dense(dense),
            f"### Sequences of uneven length, {result.gpu}",
            *_varlen(varlen),
            *_paged(varlen, result.gpu),
            f"### Overhead of a call, {result.gpu}",
            *_overhead(result.data["call_us"]),
        )
    return page("GPU: prefill", *blocks)


def prefill_chart() -> str:
    """gpu-prefill.svg."""
    return _chart("Prefill on an H200, causal", "gpu", 200)


def backward_chart() -> str:
    """gpu-backward.svg."""
    return _chart("Gradients on an H200, causal", "gpu_backward", 100)


def decode_chart() -> str:
    """gpu-decode.svg."""
    result, panels = Result.load("gpu_decode"), []
    single = [one for one in result.data["measurements"] if one["batch_size"] == 1]
    for heads in dict.fromkeys((one["nheads"], one["nheads_k"]) for one in single):
        found = sorted(
            (one for one in single if (one["nheads"], one["nheads_k"]) == heads), key=lambda one: one["seqlen"]
        )
        rates = {
            name: [one["gbps"][kernel] for one in found]
            for kernel, name in {"fastattention": "fastattention", **PEERS}.items()
            if kernel in found[0]["gbps"]
        }
        rates["copy within the GPU"] = [result.data["copy_gbps"]] * len(found)
        panels.append(Panel("{} on {} heads of 128".format(*heads), [tokens(one["seqlen"]) for one in found], rates))
    styles = {
        "fastattention": STYLES["fastattention sm80"], **{name: STYLES[name] for name in ("cuDNN", "FlashAttention-2")},
        "copy within the GPU": STYLES["CUTLASS"],
    }  # fmt: skip
    subtitle = "GB/s of keys and values that are read, float16, one query of one sequence; higher is better"
    return LineChart("Decode on an H200", subtitle, "keys", 1000, styles, panels).svg()


def _chart(title: str, name: str, step: float) -> str:
    """TFLOPS by length: a panel for each head dimension."""
    causal = [one for one in Result.load(name).data["measurements"] if one["causal"] and one["tokens"] != "packed"]
    panels = []
    for headdim in sorted({one["headdim"] for one in causal}):
        found = sorted((one for one in causal if one["headdim"] == headdim), key=lambda one: int(one["tokens"]))
        rates = {PEERS.get(kernel, kernel): [one["tflops"][kernel] for one in found] for kernel in PATHS}
        panels.append(Panel(f"heads of {headdim}", [tokens(int(one["tokens"])) for one in found], rates))
    subtitle = "TFLOPS, float16; higher is better. The dashed lines are what Turing can run; no T4 was measured."
    return LineChart(title, subtitle, "tokens", step, STYLES, panels).svg()


def _dense(measurements: list[dict[str, Any]]) -> str:
    rows = []
    for one in measurements:
        ampere, flash, cudnn, turing, cutlass = (one["tflops"][name] for name in PATHS)
        cells = [f"{rate:.0f}" for rate in (ampere, flash, cudnn, turing, cutlass)]
        rows.append([_problem(one), *cells, ratio(ampere / flash), ratio(ampere / cudnn), ratio(turing / cutlass)])
    headings = ["heads of, mask, tokens", "`sm80`", "FlashAttention-2", "cuDNN", "`sm75`", "CUTLASS"]
    return table([*headings, "`sm80` vs FlashAttention-2", "`sm80` vs cuDNN", "`sm75` vs CUTLASS"], rows)


def _varlen(measurements: list[dict[str, Any]]) -> list[str]:
    rows = []
    for one in measurements:
        cells = [_problem(one)]
        for path in ("fastattention sm80", "fastattention sm75"):
            rate, dense = one["tflops"][path], one["dense_tflops"][path]
            cells += [f"{rate:.0f}", f"{dense:.0f}", ratio(rate / dense)]
        rows.append(cells)
    headings = ["heads of, mask", "`sm80`, varlen", "dense", "ratio", "`sm75`, varlen", "dense", "ratio"]
    what = "Eight sequences of 819 to 4096 tokens in one call, beside dense batches of the same lengths, in TFLOPS."
    return [what, table(headings, rows)]


def _paged(measurements: list[dict[str, Any]], gpu: str) -> list[str]:
    """Nothing for results that are older than the question."""
    if "paged_tflops" not in measurements[0]:
        return []
    rows = []
    for one in measurements:
        pages = one["paged_tflops"]
        rates = (pages[name] for name in ("float16", "int8", "float8"))
        cells = (f"{rate:.0f} ({rate / one['tflops']['fastattention sm80']:.2f})" for rate in rates)
        rows.append([_problem(one), *cells])
    what = """\
The same sequences with keys and values in pages of 64 tokens, in TFLOPS, and in parentheses as a part of those without
pages. Each CTA converts the quantized keys and values that it reads."""
    return [f"### Pages, {gpu}", what, table(["heads of, mask", "float16", "int8", "float8"], rows)]


def _problem(one: dict[str, Any]) -> str:
    mask = "causal" if one["causal"] else "full"
    length = "" if one["tokens"] == "packed" else f", {tokens(int(one['tokens']))}"
    return f"{one['headdim']}, {mask}{length}"


def _overhead(calls: dict[str, float]) -> list[str]:
    rows = [
        ["`fast_attn_func`, the whole call", number(calls["fast_attn_func"])],
        ["of that, from the validated call to the enqueued kernel", number(calls["backend"])],
        ["torch's SDPA, the whole call", number(calls["SDPA"])],
    ]
    what = "Microseconds of the CPU for a call on a single token. They depend on the host, and on who else uses it."
    return [what, table(["call", "us"], rows)]


def build_backward() -> str:
    """gpu-backward.md."""
    result = Result.load("gpu_backward")
    rates, peaks = _gradients(result.data["measurements"]), _peaks(result.data["peaks"])
    blocks = result.sourced(f"## {result.gpu}", rates, f"### Memory, {result.gpu}", *peaks)
    picture = "![Gradients by length, beside cuDNN, FlashAttention-2 and CUTLASS](../assets/gpu-backward.svg)"
    return page("GPU: backward", BACKWARD_INTRODUCTION, picture, *blocks)


def _gradients(measurements: list[dict[str, Any]]) -> str:
    rows = []
    for one in measurements:
        rates = [one["tflops"][name] for name in GRADIENT_PATHS]
        ampere, ampere_det, flash, cudnn, turing, turing_det, cutlass = rates
        ratios = (ampere / flash, ampere_det / flash, ampere / cudnn, turing / cutlass, turing_det / cutlass)
        rows.append([_problem(one), *(f"{rate:.0f}" for rate in rates), *map(ratio, ratios)])
    headings = [
        "heads of, mask, tokens", "`sm80`", "`sm80` det.", "FlashAttention-2", "cuDNN", "`sm75`", "`sm75` det.",
        "CUTLASS", "`sm80` vs FlashAttention-2", "det. vs FlashAttention-2", "`sm80` vs cuDNN", "`sm75` vs CUTLASS",
        "det. vs CUTLASS",
    ]  # fmt: skip
    return table(headings, rows)


def _peaks(peaks: list[dict[str, Any]]) -> list[str]:
    names = ("fastattention", "fastattention deterministic", "SDPA flash", "SDPA cudnn", "SDPA efficient")
    rows = []
    for one in peaks:
        results = 4 * 2 * 2048 * one["tokens"]  # out and three gradients in float16
        rows.append(
            [tokens(one["tokens"]), *(f"{value / 1e6:.0f}" for value in (results, *map(one["bytes"].get, names)))]
        )
    what = """\
Peak memory of a forward and its backward beyond q, k, v and the gradient of out, in MB: one causal sequence, heads of
128, hidden size 2048, float16. `results` is out and the three gradients, which every row includes."""
    headings = ["tokens", "results", "fastattention", "deterministic", "FlashAttention-2", "cuDNN", "CUTLASS"]
    return [what, table(headings, rows)]


def build_decode() -> str:
    """gpu-decode.md."""
    blocks = [
        DECODE_INTRODUCTION,
        "![Decode by the number of keys, beside cuDNN and FlashAttention-2](../assets/gpu-decode.svg)",
    ]
    for name in ("gpu_decode", "h100/gpu_decode"):
        result = Result.load(name)
        rows = [[f"`fast_attn_with_kvcache`{_case(name)}", number(us)] for name, us in result.data["call_us"].items()]
        blocks += result.sourced(
            f"## {result.gpu}",
            *_shapes(result.data),
            f"### Pages, quantized caches and other code paths, {result.gpu}",
            *_variations(result.data),
            f"### Overhead of a call, {result.gpu}",
            "Microseconds of the CPU for a call on a short cache.",
            table(["call", "us"], rows),
        )
    return page("GPU: decode", *blocks)


def _case(name: str) -> str:
    return "" if name == "fast_attn_with_kvcache" else f" {name}"


def _shapes(data: dict[str, Any]) -> list[str]:
    copy = data["copy_gbps"]
    rows = []
    for one in data["measurements"]:
        ours, flash, cudnn = (one["gbps"][name] for name in ("fastattention", "SDPA flash", "SDPA cudnn"))
        cells = [number(one["microseconds"]["fastattention"]), *(f"{rate:.0f}" for rate in (ours, flash, cudnn))]
        rows.append([_shape(one), *cells, ratio(ours / flash), ratio(ours / cudnn), f"{ours / copy:.0%}"])
    headings = ["batch, query heads on key heads, keys", "us", "GB/s", "FlashAttention-2", "cuDNN"]
    what = f"A copy within this GPU reads and writes {copy:.0f} GB/s in all."
    return [what, table([*headings, "vs FlashAttention-2", "vs cuDNN", "of a copy"], rows)]


def _variations(data: dict[str, Any]) -> list[str]:
    varied = [one for one in data["measurements"] if "pages of 16" in one["microseconds"]]
    rows = []
    for name in VARIATIONS:
        cells = []
        for one in varied:
            taken = one["microseconds"]
            cells += [number(taken[name]), ratio(taken["fastattention"] / taken[name])]
        rows.append([name, *cells])
    headings = ["variation"]
    for one in varied:
        headings += [f"us: {_shape(one)}", "ratio"]
    what = "Ratios are to the float16 cache in rows, by the same kernel on the GPU's own code path."
    return [what, table(headings, rows)]


def _shape(one: dict[str, Any]) -> str:
    return f"{one['batch_size']}, {one['nheads']} on {one['nheads_k']}, {tokens(one['seqlen'])}"
