"""The limits of the operators of torch_npu, each with its source, as reasons to refuse a Problem.

indexer.py and linear_all_reduce.py have those of operators that are no attention.

Sources, as of torch_npu 2.13:
    [T]  torch_npu's documentation of npu_fusion_attention
    [I]  torch_npu's documentation of npu_fused_infer_attention_score
    [V]  CANN's page aclnnFlashAttentionVarLenScoreV5, what [T] runs for variable-length sequences
    [S]  CANN's page aclnnFlashAttentionScoreV3, what [T] runs with sinks
    [G]  CANN's pages aclnnFlashAttentionScoreGrad and, with sinks, its version 3: gradients of dense calls
    [U]  CANN's pages aclnnFlashAttentionUnpaddingScoreGradV4 and, with sinks, V5: gradients of varlen calls
    [F]  torch_npu's documentation of npu_sparse_flash_attention on A2 and A3, releases 7.3.0, 26.0.0 and 26.1.0
Where they disagree the narrower one counts.
"""

from __future__ import annotations

import torch

from fastattention.attention.problem import Layout, Problem
from fastattention.backends.ascend.vendor.operators import SELECTED, SELECTED_LATENTS, SELECTED_ROPE
from fastattention.backends.common.arguments import why_not_arguments
from fastattention.backends.common.gradients import why_not_backward

MAX_HEADS = 256  # [T], [I]: query heads
MAX_TOKENS = 2**20  # [T]: "1M" tokens of a sequence; [V]: and of all variable-length sequences
_MAX_HEADDIM = 768  # [T]
_MAX_BATCH = 2 * 2**20  # [T]: "2M" sequences of one length
_MAX_VARLEN_BATCH = 1024  # [T]: a list of lengths has at most "1K"; [V] allows 20000

_INSTEAD = "use backend='sdpa' or torch.no_grad()"

_MAX_CACHE_HEADDIM = 512  # [I]
# [I]: tokens of a page for one query; elements of headdim for more than one, but checked for every call, to be safe.
_STEP, _INT8_STEP = 16, 32  # float16 and bfloat16; int8
_MAX_INT8_QUERIES = 16  # [I]
_MAX_CACHE_GROUP = 64  # [I]: query heads a key head
_MAX_CACHE_BATCH = 65536  # [I]
_MAX_ROW = 65534  # [I]: nheads * headdim of BSND must be less than 65535; for a page, at most 65535
_MAX_DECODE_KEYS = 262144  # [I]: for one query
_MAX_PREFILL_TOKENS = 20 * 2**20  # [I]: "20M", for more than one query
_MAX_PAGE = 512  # [I]
_PREFILL_PAGE_STEP = 128  # [I]: more than one query
_SELECTED_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # [F]


def why_not(problem: Problem) -> str | None:
    """Why no operator of torch_npu computes exactly `problem`, or None.

    The device is not checked. Appending and rotary embedding happen before the operator and are no reason.
    """
    if problem.needs_grad:
        return _why_not_gradients(problem)
    if is_selected(problem):
        return _why_not_selected(problem)
    if (reason := why_not_features(problem)) is not None:
        return reason
    if problem.layout is Layout.KVCACHE:
        return why_not_inference(problem) or _why_not_quantized(problem)
    if problem.layout is Layout.VARLEN:
        return _why_not_varlen(problem)
    if why_not_inference(problem) is None:
        return None
    return _why_not_training(problem)


def why_not_features(problem: Problem) -> str | None:
    """Features that no operator has, or that it has with another meaning.

    pse and pse_shift hold biases and slopes as seqlen_q x seqlen_k values in the dtype of q: neither small nor exact.
    """
    return why_not_arguments(problem, "torch_npu", {"sinks"})


