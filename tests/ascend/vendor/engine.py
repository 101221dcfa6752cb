"""A backend that uses only the vendor's operators, for the list of cases."""

from __future__ import annotations

from conformance.engines import RegisteredEngine

from fastattention.attention.problem import Problem
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.backend import AscendBackend


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


class VendorEngine(RegisteredEngine):
    """The engine of the backend above."""

    @property
    def registered(self) -> dict[str, str]:
        return {VendorBackend.name: f"{__name__}:{VendorBackend.__name__}"}


ENGINE = VendorEngine("vendor")
