"""A tiny Llama of random weights: eager against fast_attention on the device, in prefill and decoding."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from fastattention.cli.check.report import CheckReport, Entry, Note
from fastattention.cli.check.run import recorded

PROMPT, NEW_TOKENS = 37, 5
DTYPE = torch.float16
# The allowed error is this many times that of eager, and one unit of rounding of the largest logit.
FACTOR = 3.0


def run(report: CheckReport, device: str) -> None:
    """Adds an entry with what was compared, or why the model was skipped."""
    known = {"kind": "model", "name": "tiny Llama", "dtype": "float16", "implementation": "transformers"}
    report.attempt(known, lambda note: _compare(device, note))


def _compare(device: str, note: Note) -> Entry:
    if importlib.util.find_spec("transformers") is None:
        return {"state": "skipped", "reason": "transformers is not installed; pip install 'transformers>=5.23'"}
    try:
        importlib.import_module("fastattention.integrations.transformers")  # registers the name
    except ImportError as error:
        return {"state": "skipped", "reason": str(error)}

    model = _tiny_llama()
    tokens = torch.randint(256, (2, PROMPT + NEW_TOKENS), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    # float32 is a thousand times as exact. Eager in float64 makes NaN of rows that are padding.
    exact = _logits(model.to(DTYPE).float(), tokens)
    model = model.to(device, DTYPE)
    eager = _logits(model, tokens)
    model.set_attn_implementation("fast_attention")
    with recorded() as served_by:
        ours = _logits(model, tokens)
    note({"served_by": ", ".join(sorted(served_by))})
    floor = torch.finfo(DTYPE).eps * float(max(one.abs().max() for one in exact.values()))
    errors = {}
    for name, right in exact.items():
        allowed = FACTOR * float((eager[name] - right).abs().max()) + floor
        errors[name] = {"error": float((ours[name] - right).abs().max()), "allowed": allowed}
    is_right = all(one["error"] <= one["allowed"] for one in errors.values())
    return {"state": "right" if is_right else "wrong", "errors": errors}


def _tiny_llama() -> Any:
    """Two layers, GQA, heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # large enough for attention to move the logits
    )
    model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")
    return model.eval()


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits of the prompt, and of tokens that follow one by one, float64 on the CPU. The first row is padded."""
    from transformers import DynamicCache

    from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

    tokens = tokens.to(model.device)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    cache = {CACHE_ARGUMENT: DynamicCache(config=model.config), "use_cache": True}
    prefill = model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], **cache).logits
    decoded = [
        model(tokens[:, length - 1 : length], attention_mask=mask[:, :length], **cache).logits
        for length in range(PROMPT + 1, PROMPT + NEW_TOKENS + 1)
    ]
    shown = mask[:, :PROMPT].bool()
    return {"prefill": prefill[shown].double().cpu(), "decode": torch.cat(decoded, dim=1).double().cpu()}
