"""What linear attention must return: cases, their tensors, the recurrence in float64, and how far off torch is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.backends.torch.linear import linear_attention as chunks_of_torch
from fastattention.backends.torch.linear import sums_between
from fastattention.engine.offsets import spans
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import RULES, LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.reference import l2norm, linear_attention
from fastattention.linear.validation import LinearOptions
from fastattention.testing.oracle import Expected, Results, error_of, largest


@dataclass(frozen=True)
class LinearCase:
    """One call. seqlens: of the sequences of a varlen call; otherwise there are `batch_size` of `seqlen` tokens."""

    # "delta", "head" (GLA with a gate a head), "key" (GLA with a gate for every key dimension), "kda" or "ssd"
    rule: str = "delta"
    batch_size: int = 1
    seqlen: int = 100
    seqlens: tuple[int, ...] | None = None
    nheads: int = 2
    nheads_k: int = 2
    headdim_k: int = 64
    headdim_v: int = 64
    gates: float = 1.0  # times the logarithms of sigmoids
    scale: float | None = None
    l2norm: bool = True  # of delta rules: without, its states grow without bound
    initial_state: bool = False
    returns_state: bool = True
    gate_dtype: torch.dtype | None = torch.float32  # None: that of q
    layout: str = "contiguous"  # or "heads": q, k and v are views of (batch_size, heads, seqlen, headdim)

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:
        """Axis -> value: what tests of this list are sampled by, in place of names. See tiers.py."""
        return {
            "rule": self.rule,
            "varlen": self.seqlens is not None,
            "batch": self.batch_size > 1,
            "seqlen": min(self.seqlen, 2) + (self.seqlen > 64),
            "headdims": (self.headdim_k, self.headdim_v),
            "group": self.nheads // self.nheads_k,
            "gates": self.gates,
            "scaled": self.scale is not None,
            "l2norm": self.l2norm,
            "state": (self.initial_state, self.returns_state),
            "gate_dtype": self.gate_dtype,
            "memory": self.layout,
        }

    def options(self, chunked: bool) -> LinearOptions:
        """The scalars of the call."""
        return LinearOptions(self._rule, chunked, self.scale, self.overwrites and self.l2norm, self.returns_state)

    @property
    def _rule(self) -> str:
        return {"delta": "gated_delta_rule", "head": "gla", "key": "gla"}.get(self.rule, self.rule)

    @property
    def overwrites(self) -> bool:
        """Whether the rule is a delta rule."""
        return RULES[self._rule].overwrites

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> LinearInputs:
        """Random tensors, the same on every device."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr(self).encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

        batch_size, seqlen = (1, sum(self.seqlens)) if self.seqlens is not None else (self.batch_size, self.seqlen)
        sequences = batch_size if self.seqlens is None else len(self.seqlens)
        q, k = (normal(batch_size, seqlen, self.nheads_k, self.headdim_k) for _ in range(2))
        v = normal(batch_size, seqlen, self.nheads, self.headdim_v)
        if not (self.overwrites and self.l2norm):
            k = functional.normalize(k, dim=-1)
        last = (self.headdim_k,) if self.rule in ("key", "kda") else ()
        g = self.gates * functional.logsigmoid(normal(batch_size, seqlen, self.nheads, *last))
        gate_dtype = self.gate_dtype or dtype
        beta = None
        if RULES[self._rule].has_beta:
            shape = (batch_size, seqlen, self.nheads)
            beta = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        state = normal(sequences, self.nheads, self.headdim_k, self.headdim_v) if self.initial_state else None
        offsets = None
        if self.seqlens is not None:
            offsets = torch.tensor([0, *self.seqlens], dtype=torch.int64, device="cpu").cumsum(0).to(torch.int32)
        if self.layout == "heads":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        beta = None if beta is None else beta.to(gate_dtype)
        skip = normal(self.nheads) if RULES[self._rule].has_skip else None
        inputs = LinearInputs(q.to(dtype), k.to(dtype), v.to(dtype), g.to(gate_dtype), beta, state, offsets, skip)
        return LinearInputs._make([None if x is None else x.to(device) for x in inputs])