def _why_not_gradients(problem: Problem) -> str | None:
    """Why npu_fusion_attention and npu_fusion_attention_grad cannot serve a problem together, or None."""
    if (reason := why_not_backward(problem, "npu_fusion_attention_grad")) is not None:
        return reason
    without_gradients = {
        # It takes no gradient of lse, and the caller may differentiate lse.
        "return_lse": problem.return_lse,
        "deterministic=True": problem.deterministic,  # [G], [U]: the sums are in no fixed order unless CANN is told so
    }
    for given, is_given in without_gradients.items():
        if is_given:
            return f"{given} with gradients is not served by npu_fusion_attention_grad; {_INSTEAD}"
    if problem.headdim_v != problem.headdim:  # [U]; [G]: attention_in has the shape of query
        widths = f"headdim_v={problem.headdim_v} must equal headdim={problem.headdim}"
        return f"{widths} for npu_fusion_attention_grad; {_INSTEAD}"
    if "sinks" in problem.score_tensors and problem.dtype is torch.float32:  # version 3 of [G], V5 of [U]
        return f"sinks in float32: npu_fusion_attention_grad takes them with float16 and bfloat16; {_INSTEAD}"
    limits = _why_not_varlen if problem.layout is Layout.VARLEN else _why_not_training
    reason = why_not_features(problem) or limits(problem)
    return None if reason is None else f"{reason}; use backend='sdpa'"


def _why_not_training(problem: Problem) -> str | None:
    """Why npu_fusion_attention cannot serve a problem, or None."""
    if problem.headdim_v > problem.headdim:  # [T], [V], [S]
        return f"headdim_v={problem.headdim_v} must not exceed headdim={problem.headdim} for npu_fusion_attention"
    bounds = {
        "headdim": (problem.headdim, _MAX_HEADDIM),
        "nheads": (problem.nheads, MAX_HEADS),
        "seqlen_q": (problem.seqlen_q, MAX_TOKENS),
        "seqlen_k": (problem.seqlen_k, MAX_TOKENS),
        "batch_size": (problem.batch_size, _MAX_BATCH),
    }
    return _beyond(bounds, "npu_fusion_attention")


def _why_not_varlen(problem: Problem) -> str | None:
    if problem.is_paged:  # [T], [V]: there is no block table; [I]: nor with TND before bfloat16 and headdim 128
        return "block_table with variable-length sequences; npu_fusion_attention takes no pages"
    if (reason := _why_not_training(problem)) is not None:
        return reason
    bounds = {"batch_size": (problem.batch_size, _MAX_VARLEN_BATCH), "total_q": (problem.total_q, MAX_TOKENS)}
    return _beyond(bounds, "npu_fusion_attention with variable-length sequences")


def why_not_inference(problem: Problem) -> str | None:
    """Why npu_fused_infer_attention_score cannot serve a call with a cache, or a dense one, or None."""
    if problem.needs_grad:
        return f"a gradient is needed, and npu_fused_infer_attention_score has none; {_INSTEAD}"
    if problem.dtype not in (torch.float16, torch.bfloat16):  # [I]
        return f"dtype {problem.dtype}; npu_fused_infer_attention_score takes float16 and bfloat16"
    # Version 2 of the operator has learnable_sink: for variable-length sequences in bfloat16 only.
    if "sinks" in problem.score_tensors:
        return "sinks; npu_fused_infer_attention_score takes none with these layouts"
    if problem.headdim_v != problem.headdim:  # [I]: k and v have one shape
        return f"headdim_v={problem.headdim_v} must equal headdim={problem.headdim} for npu_fused_infer_attention_score"
    in_int8 = problem.cache_dtype is torch.int8
    step = _INT8_STEP if in_int8 else _STEP
    if problem.headdim % step:
        cache = " with an int8 cache" if in_int8 else ""
        return f"headdim={problem.headdim} must be a multiple of {step} for npu_fused_infer_attention_score{cache}"
    most_keys = _MAX_DECODE_KEYS if problem.seqlen_q == 1 else _MAX_PREFILL_TOKENS
    bounds = {
        "headdim": (problem.headdim, _MAX_CACHE_HEADDIM),
        "nheads": (problem.nheads, MAX_HEADS),
        "nheads / nheads_k": (problem.group_size, _MAX_CACHE_GROUP),
        "nheads * headdim": (problem.nheads * problem.headdim, _MAX_ROW),
        "seqlen_q": (problem.seqlen_q, _MAX_PREFILL_TOKENS),
        "seqlen_k": (problem.seqlen_k, most_keys),
        "batch_size": (problem.batch_size, _MAX_CACHE_BATCH),
    }
    return _beyond(bounds, "npu_fused_infer_attention_score") or _why_not_page(problem, step)


