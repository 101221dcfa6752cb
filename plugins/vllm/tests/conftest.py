"""vLLM in this process, on the CPU, without network. These variables must be set before vLLM is imported."""

from __future__ import annotations

import os

os.environ.update(
    FASTATTENTION_VLLM="0",  # tests name the backend themselves
    HF_HUB_OFFLINE="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # for functions of tests that run in the engine's process
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
os.environ.setdefault("OMP_NUM_THREADS", "2")
