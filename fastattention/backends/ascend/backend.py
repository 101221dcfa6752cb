"""The ascend backend: checks a call, and chooses between our kernels and the operators of torch_npu."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastattention import environment
from fastattention.attention.backend import AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, OutputGradients, Problem
from fastattention.backends.ascend.chips import Chip, find_chip
from fastattention.backends.ascend.device import device_name, why_no_npu
from fastattention.backends.common.arguments import why_not_arguments
from fastattention.backends.common.kv_append import append_tokens
from fastattention.backends.common.panel_cache import REFUSAL
from fastattention.errors import ArgumentError, UnsupportedError

# The first call on any machine imports this module to ask whether there is an NPU. Machines without one need no more.
if TYPE_CHECKING:
    from fastattention.backends.ascend.call import Launch
    from fastattention.backends.ascend.tiling import Tiling


# Not attn_bias: a tile of it would take the Vector units' buffers from the scores. Not qk_dtype: no tiling is made
# for the Cube's int8 products.
_SERVED_BY_KERNELS = frozenset({"alibi_slopes", "sinks", "softcap"})


class AscendBackend(AttentionBackend):
    """Attention on Ascend NPUs.

    The rule: an operator of torch_npu where one computes exactly what is asked, since those have been measured on the
    device; our Triton kernels, which have not, for everything else. Only the operators have a backward.

    implementation: "vendor" or "triton" for that one alone; None follows FASTATTENTION_ASCEND, else the rule.
    """

    name = "ascend"
    has_backward = True

    def __init__(self, implementation: str | None = None) -> None:
        self._forced = implementation

    def why_unavailable(self) -> str | None:
        """Why there is no NPU to run on."""
        return why_no_npu()

    def describe(self) -> str:
        """The NPUs, and which implementation computes on them."""
        count = torch.npu.device_count()  # type: ignore[attr-defined]  # torch_npu adds it
        chips = ", ".join(f"npu:{index} {device_name(index)}" for index in range(count))
        ours = _why_no_triton() or "our Triton kernels for other calls"
        return f"{chips}; operators of torch_npu where they are exact, {ours} (FASTATTENTION_ASCEND chooses)"

    def why_not(self, problem: Problem) -> str | None:
        """Refuses float8 caches, bias, dropout, wide heads, and gradients that the operators do not compute."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.panel_size:
            return REFUSAL
        reasons = self._reasons(problem)
        if None in reasons.values():
            return None
        return _listed(reasons)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Appends to the cache if asked to, then attends by the first implementation without a reason against it."""
        from fastattention.backends.ascend import call, vendor

        implementation = self.implementation(problem, inputs)
        if inputs.k_new is not None:
            inputs = inputs._replace(q=append_tokens(problem, inputs))
        if implementation == "vendor":
            return vendor.forward(problem, inputs)
        chip = self._chip(problem)
        prepared = call.prepare(problem, inputs, self._tiling(problem, chip), chip)
        with _current_device(problem.device):
            for launch in prepared.launches:
                self._launch(launch)
        return call.finish(prepared.output)

    def backward(
        self, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
    ) -> dict[str, Tensor]:
        """Gradients by an operator of torch_npu: our kernels refuse a problem with gradients."""
        from fastattention.backends.ascend import vendor

        return vendor.backward(problem, inputs, result, grads)

    def implementation(self, problem: Problem, inputs: Inputs | None = None) -> str:
        """Which implementation serves a problem: "vendor", or "triton", also where operators would copy these inputs.

        Raises UnsupportedError with the reasons when neither does.
        """
        from fastattention.backends.ascend import vendor

        reasons = self._reasons(problem)
        serving = [name for name, reason in reasons.items() if reason is None]
        if not serving:
            raise UnsupportedError(_listed(reasons))
        if inputs is not None and serving == ["vendor", "triton"] and vendor.why_rather_not(problem, inputs):
            return "triton"
        return serving[0]

    def how(self, problem: Problem) -> str:
        """Which implementation serves an accepted problem, why not the operators, and who computes gradients."""
        from fastattention.backends.ascend import vendor

        if problem.grads:
            return "operators of torch_npu, forward and backward"
        reasons = self._reasons(problem)
        if reasons.get("vendor", "") is None and vendor.is_selected(problem):
            return "npu_sparse_flash_attention of torch_npu, on a copy of the latents"
        if self.implementation(problem) == "triton":
            return f"our Triton kernels (vendor: {reasons['vendor']})" if "vendor" in reasons else "our Triton kernels"
        if problem.layout is Layout.KVCACHE and reasons.get("triton", "") is None:
            return "operators of torch_npu, or our Triton kernels where those would copy the cache"
        return "operators of torch_npu"

    def _reasons(self, problem: Problem) -> dict[str, str | None]:
        """Why each implementation that is allowed cannot serve `problem`, in the order in which they are tried."""
        reasons = {"vendor": self._why_not_vendor, "triton": self._why_not_triton}
        return {name: reasons[name](problem) for name in self._implementations()}

    def _why_not_vendor(self, problem: Problem) -> str | None:
        from fastattention.backends.ascend import vendor

        reason = self._why_no_operators() or vendor.why_not(problem)
        if reason is None and vendor.is_selected(problem):
            return self._why_no_chip(problem)  # older ones lack the operator
        return reason

    def _why_not_triton(self, problem: Problem) -> str | None:
        return self._why_no_compiler() or why_not_kernels(problem) or self._why_no_chip(problem)

    def _why_no_chip(self, problem: Problem) -> str | None:
        try:
            self._chip(problem)
        except ArgumentError as error:
            return f"this NPU is not known: {error}"
        return None

    # Tests, which have no NPU, replace these methods.

    def _why_not_device(self, problem: Problem) -> str | None:
        if problem.device.type != "npu":
            return f"tensors are on {problem.device}; the ascend backend takes tensors on npu"
        return None

    def _implementations(self) -> tuple[str, ...]:
        return environment.ascend_kernels() if self._forced is None else (self._forced,)

    def _why_no_operators(self) -> str | None:
        return _why_no_operators()

    def _why_no_compiler(self) -> str | None:
        return _why_no_triton()

    def _chip(self, problem: Problem) -> Chip:
        return find_chip(device_name(problem.device.index or 0))

    def _tiling(self, problem: Problem, chip: Chip) -> Tiling:
        from fastattention.backends.ascend.tiling import choose_tiling

        return choose_tiling(problem, chip)

    def _launch(self, launch: Launch) -> None:
        launch.kernel[(launch.num_programs,)](**launch.arguments, **launch.constants, **launch.options)


def _listed(reasons: dict[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    current: contextlib.AbstractContextManager[object] = getattr(torch, device.type).device(device)
    return current


def why_not_kernels(problem: Problem) -> str | None:
    """Why our kernels cannot serve `problem` on any chip, or None."""
    from fastattention.backends.ascend import call

    if problem.needs_grad:
        return "a gradient is needed and the kernels have no backward; use backend='sdpa' or torch.no_grad()"
    if (reason := why_not_arguments(problem, "our Triton kernel", _SERVED_BY_KERNELS)) is not None:
        return reason
    if problem.cache_dtype is not None and problem.layout is Layout.VARLEN:
        return "quantized pages are read for queries of one length only; use fast_attn_with_kvcache, or backend='sdpa'"
    if problem.cache_dtype not in (None, torch.int8):
        return f"a cache in {problem.cache_dtype} is not served, only in int8 and the dtype of q; use backend='sdpa'"
    if max(problem.headdim, problem.headdim_v) > call.MAX_HEADDIM:
        widths = f"headdim={problem.headdim}, headdim_v={problem.headdim_v}"
        return f"{widths}; at most {call.MAX_HEADDIM} is served"
    return None


@functools.cache
def _why_no_operators() -> str | None:
    from fastattention.backends.ascend import vendor

    return vendor.why_unavailable()


@functools.cache
def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton-ascend is not installed, which our kernels need; pip install triton-ascend"
    try:
        found = importlib.util.find_spec("triton.backends.ascend")
    except Exception as error:  # it imports triton, and triton-ascend mixed with upstream Triton fails in many ways
        return f"triton cannot be imported: {error}; uninstall every triton and install triton-ascend"
    if found is None:
        return "the triton that is installed is not triton-ascend; uninstall it and install triton-ascend"
    return None