def _why_not_page(problem: Problem, decode_step: int) -> str | None:
    """Page sizes that it does not take. decode_step: for one query, pages must be a multiple of it."""
    size = problem.page_block_size
    if size is None:
        return None
    step = decode_step if problem.seqlen_q == 1 else _PREFILL_PAGE_STEP
    if size % step or size > _MAX_PAGE:
        return (
            f"page_block_size={size}; npu_fused_infer_attention_score takes multiples of {step} up to {_MAX_PAGE} "
            f"for seqlen_q={problem.seqlen_q}"
        )
    return None


def _why_not_quantized(problem: Problem) -> str | None:
    """Quantized caches, with a scale for every token and head, that it does not take."""
    if problem.cache_dtype is None:
        return None
    if problem.cache_dtype is not torch.int8:
        return f"a cache in {problem.cache_dtype}; npu_fused_infer_attention_score takes int8"
    if problem.seqlen_q == 1:
        return None
    # [I]: for more than one query, a scale belongs to a token. With one key head that is the same.
    refused = {
        f"nheads_k={problem.nheads_k}": problem.nheads_k > 1,
        f"dtype {problem.dtype}": problem.dtype is not torch.bfloat16,
        "block_table": problem.is_paged,
        f"more than {_MAX_INT8_QUERIES} queries": problem.seqlen_q > _MAX_INT8_QUERIES,
    }
    given = [name for name, is_given in refused.items() if is_given]
    if not given:
        return None
    return (
        f"{' and '.join(given)} with seqlen_q={problem.seqlen_q} and an int8 cache; beyond one query "
        f"npu_fused_infer_attention_score takes one key head, bfloat16, no pages, at most {_MAX_INT8_QUERIES} queries"
    )


def is_selected(problem: Problem) -> bool:
    """Whether pages have one token, which npu_fused_infer_attention_score does not take: keys that queries select."""
    return problem.layout is Layout.KVCACHE and problem.page_block_size == 1


def _why_not_selected(problem: Problem) -> str | None:
    """Why npu_sparse_flash_attention cannot serve a call whose pages have one token, or None. The chip is not checked.

    It has sinks on other chips only [F]. A problem does not tell whether v is in k: `selected.forward` refuses others.
    """
    if (reason := why_not_arguments(problem, SELECTED, ())) is not None:
        return reason
    if problem.dtype not in (torch.float16, torch.bfloat16) or problem.cache_dtype is not None:
        dtypes = f"dtype {problem.dtype}" + ("" if problem.cache_dtype is None else f", cache in {problem.cache_dtype}")
        return f"{dtypes}; {SELECTED} takes float16 and bfloat16 throughout"
    served = {
        "seqlen_q": 1,
        "nheads_k": 1,
        "headdim": SELECTED_LATENTS + SELECTED_ROPE,
        "headdim_v": SELECTED_LATENTS,
    }
    for name, only in served.items():
        if (given := getattr(problem, name)) != only:
            return f"{name}={given} with page_block_size=1; {SELECTED} takes {only}"
    if problem.nheads not in _SELECTED_HEADS:
        return f"nheads={problem.nheads}; {SELECTED} takes {', '.join(map(str, _SELECTED_HEADS))}"
    if 0 <= problem.window_left < problem.seqlen_k - 1:
        return f"window_size on the left, {problem.window_left}; {SELECTED} has none"
    if not hasattr(torch.ops.npu, SELECTED):
        return f"no {SELECTED} is registered; import torch_npu, or install a version that has it"
    return None


def _beyond(bounds: dict[str, tuple[int, int]], operator: str) -> str | None:
    """The reason of the first quantity that exceeds its limit; bounds: name -> (given, limit)."""
    for name, (given, limit) in bounds.items():
        if given > limit:
            return f"{name}={given}; {operator} takes at most {limit}"
    return None
