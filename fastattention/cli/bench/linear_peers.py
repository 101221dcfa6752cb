"""Calls of linear attention that `fastattention bench linear` compares: ours, and those of peers."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from fastattention import linear
from fastattention.cli.bench.gpu import TimedCall

OURS = "fastattention"
PEERS = (OURS, "fla", "Transformers", "torch")

Call = Callable[..., Any]


class RuleCalls(NamedTuple):
    """The functions of a rule: for many tokens, and token by token."""

    ours: tuple[Call, Call]
    fla: tuple[str, str, str]  # module, and functions
    transformers: tuple[str, str, str] | None  # module, and functions


RULES = {
    "gated delta rule": RuleCalls(
        (linear.chunk_gated_delta_rule, linear.recurrent_gated_delta_rule),
        ("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ),
    "KDA": RuleCalls(
        (linear.chunk_kda, linear.recurrent_kda),
        ("kda", "chunk_kda", "fused_recurrent_kda"),
        ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    ),
    "GLA": RuleCalls((linear.chunk_gla, linear.recurrent_gla), ("gla", "chunk_gla", "fused_recurrent_gla"), None),
    "GLA, gates of heads": RuleCalls(
        (linear.chunk_gla, linear.recurrent_gla),
        ("simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla"),
        None,
    ),
    "Mamba-2": RuleCalls(
        (linear.chunk_ssd, linear.recurrent_ssd),
        ("simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla"),
        ("mamba2", "mamba2_chunk_scan", "mamba2_selective_state_update"),
    ),
}


@dataclass(frozen=True)
class LinearWorkload:
    """One call. trains: a forward and its backward."""

    rule: str  # of RULES
    batch_size: int
    seqlen: int
    dtype: str
    trains: bool
    nheads: int = 16
    headdim: int = 128

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, counted once."""
        return 4 * self.batch_size * self.nheads * self.headdim**2

    @property
    def is_step(self) -> bool:
        """Whether single tokens are decoded."""
        return self.seqlen == 1

    def tensors(self, device: str) -> dict[str, Tensor]:
        """q, k, v, g and, where the rule has it, beta. Heads of Mamba-2 share q and k, and have a `rate` each."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.batch_size, self.seqlen, self.nheads)
        dtype = getattr(torch, self.dtype)

        def normal(nheads: int, *more: int) -> Tensor:
            return torch.randn(*shape[:2], nheads, *more, generator=generator, device=device, dtype=torch.float32)

        heads_k = 1 if self.rule == "Mamba-2" else self.nheads
        q, k = (normalize(normal(heads_k, self.headdim), dim=-1).to(dtype) for _ in range(2))
        found = {"q": q, "k": k, "v": normal(self.nheads, self.headdim).to(dtype)}
        if self.rule in ("GLA", "KDA"):
            found["g"] = logsigmoid(normal(self.nheads, self.headdim)).to(dtype)
        else:
            found["g"] = logsigmoid(normal(self.nheads))
        if not self.rule.startswith("GLA"):
            found["beta"] = normal(self.nheads).sigmoid().to(dtype)
        if self.rule == "Mamba-2":
            found["rate"] = -torch.ones(self.nheads, device=device, dtype=torch.float32)
        return {name: tensor.requires_grad_(self.trains) for name, tensor in found.items()}

    def state(self, device: str) -> Tensor:
        """Zeros, before the first token."""
        return torch.zeros(self.batch_size, self.nheads, self.headdim, self.headdim, device=device, dtype=torch.float32)


def call_of(peer: str, workload: LinearWorkload, device: str) -> TimedCall:
    """A call of one of PEERS. Raises where the peer has none."""
    tensors, state = workload.tensors(device), workload.state(device)
    make: dict[str, Callable[..., TimedCall]] = {
        OURS: _ours,
        "fla": _fla,
        "Transformers": _transformers,
        "torch": functools.partial(_ours, backend="torch"),
    }
    call = make[peer](workload, tensors, state)
    if not workload.trains:
        return call
    leaves = list(tensors.values())
    weights = torch.randn(
        *tensors["v"].shape, generator=torch.Generator(device).manual_seed(1), device=device, dtype=torch.float32
    )

    def train() -> Any:
        results: Any = call()
        out = results[0]
        return torch.autograd.grad(out, leaves, weights.to(out.dtype), allow_unused=True)

    return train


def _ours(workload: LinearWorkload, tensors: dict[str, Tensor], state: Tensor, backend: str = "auto") -> TimedCall:
    function = RULES[workload.rule].ours[workload.is_step]
    arguments: dict[str, Any] = {"initial_state": state, "output_final_state": True, "backend": backend}
    if workload.rule == "Mamba-2":
        q, k, v, _, beta, rate = tensors.values()
        return functools.partial(function, v, beta, rate, k, q, state_v_first=False, **arguments)
    if workload.rule in ("gated delta rule", "KDA"):
        arguments["use_qk_l2norm_in_kernel"] = True
    return functools.partial(function, *tensors.values(), **arguments)


def _transformers(workload: LinearWorkload, tensors: dict[str, Tensor], state: Tensor) -> TimedCall:
    """The function of Transformers' models in operations of torch, whatever integration has replaced it."""
    names = RULES[workload.rule].transformers
    if names is None:
        raise ValueError(f"Transformers has no function for {workload.rule}")
    module = importlib.import_module(f"transformers.models.{names[0]}.modeling_{names[0]}")
    function = inspect.unwrap(getattr(module, names[1 + workload.is_step]))
    if workload.rule != "Mamba-2":
        q, k, v, g, beta = tensors.values()
        return functools.partial(
            function, q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    q, k, v, _, beta, rate = tensors.values()
    if not workload.is_step:
        return functools.partial(
            function, v, beta, rate, k, q, chunk_size=256, initial_states=state, return_final_states=True,
            dt_limit=(0.0, float("inf")),
        )  # fmt: skip
    size = workload.headdim
    return functools.partial(
        function, state, v[:, 0], beta[:, 0, :, None].expand(-1, -1, size), rate[:, None, None].expand(-1, size, size),
        k[:, 0], q[:, 0],
    )  # fmt: skip


def _fla(workload: LinearWorkload, tensors: dict[str, Tensor], state: Tensor) -> TimedCall:
    """flash-linear-attention's kernels."""
    module, *names = RULES[workload.rule].fla
    function = getattr(importlib.import_module(f"fla.ops.{module}"), names[workload.is_step])
    arguments: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    if workload.rule == "Mamba-2":  # by its GLA with gates of heads, which shares no keys
        q, k, v, _, beta, rate = tensors.values()

        def mamba_2() -> Any:
            queries, keys = (x.expand(-1, -1, workload.nheads, -1).contiguous() for x in (q, k))
            steps = beta.float()
            values = (v * steps.unsqueeze(-1)).to(v.dtype)
            return function(queries, keys, values, g=steps * rate, scale=1.0, **arguments)

        return mamba_2
    q, k, v, g = list(tensors.values())[:4]
    if "beta" in tensors:
        return functools.partial(
            function, q, k, v, g=g, beta=tensors["beta"], use_qk_l2norm_in_kernel=True, **arguments
        )
    name = "gk" if workload.rule == "GLA" and workload.is_step else "g"
    return functools.partial(function, q, k, v, **{name: g}, **arguments)
