"""What is refused: every error names the argument, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Batch, make_layer, make_vllm_classes
from fastattention import ArgumentError, UnsupportedError

pytest.importorskip("vllm")
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec

from fastattention_vllm.cpu import FastAttentionCpuBackend, FastAttentionCpuImpl
from fastattention_vllm.cuda import FastAttentionCudaBackend

MODES = ("cpu", "gpu-class")


def make_impl(target: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    arguments = {
        "num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    return make_vllm_classes(target, dtype, arguments | changes)[0]


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head_size": 576}, UnsupportedError, r"head_size=576 .* allowed are 1 to 512"),
        ({"num_heads": 3}, ArgumentError, r"num_heads=3 must be a positive multiple of num_kv_heads=2"),
        ({"sliding_window": 0}, ArgumentError, r"sliding_window=0 must be at least 1, or None"),
        ({"logits_soft_cap": -1.0}, ArgumentError, r"logits_soft_cap=-1.0 must be finite and at least 0"),
        ({"scale": float("nan")}, ArgumentError, r"scale=nan must be finite"),
        ({"alibi_slopes": [0.5]}, ArgumentError, r"alibi_slopes has 1 numbers; needed are num_heads=4"),
        ({"sinks": torch.zeros(2)}, ArgumentError, r"sinks must be \(num_heads,\) = \(4,\), got \(2,\)"),
        (
            {"kv_cache_dtype": "fp8"},
            UnsupportedError,
            r"kv_cache_dtype='fp8' .* allowed are auto, .* one scale a token",
        ),
        ({"kv_cache_dtype": "int4_per_token_head"}, UnsupportedError, r"'int4_per_token_head' is not supported"),
        ({"kv_cache_dtype": "bfloat16"}, UnsupportedError, r"'bfloat16' differs from the model's dtype, torch.float32"),
    ],
    ids=["head_size", "num_heads", "window", "softcap", "scale", "alibi", "sinks", "fp8", "int4", "cache_dtype"],
)
def test_wrong_layers_are_refused(target: str, changes: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make_impl(target, **changes)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"dtype=torch.float64 .* allowed are torch.float16"):
        make_impl(dtype=torch.float64)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int4_per_token_head", "nvfp4"])
def test_backend_denies_other_cache_dtypes(kv_cache_dtype: str) -> None:
    assert not FastAttentionCpuBackend.supports_kv_cache_dtype(kv_cache_dtype)
    assert not FastAttentionCudaBackend.supports_kv_cache_dtype(kv_cache_dtype)
    assert FastAttentionCpuBackend.supports_kv_cache_dtype("int8_per_token_head")


@pytest.mark.parametrize("attn_type", [kind for kind in AttentionType if kind != AttentionType.DECODER])
def test_gpus_take_decoders_only(attn_type: AttentionType) -> None:
    assert not FastAttentionCudaBackend.supports_attn_type(attn_type)
    with pytest.raises(UnsupportedError, match=r"attn_type=.* is not supported on GPUs; allowed is 'decoder'"):
        make_impl("gpu-class", attn_type=attn_type)


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_fused_output_quantization_is_refused(target: str, name: str) -> None:
    batch = Batch([1], [5])
    impl = make_impl(target)
    with pytest.raises(UnsupportedError, match=f"{name} is given; fused quantization"):
        impl.forward(None, batch.query, None, None, batch.kv_cache, None, batch.query, **{name: torch.ones(1)})


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": torch.ones(2, dtype=torch.bool)}, "causal is a tensor"),
        ({"mm_req_doc_ranges": {0: [(1, 3)]}}, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.ones(2)}, "rswa_prefix_lens"),
    ],
    ids=["causal", "multimodal", "rswa"],
)
def test_masks_that_differ_between_requests_are_refused(target: str, changes: dict[str, Any], message: str) -> None:
    batch = Batch([1, 3], [5, 8])
    layer = make_layer(target, batch, scale=1.0)
    with pytest.raises(UnsupportedError, match=message):
        layer.forward(batch.query, batch.kv_cache, batch.common(**changes), torch.empty_like(batch.query))


def test_alibi_without_causal_mask_is_refused() -> None:
    batch = Batch([1, 3], [5, 8])
    layer = make_layer("cpu", batch, scale=1.0, alibi_slopes=[1.0] * 4)
    with pytest.raises(UnsupportedError, match="alibi_slopes with causal=False"):
        layer.forward(batch.query, batch.kv_cache, batch.common(causal=False), torch.empty_like(batch.query))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: cache[..., :100], r"must be \(num_blocks, num_kv_heads, block_size, 128\), got shape"),
        (lambda cache: cache[:, :, :8], "block_size=8 of kv_cache must be a multiple of 16"),
        (lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2), r"contiguous in its last two axes"),
        (lambda cache: cache.half(), "kv_cache has dtype torch.float16; the layer was made for torch.float32"),
    ],
    ids=["content", "block_size", "layout", "dtype"],
)
def test_other_caches_are_refused(change: Any, message: str) -> None:
    batch = Batch([1, 3], [5, 20])
    layer = make_layer("cpu", batch, scale=1.0)
    with pytest.raises(ArgumentError, match=message):
        layer.forward(batch.query, change(batch.kv_cache), batch.common(), torch.empty_like(batch.query))


def test_queries_of_another_dtype_are_refused() -> None:
    batch = Batch([1, 3], [5, 8])
    layer = make_layer("cpu", batch, scale=1.0)
    query = batch.query.half()
    with pytest.raises(ArgumentError, match=r"query has dtype torch.float16; the layer was made for torch.float32"):
        layer.forward(query, batch.kv_cache, batch.common(), torch.empty_like(query))


@pytest.mark.parametrize("target", MODES)
def test_warming_up_gives_zeros(target: str) -> None:
    output = torch.full((3, 4, 64), torch.nan)
    assert make_impl(target).forward(None, output, None, None, torch.tensor([]), None, output) is output
    assert (output == 0).all()


def test_encoders_and_cross_attention_go_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(CPUAttentionBackendImpl, "__init__", lambda self, *args: calls.append("init"))
    monkeypatch.setattr(CPUAttentionBackendImpl, "forward", lambda self, *args: calls.append("forward"))
    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", lambda self, *args: calls.append("update"))
    for attn_type in AttentionType:
        if attn_type == AttentionType.DECODER:
            continue
        impl = make_impl(attn_type=attn_type)
        impl.do_kv_cache_update(None, None, None, None, None)
        impl.forward(None, None, None, None, None, None, None)
        assert calls == ["init", "update", "forward"]
        calls.clear()
    assert issubclass(FastAttentionCpuImpl, CPUAttentionBackendImpl)


def test_block_sizes_of_encoders_are_those_of_vllm() -> None:
    shape: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    sizes = FastAttentionCpuBackend.get_supported_kernel_block_sizes
    for spec in (CrossAttentionSpec(**shape), EncoderOnlyAttentionSpec(**shape)):
        assert sizes(spec) == CPUAttentionBackend.get_supported_kernel_block_sizes(spec)
    assert [size.base for size in sizes(FullAttentionSpec(**shape))] == [16]
