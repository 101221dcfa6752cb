"""The list of cases on the vendor's operators, as they are documented."""

from __future__ import annotations

import pytest
import torch
from conformance.check import check

from ascend.vendor.cases import MORE, parametrize, runs
from ascend.vendor.engine import ENGINE
from ascend.vendor.environment import skip_without_torch_npu
from fastattention.testing.case import Case

skip_without_torch_npu()

RUNS = runs(torch.float16, torch.bfloat16, torch.float32)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        parametrize(metafunc, RUNS)


def test_is_right_repeats_and_writes_nothing_else(case: Case, dtype: torch.dtype) -> None:
    check(ENGINE, case, dtype)


def test_every_case_of_ours_is_served() -> None:
    served = {case.name for case, dtype in RUNS if dtype is torch.bfloat16}
    assert [case.name for case in MORE if case.name not in served] == []