def run_rule(inputs: LinearInputs, rule: str, chunked: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """(out, final state) of the operator. rule: as that of a LinearCase."""
    out, state = LINEAR_ATTENTION(inputs, LinearCase(rule=rule).options(chunked), backend)
    assert state is not None
    return out, state


def linear_results(output: LinearOutput) -> Results:
    """The results of a call by name."""
    return {name: one for name, one in output._asdict().items() if one is not None}


def expected_linear(problem: LinearProblem, inputs: LinearInputs) -> Expected:
    """What the call must return.

    Sums of a few tokens are exact in torch by chance: two roundings of the largest value are always allowed.
    """
    exact, usual = (linear_results(one(problem, inputs)) for one in (linear_attention, same_precision))
    return _expected(problem, exact, usual, 2)


def _expected(problem: LinearProblem, exact: Results, usual: Results, roundings: int) -> Expected:
    """roundings: of the largest value, which are always allowed."""
    floor = roundings * torch.finfo(problem.dtype).eps
    return Expected(
        exact,
        {name: error_of(name, usual[name], right) for name, right in exact.items()},
        {name: floor * largest(right) for name, right in exact.items()},
    )


def expected_gradients(problem: LinearProblem, inputs: LinearInputs) -> Expected:
    """What the gradients of `linear_gradients` must be, as `expected_linear` says it of results."""
    exact_problem = replace(problem, dtype=torch.float64)
    # Chunks in float64, as the recurrence would take a hundred times as long. A test compares the two.
    exact = linear_gradients(lambda x: chunks_of_torch(exact_problem, x, 16, torch.float64), inputs)
    usual = linear_gradients(lambda x: same_precision(problem, x), inputs)
    return _expected(problem, exact, usual, 4)


def linear_gradients(compute: Callable[[LinearInputs], LinearOutput], inputs: LinearInputs) -> Results:
    """The gradient of every tensor with one, for `random_gradients` of results."""
    leaves = leaves_of(inputs)
    results = [x for x in compute(inputs._replace(**leaves)) if x is not None and x.requires_grad]
    weights = random_gradients([x.shape for x in results], inputs.q.dtype)
    given = [weight.to(x.device, x.dtype) for weight, x in zip(weights, results, strict=True)]
    found = torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True, materialize_grads=True)
    return {f"gradient of {name}": grad for name, grad in zip(leaves, found, strict=True)}


def leaves_of(inputs: LinearInputs) -> dict[str, Tensor]:
    """All tensors that hold floats, which require a gradient."""
    floats = {name: x for name, x in inputs._asdict().items() if x is not None and x.is_floating_point()}
    return {name: x.detach().requires_grad_() for name, x in floats.items()}


def random_gradients(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Gradients of results of these shapes: the same in every call, and on the CPU."""
    generator = torch.Generator("cpu").manual_seed(0)
    floats = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
    return [x.to(dtype) for x in floats]


def same_precision(problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
    """What matrix units make of it: operands of products are rounded to the dtype of the call, sums are float32.

    In chunks or token by token, as the problem says: what a chunk rounds off a value no later token of it puts right.
    """

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(problem.dtype).float()

    q, k, v, g = (tensor.float() for tensor in inputs[:4])
    if problem.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (rounded(x).repeat_interleave(problem.group_size, dim=2) for x in (q * problem.scale, k))
    if not problem.gate_per_key:
        g = g.unsqueeze(-1)
    beta = None if inputs.beta is None else inputs.beta.float().unsqueeze(-1)
    chunk = 64 if problem.chunked else 1
    outs, last_states = [], []
    states = inputs.initial_state
    if states is None:
        states = torch.zeros(problem.state_shape, dtype=torch.float32, device=problem.device)
    for last_state, (batch, first, last) in zip(
        states, spans(problem.batch_size, problem.seqlen, inputs.cu_seqlens), strict=True
    ):
        for begin in range(first, last, chunk):
            part = slice(begin, min(begin + chunk, last))
            queries, keys, values, gates = (
                x[batch, part].transpose(0, 1) for x in (q, k, v, g)
            )  # (nheads, tokens, ...)
            between = sums_between(gates.unsqueeze(0))[0].exp()  # (nheads, tokens, tokens, headdim_k or 1)
            since = gates.cumsum(dim=1).exp()
            state, update = rounded(last_state), values
            between = between.expand(*between.shape[:3], keys.shape[-1])
            held = rounded(keys * since) @ state if problem.gate_per_key else since * (keys @ state)
            learned = None if beta is None else beta[batch, part].transpose(0, 1)
            if learned is not None and problem.delta_rule:
                system = learned * torch.einsum("hid,hjd,hijd->hij", keys, keys, between).tril(-1)
                right = learned * (values - held)
                update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            scores = torch.einsum("hid,hjd,hijd->hij", queries, keys, between)
            if learned is not None and not problem.delta_rule:
                update = learned * update
            result = rounded(queries * since) @ state + rounded(scores) @ rounded(update)
            if inputs.skip is not None:
                result = result + inputs.skip[:, None, None] * values
            outs.append(result.transpose(0, 1).to(problem.dtype))
            carried = rounded(keys * between[:, -1]) if problem.gate_per_key else keys
            update = update if problem.gate_per_key else update * between[:, -1, :, :1]
            last_state = since[:, -1].unsqueeze(-1) * last_state + carried.mT @ rounded(update)
        last_states.append(last_state)
    out = torch.cat(outs).reshape(problem.out_shape) if outs else torch.zeros_like(inputs.v)
    states = torch.stack(last_states) if last_states else states
    return LinearOutput(out, states if problem.returns_state else None)
