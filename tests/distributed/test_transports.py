"""Who may sum, why not, and what is kept: transports other than c10d refuse processes, and say why."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.case import DenseCase
from torch import Tensor

from distributed.sums import Sum, check, run_part
from distributed.team import Team
from fastattention import ArgumentError, UnsupportedError
from fastattention.distributed import agreement
from fastattention.distributed.transports import Transfer, c10d, nccl_symmetric, on_one_host, peer_kernel
from fastattention.distributed.transports.copy_engine import CopyEngine
from fastattention.distributed.transports.nccl_symmetric import NcclSymmetric
from fastattention.distributed.transports.peer_kernel import PeerKernel
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.chips import CHIPS

CPU = torch.device("cpu")
ONE = Sum(DenseCase(name="refused", batch_size=2, seqlen_q=12, seqlen_k=12), (4, 6, 14))
REASONS = {
    "copy_engine": "it is for GPUs, and tensors are on cpu",
    "peer_kernel": "it is for GPUs, and tensors are on cpu",
    "ring_product": "it is for GPUs, and tensors are on cpu",
    "nccl_symmetric": "it is NCCL's, and the group has gloo for tensors on cpu",
}


def run_by(one: Sum, transport: str) -> Tensor:
    with mock.patch.object(c10d.C10d, "_begin", side_effect=AssertionError("a sum has begun")):
        return run_part(one, "pairs", transport=transport)


@pytest.mark.parametrize("transport", REASONS)
def test_a_transport_of_gpus_refuses_processes(team: Team, transport: str) -> None:
    for error in team.outcomes(run_by, ONE, transport):
        assert isinstance(error, UnsupportedError)
        assert str(error) == f"no transport can sum the rows of this call:\n  {transport}: {REASONS[transport]}"


def run_by_any(one: Sum) -> tuple[Tensor, str]:
    """The result in a pair of ranks, and whose it is."""
    out = run_part(one, "pairs", transport="auto")
    known = [each for group, each in agreement._agreements.items() if dist.get_world_size(group) == 2]
    [name] = {agreed.called.transport.name for each in known for agreed in each.agreed.values()}
    return out, name


@pytest.mark.parametrize("plan", [(4, 6, 14), "auto"], ids=["given", "auto"])
def test_auto_then_takes_c10d(team: Team, plan: tuple[int, ...] | str) -> None:
    one = Sum(ONE.case, plan)
    results = team.run(run_by_any, one)
    check(one, [out for out, _ in results[:2]])
    assert {name for _, name in results} == {"c10d"}


@contextlib.contextmanager
def pretended(reason: str | None = None) -> Any:
    """Transports of a group of one whose devices refuse for a reason, or not at all."""
    with (
        mock.patch.object(on_one_host, "_why_not_group", return_value=reason),
        mock.patch.object(nccl_symmetric, "_why_not_group", return_value=reason),
        mock.patch.object(c10d.C10d, "__init__", return_value=None),
        mock.patch.object(peer_kernel, "gather", lambda mine, group: [mine]),
        mock.patch.object(module, "device_limits", return_value=CHIPS["H100"]),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "get_world_size", return_value=1),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(torch.cuda, "Event"),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "MemPool", side_effect=lambda allocator: object()),
        mock.patch.object(torch.cuda, "use_mem_pool", side_effect=lambda pool, device: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        yield


GROUP = SimpleNamespace(group_name="pretended", _get_backend=lambda device: None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("transport", "hidden"), [(CopyEngine, 3), (PeerKernel, 3), (NcclSymmetric, 24)])
def test_where_nothing_speaks_against_it_every_dtype_is_summed(transport: Any, hidden: int, dtype: torch.dtype) -> None:
    with pretended():
        assert transport(GROUP, CPU).why_not(Transfer(7, hidden, dtype, CPU, 1)) is None
    with pretended("no"):
        assert transport(GROUP, CPU).why_not(Transfer(7, hidden, dtype, CPU, 1)) == "no"


@pytest.mark.parametrize("transport", [CopyEngine, PeerKernel])
def test_transports_on_one_host_add_floats_alone(transport: Any) -> None:
    with pretended():
        reason = transport(GROUP, CPU).why_not(Transfer(7, 3, torch.float64, CPU, 1))
    assert reason == "torch.float64 is not added up; float16, bfloat16 and float32 are"


@pytest.mark.parametrize(
    ("hidden", "dtype", "row_bytes"),
    [
        (1, torch.float16, 2),
        (3, torch.bfloat16, 6),
        (2, torch.float32, 8),
        (4, torch.float32, None),
        (71, torch.float16, 142),
        (72, torch.float16, None),  # 9 * 16
        (76, torch.bfloat16, 152),
        (1, torch.float64, 8),
    ],
)
def test_nccl_symmetric_refuses_rows_that_are_not_aligned(
    hidden: int, dtype: torch.dtype, row_bytes: int | None
) -> None:
    with pretended():
        reason = NcclSymmetric(GROUP, CPU).why_not(Transfer(16, hidden, dtype, CPU, 1))  # type: ignore[arg-type]
    wrong = f"rows of {row_bytes} bytes; its kernels sum wrongly what is not aligned to 16"
    assert reason == (None if row_bytes is None else wrong)


def group_of(backend: str) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))


@pytest.mark.parametrize(
    ("device", "backend", "version", "able", "reason"),
    [
        ("cuda", "nccl", (2, 27, 3), True, None),
        ("cuda", "nccl", (2, 28, 0), True, None),
        ("cpu", "gloo", (2, 27, 3), True, "it is NCCL's, and the group has gloo for tensors on cpu"),
        ("cuda", "gloo", (2, 27, 3), True, "it is NCCL's, and the group has gloo for tensors on cuda"),
        ("cuda", "nccl", (2, 26, 5), True, "NCCL 2.26.5 has no symmetric memory; 2.27 and newer have"),
        ("cuda", "nccl", (2, 27, 3), False, f"torch {torch.__version__} cannot register memory with NCCL"),
    ],
)
def test_nccl_symmetric_needs_what_it_is_made_of(
    device: str,
    backend: str,
    version: tuple[int, ...],
    able: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registering = SimpleNamespace(**({"register_mem_pool": None} if able else {}))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", registering, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert nccl_symmetric._why_not_group(group_of(backend), torch.device(device)) == reason


def test_nccl_symmetric_reads_no_memory_of_peers_where_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    reason = nccl_symmetric._why_not_group(group_of("nccl"), torch.device("cuda"))
    assert str(reason).startswith("NCCL_P2P_DISABLE=1 keeps GPUs from reading each other's memory")


def nccl() -> tuple[NcclSymmetric, mock.Mock]:
    """The transport, and its communicator that takes notes. Within `pretended`."""
    transport = NcclSymmetric(GROUP, CPU)  # type: ignore[arg-type]
    transport._communicator = mock.Mock()
    return transport, transport._communicator


def begin(transport: NcclSymmetric, count: int) -> Tensor:
    return transport.begin(torch.zeros(count, 4), [count])


def test_a_pool_is_registered_once_and_again_when_it_must_grow() -> None:
    with pretended():
        transport, communicator = nccl()
        first = begin(transport, 6)
        assert (first.shape, first.dtype) == ((6, 4), torch.float32)
        assert begin(transport, 3).data_ptr() == first.data_ptr()
        [(pool,)] = [call.args for call in communicator.register_mem_pool.call_args_list]
        communicator.deregister_mem_pool.assert_not_called()
        begin(transport, 7)
        communicator.deregister_mem_pool.assert_called_once_with(pool)
        assert communicator.register_mem_pool.call_count == 2
        assert all(call.kwargs == {"symm": True} for call in communicator.register_mem_pool.call_args_list)


def test_a_pool_that_a_graph_uses_stays_registered_until_the_end() -> None:
    with pretended():
        transport, communicator = nccl()
        captured = begin(transport, 6)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            assert begin(transport, 6).data_ptr() == captured.data_ptr()
            with pytest.raises(ArgumentError, match="a pool cannot grow while a CUDA graph is captured"):
                begin(transport, 7)
        assert begin(transport, 7).data_ptr() != captured.data_ptr()
        communicator.deregister_mem_pool.assert_not_called()
        assert [kept.data_ptr() for kept in transport._in_graphs.values()] == [captured.data_ptr()]
        transport.close()
        assert communicator.deregister_mem_pool.call_count == 2
        communicator.shutdown.assert_called_once()


def test_a_pool_that_is_given_back_is_taken_anew() -> None:
    with pretended():
        transport, communicator = nccl()
        transport.release()
        communicator.deregister_mem_pool.assert_not_called()
        begin(transport, 6)
        transport.release()
        communicator.deregister_mem_pool.assert_called_once()
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
            captured = begin(transport, 6)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            begin(transport, 6)
        transport.release()
        communicator.deregister_mem_pool.assert_called_once()  # a graph uses that one
        assert begin(transport, 6).data_ptr() != captured.data_ptr()


def test_a_pool_taken_in_inference_mode_serves_calls_out_of_it() -> None:
    with pretended():
        transport, _ = nccl()
        with torch.inference_mode():
            begin(transport, 6)
        with torch.no_grad():
            torch.mm(torch.ones(6, 2), torch.ones(2, 4), out=begin(transport, 6))
