"""explain: every backend's verdict, without computing and without writing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattention
from fastattention import ArgumentError, explain, fast_attn_func, fast_attn_with_kvcache
from fastattention.attention.problem import Layout, Problem
from unit.fakes import Absent, Picky, Willing
from unit.samples import int32

RegisterBackends = Callable[..., None]


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def qkv(headdim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return x(1, 3, 2, headdim), x(1, 4, 2, headdim), x(1, 4, 2, headdim)


def test_it_names_the_backend_and_every_reason(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Picky, Willing)
    explanation = explain(*qkv(), causal=True)
    assert explanation.backend == "willing"
    assert explanation.problem.seqlen_k == 4
    assert explanation.problem.is_causal
    assert [verdict.backend for verdict in explanation.verdicts] == ["absent", "picky", "willing"]
    assert str(explanation).splitlines() == [
        "read as batch_size=1, seqlen_q=3, seqlen_k=4, nheads=2, nheads_k=2, headdim=8, headdim_v=8",
        "   absent: needs a device called moon; there is none",
        "   picky: headdim=8 is not supported by picky; use 64",
        "-> willing: serves this call",
        "main-memory traffic of willing: not modelled; lower bound 896 B; standard attention 1.25 KiB",
    ]


def test_it_tells_the_chosen_from_the_able(only_backends: RegisterBackends) -> None:
    only_backends(Picky, Willing)
    explanation = explain(*qkv(64))
    _, *lines = str(explanation).splitlines()
    assert lines[:2] == ["-> picky: serves this call", "   willing: could serve this call"]
    assert lines[2].startswith("main-memory traffic of picky: ")


def test_it_explains_that_nobody_can(only_backends: RegisterBackends) -> None:
    only_backends(Absent)
    explanation = explain(*qkv())
    assert explanation.backend is None
    assert str(explanation).endswith("\n   absent: needs a device called moon; there is none")


CALLS: dict[str, tuple[Layout, tuple[Any, ...]]] = {
    "fast_attn_func": (Layout.DENSE, qkv()),
    "fast_attn_qkvpacked_func": (Layout.DENSE, (x(1, 3, 3, 2, 8),)),
    "fast_attn_kvpacked_func": (Layout.DENSE, (x(1, 3, 2, 8), x(1, 4, 2, 2, 8))),
    "fast_attn_varlen_func": (Layout.VARLEN, (x(3, 2, 8), x(4, 2, 8), x(4, 2, 8), int32(0, 3), int32(0, 4))),
    "fast_attn_varlen_qkvpacked_func": (Layout.VARLEN, (x(3, 3, 2, 8), int32(0, 3))),
    "fast_attn_varlen_kvpacked_func": (Layout.VARLEN, (x(3, 2, 8), x(4, 2, 2, 8), int32(0, 3), int32(0, 4))),
    "fast_attn_with_kvcache": (Layout.KVCACHE, qkv()),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_it_explains_every_function(name: str, only_backends: RegisterBackends) -> None:
    only_backends(Willing)
    Willing.served.clear()
    layout, arguments = CALLS[name]
    explanation = explain(*arguments, function=getattr(fastattention, name))
    assert Willing.served == []  # nothing is computed
    assert explanation.problem.layout is layout
    assert explanation.backend == "willing"


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_it_does_not_write_caches(paged: bool) -> None:
    k_cache, v_cache = x(2, 8, 2, 8), x(2, 8, 2, 8)
    before = k_cache.clone(), v_cache.clone()
    explanation = explain(
        x(2, 1, 2, 8), k_cache, v_cache, x(2, 1, 2, 8), x(2, 1, 2, 8),
        cache_seqlens=int32(3, 5), block_table=torch.tensor([[0], [1]], dtype=torch.int32) if paged else None,
        function=fast_attn_with_kvcache,
    )  # fmt: skip
    assert explanation.problem.seqlen_new == 1
    assert explanation.backend is not None
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_it_refuses_what_the_call_refuses() -> None:
    with pytest.raises(ArgumentError, match="k has headdim 4"):
        explain(x(1, 3, 2, 8), x(1, 4, 2, 4), x(1, 4, 2, 8))
    with pytest.raises(ArgumentError, match="backend='nobody'"):
        explain(*qkv(), backend="nobody")


@pytest.mark.parametrize("function", [torch.relu, 3], ids=["another", "none"])
def test_it_refuses_a_function_that_is_not_ours(function: Any) -> None:
    with pytest.raises(ArgumentError, match=r"function=.*(relu|3).* must be one of fastattention's"):
        explain(x(2, 2), function=function)


def test_the_next_call_computes_again() -> None:
    q, k, v = qkv()
    explain(q, k, v)
    with pytest.raises(ArgumentError):
        explain(q, k, v, softcap=-1.0)
    assert fast_attn_func(q, k, v, backend="sdpa").shape == q.shape


def test_calls_of_other_threads_compute_meanwhile(only_backends: RegisterBackends) -> None:
    q, k, v = qkv()
    computed: list[Tensor] = []

    class CallsFromAThread(Willing):
        def why_not(self, problem: Problem) -> str | None:
            if problem.is_causal:
                thread = threading.Thread(target=lambda: computed.append(fast_attn_func(q, k, v)))
                thread.start()
                thread.join()
            return None

    only_backends(CallsFromAThread)
    assert explain(q, k, v, causal=True).backend == "willing"
    assert [out.shape for out in computed] == [q.shape]


def test_it_tells_who_computes_gradients() -> None:
    q, slopes = x(1, 3, 2, 8).requires_grad_(), x(2).requires_grad_()
    lines = str(explain(q, q, q)).splitlines()
    assert "-> cpu: serves this call by kernels of its own, forward and backward" in lines
    assert "   sdpa: could serve this call by operations that torch differentiates" in lines
    lines = str(explain(q, q, q, alibi_slopes=slopes)).splitlines()
    assert "   cpu: alibi_slopes requires a gradient, which cpu does not compute; use backend='sdpa'" in lines
    assert "-> sdpa: serves this call by operations that torch differentiates" in lines
