"""Which memory a call may write: new tokens of its caches, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.reference import apply_rotary, reference_attention
from fastattention.quantized import LARGEST_STORED
from fastattention.testing.calls import WRITTEN, Call, build_call
from fastattention.testing.case import Case, KvCacheCase
from fastattention.testing.memory import bits
from fastattention.testing.oracle import largest

_EPS32 = torch.finfo(torch.float32).eps


class Snapshot(NamedTuple):
    """The memory behind a call's tensors before it ran."""

    buffers: dict[str, Tensor]
    caches: dict[str, Tensor]

    @classmethod
    def of(cls, call: Call) -> Snapshot:
        """The memory of a call that has not run."""
        buffers = {name: buffer.clone() for name, buffer in call.buffers.items()}
        caches = {name: call.arguments[name].clone() for name in WRITTEN if name in call.arguments}
        return cls(buffers, caches)

    def fault(self, case: Case, call: Call, dtype: torch.dtype) -> str | None:
        """What is wrong with the memory after the call of `case` has run, or None.

        New tokens are in the caches, and every other bit, gaps between rows included, is as it was. To find that out,
        new tokens are taken out of the caches again.
        """
        if call.new_slots is not None:
            if (wrong := _wrong_tokens(case, call, dtype)) is not None:
                return wrong
            for name, cache in self.caches.items():
                call.arguments[name][call.new_slots] = cache[call.new_slots]
        for name, buffer in self.buffers.items():
            if not torch.equal(bits(buffer), bits(call.buffers[name])):
                return f"{name} was written where nothing belongs"
        return None


def _wrong_tokens(case: Case, call: Call, dtype: torch.dtype) -> str | None:
    """What is wrong with appended tokens: values and keys are copies, rotated keys to within rounding; or quantized."""
    assert isinstance(case, KvCacheCase)
    assert call.new_slots is not None
    if case.cache_dtype is not None:
        return _wrong_quantized_tokens(case, call, dtype)
    new_k, new_v = (call.arguments[name].flatten(0, 1) for name in ("k", "v"))
    k, v = (call.arguments[name][call.new_slots] for name in ("k_cache", "v_cache"))
    if not torch.equal(v, new_v):
        return "new values are not in v_cache"
    if not torch.equal(k[..., case.rotary_dim :], new_k[..., case.rotary_dim :]):
        return "new keys are not in k_cache"
    if case.rotary_dim:
        exact = build_call(case, dtype)
        reference_attention(*exact.prepare())
        rotated = exact.arguments["k_cache"][call.new_slots]
        if not torch.allclose(k, rotated, rtol=torch.finfo(dtype).eps, atol=8 * _EPS32):
            return "new keys in k_cache are rotated wrongly"
    return None


def _wrong_quantized_tokens(case: KvCacheCase, call: Call, dtype: torch.dtype) -> str | None:
    """What is wrong with new tokens in a quantized cache.

    Scales are those of the exact tokens, and stored values the nearest to them: half a step away, and a little for what
    float32 does to a value before it is rounded.
    """
    problem, inputs = build_call(case, dtype).prepare()
    if case.rotary_dim:
        _, inputs = apply_rotary(problem, inputs, torch.float64)
    assert case.cache_dtype is not None
    largest_stored = LARGEST_STORED[case.cache_dtype]
    for name, new in (("k", inputs.k_new), ("v", inputs.v_new)):
        assert new is not None
        exact = new.double().flatten(0, 1)
        stored, scale = (call.arguments[f"{name}_{what}"][call.new_slots].double() for what in ("cache", "scale"))
        amax = exact.abs().amax(dim=-1, keepdim=True)
        if not torch.allclose(scale, amax.squeeze(-1) / largest_stored, rtol=8 * _EPS32, atol=0.0):
            return f"{name}_scale is not that of the new tokens"
        wanted = exact * (largest_stored / amax)
        distance = largest((stored - wanted).abs() / step_at(wanted, case.cache_dtype))
        if not distance <= 0.501:
            return f"{name}_cache is {distance:.3f} steps from a new token"
    return None


def step_at(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """The distance between values of `cache_dtype` around x."""
    if cache_dtype is torch.int8:
        return torch.ones_like(x)
    # 3 bits after the first; the smallest normal value is 2^-6
    return torch.exp2(torch.log2(x.abs().clamp(min=2.0**-6)).floor() - 3)
