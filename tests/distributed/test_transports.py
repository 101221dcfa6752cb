"""Who may sum, and why not: transports other than c10d refuse processes, and say why."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from conformance.case import DenseCase
from torch import Tensor

from distributed.sums import Sum, check, run_part
from distributed.team import Team
from fastattention import ArgumentError, UnsupportedError
from fastattention.distributed import agreement
from fastattention.distributed.transports import c10d, check_name

ONE = Sum(DenseCase(name="refused", batch_size=2, seqlen_q=12, seqlen_k=12), (4, 6, 14))
REASONS = {
    ("ring_product", ONE): "it is for GPUs, and tensors are on cpu",
    ("peer_kernel", Sum(ONE.case, "auto")): "it is for GPUs, and tensors are on cpu",
}


def run_by(one: Sum, transport: str) -> Tensor:
    with mock.patch.object(c10d.C10d, "_all_reduce", side_effect=AssertionError("a sum has begun")):
        return run_part(one, "pairs", transport=transport)


@pytest.mark.parametrize(("transport", "one"), REASONS, ids=[transport for transport, _ in REASONS])
def test_a_transport_of_gpus_refuses_processes(team: Team, transport: str, one: Sum) -> None:
    for error in team.outcomes(run_by, one, transport):
        assert isinstance(error, UnsupportedError)
        assert str(error) == f"no transport can sum the rows of this call:\n  {transport}: {REASONS[transport, one]}"


def run_by_any(one: Sum) -> tuple[Tensor, str]:
    """The result in a pair of ranks, and whose it is."""
    out = run_part(one, "pairs", transport="auto")
    known = [each for group, each in agreement._agreements.items() if dist.get_world_size(group) == 2]
    [name] = {agreed.eager.transport.name for each in known for agreed in each.agreed.values()}
    return out, name


@pytest.mark.parametrize("plan", [(4, 6, 14), "auto"], ids=["given", "auto"])
def test_auto_then_takes_c10d(team: Team, plan: tuple[int, ...] | str) -> None:
    one = Sum(ONE.case, plan)
    results = team.run(run_by_any, one)
    assert [name for _, name in results] == ["c10d"] * team.size
    check(one, [out for out, _ in results[:2]])


@pytest.mark.parametrize("name", ["nccl_symmetric", "copy_engine", "", None, 3])
def test_an_unknown_transport_is_refused_and_the_known_are_named(name: object) -> None:
    with pytest.raises(ArgumentError, match=r"transport=.* choose 'auto' or one of 'c10d', 'ring_product', 'peer_"):
        check_name(name)
