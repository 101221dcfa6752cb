"""Models whose indexers select keys: DeepSeek-V3.2, GLM-5 and others with the same code.

Their indexers end with the same statements, which score every key for every query and head in float32: 64 GiB for a
prompt of 16,384 tokens. Here these statements give way to `fast_indexer_func`, whose memory is bounded. So the mask
may be a SequenceMask. An indexer that ends in any other way stays as it is, and gets the matrix that it computes with.
GLM-5 Next, whose indexer pools keys, makes a matrix of its indices. Here it hands on the indices instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastattention.errors import ArgumentError
from fastattention.indexer import fast_indexer_func
from fastattention.integrations.transformers.latents import serve_latents
from fastattention.integrations.transformers.masks import (
    CachedMask,
    DenseMask,
    SelectedKeys,
    SequenceMask,
    VarlenMask,
    matrix_of,
)
from fastattention.integrations.transformers.model_source import (
    MASK,
    asks_interface,
    is_computation,
    modeling_of,
    modules_of,
    once_for_each_class,
)
from fastattention.integrations.transformers.versions import NAME

# The end of an indexer's forward: `weights`, before or after the scale of the scores, may be computed in any way.
_SCALED, _PLAIN = (
    f"scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)){scale}"
    for scale in (" * self.softmax_scale", "")
)
_RELU = "scores = F.relu(scores)"
_AFTER_WEIGHTS = """
index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
if attention_mask.dtype == torch.bool:
    index_scores = index_scores.masked_fill(~attention_mask, float("-inf"))
else:
    index_scores = index_scores + attention_mask
topk = min(self.index_topk, index_scores.shape[-1])
return index_scores.topk(topk, dim=-1).indices.to(torch.int32)
"""
_BUILDER = "build_attention_mask_from_topk"  # of GLM-5 Next
_SELECT = "__select_keys"  # the name of select_keys in the changed forward


@once_for_each_class
def serve_indexers(config_class: type) -> bool:
    """Changes the indexers of this configuration's model; whether its masks need not be matrices then."""
    modeling = modeling_of(config_class)
    if modeling is None:
        return False
    changed = [_change(one, modeling) for one in modules_of(config_class) if one.__name__.endswith("Indexer")]
    return any(changed) and all(changed) and _only_indexers_compute(modeling)


def serve_masks_of_indices(config: object) -> None:
    """Makes modules that turn indices into a mask hand on SelectedKeys, and latents, with this configuration."""
    if builds_masks_of_indices(config):
        serve_latents(config)


@once_for_each_class
def builds_masks_of_indices(config_class: type) -> bool:
    """Whether modules of a model make masks of indices, which are changed for fast_attention if they do."""
    builders = [module for module in modules_of(config_class) if _BUILDER in vars(module)]
    for module in builders:
        build = vars(module)[_BUILDER]
        if not hasattr(build, "hands_on_indices"):
            setattr(module, _BUILDER, _handing_on(build))
    return bool(builders)


