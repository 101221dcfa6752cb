"""Tests what we rely on in vLLM. A failure here names what a new version changed."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, PAD_SLOT_ID
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout, get_kv_quant_mode

from fastattention_vllm.backend import FastAttentionBackend, FastAttentionMetadataBuilder
from fastattention_vllm.cpu import FastAttentionCpuBackend, FastAttentionCpuImpl, FastAttentionCpuMetadataBuilder
from fastattention_vllm.cuda import FastAttentionCudaBackend, FastAttentionCudaImpl
from fastattention_vllm.options import QUANTIZED

# Our class and vLLM's class whose methods it must match.
PAIRS: dict[str, tuple[type, type]] = {
    "cpu-impl": (FastAttentionCpuImpl, CPUAttentionBackendImpl),
    "cpu-builder": (FastAttentionCpuMetadataBuilder, CPUAttentionMetadataBuilder),
    "cpu-backend": (FastAttentionCpuBackend, CPUAttentionBackend),
    "builder": (FastAttentionMetadataBuilder, AttentionMetadataBuilder),
    "backend": (FastAttentionBackend, AttentionBackend),
    "cuda-backend": (FastAttentionCudaBackend, AttentionBackend),
    "cuda-impl": (FastAttentionCudaImpl, AttentionImpl),
}

# Arguments that vLLM passes to a layer's constructor only for models that need them.
OPTIONAL = {"sinks"}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("pair", PAIRS)
def test_methods_have_the_parameters_of_vllm(pair: str) -> None:
    ours, theirs = PAIRS[pair]
    compared = 0
    for name, member in vars(ours).items():
        original = getattr(theirs, name, None)
        if not callable(getattr(ours, name)) or original is None or isinstance(member, type):
            continue
        if name.startswith("__") and name != "__init__":
            continue
        mine = [parameter for parameter in parameters(getattr(ours, name)) if parameter not in OPTIONAL]
        assert mine == [parameter for parameter in parameters(original) if parameter not in OPTIONAL], name
        compared += 1
    assert compared >= 2


def test_constructor_and_cache_update_match_those_of_triton() -> None:
    assert parameters(FastAttentionCudaImpl.do_kv_cache_update) == parameters(TritonAttentionImpl.do_kv_cache_update)
    ours, theirs = (parameters(impl.__init__) for impl in (FastAttentionCudaImpl, TritonAttentionImpl))
    assert theirs[: len(ours)] == ours  # further arguments are given only to backends that ask for them


def test_own_cpu_backend_says_nothing_that_ours_does_not() -> None:
    known = {
        "forward_includes_kv_cache_update", "get_builder_cls", "get_impl_cls", "get_name", "get_supported_head_sizes",
        "get_supported_kernel_block_sizes", "supported_dtypes", "supported_kv_cache_dtypes",
        "supported_kv_cache_layouts", "supports_attn_type", "supports_kv_cache_dtype", "supports_non_causal",
        "supports_sliding_window",
    }  # fmt: skip
    assert {name for name in vars(CPUAttentionBackend) if not name.startswith("_")} <= known
    assert CPUAttentionBackend.forward_includes_kv_cache_update is False
    assert CPUAttentionBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)


def test_metadata_has_the_fields_that_are_read() -> None:
    needed = {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
        "max_seq_len", "block_table_tensor", "slot_mapping", "causal", "mm_req_doc_ranges", "rswa_prefix_lens",
    }  # fmt: skip
    assert needed <= {field.name for field in fields(CommonAttentionMetadata)}


def test_spec_of_a_quantized_cache_has_room_for_scales() -> None:
    assert {"head_size", "head_size_v", "kv_quant_mode", "state_content_bytes"} <= {
        field.name for field in fields(AttentionSpec)
    }
    for name, stored in QUANTIZED.items():
        allocated = STR_DTYPE_TO_TORCH_DTYPE[name]
        assert allocated.itemsize == stored.itemsize == 1
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=64, dtype=allocated, kv_quant_mode=get_kv_quant_mode(name)
        )
        assert FastAttentionBackend.customize_spec(spec).page_size_bytes == 2 * 16 * (2 * 64 + 8)
    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    assert FastAttentionBackend.customize_spec(plain) == plain


def test_numbers_and_names_that_are_relied_on() -> None:
    assert NULL_BLOCK_ID == 0
    assert PAD_SLOT_ID == -1
    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    assert AttentionType.DECODER == "decoder"
    assert parameters(register_backend)[:2] == ["backend", "class_path"]
    for name in (FastAttentionCpuBackend.get_name(), FastAttentionCudaBackend.get_name()):
        assert name in AttentionBackendEnum.__members__


def test_attention_stays_outside_cuda_graphs() -> None:
    assert FastAttentionMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
