"""Calls that one call of torch's attention serves without copies: their choice and results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention.attention.problem import Problem
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.sdpa import fused, gpu_kernels
from fastattention.backends.sdpa.backend import SdpaBackend

CAUSAL, FULL = Options(causal=True), Options()


def qkv(
    seqlen_q: int = 13, seqlen_k: int = 13, nheads: int = 4, nheads_k: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, seqlen_q, nheads, 16, dtype=dtype)
    k, v = (torch.randn(2, seqlen_k, nheads_k, 16, dtype=dtype) for _ in range(2))
    return q, k, v


WHOLE: list[tuple[Options, dict[str, Any]]] = [
    (FULL, {}),
    (FULL, {"seqlen_k": 29}),
    (FULL, {"dtype": torch.bfloat16}),
    (CAUSAL, {}),
    (CAUSAL, {"nheads_k": 2}),
    (CAUSAL, {"seqlen_q": 1, "seqlen_k": 29}),  # a single query sees every key
    (Options(window_left=12, window_right=12), {}),  # hides nothing
]
PARTS: list[tuple[Options, dict[str, Any]]] = [
    (FULL, {"nheads_k": 2}),  # of a CPU: heads are folded
    (FULL, {"dtype": torch.float16}),  # of a CPU: computed in float32
    (CAUSAL, {"seqlen_q": 5}),
    (CAUSAL, {"seqlen_k": 5}),
    (CAUSAL, {"seqlen_k": 0, "seqlen_q": 0}),
    *((options, {}) for options in (Options(window_left=3), Options(softcap=2.0), Options(return_lse=True))),
    (Options(softmax_scale=-1.0), {}),
]


@pytest.mark.parametrize(("options", "sizes"), WHOLE + PARTS)
def test_they_give_what_the_longer_way_does(
    options: Options, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, inputs = prepare_dense(*qkv(**sizes), options)
    given = fused.attend_whole(problem, inputs)
    assert (given is not None) == ((options, sizes) in WHOLE)
    out = SdpaBackend().forward(problem, inputs).out
    monkeypatch.setattr(fused, "attend_whole", lambda problem, inputs: None)
    usual = SdpaBackend().forward(problem, inputs).out
    torch.testing.assert_close(out, usual)
    assert out.is_contiguous()
    assert given is None or torch.equal(given, out)


@pytest.mark.parametrize("name", ["alibi_slopes", "attn_bias", "sinks"])
def test_what_changes_scores_is_not_whole(name: str) -> None:
    tensor = torch.randn(13) if name == "attn_bias" else torch.randn(4)
    problem, inputs = prepare_dense(*qkv(), FULL, **{name: tensor})
    assert fused.attend_whole(problem, inputs) is None


def on_gpu(monkeypatch: pytest.MonkeyPatch, shares_keys: bool = True, **sizes: Any) -> tuple[Problem, Any]:
    """A call that seems to be on a GPU, whose kernels may support heads that share keys."""
    monkeypatch.setattr(gpu_kernels, "share_keys", lambda problem: shares_keys)
    problem, inputs = prepare_dense(*qkv(**sizes), FULL)
    return replace(problem, device=torch.device("cuda", 0)), inputs


@pytest.mark.parametrize("shares_keys", [False, True])
def test_on_a_gpu_its_kernels_share_keys_or_heads_are_folded(
    shares_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, inputs = on_gpu(monkeypatch, shares_keys, nheads_k=2, dtype=torch.bfloat16)
    assert (fused.attend_whole(problem, inputs) is not None) == shares_keys


@pytest.mark.parametrize("which", [0, 1, 2])
def test_on_a_gpu_misplaced_rows_are_not_taken_as_they_lie(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, inputs = on_gpu(monkeypatch)
    assert fused.attend_whole(problem, inputs) is not None
    tensors = [inputs.q, inputs.k, inputs.v]
    wide = torch.randn(*tensors[which].shape[:3], 17)
    tensors[which] = wide[..., 1:]  # begins at 4 bytes, rows of 68
    moved = inputs._replace(**dict(zip("qkv", tensors, strict=True)))
    assert fused.attend_whole(problem, moved) is None