def _handing_on(build: Any) -> Any:
    @functools.wraps(build)
    def handed_on(self: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Any:
        if self.config._attn_implementation != NAME:
            return build(self, topk_indices, query_states, kv_length)
        indices = topk_indices.sort(dim=-1, descending=True).values  # -1 stands last
        shape = (indices.shape[0], 1, indices.shape[1], kv_length)
        return SelectedKeys(shape, False, (-1, -1), functools.partial(matrix_of, indices, kv_length), indices)

    handed_on.hands_on_indices = True  # type: ignore[attr-defined]
    return handed_on


def select_keys(q: Tensor, k: Tensor, weights: Tensor, mask: SequenceMask, topk: int) -> Tensor:
    """The keys that an indexer selects of those that the mask shows.

    - `q`: (batch_size, seqlen_q, nheads, headdim)
    - `k`: (batch_size, seqlen_k, headdim), rows of a cache
    - `weights`: (batch_size, seqlen_q, nheads)

    Returns int32 (batch_size, seqlen_q, min(topk, seqlen_k)), columns of k; -1 is no key.
    """
    topk, q = min(topk, k.shape[1]), q.to(k.dtype)
    given = (q.shape[0], 1, q.shape[1], k.shape[1])
    if mask.shape != given:
        raise ArgumentError(f"the mask is for (batch_size, 1, seqlen_q, seqlen_k) = {mask.shape}, got {given}")
    if isinstance(mask, VarlenMask):
        return _select_of_packed(q, k, weights, mask, topk)
    if isinstance(mask, DenseMask):
        return fast_indexer_func(q, k[:, : mask.num_keys], weights, topk, mask.causal)
    assert isinstance(mask, CachedMask)
    order, lengths = mask.order, mask.cache_seqlens
    if mask.cache_leftpad is not None:
        columns = torch.arange(k.shape[1], dtype=torch.int64, device=k.device)
        order = (columns + mask.cache_leftpad[:, None]).clamp(max=k.shape[1] - 1)
        lengths = lengths - mask.cache_leftpad
    if order is None:
        return fast_indexer_func(q, k, weights, topk, mask.causal, seqused_k=lengths)
    k = k.take_along_dim(order[:, :, None], dim=1)
    found = fast_indexer_func(q, k, weights, topk, mask.causal, seqused_k=lengths)
    columns = order.gather(1, found.clamp(min=0).long().flatten(1)).view_as(found)
    return torch.where(found < 0, -1, columns).to(torch.int32)


def _select_of_packed(q: Tensor, k: Tensor, weights: Tensor, mask: VarlenMask, topk: int) -> Tensor:
    assert mask.tokens_q is not None
    assert mask.tokens_k is not None
    found = fast_indexer_func(
        q[mask.tokens_q], k[mask.tokens_k], weights[mask.tokens_q], topk, mask.causal, cu_seqlens_q=mask.cu_seqlens_q,
        cu_seqlens_k=mask.cu_seqlens_k,
    )  # fmt: skip
    first = mask.cu_seqlens_k[mask.tokens_q[0]]  # a sequence is the tokens of a row of the batch
    columns = mask.tokens_k[1][first[:, None] + found.clamp(min=0)]
    found = torch.where(found < 0, -1, columns).to(torch.int32)
    return found.new_full((*q.shape[:2], topk), -1).index_put(mask.tokens_q, found)


def _change(indexer: Any, modeling: ModuleType) -> bool:
    """Changes `forward` of a class, for calls with a SequenceMask, if it ends as expected. True if it has been."""
    forward = indexer.forward
    if hasattr(forward, "selects_keys"):
        return True
    changed = _changed(forward, modeling)
    if changed is None:
        return False
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation == NAME:
            mask = signature.bind_partial(self, *args, **kwargs).arguments.get(MASK)
            if isinstance(mask, SequenceMask):
                return changed(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    chosen.selects_keys = True  # type: ignore[attr-defined]
    indexer.forward = chosen
    return True


def _changed(forward: Any, modeling: ModuleType) -> Any:
    """The function with another end, or None where its own is not what is expected."""
    try:
        lines, first_line = inspect.getsourcelines(forward)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # no source
        return None
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    *start, scores, relu, weights, mask_and_topk, choose, count, result = function.body
    texts = [ast.unparse(node) for node in (scores, relu)]
    expected = ast.unparse(ast.parse(_AFTER_WEIGHTS))
    found = "\n".join(ast.unparse(node) for node in (mask_and_topk, choose, count, result))
    if texts not in ([_SCALED, _RELU], [_PLAIN, _RELU]) or found != expected:
        return None
    scale = " * self.softmax_scale" if texts[0] == _SCALED else ""
    end = ast.parse(f"return {_SELECT}(q, k, weights{scale}, attention_mask, self.index_topk)").body
    function.body = [*start, weights, *(ast.copy_location(node, result) for node in end)]
    ast.increment_lineno(ast.fix_missing_locations(tree), first_line - 1)
    names = {**vars(modeling), _SELECT: select_keys}
    exec(compile(tree, str(modeling.__file__), "exec"), names)  # tracebacks show lines of the model
    return names[function.name]


def _only_indexers_compute(modeling: ModuleType) -> bool:
    """Whether modules that ask for attention do no more with their mask than to hand it on, also to an indexer."""
    tree = ast.parse(inspect.getsource(modeling))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and asks_interface(node)]
    return not any(
        is_computation(node) and ast.unparse(node) != f"{MASK}[:, 0, :, :]"
        for function in functions
        for node in _of_fast_attention(function)
    )


def _of_fast_attention(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, but for code that runs with other implementations."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "_attn_implementation in ('eager', 'sdpa')" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _of_fast_attention(other)
        else:
            yield from _of_fast_attention(child)
