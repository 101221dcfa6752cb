"""Runs the model in folder sys.argv[1] as a user would, and prints the class of its attention layers."""

from __future__ import annotations

import sys

from engine import attention_classes
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20, enforce_eager=True)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    (classes,) = llm.apply_model(attention_classes)
    print(*classes)
