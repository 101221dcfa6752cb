"""Calls of a known signature: not checked again, and right; wrong ones are refused as ever."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from unit.refusals import Refusal, assert_refused

from distributed.test_arguments import HIDDEN, WRONG, dense
from fastattention import ArgumentError, UnsupportedError, explain, fast_attn_func
from fastattention.distributed import agreement, attention_out_proj, attention_out_proj_allreduce
from fastattention.distributed.agreement import Agreed, Agreement, Key
from fastattention.distributed.row_blocks import Strategy
from fastattention.distributed.row_partitions import Partition
from fastattention.distributed.transports import Compute, Transfer, Transport
from fastattention.gpu_runtime import module


class Doubled(Transport):
    """A sum with another rank that has the same values."""

    name = "doubled"

    def __init__(self) -> None:
        pass

    def why_not(self, transfer: Transfer) -> str | None:
        return None

    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        partial = torch.full_like(out, torch.nan)
        compute(0, sum(rows), partial)
        torch.mul(partial, 2.0, out=out)


@pytest.fixture
def known(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agreement]:
    """The agreement of a group that seems to have two ranks, whose calls have one block. No gradient is recorded."""

    def agree(self: Agreement, key: Key, call: object, group: object) -> Agreed:
        return Agreed(*2 * (Strategy(Doubled(), Partition((key.problem.total_q,))),))

    monkeypatch.setattr(Agreement, "_agree", agree)
    found = agreement.agreement_of(dist.GroupMember.WORLD)
    found.group_size = 2
    with torch.no_grad():
        yield found


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Fails the test for any call that is checked."""
    with mock.patch.object(attention_out_proj, "prepare_dense", side_effect=AssertionError("checked")):
        yield


