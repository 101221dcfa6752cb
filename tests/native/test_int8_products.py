"""qk_dtype="int8" on CPUs, by every instruction set that multiplies int8. Conformance checks what it computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import UnsupportedError, explain, fast_attn_func, fast_attn_varlen_func, set_num_threads
from fastattention.backends.cpu.library import load_library
from fastattention.quantized import KEYS_OF_SCALE

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
SHAPES = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 900), (70, 70), (60, 700)])
attend = functools.partial(fast_attn_func, backend="cpu", qk_dtype="int8")


@pytest.fixture
def int8_isa(isa: str) -> str:
    if not load_library().multiplies_int8:
        pytest.skip(f"{isa} does not multiply int8 on this processor")
    return isa


def tensors(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    q = torch.randn(1, seqlen_q, 4, 48, generator=generator).to(dtype)
    k, v = (torch.randn(1, seqlen_k, 2, 48, generator=generator).to(dtype) for _ in range(2))
    return q, k, v


def test_an_instruction_set_without_int8_products_refuses(isa: str) -> None:
    q, k, v = tensors(4, 4)
    if load_library().multiplies_int8:
        assert isa != "generic"
        assert attend(q, k, v).isfinite().all()
        return
    with pytest.raises(
        UnsupportedError, match=f"AVX-VNNI, AVX-512 VNNI, AMX int8 or dot products of Arm.* {isa}.*leave qk_dtype out"
    ):
        attend(q, k, v)


def test_the_newest_instruction_sets_multiply_int8(isa: str) -> None:
    if isa in ("avx512_bf16", "amx_bf16", "neon_bf16"):  # every processor with these has it
        assert load_library().multiplies_int8


def test_explain_says_that_it_is_approximate(int8_isa: str) -> None:
    q, k, v = tensors(4, 4)
    explanation = explain(q, k, v, qk_dtype="int8")
    assert explanation.backend == "cpu"
    assert "int8 products of queries and keys, approximate" in str(explanation)
    assert "approximate" not in str(explain(q, k, v))


def test_gradients_are_refused_with_a_reason(int8_isa: str) -> None:
    q, k, v = tensors(4, 4)
    with pytest.raises(UnsupportedError, match=r"gradients are not served with qk_dtype; leave it out"):
        attend(q.requires_grad_(), k, v)


@DTYPES
@SHAPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_bad_query_spoils_its_own_row_only(
    int8_isa: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, bad: float
) -> None:
    q, k, v = tensors(seqlen_q, seqlen_k, dtype)
    row = seqlen_q // 2
    clean = attend(q, k, v)
    q[0, row, 1, 5] = bad
    out, lse = attend(q, k, v, return_lse=True)
    assert out[0, row, 1].isnan().all()
    assert lse[0, 1, row].isnan()
    out[0, row, 1] = clean[0, row, 1]
    assert torch.equal(out, clean)


@DTYPES
@SHAPES
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("softcap", [0.0, 20.0], ids=["plain", "softcap"])
def test_a_bad_key_spoils_the_rows_that_see_its_group_only(
    int8_isa: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, bad: float, softcap: float
) -> None:
    """It counts as 0 in the mean, so other rows see only that."""
    q, k, v = tensors(seqlen_q, seqlen_k, dtype)
    offset = seqlen_k - seqlen_q
    key = offset + seqlen_q // 2  # on the diagonal of the middle row
    k[0, key, 1, 7] = bad
    out, lse = attend(q, k, v, causal=True, softcap=softcap, return_lse=True)
    sees = torch.arange(seqlen_q) + offset >= key // KEYS_OF_SCALE * KEYS_OF_SCALE
    assert out[0, sees, 2:].isnan().all()
    assert lse[0, 2:, sees].isnan().all()
    assert out[0, ~sees].isfinite().all()
    assert out[0, :, :2].isfinite().all()
    k[0, key, 1, 7] = 0.0  # its value in the mean
    assert torch.equal(out[0, ~sees], attend(q, k, v, causal=True, softcap=softcap)[0, ~sees])


def test_large_keys_do_not_overflow_the_mean(int8_isa: str) -> None:
    q, k, v = tensors(20, 300)
    out = attend(q * 1e-30, k * 1e-8 + 2e38, v)
    assert out.isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_threads_do_not_change_a_bit(int8_isa: str, causal: bool) -> None:
    """Tests heads that fit a thread's cache, and heads whose panels all threads pack."""
    for seqlen in (300, 3000):
        q, k, v = tensors(seqlen, seqlen)
        results = []
        for num_threads in (1, 2, 3):
            set_num_threads(num_threads)
            results.append(attend(q, k, v, causal=causal, return_lse=True))
        set_num_threads(None)
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])


def test_varlen_sequences_have_means_of_their_own(int8_isa: str) -> None:
    q, k, v = tensors(90, 90)
    k[0, 50:] += 30.0
    bounds = torch.tensor([0, 50, 90], dtype=torch.int32)
    together = fast_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 50, 50, qk_dtype="int8", backend="cpu")
    for part in (slice(0, 50), slice(50, 90)):
        assert torch.equal(together[part], attend(q[:, part], k[:, part], v[:, part])[0])


def test_vmap_and_compiled_calls_give_the_same_bits(int8_isa: str) -> None:
    q, k, v = (torch.stack((x, -x)) for x in tensors(40, 70))
    expected = torch.stack([attend(*one) for one in zip(q, k, v, strict=True)])
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(attend)(q, k, v), expected)
        torch.compiler.reset()
        compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q[0], k[0], v[0]), expected[0])
        torch.compiler.reset()
