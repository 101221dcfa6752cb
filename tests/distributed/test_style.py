"""TilingAllReduce: a block of attention that is parallelized computes what the whole one does, in row blocks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiers import slow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from distributed.layers import (
    HEADDIM,
    HIDDEN,
    NHEADS,
    Attend,
    assert_as_exact_as,
    cached,
    causal,
    computed,
    exact,
    parallel,
    thirds,
    tokens,
    whole,
    window,
)
from distributed.team import Team
from fastattention import fast_attn_func
from fastattention.distributed import (
    DeferredAttention,
    NotTiledWarning,
    TilingAllReduce,
    deferred_attn,
    deferred_attn_with_kvcache,
    npu,
    row_partitions,
)
from fastattention.errors import ArgumentError, UnsupportedError

TILED = r"attention, projection and all-reduce run one after the other: "


@contextlib.contextmanager
def told(reason: str | None) -> Iterator[None]:
    """Asserts that exactly this reason, if any, is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    given = [str(warning.message) for warning in caught if warning.category is NotTiledWarning]
    assert len(given) == (reason is not None), given
    assert reason is None or f"{TILED}{reason}" in given[0], given


def in_blocks(size: int, attend: Attend) -> Tensor:
    """The result on one rank, which has asked for a partition of all rows."""
    asked: list[int] = []

    def partition(num_rows: int) -> list[int]:
        asked.append(num_rows)
        return thirds(num_rows)

    block, x = whole(attend), tokens()
    with torch.no_grad(), told(None):
        out = parallel(block, size, TilingAllReduce(partition=partition))(x)
        assert_as_exact_as(out, block(x), exact(block, x))
    assert asked == [33]
    return out


@slow
@pytest.mark.parametrize("attend", [causal, window, cached], ids=lambda attend: attend.__name__)
def test_it_computes_what_the_whole_block_does_on_every_rank(team: Team, attend: Attend) -> None:
    first, *others = team.run(in_blocks, team.size, attend)
    assert all(torch.equal(first, other) for other in others)


REASONS = {
    "gradients": "gradients are wanted",
    "tensors": "the projection was given a tensor",
    "dtypes": "the projection's weight is torch.float32 and attention's output torch.bfloat16",
    "npu": "tensors are on cpu; npu_mm_all_reduce_base is an operator of Ascend NPUs",
}


def as_rowwise(size: int, kind: str) -> None:
    """Checks that results and gradients are those of RowwiseParallel, where TilingAllReduce is not possible."""
    style = TilingAllReduce(partition=thirds, transport=npu.NAME if kind == "npu" else "auto")
    ours = parallel(whole(computed if kind == "tensors" else causal), size, style)
    theirs, x = parallel(whole(computed), size, RowwiseParallel()), tokens()
    has_gradients = kind in ("gradients", "tensors")
    with torch.set_grad_enabled(has_gradients):
        with told(REASONS[kind]), torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "dtypes"):
            out = ours(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "dtypes"):
            expected = theirs(x)
    assert torch.equal(out, expected)
    if has_gradients:
        out.square().sum().backward()
        expected.square().sum().backward()
        for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert isinstance(weight.grad, DTensor), name
            assert isinstance(other.grad, DTensor), name
            assert torch.equal(weight.grad.full_tensor(), other.grad.full_tensor()), name


@pytest.mark.parametrize("kind", REASONS)
def test_what_cannot_be_tiled_is_told_and_computed_as_by_rowwise_parallel(team: Team, kind: str) -> None:
    team.run(as_rowwise, team.size, kind)


@torch.no_grad()
def calls_too_short_for_blocks_take_the_usual_way_without_a_word(size: int) -> None:
    block = whole()
    made = parallel(block, size, TilingAllReduce())
    for limit in ("LEAST_BYTES", "LEAST_ROWS"):
        with pytest.MonkeyPatch.context() as patch, told(None):
            patch.setattr(row_partitions, limit, 1)  # the other limit is reason enough
            patch.setattr(DeferredAttention, "project", lambda *_, **__: pytest.fail("it was divided into blocks"))
            for x in (tokens(3, 1), tokens(1, 1), tokens(3, 11)):
                assert_as_exact_as(made(x), block(x), exact(block, x))


@torch.no_grad()
def long_calls_are_divided_as_is_agreed_on(size: int) -> None:
    block, x, calls, project = whole(), torch.randn(2, 600, HIDDEN), [], DeferredAttention.project
    made = parallel(block, size, TilingAllReduce())
    with pytest.MonkeyPatch.context() as patch, told(None):
        patch.setattr(row_partitions, "LEAST_BYTES", 1)
        patch.setattr(DeferredAttention, "project", lambda *a, **k: calls.append(k["partition"]) or project(*a, **k))
        assert_as_exact_as(made(x), block(x), exact(block, x))
    assert calls == ["auto"]


@torch.no_grad()
def torch_compile_traces_the_usual_way(size: int) -> None:
    block, x = whole(), tokens()
    made = torch.compile(parallel(block, size, TilingAllReduce(partition=thirds)), backend="eager")
    with told("the call is traced by torch.compile"):
        out = made(x)
    assert_as_exact_as(out, block(x), exact(block, x))


