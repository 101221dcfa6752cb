"""The drop-in module named flash_attn."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastattention
from fastattention import ArgumentError, FastAttentionError
from fastattention.integrations import flash_attn as drop_in

TAIL = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
CACHE = {
    **dict.fromkeys("k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table".split()),
    "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
    "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
# flash-attn 2.8: arguments without a default, and those with one.
SIGNATURES = {
    "flash_attn_func": ("q k v", TAIL),
    "flash_attn_qkvpacked_func": ("qkv", TAIL),
    "flash_attn_kvpacked_func": ("q kv", TAIL),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {**TAIL, "block_table": None},
    ),
    "flash_attn_varlen_qkvpacked_func": ("qkv cu_seqlens max_seqlen", TAIL),
    "flash_attn_varlen_kvpacked_func": ("q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k", TAIL),
    "flash_attn_with_kvcache": ("q k_cache v_cache", CACHE),
}


@pytest.fixture
def installed() -> Iterator[ModuleType]:
    drop_in.install()
    yield sys.modules["flash_attn"]
    drop_in.uninstall()


@pytest.mark.usefixtures("installed")
def test_imports_of_flash_attn_work() -> None:
    package = importlib.import_module("flash_attn")
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    padding = importlib.import_module("flash_attn.bert_padding")
    assert package.flash_attn_func is interface.flash_attn_func is fastattention.fast_attn_func
    assert package.flash_attn_interface is interface
    assert package.bert_padding is padding
    assert (padding.unpad_input, padding.pad_input) == (drop_in.unpad_input, drop_in.pad_input)
    assert padding.index_first_axis is drop_in.index_first_axis
    assert tuple(int(part) for part in package.__version__.split(".")) == (2, 8, 3)
    assert importlib.util.find_spec("flash_attn") is not None
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers")


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_those_of_flash_attn(name: str, installed: ModuleType) -> None:
    """Arguments have its order and defaults; ours follow, keyword-only. max_seqlen may be omitted."""
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(installed, name)).parameters
    positional = [key for key, value in parameters.items() if value.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [*required.split(), *optional]
    assert {key: parameters[key].default for key in optional} == optional


def test_the_functions_compute(installed: ModuleType) -> None:
    q, k, v = (torch.randn(2, 5, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    out = installed.flash_attn_func(q, k, v, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-6, rtol=1e-5)


def test_installing_twice_and_uninstalling() -> None:
    drop_in.install()
    first = sys.modules["flash_attn"]
    drop_in.install()
    assert sys.modules["flash_attn"] is first
    drop_in.uninstall()
    drop_in.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
def test_another_flash_attn_is_not_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType(name)
    real.__file__ = f"site-packages/{name}.py"
    monkeypatch.setitem(sys.modules, name, real)
    with pytest.raises(FastAttentionError, match=f"^{name} is already imported, from site-packages/{name}"):
        drop_in.install()
    drop_in.uninstall()
    assert sys.modules[name] is real
    assert {"flash_attn", "flash_attn_interface"} & set(sys.modules) == {name}


masks = st.integers(1, 4).flatmap(
    lambda seqlen: st.lists(st.lists(st.booleans(), min_size=seqlen, max_size=seqlen), min_size=1, max_size=4)
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masks, st.sampled_from([torch.bool, torch.int64, torch.int32]))
def test_unpadding_and_padding_are_inverse(rows: list[list[bool]], dtype: torch.dtype) -> None:
    mask = torch.tensor(rows, dtype=dtype)
    batch_size, seqlen = mask.shape
    hidden = torch.arange(1.0, 1 + batch_size * seqlen * 6).view(batch_size, seqlen, 2, 3)
    unpadded, indices, cu_seqlens, longest, used = drop_in.unpad_input(hidden, mask)
    assert unpadded.shape == (sum(map(sum, rows)), 2, 3)
    assert cu_seqlens.dtype is used.dtype is torch.int32
    assert cu_seqlens.diff().tolist() == used.tolist() == [sum(row) for row in rows]
    assert cu_seqlens[0] == 0
    assert longest == max(sum(row) for row in rows)
    padded = drop_in.pad_input(unpadded, indices, batch_size, seqlen)
    assert torch.equal(padded, hidden * mask.bool()[:, :, None, None])


def test_unpadding_keeps_places_that_are_not_used() -> None:
    hidden = torch.arange(8.0).view(2, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    unpadded, indices, cu_seqlens, longest, used = drop_in.unpad_input(hidden, mask, unused)
    assert unpadded.tolist() == [0.0, 1.0, 2.0, 4.0]
    assert indices.tolist() == [0, 1, 2, 4]
    assert cu_seqlens.tolist() == [0, 3, 4]
    assert (longest, used.tolist()) == (3, [2, 1])


def test_padding_has_gradients() -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False, True], [False, True, False]])
    unpadded, indices, *_ = drop_in.unpad_input(hidden, mask)
    (drop_in.pad_input(unpadded, indices, 2, 3) * 2.0).sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, 2.0 * mask[:, :, None].expand(2, 3, 4))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"\(batch_size, seqlen\) = \(2, 3\), got shape \(2, 4\)"):
        drop_in.unpad_input(torch.zeros(2, 3, 4), torch.ones(2, 4))
