"""README's chart: our speed against torch's SDPA, gains and losses, as SVG that is the same on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

from .results import Result

WIDTH, MARGIN = 800, 24
LABELS_END, PLOT_BEGIN, PLOT_END = 268, 284, 730  # pixels from the left
ROW, BAR, GROUP_HEADING, GROUP_GAP = 27, 17, 28, 12  # pixels of height
PLOT_TOP = 104
LOWEST, HIGHEST = 0.25, 16.0  # of the logarithmic axis
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16)
GAIN, LOSS, INK, FAINT, GRID = "#1f7a8c", "#d1603d", "#1f2933", "#66737f", "#e4e8eb"


@dataclass(frozen=True)
class Bar:
    """One comparison."""

    label: str
    against: str  # the kernel that SDPA runs
    ratio: float


@dataclass(frozen=True)
class Group:
    """Comparisons on one device."""

    heading: str
    detail: str
    bars: list[Bar]


def build() -> str:
    """speed.svg."""
    groups = [_cpu(), _gpu_prefill(), _gpu_decode()]
    height = PLOT_TOP + sum(GROUP_HEADING + ROW * len(group.bars) + GROUP_GAP for group in groups) + 62
    bottom = height - 62
    parts = [*_frame(height), *_axis(bottom)]
    top = PLOT_TOP
    for group in groups:
        parts += _draw(group, top)
        top += GROUP_HEADING + ROW * len(group.bars) + GROUP_GAP
    parts += [
        _text(
            MARGIN,
            height - 30,
            "Higher is better; logarithmic scale. Sources and all other shapes: docs/benchmarks.",
            12.5,
            FAINT,
        ),
        _text(
            MARGIN,
            height - 12,
            "Not measured on a V100, T4, P100 or Ascend NPU: their paths were run elsewhere.",
            12.5,
            FAINT,
        ),
    ]
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _cpu() -> Group:
    prefill, decode, overhead = Result.load("prefill"), Result.load("decode"), Result.load("overhead")
    bars = []
    for dtype in ("bfloat16", "float16", "float32"):
        label = f"prefill {dtype}, 4096 tokens, 16 heads of 128, causal"
        bars.append(Bar(f"prefill, {dtype}", "", _cpu_speedup(prefill, label)))
    for dtype in ("bfloat16", "float16", "float32"):
        label = f"decode {dtype}, 16384 keys, 32 heads of 128"
        bars.append(Bar(f"decode, {dtype}", "", _cpu_speedup(decode, label)))
    label = "prefill float32, 1 tokens, 1 heads of 64"
    bars.append(Bar("one token, one head: overhead", "", _cpu_speedup(overhead, label)))
    cpu, threads = prefill.machine["cpu"], prefill.machine["num_threads"]
    return Group(f"CPU: {cpu}, {threads} cores", "prefill of 4K tokens, decode over 16K keys", bars)


def _cpu_speedup(result: Result, label: str) -> float:
    found = (
        one["fastattention_speedup"]
        for one in result.data["measurements"]
        if one["workload"]["label"] == label and one["peer"] == "torch SDPA"
    )
    return float(next(found))


def _gpu_prefill() -> Group:
    result = Result.load("gpu")
    rates = _only(result, headdim=128, causal=True, tokens="4096")["tflops"]
    ours, turing = rates["fastattention sm80"], rates["fastattention sm75"]
    bars = [
        Bar("path for Turing", "vs CUTLASS", turing / rates["SDPA efficient"]),
        Bar("path for Ampere and newer", "vs FlashAttention-2", ours / rates["SDPA flash"]),
        Bar("path for Ampere and newer", "vs cuDNN", ours / rates["SDPA cudnn"]),
    ]
    return Group(f"GPU, prefill: {result.gpu}, float16", "4K tokens, causal; CUTLASS is what a T4 or V100 has", bars)


def _gpu_decode() -> Group:
    result = Result.load("gpu_decode")
    taken = _only(result, batch_size=16, nheads=32, nheads_k=8, seqlen=8192)["microseconds"]
    bars = [
        Bar("one query a sequence", "vs FlashAttention-2", taken["SDPA flash"] / taken["fastattention"]),
        Bar("one query a sequence", "vs cuDNN", taken["SDPA cudnn"] / taken["fastattention"]),
    ]
    return Group(f"GPU, decode: {result.gpu}, float16", "16 sequences over 8K keys", bars)


def _only(result: Result, **fields: object) -> dict[str, Any]:
    found = (one for one in result.data["measurements"] if all(one[name] == value for name, value in fields.items()))
    return dict(next(found))


def _x(ratio: float) -> float:
    return PLOT_BEGIN + (PLOT_END - PLOT_BEGIN) * math.log(ratio / LOWEST) / math.log(HIGHEST / LOWEST)


def _frame(height: int) -> list[str]:
    fonts = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\""
    description = "Speed of fastattention as a multiple of the speed of PyTorch's scaled_dot_product_attention"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(description)}" {fonts}>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        _text(MARGIN, 36, "How much faster than PyTorch's attention?", 20, INK, "600"),
        _text(MARGIN, 58, "Speed relative to the same call of scaled_dot_product_attention (SDPA)", 13.5, FAINT),
    ]


def _axis(bottom: int) -> list[str]:
    parts = []
    for tick in TICKS:
        x = _x(tick)
        colour, width = (INK, 1.5) if tick == 1 else (GRID, 1)
        parts.append(f'<path d="M{x:.1f} {PLOT_TOP}V{bottom}" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(_text(x, PLOT_TOP - 8, f"{tick:g}x", 12, INK if tick == 1 else FAINT, anchor="middle"))
    parts.append(_text(_x(1) - 8, PLOT_TOP - 26, "slower", 12, LOSS, "600", "end"))
    parts.append(_text(_x(1) + 8, PLOT_TOP - 26, "faster", 12, GAIN, "600"))
    return parts


def _draw(group: Group, top: int) -> list[str]:
    heading = (
        f'<text x="{MARGIN}" y="{top + 19}" font-size="14" fill="{INK}" font-weight="600">{escape(group.heading)}'
        f'<tspan fill="{FAINT}" font-weight="400" font-size="12.5" dx="8">{escape(group.detail)}</tspan></text>'
    )
    # White under the heading, so that the grid does not run through it.
    parts = [f'<rect x="{MARGIN}" y="{top + 4}" width="{WIDTH - 2 * MARGIN}" height="20" fill="#ffffff"/>', heading]
    for index, bar in enumerate(group.bars):
        y = top + GROUP_HEADING + ROW * index
        begin, end = sorted((_x(1), _x(bar.ratio)))
        gained = bar.ratio >= 0.995
        colour = GAIN if gained else LOSS
        parts.append(_text(LABELS_END, y + 14, f"{bar.label} {bar.against}".strip(), 13.5, INK, anchor="end"))
        width = max(end - begin, 2.0)
        parts.append(f'<rect x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
        text = f"{bar.ratio:.2f}x" if bar.ratio < 3 else f"{bar.ratio:.1f}x"
        at, anchor = (end + 6, "start") if gained else (begin - 6, "end")
        parts.append(_text(at, y + 14, text, 13.5, colour, "600", anchor))
    return parts


def _text(x: float, y: float, text: str, size: float, fill: str, weight: str = "400", anchor: str = "start") -> str:
    style = f'font-size="{size:g}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
