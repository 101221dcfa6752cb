"""The device npu in host memory behaves as tests on it need."""

from __future__ import annotations

import pytest
import torch

from ascend.vendor import host_npu
from ascend.vendor.environment import skip_without_torch_npu

skip_without_torch_npu()
host_npu.install()


def test_torch_npu_sees_one_npu() -> None:
    assert torch.npu.device_count() == 1  # type: ignore[attr-defined]
    assert torch.npu.get_device_name(0) == "Ascend910B3"  # type: ignore[attr-defined]
    assert torch.ones(2, device="npu").device == torch.device("npu", 0)


def test_views_share_memory_and_operators_do_not() -> None:
    x = torch.arange(12.0, device="npu").view(3, 4)
    x.t()[1:].mul_(10)
    total = x + 0
    x.zero_()
    assert total.tolist() == [[0, 10, 20, 30], [4, 50, 60, 70], [8, 90, 100, 110]]
    assert x.sum().item() == 0


def test_results_may_be_written_to_tensors_of_any_size() -> None:
    x, out, fits = torch.ones(2, 3, device="npu"), torch.empty(0, device="npu"), torch.empty(3, 2, device="npu").t()
    torch.add(x, x, out=out)
    torch.mul(x, 3, out=fits)
    assert out.tolist() == [[2.0] * 3] * 2
    assert fits.tolist() == [[3.0] * 3] * 2
    assert fits.stride() == (1, 2)


def test_tensors_of_the_cpu_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="npu") + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([torch.ones(2, device="npu"), torch.ones(2)])


def test_waits_are_counted() -> None:
    x = torch.arange(6, device="npu")
    host_npu.waits.clear()
    (x + x)[1:].contiguous()
    assert not host_npu.waits
    x.cpu()
    x.max().item()
    x[x > 2]
    assert dict(host_npu.waits) == {"_to_copy": 1, "_local_scalar_dense": 1, "index": 1}


def test_float64_is_counted() -> None:
    host_npu.float64.clear()
    torch.ones(2, device="npu").double().sum()
    assert host_npu.float64["sum"] == 1