def check(found: Tensor, arguments: dict[str, Any]) -> None:
    """Checks that a result is the sum of two ranks with these arguments."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in arguments.items() if name not in tensors}
    q, k, v, w_o = (tensors[name].float() for name in ("q", "k", "v", "w_o"))
    expected = 2.0 * fast_attn_func(q, k, v, **options).flatten(2) @ w_o.t() + tensors.get("bias", 0.0)
    tolerance = 16 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


FULL = dense(bias=torch.ones(HIDDEN), out=torch.empty(2, 6, HIDDEN))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1), "softcap": 3.0},
    "scale": {"softmax_scale": 0.25},
    "bias": {"bias": torch.linspace(-1.0, 1.0, HIDDEN)},
    "out": {"out": torch.full((2, 6, HIDDEN), 7.0)},
    "strided": {"q": dense()["q"].transpose(1, 2).contiguous().transpose(1, 2)},
    "fewer-queries": {"q": torch.randn(2, 1, 4, 8)},
    "fewer-heads": {"q": torch.randn(2, 6, 2, 8), "w_o": torch.randn(HIDDEN, 10)},
    "wider": {"w_o": torch.randn(HIDDEN + 1, 20)},
    "parameter": {"w_o": torch.nn.Parameter(torch.randn(HIDDEN, 20))},
    "half": {name: value.bfloat16() for name, value in dense().items()},
}
LIKE_ANY_TENSOR = ("plain", "bias", "out", "parameter")
# Each differs from a call with bias and out in something that checks read, often in only one tensor.
OTHERS: dict[str, dict[str, Any]] = {name: KINDS[name] for name in KINDS if name not in LIKE_ANY_TENSOR} | {
    "no-bias": {"bias": None},
    "no-out": {"out": None},
    "fewer-rows": {"q": dense()["q"][:, :3]},
    "more-sequences": {"q": torch.empty_strided((3, 6, 4, 8), dense()["q"].stride())},
    "bias-shape": {"bias": torch.ones(1)},
    "out-shape": {"out": torch.empty(3, 6, HIDDEN)},
    **{f"{name}-fewer": {name: dense()[name][:, :5]} for name in ("k", "v")},
    **{f"{name}-strided": {name: dense()[name].mT.contiguous().mT} for name in ("q", "k", "v")},
    **{f"{name}-dtype": {name: value.bfloat16()} for name, value in FULL.items()},
    **{f"{name}-device": {name: value.to("meta")} for name, value in FULL.items()},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_call_like_an_earlier_one_is_right_and_not_checked_again(known: Agreement, changes: dict[str, Any]) -> None:
    attention_out_proj_allreduce(**dense(**changes))
    (signature,) = known.calls
    again = copy.deepcopy(dense(**changes))
    for value in again.values():
        if isinstance(value, Tensor):
            value.normal_()
    with unchecked():
        out = attention_out_proj_allreduce(**again)
    assert out is again.pop("out", out)
    assert list(known.calls) == [signature]
    check(out, again)


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_call_of_another_signature_is_checked_or_refused(known: Agreement, changes: dict[str, Any]) -> None:
    attention_out_proj_allreduce(**FULL)
    with unchecked():
        attention_out_proj_allreduce(**FULL)
    with unchecked(), pytest.raises((AssertionError, ArgumentError), match=r"checked|meta"):
        attention_out_proj_allreduce(**FULL | changes)


@WRONG
def test_wrong_arguments_are_refused_after_right_ones(known: Agreement, refusal: Refusal) -> None:
    out = torch.full((2, 6, HIDDEN), 7.0)
    attention_out_proj_allreduce(**dense(out=out))
    attention_out_proj_allreduce(**dense(out=out, bias=torch.ones(HIDDEN)))
    assert len(known.calls) == 2
    out.fill_(7.0)
    with torch.set_grad_enabled("gradient" in refusal.says):
        assert_refused(lambda: attention_out_proj_allreduce(**(dense(out=out) | refusal.changes)), refusal)
    assert (out == 7.0).all()


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cpu", None)])
def test_what_is_remembered_knows_its_gpu(device: str, index: int | None) -> None:
    made = Agreement(2)
    key = Key(mock.Mock(device=torch.device(device)), HIDDEN, False, "auto", "auto", None)
    made.agreed[key] = mock.Mock()
    with mock.patch.object(agreement.ATTENTION_BACKENDS, "select"):
        made.remember(("signature",), key, mock.Mock())
    assert made.calls["signature",].cuda_index == index


@pytest.mark.parametrize("name", ["q", "k", "v", "w_o"])
def test_what_looks_like_a_tensor_is_refused_after_tensors(known: Agreement, name: str) -> None:
    class Like:
        """An object with all attributes that signatures read."""

        def __init__(self, tensor: Tensor, shape: Sequence[int]) -> None:
            self.shape, self.dtype, self.device, self.stride = shape, tensor.dtype, tensor.device, tensor.stride

    attention_out_proj_allreduce(**dense())
    for shape in (dense()[name].shape, [*dense()[name].shape]):  # a list cannot be hashed
        with pytest.raises(ArgumentError, match=f"{name} must be a torch.Tensor, got Like"):
            attention_out_proj_allreduce(**dense(**{name: Like(dense()[name], shape)}))


def test_a_known_call_is_refused_where_more_is_wanted_of_it_or_explained(known: Agreement) -> None:
    arguments = dense()
    attention_out_proj_allreduce(**arguments)
    compiling = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
    for traced in (compiling, FakeTensorMode()):
        with traced, pytest.raises(UnsupportedError, match="being traced"):
            attention_out_proj_allreduce(**arguments)
    for name in ("q", "k", "v", "w_o"):
        with torch.enable_grad(), pytest.raises(ArgumentError, match="requires a gradient"):
            attention_out_proj_allreduce(**dense(**{name: dense()[name].requires_grad_()}))
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="gradient"):
        attention_out_proj_allreduce(**dense(q=forward_ad.make_dual(dense()["q"], torch.ones(2, 6, 4, 8))))
    with mock.patch.object(Doubled, "run", side_effect=AssertionError("summed")):
        assert explain(**arguments, function=attention_out_proj_allreduce).backend == "cpu"


def test_a_known_call_to_a_gpu_that_is_not_current_is_checked(
    known: Agreement, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = dense()
    attention_out_proj_allreduce(**arguments)
    ((signature, cached),) = known.calls.items()
    known.calls[signature] = cached._replace(cuda_index=1)
    monkeypatch.setattr(module, "current_device", lambda: 1)
    with unchecked():
        attention_out_proj_allreduce(**arguments)
    monkeypatch.setattr(module, "current_device", lambda: 0)
    with unchecked(), pytest.raises(AssertionError, match="checked"):
        attention_out_proj_allreduce(**arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"partition": [12]},
        {"alibi_slopes": torch.ones(4), "causal": True},
        {"attn_bias": torch.zeros(7)},
        {"sinks": torch.zeros(4)},
        *({name: dense()[name].mT.contiguous().mT} for name in ("q", "k", "v")),  # copied
    ],
    ids=["blocks", "alibi", "attn_bias", "sinks", "q", "k", "v"],
)
def test_calls_that_need_more_are_checked_every_time(known: Agreement, changes: dict[str, Any]) -> None:
    attention_out_proj_allreduce(**dense(**changes))
    assert not known.calls
    assert len(known.agreed) == 1


def test_a_rank_that_is_alone_has_agreed_on_nothing(known: Agreement) -> None:
    known.group_size = 1
    attention_out_proj_allreduce(**dense())
    assert not known.calls


def test_what_ranks_no_longer_agree_on_is_forgotten(known: Agreement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_KEPT", 2)
    agreed, kept = [], []
    for seqlen_q, partition in ((1, "auto"), (2, [4]), (3, "auto"), (4, [8]), (3, "auto")):
        attention_out_proj_allreduce(**dense(q=torch.randn(2, seqlen_q, 4, 8), partition=partition))
        agreed.append([key.problem.seqlen_q for key in known.agreed])
        kept.append([call.key.problem.seqlen_q for call in known.calls.values()])
    assert agreed == [[1], [1, 2], [2, 3], [3, 4], [3, 4]]
    assert kept == [[1], [1], [3], [], [3]]


def test_signatures_of_one_kind_of_call_are_bounded(known: Agreement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_KEPT", 2)
    for count in range(3):
        room = torch.randn(2, 6 + count, 4, 8)
        attention_out_proj_allreduce(**dense(q=room[:, :6]))
    assert len(known.agreed) == 1
    assert len(known.calls) == 1
