"""Calls on which plans are tested."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fastattention
from fastattention import fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention import operators
from unit.samples import int32

PACKAGE = Path(fastattention.__file__).parent
Function = Callable[..., Any]
Arguments = dict[str, Any]


def dense(**changes: Any) -> Arguments:
    return {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 7, 2, 8), "v": torch.randn(2, 7, 2, 8)} | changes


def varlen(**changes: Any) -> Arguments:
    tensors = {"q": torch.randn(5, 4, 8), "k": torch.randn(7, 2, 8), "v": torch.randn(7, 2, 8)}
    lengths = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 4, 7), "max_seqlen_q": 3, "max_seqlen_k": 4}
    return tensors | lengths | changes


def kvcache(**changes: Any) -> Arguments:
    tensors = {
        "q": torch.randn(2, 1, 4, 8), "k_cache": torch.randn(2, 16, 2, 8), "v_cache": torch.randn(2, 16, 2, 8),
        "k": torch.randn(2, 1, 2, 8), "v": torch.randn(2, 1, 2, 8), "cache_seqlens": int32(3, 5),
    }  # fmt: skip
    return tensors | changes


FUNCTIONS: dict[str, tuple[Function, Callable[..., Arguments]]] = {
    "dense": (fast_attn_func, dense),
    "varlen": (fast_attn_varlen_func, varlen),
    "kvcache": (fast_attn_with_kvcache, kvcache),
}
every_function = pytest.mark.parametrize(("function", "arguments"), FUNCTIONS.values(), ids=FUNCTIONS)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Fails the test for any call that is validated as a new one."""
    with contextlib.ExitStack() as stack:
        for name in ("prepare_prefill", "prepare_kvcache"):
            stack.enter_context(mock.patch.object(operators, name, side_effect=AssertionError("checked")))
        yield


def assert_new(call: Function, arguments: Arguments) -> None:
    """Asserts that the call is validated, with any result."""
    with unchecked(), pytest.raises(AssertionError, match="checked"):
        call(**arguments)


def other_strides(x: Tensor) -> Tensor:
    """As x, with its second axis outermost in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def files_of(call: Callable[[], object]) -> set[str]:
    """The files of the package whose functions a call enters."""
    entered: set[str] = set()

    def enter(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered
