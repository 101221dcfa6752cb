"""The public functions of linear attention: flash-linear-attention's argument order and semantics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor

from fastattention.engine.checks import read_flag, require_tensor
from fastattention.engine.operator import Request, serves_requests
from fastattention.linear.gates import beta_of, kda_gate_of
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import LinearInputs, LinearOutput
from fastattention.linear.ssd import SsdArguments, ssd_inputs
from fastattention.linear.validation import LinearOptions, check_values_first, read_linear_options

Arguments = ParamSpec("Arguments")


def linear_function(read: Callable[Arguments, Any]) -> Callable[Arguments, tuple[Tensor, Tensor | None]]:
    """Makes a public function of `read`, which makes a Request of its arguments."""
    return serves_requests(read)


# Arguments of mamba_ssm's functions that ours do not have.
_MAMBA_NAMES = {
    "initial_states": "give initial_state",
    "return_final_states": "give output_final_state",
    "seq_idx": "give cu_seqlens",
    "z": "multiply the result by silu(z)",
    "chunk_size": "leave it out: backends choose their chunks",
}


def ssd_function(read: Callable[Arguments, Any]) -> Callable[Arguments, tuple[Tensor, Tensor | None]]:
    """`linear_function` for those with the names of mamba_ssm."""
    return serves_requests(read, _MAMBA_NAMES)


@linear_function
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Any:
    """Gated linear attention, in chunks of tokens: for prompts and training.

    For every token t and head, in float32, S being the state:

        S = diag(exp(g_t)) S + k_t v_t^T,  out_t = scale * S^T q_t

    - `q`, `k`: (batch_size, seqlen, nheads_k, headdim_k), float32, bfloat16 or float16, headdim up to 256
    - `v`: (batch_size, seqlen, nheads, headdim_v), in the dtype of q; nheads_k divides nheads, and nheads / nheads_k
        neighbouring heads share their queries and keys
    - `g`: logarithms of the gates, at most 0: (batch_size, seqlen, nheads, headdim_k), or (batch_size, seqlen, nheads)
        for one gate a head; any of the three dtypes. -inf forgets everything before the token
    - `scale`: None means headdim_k ** -0.5
    - `initial_state`: float32 (batch_size, nheads, headdim_k, headdim_v); None means zeros. It is not written
    - `output_final_state`: whether to return the state after the last token
    - `state_v_first`: states have headdim_v before headdim_k
    - `cu_seqlens`: int32 or int64 (num_sequences + 1,), rising from 0 to seqlen: sequences that follow one another in a
      batch of 1. States then are (num_sequences, ...)
    - `backend`: "auto", or the name of a backend; `fastattention.explain(..., function=chunk_gla)` lists them with
      reasons

    Returns (out, final_state): out like v; final_state float32, None unless asked for. Both have gradients, for every
    tensor. Raises ArgumentError for wrong arguments, UnsupportedError when the backend named cannot serve the call.
    """
    given = LinearInputs(q, k, v, g, None, initial_state, cu_seqlens)
    return _request(given, read_linear_options("gla", True, scale, False, output_final_state), state_v_first, backend)


@linear_function
def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Any:
    """Gated linear attention token by token: for decoding. Arguments and results are those of `chunk_gla`.

    Each state is read and written once, however many tokens there are.
    """
    given = LinearInputs(q, k, v, g, None, initial_state, cu_seqlens)
    return _request(given, read_linear_options("gla", False, scale, False, output_final_state), state_v_first, backend)


@linear_function
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Any:
    """The gated delta rule, in chunks of tokens: for prompts and training.

    For every token t and head, in float32, S being the state:

        S = exp(g_t) S,  S = S + k_t (beta_t (v_t - S^T k_t))^T,  out_t = scale * S^T q_t

    The arguments that are not listed are those of `chunk_gla`.

    - `g`: logarithms of the gates, at most 0: (batch_size, seqlen, nheads)
    - `beta`: how far a token overwrites what its key holds: (batch_size, seqlen, nheads), in any of the three dtypes
    - `use_qk_l2norm_in_kernel`: divides every query and key x by sqrt(sum(x^2) + 1e-6), in float32
    - `use_beta_sigmoid_in_kernel`: beta is given before its sigmoid
    - `allow_neg_eigval`: the sigmoid is doubled; takes use_beta_sigmoid_in_kernel

    Returns (out, final_state) and raises as `chunk_gla`.
    """
    given = LinearInputs(
        q, k, v, g, beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), initial_state, cu_seqlens
    )
    options = read_linear_options("gated_delta_rule", True, scale, use_qk_l2norm_in_kernel, output_final_state)
    return _request(given, options, state_v_first, backend)


@linear_function
def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Any:
    """The gated delta rule token by token: for decoding. Arguments and results are those of `chunk_gated_delta_rule`.

    Each state is read and written once, however many tokens there are.
    """
    given = LinearInputs(
        q, k, v, g, beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), initial_state, cu_seqlens
    )
    options = read_linear_options("gated_delta_rule", False, scale, use_qk_l2norm_in_kernel, output_final_state)
    return _request(given, options, state_v_first, backend)


@linear_function
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    *,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,  # noqa: N803, as in flash-linear-attention
    dt_bias: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """Kimi delta attention (KDA), in chunks of tokens: for prompts and training.

    The gated delta rule with a gate for every key dimension. For every token t and head, in float32, S being the state:

        S = diag(exp(g_t)) S,  S = S + k_t (beta_t (v_t - S^T k_t))^T,  out_t = scale * S^T q_t

    The arguments that are not listed are those of `chunk_gated_delta_rule`.

    - `g`: logarithms of the gates, at most 0: (batch_size, seqlen, nheads, headdim_k), any of the three dtypes
    - `use_gate_in_kernel`: g is given before its gate function, -exp(A_log) softplus(g + dt_bias), in float32
    - `lower_bound`: the function is lower_bound * sigmoid(exp(A_log) (g + dt_bias)) instead; negative, -5 in models
    - `A_log`: (nheads,); may be None with lower_bound, which stands for zeros
    - `dt_bias`: (nheads * headdim_k,) or (nheads, headdim_k); None means zeros

    Returns (out, final_state) and raises as `chunk_gla`.
    """
    g = kda_gate_of(g, q, v, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta = beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    given = LinearInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    options = read_linear_options("kda", True, scale, use_qk_l2norm_in_kernel, output_final_state)
    return _request(given, options, state_v_first, backend)


@linear_function
def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    *,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,  # noqa: N803, as in flash-linear-attention
    dt_bias: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """Kimi delta attention token by token: for decoding. Arguments and results are those of `chunk_kda`.

    Each state is read and written once, however many tokens there are.
    """
    g = kda_gate_of(g, q, v, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta = beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    given = LinearInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    options = read_linear_options("kda", False, scale, use_qk_l2norm_in_kernel, output_final_state)
    return _request(given, options, state_v_first, backend)


@ssd_function
def chunk_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803, as in mamba_ssm
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = True,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """Mamba-2, state space duality (SSD), in chunks of tokens: for prompts and training.

    Gated linear attention with a gate a head. For every token t and head, in float32, S being the state:

        S = exp(dt_t A) S + B_t (dt_t x_t)^T,  out_t = S^T C_t + D x_t

    Names and order are those of mamba_ssm's mamba_chunk_scan_combined.

    - `x`: (batch_size, seqlen, nheads, headdim), float32, bfloat16 or float16, headdim up to 256
    - `dt`: lengths of steps, (batch_size, seqlen, nheads), any of the three dtypes
    - `A`: (nheads,), negative; `D`: (nheads,), None means zeros; any of the three dtypes
    - `B`, `C`: (batch_size, seqlen, ngroups, dstate), in the dtype of x, dstate up to 256; ngroups divides nheads, and
      nheads / ngroups neighbouring heads share their B and C
    - `dt_bias`: (nheads,), added to dt; `dt_softplus`: then the softplus of it is taken; both in float32
    - `dt_limit`: the least and the largest step, to which steps are clamped last
    - `initial_state`: float32 (batch_size, nheads, headdim, dstate); None means zeros. It is not written
    - `output_final_state`: whether to return the state after the last token
    - `state_v_first`: False for states with dstate before headdim
    - `cu_seqlens`, `backend`: as of `chunk_gla`

    Returns (out, final_state): out like x; final_state float32, None unless asked for. Raises as `chunk_gla`.
    """
    given = SsdArguments(x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit)
    options = read_linear_options("ssd", True, 1.0, False, output_final_state)
    return _request(ssd_inputs(given, initial_state, cu_seqlens), options, state_v_first, backend)


@ssd_function
def recurrent_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803, as in mamba_ssm
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = True,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """Mamba-2 token by token: for decoding. Arguments and results are those of `chunk_ssd`.

    Each state is read and written once, however many tokens there are.
    """
    given = SsdArguments(x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit)
    options = read_linear_options("ssd", False, 1.0, False, output_final_state)
    return _request(ssd_inputs(given, initial_state, cu_seqlens), options, state_v_first, backend)


def _request(given: LinearInputs, options: LinearOptions, state_v_first: object, backend: str) -> Request:
    if state_v_first is False or not read_flag("state_v_first", state_v_first):
        return LINEAR_ATTENTION, given, options, backend, tuple
    if given.initial_state is not None:
        require_tensor("initial_state", given.initial_state)
        ranks = [x.dim() if isinstance(x, Tensor) else 0 for x in (given.q, given.v)]
        if ranks == [4, 4]:  # otherwise validation names q or v
            check_values_first(given)
        if given.initial_state.dim() >= 2:
            given = given._replace(initial_state=given.initial_state.mT)
    return LINEAR_ATTENTION, given, options, backend, _values_first


def _values_first(result: LinearOutput) -> tuple[Tensor, Tensor | None]:
    return result.out, None if result.final_state is None else result.final_state.mT.contiguous()
