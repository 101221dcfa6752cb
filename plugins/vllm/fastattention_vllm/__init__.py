"""vLLM attention by fastattention.

vLLM loads `register` through the entry point group `vllm.general_plugins`, in each of its processes. From there on:

register       names one of the two classes below to vLLM
cpu.py         vLLM's classes on CPUs: backend, metadata builder, implementation. Replaces CPU_ATTN.
cuda.py        the same on NVIDIA GPUs, as the backend CUSTOM. Not run inside vLLM.
backend.py     what both report to vLLM: head sizes, cache dtypes, layout
paged_attention.py  the computation of both: writes a layer's cache and attends to it
options.py     the checked constructor arguments of a layer
metadata.py    one batch, as vLLM describes it
layout.py      keys, values and scales within vLLM's cache tensor
versions.py    the versions of vLLM that were tested

Only cpu.py, cuda.py and backend.py import vLLM at their top.
"""

from __future__ import annotations

import logging
import os

from fastattention_vllm.versions import why_untested

# A child of vLLM's own logger: vLLM gives no handler to others.
logger = logging.getLogger("vllm.fastattention")

CPU_BACKEND = "fastattention_vllm.cpu.FastAttentionCpuBackend"
CUDA_BACKEND = "fastattention_vllm.cuda.FastAttentionCudaBackend"


def register() -> None:
    """Names our attention backend to vLLM: CPU_ATTN on CPUs, CUSTOM on NVIDIA GPUs, nothing elsewhere.

    The environment variable FASTATTENTION_VLLM decides: 0 turns the plugin off, 1 turns it on with an untested version
    of vLLM too. Without it the plugin is on with tested versions, and others get a warning and vLLM's own attention.

    Raises ValueError for another value of FASTATTENTION_VLLM.
    """
    setting = os.environ.get("FASTATTENTION_VLLM", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"FASTATTENTION_VLLM={setting!r} is not allowed; use 0 (off) or 1 (on), or unset it")
    if setting == "0":
        return

    import vllm

    if (reason := why_untested(vllm.__version__)) is not None:
        if setting != "1":
            logger.warning("%s. vLLM's own attention stays; FASTATTENTION_VLLM=1 uses fastattention anyway", reason)
            return
        logger.warning("%s. FASTATTENTION_VLLM=1 uses fastattention anyway", reason)

    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The class is named by its path: vLLM imports it when it first needs it.
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
        logger.info("fastattention serves CPU_ATTN; FASTATTENTION_VLLM=0 turns it off")
    elif current_platform.is_cuda():
        if AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() != CUDA_BACKEND:
            taken = AttentionBackendEnum.CUSTOM.get_path()
            logger.warning("The attention backend CUSTOM is taken by %s; fastattention is not registered", taken)
            return
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
