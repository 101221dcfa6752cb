"""A backend that knows nothing but the vendor's operators, for the list of cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from conformance.engines import Engine, forget_backends

from fastattention.backends import registry
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.problem import Problem


class VendorBackend(AscendBackend):
    """Tensors stay on the CPU, where training.py and inference.py have registered the operators."""

    name = "vendor"

    def __init__(self) -> None:
        super().__init__("vendor")

    def why_unavailable(self) -> str | None:
        return vendor.why_unavailable()

    def describe(self) -> str:
        return "operators of torch_npu on a CPU"

    def _why_not_device(self, problem: Problem) -> str | None:
        return None


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
