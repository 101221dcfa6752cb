"""Computations with eager attention and with fast_attention, and their comparison.

Eager attention goes with Transformers' own functions for linear layers, fast_attention with ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from fastattention.errors import FastAttentionError
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.models import make_cache, own_linear_layers

from .tiny import BATCH_SIZE, LENGTH, Tiny, floats, limited

PADDINGS = ("none", "left", "right", "both")
CLOSE = 2e-5  # of the largest value; larger differences are compared with float64
ROUNDING = 10  # times eager attention's own largest error; a wrong mask shows by thousands
NEGLIGIBLE = 1e-2  # gradients that are 0 up to rounding are compared relative to others
Result = list[Tensor]
Computation = Callable[[Any, Tiny], Result]


class EagerFailsError(Exception):
    """Eager attention fails, so there is nothing to compare with."""


def padding(side: str) -> Tensor | None:
    """int64 (BATCH_SIZE, LENGTH), 1 is a token; the first sequence has no padding."""
    if side == "none":
        return None
    mask = torch.ones(BATCH_SIZE, LENGTH, dtype=torch.int64)
    for row, count in ((1, 4), (2, 6)):
        left = count if side == "left" else count // 2 if side == "both" else 0
        mask[row, :left] = 0
        if count > left:
            mask[row, LENGTH - (count - left) :] = 0
    return mask


def _given(model: Any, tiny: Tiny, side: str) -> dict[str, Tensor]:
    mask, given = padding(side), tiny.inputs()
    given = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in given.items()}
    if mask is None:
        return given
    return given | {"attention_mask": mask, "input_ids": given["input_ids"].where(mask.bool(), tiny.padding_token)}


def forward(side: str) -> Computation:
    """All outputs at real tokens."""

    def compute(model: Any, tiny: Tiny) -> Result:
        mask = padding(side)
        with torch.no_grad():
            outputs = floats(model(**_given(model, tiny, side)))
        if mask is None:
            return outputs
        # Outputs of another length belong to the decoder, or to the whole sequence.
        return [one[mask.bool()] if one.shape[:2] == mask.shape else one for one in outputs]

    return compute


def generation(side: str, num_beams: int = 1, **given: Any) -> Computation:
    """Tokens, then logits of every step. `_difference` compares them until tokens differ."""

    def compute(model: Any, tiny: Tiny) -> Result:
        inputs = {name: value for name, value in _given(model, tiny, side).items() if name != "decoder_input_ids"}
        out = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, output_logits=True, output_scores=True,
            return_dict_in_generate=True, num_beams=num_beams, **given,
        )  # fmt: skip
        new = out.sequences[:, -len(out.logits) :]
        return [new, *(out.logits if num_beams == 1 else [out.sequences_scores])]

    return compute


def chunks(model: Any, tiny: Tiny) -> Result:
    """Logits of a padded prompt in chunks of four tokens, all on one cache."""
    given = _given(model, tiny, "left")
    mask, ids = given["attention_mask"], given["input_ids"]
    cache, logits = make_cache("dynamic", model), []
    with torch.no_grad():
        for begin in range(0, LENGTH, 4):
            end = min(begin + 4, LENGTH)
            given = {"attention_mask": mask[:, :end], CACHE_ARGUMENT: cache}
            logits.append(model(input_ids=ids[:, begin:end], **given).logits)
    return [torch.cat(logits, dim=1)[mask.bool()]]


def packing(model: Any, tiny: Tiny) -> Result:
    """Sequences in a row, told by positions that start again."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0]]).expand(BATCH_SIZE, -1)
    with torch.no_grad():
        return [model(**tiny.inputs(), position_ids=positions, use_cache=False).logits]


def gradients(side: str) -> Computation:
    """Gradients of all weights, for a loss of the real tokens."""

    def compute(model: Any, tiny: Tiny) -> Result:
        model = copy.deepcopy(model)
        given, mask = _given(model, tiny, side), padding(side)
        outputs = [one for one in floats(model(**given)) if one.requires_grad]
        real = [one[mask.bool()] if mask is not None and one.shape[:2] == mask.shape else one for one in outputs]
        generator = torch.Generator().manual_seed(2)
        loss = torch.stack(
            [(one * torch.randn(one.shape, generator=generator).to(one.dtype)).sum() for one in real]
        ).sum()
        loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    return compute


def checks_of(tiny: Tiny) -> dict[str, Computation]:
    """The computations for a kind of model."""
    if tiny.eager.main_input_name != "input_ids":
        return {"forward": forward("none"), "gradients": gradients("none")}
    found: dict[str, Computation] = {f"padding {side}": forward(side) for side in PADDINGS}
    generates = tiny.kind in ("decoder", "encoder-decoder") and tiny.eager.can_generate()
    if generates:
        found["greedy"] = generation("left")
        found["static cache"] = generation("left", cache_implementation="static")
        found["beams"] = generation("left", num_beams=3)
    if tiny.kind == "decoder":
        found |= {"chunks": chunks, "packing": packing}
    return found | {"gradients": gradients("left")}


