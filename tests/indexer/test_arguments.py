"""Refusals of the indexer, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from unit.samples import int32

from fastattention import ArgumentError, UnsupportedError, explain
from fastattention.indexer import fast_indexer_func

Q, K, WEIGHTS = torch.zeros(2, 3, 4, 8), torch.zeros(2, 9, 8), torch.zeros(2, 3, 4)
CALL: dict[str, Any] = {"q": Q, "k": K, "weights": WEIGHTS, "topk": 5}
VARLEN: dict[str, Any] = {"q": Q.flatten(0, 1), "weights": WEIGHTS.flatten(0, 1), "cu_seqlens_q": int32(0, 2, 6)}
VARLEN_KEYS: dict[str, Any] = {"k": K.flatten(0, 1), "cu_seqlens_k": int32(0, 7, 18)}
PAGES: dict[str, Any] = {"k": torch.zeros(6, 4, 8), "block_table": int32([0, 5, -1], [3, -1, -1]),
                         "seqused_k": int32(8, 3)}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q-no-tensor": ({"q": 3}, r"q must be a torch.Tensor, got int"),
    "q-rank": ({"q": Q[0]}, r"q must be \(batch_size, seqlen_q, nheads, headdim\), got shape \(3, 4, 8\)"),
    "q-rank-varlen": (VARLEN | {"q": Q}, r"q must be \(total_q, nheads, headdim\), got shape \(2, 3, 4, 8\)"),
    "q-dtype": ({"q": Q.double()}, r"q has dtype torch.float64; allowed are float16, bfloat16, float32"),
    "k-no-tensor": ({"k": None}, r"k must be a torch.Tensor, got NoneType"),
    "k-with-heads": ({"k": K[:, :, None]}, r"k must be \(batch_size, seqlen_k, headdim\), got shape \(2, 9, 1, 8\)"),
    "k-rank-varlen": (VARLEN_KEYS | {"k": K}, r"k must be \(total_k, headdim\), got shape \(2, 9, 8\)"),
    "k-rank-pages": (PAGES | {"k": K[0]}, r"k must be \(num_blocks, page_block_size, headdim\), got shape \(9, 8\)"),
    "k-dtype": ({"k": K.half()}, r"k has dtype torch.float16 and q has torch.float32; they must be the same"),
    "k-device": ({"k": K.to("meta")}, r"k is on meta and q on cpu; they must be on the same device"),
    "k-headdim": ({"k": K[..., 1:]}, r"k must have the headdim of q, 8, got 7"),
    "k-batch": ({"k": K[:1]}, r"keys are those of 1 sequences, and queries of 2"),
    "k-more-batches": ({"k": K.repeat(2, 1, 1)}, r"keys are those of 4 sequences, and queries of 2"),
    "k-batch-varlen": (VARLEN | {"k": K[:1]}, r"keys are those of 1 sequences, and queries of 2"),
    "weights-no-tensor": ({"weights": 1.0}, r"weights must be a torch.Tensor, got float"),
    "weights-of-heads": ({"weights": WEIGHTS[0, 0]}, r"weights must be .* = \(2, 3, 4\), got \(4,\)"),
    "weights-tokens": (
        {"weights": WEIGHTS[:, :2]},
        r"weights must be \(batch_size, seqlen_q, nheads\) = \(2, 3, 4\), got \(2, 2, 4\)",
    ),
    "weights-varlen": (VARLEN | {"weights": WEIGHTS}, r"weights must be \(total_q, nheads\) = \(6, 4\), got shape"),
    "weights-dtype": ({"weights": WEIGHTS.int()}, r"weights must be float32, float16 or bfloat16, got torch.int32"),
    "weights-device": ({"weights": WEIGHTS.to("meta")}, r"weights is on meta and q on cpu"),
    "topk-zero": ({"topk": 0}, r"topk=0 must be at least 1"),
    "topk-type": ({"topk": 2.5}, r"topk must be an integer, got 2.5"),
    "causal-type": ({"causal": 3}, r"causal must be True or False, got 3"),
    "offsets-dtype": (VARLEN | {"cu_seqlens_q": torch.tensor([0, 6])}, r"cu_seqlens_q must be int32, got torch.int64"),
    "offsets-rank": (VARLEN | {"cu_seqlens_q": int32([0, 6])}, r"cu_seqlens_q must be \(batch_size \+ 1\) = \(any\)"),
    "offsets-empty": (VARLEN | VARLEN_KEYS | {"cu_seqlens_q": int32(), "cu_seqlens_k": int32()},
                      r"cu_seqlens_q must be \(batch_size \+ 1,\), got no elements; an empty batch is \[0\]"),
    "offsets-first": (VARLEN | {"cu_seqlens_q": int32(1, 2, 6)}, r"cu_seqlens_q must start at 0, got 1"),
    "offsets-order": (VARLEN | {"cu_seqlens_q": int32(0, 7, 6)}, r"cu_seqlens_q must not decrease, got 7 then 6"),
    "offsets-end": (VARLEN | {"cu_seqlens_q": int32(0, 2, 5)}, r"must end at the number of tokens, 6, got 5"),
    "key-offsets-size": (VARLEN_KEYS | {"cu_seqlens_k": int32(0, 18)}, r"cu_seqlens_k must be .* = \(3\), got shape"),
    "key-offsets-dtype": (VARLEN_KEYS | {"cu_seqlens_k": torch.zeros(3)}, r"cu_seqlens_k must be int32, got torch"),
    "key-offsets-end": (VARLEN_KEYS | {"cu_seqlens_k": int32(0, 7, 17)}, r"cu_seqlens_k must end at .*, 18, got 17"),
    "used-size": ({"seqused_k": int32(4)}, r"seqused_k must be \(batch_size\) = \(2\), got shape \(1,\)"),
    "used-dtype": ({"seqused_k": torch.zeros(2)}, r"seqused_k must be int32, got torch.float32"),
    "used-negative": ({"seqused_k": int32(4, -1)}, r"seqused_k\[1\]=-1 must be 0 to 9, the tokens of that sequence"),
    "used-beyond": ({"seqused_k": int32(10, 4)}, r"seqused_k\[0\]=10 must be 0 to 9"),
    "used-beyond-varlen": (VARLEN_KEYS | {"seqused_k": int32(8, 4)}, r"seqused_k\[0\]=8 must be 0 to 7"),
    "used-beyond-pages": (PAGES | {"seqused_k": int32(13, 3)}, r"seqused_k\[0\]=13 must be 0 to 12"),
    "pages-without-lengths": (PAGES | {"seqused_k": None}, r"seqused_k must be given with block_table"),
    "pages-and-offsets": (PAGES | VARLEN_KEYS, r"cu_seqlens_k and block_table cannot be given together"),
    "pages-without-tokens": (PAGES | {"k": torch.zeros(6, 0, 8)}, r"with at least one token a page, got \(6, 0, 8\)"),
    "table-rank": (PAGES | {"block_table": int32(0, 5)}, r"block_table must be \(batch_size, max_blocks\) = \(2, any"),
    "table-batch": (PAGES | {"block_table": int32([0, 5, 1])}, r"block_table must be .* got shape \(1, 3\)"),
    "table-dtype": (PAGES | {"block_table": torch.zeros(2, 3)}, r"block_table must be int32, got torch.float32"),
    "table-page": (PAGES | {"seqused_k": int32(9, 3)}, r"block_table names page -1 for .*; the cache has pages 0 to 5"),
    "table-page-beyond": (PAGES | {"block_table": int32([0, 6, 0], [3, 0, 0])}, r"block_table names page 6 for seq"),
    "backend": ({"backend": "gpu"}, r"backend='gpu' is not known; choose 'auto' or one of 'cuda', 'ascend', 'cpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_the_argument(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        fast_indexer_func(**CALL | changes)


@pytest.mark.parametrize("keys", [{}, VARLEN_KEYS, PAGES], ids=["rows", "varlen", "pages"])
@pytest.mark.parametrize("queries", [{}, VARLEN], ids=["batch", "varlen"])
def test_queries_and_keys_may_be_varlen_or_not(queries: dict[str, Any], keys: dict[str, Any]) -> None:
    arguments = CALL | queries | keys
    assert fast_indexer_func(**arguments).shape == (*arguments["q"].shape[:-2], 5)


@pytest.mark.parametrize(
    ("first", "wrong", "message"),
    [
        (VARLEN, {"cu_seqlens_q": int32(0, 2, 7)}, "cu_seqlens_q must end at"),
        (VARLEN_KEYS, {"cu_seqlens_k": int32(0, 2, 19)}, "cu_seqlens_k must end at"),
        (PAGES, {"seqused_k": int32(8, 13)}, r"seqused_k\[1\]=13"),
        (PAGES, {"block_table": int32([0, 7, 0], [3, 0, 0])}, "page 7"),
    ],
    ids=["offsets", "key-offsets", "lengths", "pages"],
)
def test_values_are_checked_in_every_call(first: dict[str, Any], wrong: dict[str, Any], message: str) -> None:
    """Calls with a cached plan check them too."""
    fast_indexer_func(**CALL | first)
    with pytest.raises(ArgumentError, match=message):
        fast_indexer_func(**CALL | first | wrong)


@pytest.mark.parametrize("call", [{}, VARLEN | VARLEN_KEYS, PAGES], ids=["rows", "varlen", "pages"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_kernels_cannot_read_is_named(call: dict[str, Any]) -> None:
    given = CALL | call
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            continue
        without_memory = tensor.clone()
        without_memory.untyped_storage().resize_(0)
        for wrong, says in (
            (tensor.to_sparse(), f"{name} has layout torch.sparse_coo"),
            (torch.nested.nested_tensor([tensor]), f"{name} is a nested tensor"),
            (without_memory, f"{name} has {tensor.numel()} elements and no memory"),
        ):
            with pytest.raises(ArgumentError, match=says):
                fast_indexer_func(**given | {name: wrong})


def test_explain_lists_backends_with_reasons() -> None:
    explanation = explain(Q, K, WEIGHTS, 5, function=fast_indexer_func)
    assert explanation.backend == "cpu"
    text = str(explanation)
    assert "total_q=6, nheads=4, headdim=8, topk=5" in text
    assert all(f"{name}: " in text for name in ("cuda", "cpu", "torch"))


def test_a_backend_that_cannot_serve_a_call_says_why() -> None:
    with pytest.raises(UnsupportedError, match=r"cuda: "):
        fast_indexer_func(Q, K, WEIGHTS, 5, backend="cuda")
