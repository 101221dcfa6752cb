"""One vLLM engine after another in this process, with vLLM's own attention or with ours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from fastattention_vllm import CPU_BACKEND

# Chunks of 64 tokens make every longer prompt a chunked prefill, together with requests that decode.
CHUNK = 64

OURS = "FastAttentionCpuImpl"

T = TypeVar("T")


def in_engine(folder: Path, ours: bool, work: Callable[[LLM], T], dtype: str = "float32", **options: Any) -> T:
    """The result of `work` on an engine with our attention, or vLLM's own. The engine is closed afterwards."""
    AttentionBackendEnum.CPU_ATTN.clear_override()
    if ours:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    settings = {
        "max_model_len": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": CHUNK,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "enable_prefix_caching": True,
    }
    llm = None
    try:
        llm = LLM(model=str(folder), dtype=dtype, **(settings | options))
        assert llm.apply_model(attention_classes) == [{OURS if ours else "CPUAttentionBackendImpl"}]
        return work(llm)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        AttentionBackendEnum.CPU_ATTN.clear_override()


def attention_classes(model: Any) -> set[str]:
    """Names of the classes that implement a model's attention layers."""
    return {type(module.impl).__name__ for module in model.modules() if hasattr(module, "impl")}


def greedy_tokens(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt."""
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompt_logprobs(llm: LLM, prompts: list[list[int]]) -> Tensor:
    """Log-probability of every token of each prompt but its first, concatenated."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return torch.tensor(
        [
            place[token].logprob
            for output, prompt in zip(outputs, prompts, strict=True)
            for place, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
    )
