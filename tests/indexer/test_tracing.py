"""The indexer under autograd, torch.compile, fake tensors, vmap, transforms and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.mapped import check_mapped
from tiers import slow
from torch import Tensor, func
from torch.utils.flop_counter import FlopCounterMode

from fastattention import UnsupportedError
from fastattention.indexer import fast_indexer_func
from fastattention.indexer.operators import INDEXER
from fastattention.testing.indexer import IndexerCase

CASES = {
    "rows": IndexerCase(batch_size=2, seqlen_q=3, seqlen_k=20, nheads=4, headdim=16, topk=7),
    "varlen": IndexerCase(seqlens_q=(5, 0, 4), seqlens_k=(9, 3, 20), keys="varlen", nheads=2, headdim=8, topk=7),
    "pages": IndexerCase(batch_size=2, seqlen_q=3, seqlens_k=(9, 20), keys="pages", page_block_size=4, topk=7),
}
BACKENDS = ("cpu", "torch")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def arguments_of(case: IndexerCase, requires_grad: bool = False) -> dict[str, Any]:
    arguments = case.arguments(torch.float32)
    if requires_grad:
        for name in ("q", "k", "weights"):
            arguments[name] = arguments[name].clone().requires_grad_()
    return arguments


@every_case
def test_indices_have_no_gradients(case: IndexerCase) -> None:
    wanted = fast_indexer_func(**arguments_of(case))
    for backend in BACKENDS:
        found = fast_indexer_func(**arguments_of(case, requires_grad=True), backend=backend)
        assert torch.equal(found, wanted)
        assert not found.requires_grad


@every_case
def test_compiled_calls_give_the_same(case: IndexerCase) -> None:
    compiled = torch.compile(fast_indexer_func, backend="aot_eager", fullgraph=True)
    for requires_grad in (False, True):
        found = compiled(**arguments_of(case, requires_grad))
        assert torch.equal(found, fast_indexer_func(**arguments_of(case)))
        assert not found.requires_grad


@slow
@every_case
def test_the_operator_keeps_the_rules_of_torch(case: IndexerCase) -> None:
    given = {name: x for name, x in arguments_of(case).items() if isinstance(x, Tensor)}
    batch_size = 1
    if "cu_seqlens_q" not in given:
        batch_size = given["q"].shape[0]
        given.update({name: given[name].flatten(0, 1) for name in ("q", "weights")})
    if "cu_seqlens_k" in given:
        given["k"] = given["k"].unsqueeze(0)
    tensors = [given.get(name) for name in INDEXER.tensors]
    for backend in ("auto", "torch"):
        torch.library.opcheck(
            torch.ops.fastattention.indexer.default, (*tensors, case.topk, case.causal, batch_size, backend)
        )


def test_fake_and_meta_tensors_have_the_shape_of_indices() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def found(device: str) -> list[Tensor]:
        q, k, weights = (
            torch.empty(shape, dtype=torch.float16, device=device) for shape in ((2, 3, 4, 8), (2, 9, 8), (2, 3, 4))
        )
        offsets = torch.zeros(3, dtype=torch.int32, device=device)
        varlen = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return [
            fast_indexer_func(q, k, weights, 20),
            fast_indexer_func(q[0], k[0], weights[0], 5, **varlen),
        ]

    with FakeTensorMode():
        fake = found("cpu")
    for rows, varlen in (fake, found("meta")):
        assert (rows.shape, rows.dtype) == ((2, 3, 20), torch.int32)
        assert (varlen.shape, varlen.dtype) == ((3, 5), torch.int32)


@every_case
def test_vmap_is_a_call_for_each_index(case: IndexerCase) -> None:
    given = arguments_of(case)
    for names in ({"q"}, {"k"}, {"weights"}, {"q", "k", "weights"}):
        mapped = {name: torch.stack([given[name], -given[name].flip(0)]) for name in names}
        check_mapped(INDEXER, lambda **tensors: (fast_indexer_func(**tensors),), given, mapped, calls=2)


def test_vmap_of_lengths_and_of_another_axis() -> None:
    given = arguments_of(CASES["pages"])
    used = torch.tensor([[9, 20], [1, 7]], dtype=torch.int32)
    check_mapped(INDEXER, lambda **x: (fast_indexer_func(**x),), given, {"seqused_k": used}, calls=2)
    given = arguments_of(CASES["rows"])
    k = torch.stack([given["k"], -given["k"]], dim=1)
    found = torch.vmap(lambda k: fast_indexer_func(**given | {"k": k}), in_dims=1, out_dims=1)(k)
    assert torch.equal(found, torch.stack([fast_indexer_func(**given | {"k": x}) for x in k.unbind(1)], dim=1))


def test_transforms_follow_the_torch_backend() -> None:
    given = arguments_of(CASES["rows"])
    wanted = fast_indexer_func(**given)

    def loss(q: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
        indices = fast_indexer_func(**given | {"q": q}, backend=backend)
        return (q.sum() * indices.clamp(max=0).sum()), indices

    grad, found = func.grad(loss, has_aux=True)(given["q"])
    assert torch.equal(found, wanted)
    assert torch.equal(grad, torch.zeros_like(grad))
    with pytest.raises(UnsupportedError, match="follows operations of torch alone; use backend='torch'"):
        func.grad(lambda q: loss(q, "cpu")[0])(given["q"])
    found, tangent = func.jvp(lambda q: fast_indexer_func(**given | {"q": q}), (given["q"],), (given["q"],))
    assert torch.equal(found, wanted)
    assert not tangent.any()


@every_case
def test_autocast_changes_nothing(case: IndexerCase) -> None:
    for backend in BACKENDS:
        wanted = fast_indexer_func(**arguments_of(case), backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fast_indexer_func(**arguments_of(case), backend=backend), wanted)


def test_flops_are_those_of_products_and_their_sums() -> None:
    for name, keys in (("rows", 20), ("pages", 4 * 6)):  # pages: the tokens that rows of the table hold
        case = CASES[name]
        with FlopCounterMode(display=False) as counter:
            fast_indexer_func(**arguments_of(case))
        assert counter.get_total_flops() == 2 * 6 * case.nheads * keys * (case.headdim + 1)