def run(tiny: Tiny) -> dict[str, str]:
    """Per check: "same", "eager fails: ...", "refused: ...", "error: ..." or "differs by ...".

    "asks" says whether the model ever asked for fast_attention.
    """
    with _counted() as calls:
        try:
            with limited():
                fast = tiny.fast()
        except Exception as error:
            return {"loading": _said(error)}
        results = {name: _compare(name, tiny, fast, compute) for name, compute in checks_of(tiny).items()}
    return results | {"asks": "yes" if calls else "no"}


def _compare(name: str, tiny: Tiny, fast: Any, compute: Computation) -> str:
    try:
        with limited(), own_linear_layers():
            expected = compute(tiny.eager, tiny)
            padded = compute(tiny.eager, tiny._replace(padding_token=7))
            depends = _difference(padded, expected) > CLOSE
            random = depends and _difference(compute(tiny.eager, tiny), expected) > CLOSE
    except Exception as error:
        return f"eager fails: {_line(error)}"
    if depends:
        why = "its results are random" if random else "real tokens depend on which token is padding"
        return f"eager fails: {why}"
    if not all(bool(one.isfinite().all()) for one in expected if one.is_floating_point()):
        return "eager fails: numbers that are not finite"
    try:
        with limited():
            found = compute(fast, tiny)
    except Exception as error:
        return _said(error)
    difference = _difference(found, expected)
    if difference <= CLOSE:
        return "same"
    allowed = max(CLOSE, _rounding(tiny, gradients("none") if name == "gradients" else forward("none")))
    if difference <= allowed:
        return "same"
    with_sdpa = _with_sdpa(tiny, compute)
    if _difference(found, with_sdpa) <= allowed:
        return "eager fails: torch's SDPA gives other numbers, those of fast_attention"
    # Where keys are equal, eager's gradients cancel to 0. Those from the sum of out * dout keep its rounding.
    if name == "gradients" and difference <= 2 * _difference(with_sdpa, expected) < 1:
        return "eager fails: torch's SDPA gives other gradients, and no nearer ones than fast_attention"
    return f"differs by {difference:.1e} of the largest number, where rounding explains {allowed:.1e}"


def _with_sdpa(tiny: Tiny, compute: Computation) -> Result:
    """Results with SDPA; empty for models that have none."""
    model = copy.deepcopy(tiny.eager)
    try:
        with limited(), own_linear_layers():
            model.set_attn_implementation("sdpa")
            return compute(model, tiny)
    except Exception:
        return []


def _rounding(tiny: Tiny, compute: Computation) -> float:
    """The tolerance from eager attention's own error in float32, without padding, which becomes NaN in float64."""
    try:
        with limited(), own_linear_layers():
            return ROUNDING * _difference(compute(tiny.eager, tiny), compute(copy.deepcopy(tiny.eager).double(), tiny))
    except Exception:  # not every model runs in float64
        return 0.0


def _difference(found: Result, expected: Result) -> float:
    """The largest difference, relative to the largest value of its tensor, or to NEGLIGIBLE times that of all tensors.

    Logits of a step are compared only for texts that are still the same.
    """
    if len(found) != len(expected):
        return torch.inf
    worst, tokens, step = 0.0, None, 0
    largest = max((float(one.abs().max()) for one in expected if one.is_floating_point()), default=0.0)
    for one, other in zip(found, expected, strict=True):
        if not other.is_floating_point():
            tokens = (one, other)
            continue
        if one.shape != other.shape or bool(one.isnan().any()):
            return torch.inf
        rows = slice(None)
        if tokens is not None and len(expected) > 2:
            rows = (tokens[0][:, :step] == tokens[1][:, :step]).all(dim=1)
            step += 1
        scale = max(float(other.abs().max()), NEGLIGIBLE * largest, 1e-30)
        if one[rows].numel():
            finite = other[rows].isfinite()
            gap = (one.double() - other.double())[rows][finite]
            worst = max(worst, float(gap.abs().max()) / scale if gap.numel() else 0.0)
    return worst


@contextmanager
def _counted() -> Iterator[list[str]]:
    """Records which layers called fast_attention."""
    mapping: Any = AttentionInterface._global_mapping
    attend, calls = mapping["fast_attention"], []

    def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return attend(module, *args, **kwargs)

    mapping["fast_attention"] = counting
    try:
        yield calls
    finally:
        mapping["fast_attention"] = attend


def _said(error: Exception) -> str:
    return f"{'refused' if isinstance(error, FastAttentionError) else 'error'}: {_line(error)}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
