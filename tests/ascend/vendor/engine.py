"""A backend that knows nothing but the vendor's operators, for the list of cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from conformance.engines import Engine, forget_backends

from fastattention.backends import registry
from fastattention.backends.ascend import vendor
from fastattention.backends.base import Backend
from fastattention.backends.common.kv_append import append_tokens
from fastattention.problem import AttentionOutput, Inputs, Problem


class VendorBackend(Backend):
    """Tensors stay on the CPU, where training.py and inference.py have registered the operators."""

    name = "vendor"

    def why_unavailable(self) -> str | None:
        return vendor.why_unavailable()

    def why_not(self, problem: Problem) -> str | None:
        return vendor.why_not(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        if inputs.k_new is not None:
            inputs = inputs._replace(q=append_tokens(problem, inputs))
        return vendor.forward(problem, inputs)

    def describe(self) -> str:
        return "operators of torch_npu on a CPU"


class VendorEngine(Engine):
    """Registered while it is active, and not otherwise."""

    @contextmanager
    def active(self) -> Iterator[None]:
        with mock.patch.dict(registry.ORDER, vendor=f"{__name__}:VendorBackend"):
            forget_backends()
            yield
        forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        with self.active():
            return super().refusal(problem)


ENGINE = VendorEngine("vendor")