@torch.no_grad()
def a_wrong_plan_is_an_error_after_which_the_group_still_works(size: int) -> None:
    block = whole()
    made = parallel(block, size, TilingAllReduce(partition=lambda num_rows: [num_rows, 1]))
    with pytest.raises(ArgumentError, match=r"partition=\[33, 1\].*= 33"):
        made(tokens())
    parallel(block, size, TilingAllReduce(partition=thirds))(tokens())


@torch.no_grad()
def a_copy_computes_with_its_own_weights(size: int) -> None:
    block, x = whole(), tokens()
    made = parallel(block, size, TilingAllReduce(partition=thirds))
    twin = copy.deepcopy(made)
    made.o.weight.to_local().zero_()  # type: ignore[operator]
    assert_as_exact_as(twin(x), block(x), exact(block, x))


def layers_that_are_not_linear_are_refused(size: int) -> None:
    with pytest.raises(UnsupportedError, match=r"an nn\.Linear, got Embedding"):
        parallelize_module(nn.Embedding(3, 4), init_device_mesh("cpu", (size,)), TilingAllReduce())


PROMISES = [
    calls_too_short_for_blocks_take_the_usual_way_without_a_word,
    long_calls_are_divided_as_is_agreed_on,
    pytest.param(torch_compile_traces_the_usual_way, marks=slow),
    a_wrong_plan_is_an_error_after_which_the_group_still_works,
    a_copy_computes_with_its_own_weights,
    layers_that_are_not_linear_are_refused,
]


@pytest.mark.parametrize("promise", PROMISES, ids=attrgetter("__name__"))
def test_on_every_rank(team: Team, promise: Callable[[int], None]) -> None:
    team.run(promise, team.size)


def deferred() -> tuple[Any, Tensor]:
    q, k, v = whole().heads(tokens())
    return deferred_attn(q, k, v, causal=True), fast_attn_func(q, k, v, causal=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda out: out.transpose(1, 2),
        lambda out: out.reshape(-1, NHEADS * HEADDIM),
        lambda out: out.reshape((3, 11, 4, -1)),
        lambda out: out.flatten(0, 1),
        lambda out: out.view(33, -1),
        lambda out: out[:, 1:],
        lambda out: out * torch.arange(HEADDIM),
        lambda out: torch.arange(HEADDIM) - out,
        lambda out: torch.cat([out, out]),
        lambda out: torch.stack(tensors=[out.flatten(2).contiguous()]),
        lambda out: out.mean(),
        lambda out: out * 0.5 + 1,
        lambda out: 1 - out / 2,
        lambda out: abs(-out) ** 2,
        lambda out: (out > 0) & (out != 1.0),
        lambda out: torch.tensor(len(out)),
    ],
)
def test_whatever_else_wants_its_numbers_gets_the_tensor(use: Callable[[Any], Tensor]) -> None:
    waiting, out = deferred()
    assert torch.equal(use(waiting), use(out))


@torch.no_grad()
def test_numpy_gets_the_numbers_too() -> None:
    waiting, out = deferred()
    assert np.array_equal(np.asarray(waiting), out.numpy())


@pytest.mark.parametrize(
    "flat",
    [
        lambda out: out.flatten(2),
        lambda out: out.flatten(-2, -1),
        lambda out: out.reshape(*out.shape[:2], -1).contiguous(),
        lambda out: out.view((3, 11, NHEADS * HEADDIM)),
        lambda out: out.contiguous().reshape(torch.Size((3, -1, NHEADS * HEADDIM))),
    ],
)
def test_flattening_heads_leaves_it_waiting(flat: Callable[[Any], Any]) -> None:
    waiting, out = deferred()
    assert isinstance(flat(waiting), DeferredAttention)
    assert flat(waiting).shape == flat(out).shape
    assert torch.equal(flat(waiting).compute(), flat(out))
    assert torch.equal(F.relu(flat(waiting)), F.relu(flat(out)))


@torch.no_grad()
def test_a_module_that_is_not_parallelised_computes_it() -> None:
    block, x = whole(cached), tokens()
    torch.testing.assert_close(block(x).double(), exact(block, x), rtol=1e-5, atol=1e-5)


def test_unknown_options_are_refused_at_once() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ArgumentError, match=r"partition=\[600, 600\] must be .auto. or a function"):
        TilingAllReduce(partition=[600, 600])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="partition='best' must be"):
        TilingAllReduce(partition="best")
    with pytest.raises(ArgumentError, match="transport='foo' is not known; choose 'auto' or one of 'c10d'"):
        TilingAllReduce(transport="foo")
    with pytest.raises(ArgumentError, match="dropout_p is no option of deferred attention; known are softmax_scale"):
        deferred_attn(q, q, q, dropout_p=0.1)
    with pytest.raises(ArgumentError, match=r"rotary_cos is no option.*cache_seqlens"):
        deferred_attn_with_kvcache(q, q, q, rotary_cos=q)
