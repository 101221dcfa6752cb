"""Calls of a known signature: not checked again, and right; wrong ones are refused as ever."""

from __future__ import annotations

import contextlib
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
from fastattention.distributed import agreement, attention_linear, attention_linear_allreduce
from fastattention.distributed.agreement import Agreed, Agreement, Key
from fastattention.distributed.row_blocks import Strategy
from fastattention.distributed.row_partitions import Partition
from fastattention.distributed.transports import Compute, Transfer, Transport
from fastattention.gpu_runtime import module


class Doubled(Transport):
    """A sum with another rank that has the same numbers."""

    name = "doubled"

    def __init__(self) -> None:
        pass

    def why_not(self, transfer: Transfer) -> str | None:
        return None

    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        partial = torch.full_like(out, torch.nan)
        compute(0, sum(rows), partial)
        torch.mul(partial, 2.0, out=out)


def agreed_on(rows: int) -> Agreed:
    return Agreed(*2 * (Strategy(Doubled(), Partition((rows,))),))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agreement]:
    """Of a group that seems to be of two, whose calls have one block."""
    monkeypatch.setattr(Agreement, "_agree", lambda self, key, call, group: agreed_on(key.problem.total_q))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = agreement.agreement_of(dist.GroupMember.WORLD)
    found.group_size = 2
    yield found
    dist.destroy_process_group()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Any call that is checked fails the test."""
    with mock.patch.object(attention_linear, "prepare_dense", side_effect=AssertionError("checked")):
        yield


def heads_first(x: Tensor) -> Tensor:
    """As x, in the strides that models have."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def check(found: Tensor, arguments: dict[str, Any]) -> None:
    """It is the sum of two ranks that have these arguments."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in arguments.items() if name not in tensors}
    q, k, v, w_o = (tensors[name].float() for name in ("q", "k", "v", "w_o"))
    expected = 2.0 * fast_attn_func(q, k, v, **options).flatten(2) @ w_o.t() + tensors.get("bias", 0.0)
    tolerance = 16 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def with_other_numbers(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return type(value)(torch.randn_like(value)) if isinstance(value, torch.nn.Parameter) else torch.randn_like(value)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1), "softcap": 3.0},
    "scale": {"softmax_scale": 0.25},
    "bias": {"bias": torch.linspace(-1.0, 1.0, HIDDEN)},
    "out": {"out": torch.full((2, 6, HIDDEN), 7.0)},
    "strided": {"q": heads_first(dense()["q"]), "v": heads_first(dense()["v"])},
    "fewer-queries": {"q": torch.randn(2, 1, 4, 8)},
    "fewer-heads": {"q": torch.randn(2, 6, 2, 8), "w_o": torch.randn(HIDDEN, 10)},
    "wider": {"w_o": torch.randn(HIDDEN + 1, 20)},
    "parameter": {"w_o": torch.nn.Parameter(torch.randn(HIDDEN, 20))},
    "half": {name: value.bfloat16() for name, value in dense().items()},
}
SAME_STRIDES: dict[str, dict[str, Any]] = {
    "fewer-rows": {"q": dense()["q"][:, :3]},
    "fewer-keys": {"k": dense()["k"][:, :5], "v": dense()["v"][:, :5]},
}
# A parameter is like any tensor.
OTHERS = {name: changes for name, changes in (KINDS | SAME_STRIDES).items() if name not in ("plain", "parameter")}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_a_call_like_an_earlier_one_is_right_and_not_checked_again(known: Agreement, changes: dict[str, Any]) -> None:
    attention_linear_allreduce(**dense(**changes))
    (signature,) = known.calls
    again = {name: with_other_numbers(value) for name, value in dense(**changes).items()}
    with unchecked():
        out = attention_linear_allreduce(**again)
    assert out is again.pop("out", out)
    assert list(known.calls) == [signature]
    check(out, again)


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
@torch.no_grad()
def test_a_call_of_another_signature_is_another(known: Agreement, changes: dict[str, Any]) -> None:
    attention_linear_allreduce(**dense())
    with unchecked(), pytest.raises(AssertionError, match="checked"):
        attention_linear_allreduce(**dense(**changes))


@WRONG
def test_wrong_arguments_are_refused_after_right_ones(known: Agreement, refusal: Refusal) -> None:
    out = torch.full((2, 6, HIDDEN), 7.0)
    with torch.no_grad():
        attention_linear_allreduce(**dense(out=out))
        attention_linear_allreduce(**dense(out=out, bias=torch.ones(HIDDEN)))
    assert len(known.calls) == 2
    out.fill_(7.0)
    with contextlib.nullcontext() if "gradient" in refusal.name else torch.no_grad():
        assert_refused(lambda: attention_linear_allreduce(**(dense(out=out) | refusal.changes)), refusal)
    assert (out == 7.0).all()


ALMOST: dict[str, tuple[dict[str, Any], str]] = {
    "q-shape": ({"q": torch.empty_strided((3, 6, 4, 8), dense()["q"].stride())}, "batch_size"),
    "k-shape": ({"k": dense()["k"][:, :5]}, "seqlen_k"),
    "v-shape": ({"v": dense()["v"][:, :5]}, "seqlen_k"),
    **{f"{name}-dtype": ({name: dense()[name].bfloat16()}, "bfloat16") for name in ("q", "k", "v")},
    **{f"{name}-device": ({name: dense()[name].to("meta")}, "meta") for name in ("k", "v")},
    "bias-shape": ({"bias": torch.ones(1)}, "bias"),
    "bias-dtype": ({"bias": torch.ones(HIDDEN).double()}, "bias"),
    "bias-device": ({"bias": torch.ones(HIDDEN, device="meta")}, "bias"),
    "out-shape": ({"out": torch.empty(3, 6, HIDDEN)}, "out"),
    "out-dtype": ({"out": torch.empty(2, 6, HIDDEN).double()}, "out"),
    "out-device": ({"out": torch.empty(2, 6, HIDDEN, device="meta")}, "out"),
}


@pytest.mark.parametrize(("change", "named"), ALMOST.values(), ids=ALMOST)
@torch.no_grad()
def test_a_single_tensor_that_does_not_fit_is_refused_after_those_that_do(
    known: Agreement, change: dict[str, Any], named: str
) -> None:
    fitting = dense(bias=torch.ones(HIDDEN), out=torch.empty(2, 6, HIDDEN))
    attention_linear_allreduce(**fitting)
    with unchecked():
        attention_linear_allreduce(**fitting)
    with pytest.raises(ArgumentError, match=named):
        attention_linear_allreduce(**fitting | change)


@torch.no_grad()
def test_a_tangent_is_refused_after_tensors_without(known: Agreement) -> None:
    attention_linear_allreduce(**dense())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(dense()["q"], torch.ones(2, 6, 4, 8))
        with pytest.raises(ArgumentError, match="gradient"):
            attention_linear_allreduce(**dense(q=dual))


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cpu", None)])
def test_what_is_remembered_knows_its_gpu(device: str, index: int | None) -> None:
    made = Agreement(2)
    key = Key(mock.Mock(device=torch.device(device)), HIDDEN, False, "auto", "auto", None)
    made.agreed[key] = agreed_on(1)
    with mock.patch.object(agreement, "select_backend"):
        made.remember(("signature",), key, mock.Mock())
    assert made.calls["signature",].cuda_index == index


@pytest.mark.parametrize("name", ["q", "k", "v", "w_o"])
@torch.no_grad()
def test_what_looks_like_a_tensor_is_refused_after_tensors(known: Agreement, name: str) -> None:
    class Like:
        """Has all that is looked at."""

        def __init__(self, tensor: Tensor, shape: Sequence[int]) -> None:
            self.shape, self.dtype, self.device, self.stride = shape, tensor.dtype, tensor.device, tensor.stride

    attention_linear_allreduce(**dense())
    for shape in (dense()[name].shape, [*dense()[name].shape]):  # a list cannot be looked up
        with pytest.raises(ArgumentError, match=f"{name} must be a torch.Tensor, got Like"):
            attention_linear_allreduce(**dense(**{name: Like(dense()[name], shape)}))


@torch.no_grad()
def test_a_known_call_is_refused_where_it_is_traced_and_only_explained_where_it_is_explained(known: Agreement) -> None:
    arguments = dense()
    attention_linear_allreduce(**arguments)
    with (
        mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        pytest.raises(UnsupportedError, match="being traced"),
    ):
        attention_linear_allreduce(**arguments)
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="being traced"):
        attention_linear_allreduce(**arguments)
    with mock.patch.object(Doubled, "run", side_effect=AssertionError("summed")):
        assert explain(**arguments, function=attention_linear_allreduce).backend == "cpu"


def test_a_gradient_that_is_wanted_of_a_known_call_is_refused(known: Agreement) -> None:
    with torch.no_grad():
        attention_linear_allreduce(**dense())
    for name in ("q", "k", "v", "w_o"):
        with pytest.raises(ArgumentError, match="requires a gradient"):
            attention_linear_allreduce(**dense(**{name: dense()[name].requires_grad_()}))


@torch.no_grad()
def test_a_known_call_to_another_gpu_than_the_current_one_goes_the_longer_way(
    known: Agreement, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = dense()
    attention_linear_allreduce(**arguments)
    ((signature, cached),) = known.calls.items()
    known.calls[signature] = cached._replace(cuda_index=1)
    monkeypatch.setattr(module, "current_device", lambda: 1)
    with unchecked():
        attention_linear_allreduce(**arguments)
    monkeypatch.setattr(module, "current_device", lambda: 0)
    with unchecked(), pytest.raises(AssertionError, match="checked"):
        attention_linear_allreduce(**arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": [12]},
        {"alibi_slopes": torch.ones(4), "causal": True},
        {"attn_bias": torch.zeros(7)},
        {"sinks": torch.zeros(4)},
        *({name: dense()[name].mT.contiguous().mT} for name in ("q", "k", "v")),  # copied
    ],
    ids=["blocks", "alibi", "attn_bias", "sinks", "q", "k", "v"],
)
@torch.no_grad()
def test_calls_that_need_more_are_checked_every_time(known: Agreement, changes: dict[str, Any]) -> None:
    attention_linear_allreduce(**dense(**changes))
    assert not known.calls
    assert len(known.agreed) == 1


@torch.no_grad()
def test_a_rank_that_is_alone_has_agreed_on_nothing(known: Agreement) -> None:
    known.group_size = 1
    attention_linear_allreduce(**dense())
    assert not known.calls


@pytest.mark.parametrize("name", ["q", "k", "v"])
@torch.no_grad()
def test_a_strided_last_axis_is_still_copied(known: Agreement, name: str) -> None:
    attention_linear_allreduce(**dense())
    strided = dense()[name].mT.contiguous().mT
    with unchecked(), pytest.raises(AssertionError, match="checked"):
        attention_linear_allreduce(**dense(**{name: strided}))


@torch.no_grad()
def test_what_ranks_no_longer_agree_on_is_forgotten(known: Agreement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_KEPT", 2)
    kept = []
    for seqlen_q, plan in ((1, "auto"), (2, [4]), (3, "auto"), (4, [8]), (3, "auto")):
        attention_linear_allreduce(**dense(q=torch.randn(2, seqlen_q, 4, 8), plan=plan))
        assert {call.key for call in known.calls.values()} <= set(known.agreed)
        kept.append([call.key.problem.seqlen_q for call in known.calls.values()])
    assert kept == [[1], [1], [3], [], [3]]


@torch.no_grad()
def test_signatures_of_one_kind_of_call_are_bounded(known: Agreement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_KEPT", 2)
    for count in range(3):
        room = torch.randn(2, 6 + count, 4, 8)
        attention_linear_allreduce(**dense(q=room[:, :6]))
    assert len(known.agreed) == 1
    assert len(known.calls) == 1
