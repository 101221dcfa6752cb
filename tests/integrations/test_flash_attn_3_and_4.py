"""Names of FlashAttention 3 and 4: order of arguments, what they compute, and what they refuse."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import (
    ArgumentError,
    UnsupportedError,
    fast_attn_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
)
from fastattention.integrations import flash_attn as drop_in
from fastattention.integrations.flash_attn import flash3, flash4
from fastattention.integrations.flash_attn.arguments import with_values_in_keys

DESCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
HINTS = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False}
WINDOW = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
SCALED = {"softmax_scale": None, "causal": False, "qv": None, **DESCALES, **WINDOW}
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
CACHE = "k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q"
NEW = "cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale"
# The arguments without a default, and those with one.
SIGNATURES_3: dict[str, tuple[str, dict[str, Any]]] = {
    "flash_attn_func": ("q k v", {**SCALED, **HINTS}),
    "flash_attn_varlen_func": (f"q k v {LENGTHS}", {"seqused_q": None, "seqused_k": None, **SCALED, **HINTS}),
    "flash_attn_qkvpacked_func": ("qkv", {
        "softmax_scale": None, "causal": False, **DESCALES, **WINDOW, "deterministic": False, "num_heads_q": None,
        "sm_margin": 0, "return_attn_probs": False,
    }),
    "flash_attn_with_kvcache": ("q k_cache v_cache", {
        **dict.fromkeys(f"{CACHE} {NEW}".split()), "causal": False, **WINDOW, "rotary_interleaved": True,
        "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0, "return_softmax_lse": False,
    }),
    "flash_attn_combine": ("out_partial lse_partial", {"out": None, "out_dtype": None}),
    "get_scheduler_metadata": (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens",
        {"qkv_dtype": torch.bfloat16, "headdim_v": None, "cu_seqlens_q": None, "cu_seqlens_k_new": None,
         "cache_leftpad": None, "page_size": None, "max_seqlen_k_new": 0, "causal": False, "window_size": (-1, -1),
         "attention_chunk": 0, "has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0},
    ),
}  # fmt: skip
SHARED_4 = {
    "softmax_scale": None, "causal": False, "window_size": (None, None), "learnable_sink": None, "softcap": 0.0,
    "num_splits": 1, "pack_gqa": None, "deterministic": False, "score_mod": None, "score_mod_bwd": None,
    "mask_mod": None,
}  # fmt: skip
SIGNATURES_4: dict[str, tuple[str, dict[str, Any]]] = {
    "flash_attn_func": ("q k v", {
        "qv": None, "gather_kv_indices": None, **SHARED_4, "aux_tensors": None, "aux_scalars": None,
        "block_sparse_tensors": None, "block_sparse_tensors_bwd": None, "return_lse": False,
    }),
    "flash_attn_varlen_func": ("q k v", {
        **dict.fromkeys(f"qv {LENGTHS} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table".split()),
        **SHARED_4, "block_sparse_tensors": None, "aux_tensors": None, "aux_scalars": None, "return_lse": False,
        "scheduler_metadata": None, "seqlen_k_per_split": None, "disable_scheduler_metadata": False,
    }),
}  # fmt: skip
MODULES = {"flash_attn_interface": SIGNATURES_3, "flash_attn.cute": SIGNATURES_4}


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    drop_in.install()
    yield
    drop_in.uninstall()


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(headdim: int = 16, seqlen_q: int = 5, seqlen_k: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, seqlen_q, 4, headdim), draw(2, seqlen_k, 2, headdim), draw(2, seqlen_k, 2, headdim, seed=1)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)


def expected(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of one dense call in float64, with the scale of q's headdim."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def assert_same(given: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(given) == len(wanted)
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, functions in MODULES.items() for name in functions]
)
def test_arguments_are_those_of_the_library(module: str, name: str) -> None:
    required, optional = MODULES[module][name]
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    empty = inspect.Parameter.empty
    assert [(key, value.default) for key, value in parameters.items()] == [
        *((key, empty) for key in required.split()), *optional.items()
    ]  # fmt: skip


def test_modules_are_found_by_every_import() -> None:
    package = importlib.import_module("flash_attn")
    cute = importlib.import_module("flash_attn.cute")
    cute_interface = importlib.import_module("flash_attn.cute.interface")
    assert package.cute is cute
    assert cute.interface is cute_interface
    assert cute.flash_attn_func is cute_interface.flash_attn_func is flash4.flash_attn_func
    assert importlib.import_module("flash_attn_interface").flash_attn_func is flash3.flash_attn_func


def test_flash3_returns_out_or_out_and_lse() -> None:
    q, k, v = qkv()
    arguments: dict[str, Any] = {"causal": True, "window_size": (3, 1), "softcap": 2.0}
    wanted = fast_attn_func(q, k, v, return_lse=True, **arguments)
    out = flash3.flash_attn_func(q, k, v, None, True, None, None, None, None, (3, 1), 0, 2.0, 3, True, True, 2)
    assert torch.equal(out, wanted[0])
    hints = {"num_splits": 4, "pack_gqa": False, "sm_margin": 8, "k_descale": torch.ones(2, 2)}
    assert_same(flash3.flash_attn_func(q, k, v, return_attn_probs=True, **arguments, **hints), wanted)


def test_flash3_varlen_call() -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv())
    out, lse = flash3.flash_attn_varlen_func(q, k, v, offsets(5, 5), offsets(9, 9), 5, 9, return_attn_probs=True)
    wanted_out, wanted_lse = expected(*qkv())
    assert_same((out, lse), (wanted_out.flatten(0, 1), wanted_lse.transpose(0, 1).flatten(1)))


def test_flash3_varlen_call_takes_used_tokens() -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv())
    lengths = (offsets(5, 5), offsets(9, 9), 5, 9)
    used = {"seqused_q": int32(3, 5), "seqused_k": int32(9, 2)}
    given = flash3.flash_attn_varlen_func(q, k, v, *lengths, *used.values(), None, True, return_attn_probs=True)
    assert_same(given, fast_attn_varlen_func(q, k, v, *lengths, causal=True, return_lse=True, **used))


@pytest.mark.parametrize("heads", ["three", "one axis"])
def test_flash3_packed_call(heads: str) -> None:
    q, k, v = qkv(seqlen_k=5)
    if heads == "three":
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        given = flash3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), return_attn_probs=True)
    else:
        given = flash3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=4, return_attn_probs=True)
    assert_same(given, expected(q, k, v))


@pytest.mark.parametrize("num_heads_q", [0, 3, 8, None])
def test_flash3_packed_heads_that_do_not_fit_are_refused(num_heads_q: int | None) -> None:
    with pytest.raises(ArgumentError, match="num_heads_q"):
        flash3.flash_attn_qkvpacked_func(torch.zeros(2, 5, 8, 16), num_heads_q=num_heads_q)


@pytest.mark.parametrize("library", [flash3, flash4], ids=["3", "4"])
def test_qv_adds_its_product_with_values_to_the_scores(library: ModuleType) -> None:
    q, k, _ = qkv(headdim=8)
    v, qv = draw(2, 9, 2, 24), draw(2, 5, 4, 24)
    tensors = [x.requires_grad_() for x in (q, k, v, qv)]
    asked = {"return_attn_probs": True} if library is flash3 else {"return_lse": True}
    out, lse = library.flash_attn_func(q, k, v, qv=qv, **asked)
    wanted = expected(torch.cat((qv, q), -1), torch.cat((v, k), -1), v)
    assert_same((out, lse if library is flash3 else lse.transpose(1, 2)), wanted)
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert_same(gradients, torch.autograd.grad(wanted[0].sum(), tensors))


def test_flash4_latents_meet_qv_alone() -> None:
    """Where keys and values are one tensor of 512 columns, FlashAttention-4 leaves q out."""
    latents, q, qv = draw(1, 7, 1, 512), draw(1, 3, 2, 512), draw(1, 3, 2, 512, seed=1)
    out, lse = expected(qv, latents, latents)
    given = flash4.flash_attn_func(q, latents, latents, qv, return_lse=True)
    assert_same(given, (out, lse.transpose(1, 2)))


def test_qv_reads_values_and_keys_that_are_parts_of_one_tensor_without_a_copy() -> None:
    """As vLLM hands over pages of latents: (num_blocks, page_block_size, 1, headdim_v + headdim)."""
    pages, q, qv = draw(6, 4, 1, 40), draw(2, 3, 4, 16), draw(2, 3, 4, 24)
    values, keys = pages.split([24, 16], -1)
    joined_q, joined, v = with_values_in_keys(q, keys, values, qv)
    assert joined.data_ptr() == v.data_ptr() == pages.data_ptr()
    torch.testing.assert_close((joined_q, joined, v), (torch.cat((qv, q), -1), pages, values), rtol=0, atol=0)
    table, used = torch.tensor([[5, 1, 0], [2, 4, 3]], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
    hidden = torch.arange(12) >= used[:, None, None, None]
    sequences = pages[table.long()].flatten(1, 2)
    wanted, lse = expected(torch.cat((qv, q), -1), sequences, sequences[..., :24], hidden)
    given = flash4.flash_attn_varlen_func(
        q, keys, values, qv, page_table=table, seqused_k=used, return_lse=True
    )  # fmt: skip
    assert_same(given, (wanted, lse.transpose(1, 2)))
    given = flash3.flash_attn_with_kvcache(
        q, keys, values, qv=qv, page_table=table, cache_seqlens=used, return_softmax_lse=True
    )  # fmt: skip
    assert_same(given, (wanted, lse))


def test_qv_reads_rows_of_a_cache_in_place() -> None:
    """As vLLM views a cache (num_tokens, headdim_v + headdim): keys and values have other strides of heads."""
    rows, q, qv = draw(24, 40), draw(3, 4, 16), draw(3, 4, 24)
    values, keys = (part.unsqueeze(1) for part in rows.split([24, 16], -1))
    assert values.stride() != keys.stride()
    _, joined, _ = with_values_in_keys(q, keys, values, qv)
    assert joined.data_ptr() == rows.data_ptr()
    torch.testing.assert_close(joined[:, 0], rows, rtol=0, atol=0)


def test_qv_copies_tensors_that_only_lie_side_by_side() -> None:
    """Keys behind the values in memory, but of other rows; and a last axis that is strided."""
    memory = draw(1, 9, 1, 2, 16)
    for v, k in ((memory[:, :4, :, 0], memory[:, 4:8, :, 0]), (memory[..., 0, ::2], memory[..., 1, ::2])):
        joined = with_values_in_keys(draw(1, 3, 2, k.shape[-1]), k, v, draw(1, 3, 2, v.shape[-1]))[1]
        torch.testing.assert_close(joined, torch.cat((v, k), -1), rtol=0, atol=0)


def test_qv_with_gradients_copies() -> None:
    """A gradient of the whole would not come back to its parts."""
    values, keys = draw(2, 9, 1, 40).split([24, 16], -1)
    keys.requires_grad_()
    _, joined, _ = with_values_in_keys(draw(2, 3, 4, 16), keys, values, draw(2, 3, 4, 24))
    assert joined.data_ptr() != values.data_ptr()
    (gradient,) = torch.autograd.grad(joined.sum(), keys)
    assert (gradient == 1).all()


def test_qv_appends_values_and_keys_to_one_cache() -> None:
    cache, q, qv, k, v = draw(2, 8, 1, 40), draw(2, 3, 4, 16), draw(2, 3, 4, 24), draw(2, 3, 1, 16), draw(2, 3, 1, 24)
    before = cache.clone()
    values, keys = cache.split([24, 16], -1)
    out = flash3.flash_attn_with_kvcache(q, keys, values, k, v, qv, cache_seqlens=4)
    wanted = before.clone()
    wanted[:, 4:7] = torch.cat((v, k), -1)
    assert (cache == wanted).all()
    seen = wanted[:, :7]
    assert_same((out,), expected(torch.cat((qv, q), -1), seen, seen[..., :24])[:1])
    with pytest.raises(UnsupportedError, match="rotary_cos is not served with qv"):
        flash3.flash_attn_with_kvcache(q, keys, values, k, v, qv, rotary_cos=draw(8, 8), rotary_sin=draw(8, 8))
    with pytest.raises(ArgumentError, match=r"v must be \(as k, with headdim_v\)"):
        flash3.flash_attn_with_kvcache(q, keys, values, k, v[:1], qv, cache_seqlens=4)


INDICES = torch.tensor([[8, -1, 2], [-1, -1, -1], [0, 1, 2], [5, 4, -1], [3, 8, 1]], dtype=torch.int32).repeat(2, 1, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_flash4_attends_to_the_keys_of_gather_kv_indices(causal: bool) -> None:
    """In a batch and in varlen sequences, where values and keys are parts of one tensor."""
    q, latents, qv = draw(2, 5, 4, 64), draw(2, 9, 1, 576), draw(2, 5, 4, 512)
    v, k = latents.split([512, 64], -1)
    hidden = torch.ones(2, 1, 5, 10, dtype=torch.bool).scatter_(3, INDICES[:, None] % 10, False)[..., :9]
    if causal:
        hidden = hidden | (torch.arange(9) > torch.arange(4, 9)[:, None])
    wanted, lse = expected(torch.cat((qv, q), -1), latents, latents[..., :512], hidden)
    wanted = wanted.nan_to_num(0.0)  # rows without keys
    asked = {"gather_kv_indices": INDICES, "causal": causal, "return_lse": True}
    assert_same(flash4.flash_attn_func(q, k, v, qv, **asked), (wanted, lse.transpose(1, 2)))
    q, k, v, qv, indices = (x.flatten(0, 1) for x in (q, k, v, qv, INDICES))
    given = flash4.flash_attn_varlen_func(
        q, k, v, qv, offsets(5, 5), offsets(9, 9), **{**asked, "gather_kv_indices": indices}
    )
    assert_same(given, (wanted.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)))


def test_flash4_says_what_is_not_served_with_gather_kv_indices() -> None:
    with pytest.raises(UnsupportedError, match=r"window_size=\(2, 0\) is not served with gather_kv_indices"):
        flash4.flash_attn_func(*qkv(), gather_kv_indices=INDICES, window_size=(2, 0))
    with pytest.raises(UnsupportedError, match="seqused_q is not served with gather_kv_indices"):
        flash4.flash_attn_varlen_func(*qkv(), gather_kv_indices=INDICES, seqused_q=torch.tensor([1, 2]))


def test_qv_of_another_shape_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"qv must be \(as q, with headdim_v\) = \(2, 5, 4, 16\), got shape"):
        flash3.flash_attn_func(q, k, v, qv=draw(2, 5, 4, 8))
    with pytest.raises(ArgumentError, match="qv has dtype"):
        flash3.flash_attn_func(q, k, v, qv=q.half())


def test_flash3_cache_call_appends_rotates_and_attends() -> None:
    q, k, v = qkv(seqlen_k=5)
    caches = draw(6, 4, 2, 16), draw(6, 4, 2, 16, seed=1)
    copies = [cache.clone() for cache in caches]
    angles = draw(12, 4)
    arguments: dict[str, Any] = {
        "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True, "rotary_interleaved": False,
        "cache_seqlens": torch.tensor([7, 0], dtype=torch.int32),
    }  # fmt: skip
    wanted = fast_attn_with_kvcache(q, *copies, k, v, block_table=TABLE, return_softmax_lse=True, **arguments)
    given = flash3.flash_attn_with_kvcache(
        q, *caches, k, v, page_table=TABLE, return_softmax_lse=True, scheduler_metadata=torch.empty(0), num_splits=2,
        pack_gqa=True, sm_margin=1, **arguments,
    )  # fmt: skip
    assert_same((*given, *caches), (*wanted, *copies))


TABLE = int32([4, 1, 3], [0, 5, 2])


def test_flash3_cache_call_takes_ragged_tokens_and_chunks() -> None:
    q, k, v = draw(4, 4, 16), draw(6, 2, 16), draw(6, 2, 16, seed=1)
    caches = [draw(6, 4, 2, 16), draw(6, 4, 2, 16, seed=1)]
    copies = [cache.clone() for cache in caches]
    arguments: dict[str, Any] = {
        "cache_seqlens": int32(7, 0), "cu_seqlens_q": offsets(1, 3), "cu_seqlens_k_new": offsets(2, 4),
        "max_seqlen_q": 3, "causal": True, "attention_chunk": 5, "return_softmax_lse": True,
    }  # fmt: skip
    wanted = fast_attn_with_kvcache(q, *copies, k, v, block_table=TABLE, **arguments)
    given = flash3.flash_attn_with_kvcache(q, *caches, k, v, page_table=TABLE, **arguments)
    assert_same((*given, *caches), (*wanted, *copies))


def test_flash3_calls_with_chunks() -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"causal": True, "attention_chunk": 4}
    out, lse = fast_attn_func(q, k, v, return_lse=True, **options)
    assert not torch.equal(out, fast_attn_func(q, k, v, causal=True))
    assert_same(flash3.flash_attn_func(q, k, v, return_attn_probs=True, **options), (out, lse))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    assert_same(
        (flash3.flash_attn_varlen_func(*rows, offsets(5, 5), offsets(9, 9), 5, 9, **options),), (out.flatten(0, 1),)
    )
    packed = torch.stack((q, q, q), 2)
    assert_same((flash3.flash_attn_qkvpacked_func(packed, **options),), (fast_attn_func(q, q, q, **options),))
    assert_same((flash3.flash_attn_qkvpacked_func(packed.flatten(2, 3), num_heads_q=4, **options),),
                (fast_attn_func(q, q, q, **options),))  # fmt: skip


@pytest.mark.parametrize("into", [None, torch.bfloat16], ids=["new", "given"])
def test_flash3_combine_merges_parts(into: torch.dtype | None) -> None:
    q, k, v = qkv()
    parts = [fast_attn_func(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 4), slice(4, 9))]
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    out = None if into is None else torch.empty(2, 5, 4, 16, dtype=into)
    merged, lse = flash3.flash_attn_combine(outs, lses.transpose(2, 3), out, into)
    wanted, wanted_lse = expected(q, k, v)
    torch.testing.assert_close(merged, wanted.to(merged.dtype), atol=2e-6 if into is None else 0.01, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse.transpose(1, 2).float())
    assert out is None or merged is out


def test_flash3_combine_refuses_another_out() -> None:
    outs, lses = torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
    with pytest.raises(ArgumentError, match=r"out is \(1, 3, 4, 8\) float16 on cpu; the result is .* float32 on cpu"):
        flash3.flash_attn_combine(outs, lses, torch.zeros(1, 3, 4, 8, dtype=torch.float16))
    with pytest.raises(ArgumentError, match="lse_partial must be"):
        flash3.flash_attn_combine(outs, lses.transpose(2, 3))


def test_flash3_scheduler_metadata_is_taken_by_calls() -> None:
    metadata = flash3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, torch.zeros(2, dtype=torch.int32))
    assert (metadata.dtype, metadata.shape) == (torch.int32, (0,))


@pytest.mark.parametrize(
    ("window", "causal", "ours"),
    [((None, None), False, (-1, -1)), ((3, None), False, (3, -1)), ((None, 2), False, (-1, 2)),
     ((2, 5), True, (2, 0)), ((-1, -1), False, (-1, -1)), ((-1, -1), True, (-1, 0)), ((1, -4), False, (-1, -1))],
)  # fmt: skip
def test_flash4_windows(window: tuple[int | None, int | None], causal: bool, ours: tuple[int, int]) -> None:
    q, k, v = qkv()
    given = flash4.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True)
    assert_same(given, fast_attn_func(q, k, v, window_size=ours, return_lse=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [(4, -2), (-2, 4), (-1, None)])
def test_flash4_windows_beside_the_diagonal_are_refused(window: tuple[int | None, int | None]) -> None:
    with pytest.raises(UnsupportedError, match="window_size="):
        flash4.flash_attn_func(*qkv(), window_size=window)


def test_flash4_always_returns_a_pair() -> None:
    q, k, v = qkv()
    sinks = draw(4)
    out, lse = flash4.flash_attn_func(q, k, v, learnable_sink=sinks)
    assert lse is None
    assert torch.equal(out, fast_attn_func(q, k, v, sinks=sinks))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    given = flash4.flash_attn_varlen_func(
        *rows, cu_seqlens_q=offsets(5, 5), cu_seqlens_k=offsets(9, 9), learnable_sink=sinks, return_lse=True
    )
    out, lse = fast_attn_func(q, k, v, sinks=sinks, return_lse=True)
    assert_same(given, (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("packed_q", [False, True], ids=["batch", "varlen"])
@pytest.mark.parametrize("keys", ["batch", "varlen", "pages"])
def test_flash4_varlen_layouts(packed_q: bool, keys: str) -> None:
    q, k, v = draw(2, 5, 4, 16), draw(2, 12, 2, 16), draw(2, 12, 2, 16, seed=1)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    used: dict[str, Any] = {"seqused_q": int32(3, 5), "seqused_k": int32(12, 2)}
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    wanted = fast_attn_varlen_func(*rows, offsets(5, 5), offsets(12, 12), 5, 12, **used, **options)
    if keys == "varlen":
        k, v = rows[1:]
        used |= {"cu_seqlens_k": offsets(12, 12)}
    elif keys == "pages":
        order = torch.empty(6, dtype=torch.int64)
        order[TABLE.flatten().long()] = torch.arange(6)
        k, v = (x.unflatten(0, (6, 4))[order] for x in rows[1:])
        used |= {"page_table": TABLE}
    if packed_q:
        given = flash4.flash_attn_varlen_func(rows[0], k, v, cu_seqlens_q=offsets(5, 5), **used, **options)
        assert_same(given, wanted)  # type: ignore[arg-type]
        return
    out, lse = flash4.flash_attn_varlen_func(q, k, v, **used, **options)
    assert lse is not None
    assert lse.shape == (2, 4, 5)
    assert_same((out.flatten(0, 1), lse.transpose(0, 1).flatten(1)), wanted)


def test_flash4_pages_need_their_lengths() -> None:
    q, _, _ = qkv()
    with pytest.raises(ArgumentError, match="page_table needs seqused_k"):
        flash4.flash_attn_varlen_func(q, torch.zeros(6, 4, 2, 16), torch.zeros(6, 4, 2, 16), page_table=TABLE)


def _kvcache(**arguments: Any) -> object:
    q, k, v = qkv()
    return flash3.flash_attn_with_kvcache(q, k, v, **arguments)


REFUSED: list[tuple[Callable[..., object], str, object]] = [
    (_kvcache, "rotary_seqlens", torch.zeros(2)),
    (_kvcache, "qv", draw(2, 5, 4, 16)),
    (lambda **one: flash4.flash_attn_varlen_func(*qkv(), page_table=TABLE, **one), "qv", draw(2, 5, 4, 16)),
    *((lambda **one: flash4.flash_attn_func(*qkv(), **one), name, ()) for name in (
        "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
        "block_sparse_tensors", "block_sparse_tensors_bwd",
    )),
    *((lambda **one: flash4.flash_attn_varlen_func(*qkv(), **one), name, ()) for name in (
        "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
        "block_sparse_tensors",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "value"), REFUSED)
def test_what_changes_results_is_refused_by_name(function: Callable[..., object], name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} is not served: "):
        function(**{name: value})


@pytest.mark.parametrize("library", [flash3, flash4], ids=["3", "4"])
def test_float8_queries_are_refused(library: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match=r"q has dtype .*float8_e4m3fn, which is not served"):
        library.flash_attn_func(*(x.to(torch.float8_e4m3fn) for x in qkv()))
