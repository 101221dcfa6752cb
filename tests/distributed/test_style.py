"""TilingAllReduce: a block of attention that is parallelised computes what the whole one does, in row blocks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed.team import Team
from fastattention import fast_attn_func
from fastattention.distributed import (
    DeferredAttention,
    NotTiledWarning,
    TilingAllReduce,
    deferred_attn,
    deferred_attn_with_kvcache,
    npu,
)
from fastattention.errors import ArgumentError, UnsupportedError

HIDDEN, HEADDIM, NHEADS, NHEADS_K = 40, 16, 8, 4
TILED = r"attention, projection and all-reduce run one after the other: "
Attend = Callable[[Tensor, Tensor, Tensor], Any]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return deferred_attn(q, k, v, causal=True)


def computed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return fast_attn_func(q, k, v, causal=True)


def window(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return deferred_attn(q, k, v, window_size=(5, 2), softmax_scale=0.5)


def cached(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The same keys in a cache with room, and the second sequence padded on the left."""
    batch_size, seqlen = k.shape[:2]
    caches = (F.pad(each, (0, 0, 0, 0, 0, 6), value=float("nan")) for each in (k, v))
    padding = torch.tensor([0, *[4] * (batch_size - 1)], dtype=torch.int32)
    return deferred_attn_with_kvcache(q, *caches, cache_seqlens=seqlen, cache_leftpad=padding, causal=True)


class Block(nn.Module):
    """Attention as users write it."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.q = nn.Linear(HIDDEN, NHEADS * HEADDIM)
        self.k = nn.Linear(HIDDEN, NHEADS_K * HEADDIM)
        self.v = nn.Linear(HIDDEN, NHEADS_K * HEADDIM)
        self.o = nn.Linear(NHEADS * HEADDIM, HIDDEN)

    def heads(self, x: Tensor) -> Iterator[Tensor]:
        return (layer(x).unflatten(-1, (-1, HEADDIM)) for layer in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.attend(*self.heads(x)).flatten(2))
        return out


def whole(attend: Attend = causal) -> Block:
    """The same on every rank."""
    torch.manual_seed(5)
    return Block(attend)


def parallel(block: Block, size: int, o: Any) -> Block:
    """A copy whose heads are divided among `size` ranks, and whose output projection has the style `o`."""
    mesh = init_device_mesh("cpu", (size,))
    styles = {name: ColwiseParallel() for name in ("q", "k", "v")}
    made = parallelize_module(copy.deepcopy(block), mesh, {**styles, "o": o})
    assert isinstance(made, Block)
    return made


def thirds(num_rows: int) -> list[int]:
    return [num_rows // 5, num_rows // 3, num_rows - num_rows // 5 - num_rows // 3]


def tokens(batch_size: int = 3, seqlen: int = 11) -> Tensor:
    return torch.randn(batch_size, seqlen, HIDDEN, generator=torch.Generator().manual_seed(2))


def exact(block: Block, x: Tensor) -> Tensor:
    """In float64 and without any of ours, by the mask of block.attend."""
    q, k, v = Block.heads(copy.deepcopy(block).double(), x.double())  # type: ignore[misc]
    k, v = (each.repeat_interleave(NHEADS // NHEADS_K, dim=2) for each in (k, v))
    row, key = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    seen = (key >= row - 5) & (key <= row + 2) if block.attend is window else key <= row
    seen = seen.expand(len(x), -1, -1).clone()
    if block.attend is cached:
        seen[1:, :, :4] = False
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (0.5 if block.attend is window else HEADDIM**-0.5)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
    return F.linear(out, block.o.weight.double(), block.o.bias.double())


def assert_as_exact_as(given: Tensor, usual: Tensor, expected: Tensor) -> None:
    """At most twice the error of the usual way, or of eight roundings."""
    errors = [(each.double() - expected).abs().max().item() for each in (given, usual)]
    floor = 8 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    assert errors[0] <= max(2 * errors[1], floor), f"error {errors[0]:.1e}, that of the usual way {errors[1]:.1e}"


@contextlib.contextmanager
def told(reason: str | None) -> Iterator[None]:
    """That exactly this reason is given why the usual way is taken, if any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    given = [str(warning.message) for warning in caught if warning.category is NotTiledWarning]
    assert len(given) == (reason is not None), given
    assert reason is None or f"{TILED}{reason}" in given[0], given


def in_blocks(size: int, attend: Attend) -> Tensor:
    """The result on one rank, which has asked for a plan of all rows."""
    asked: list[int] = []

    def plan(num_rows: int) -> list[int]:
        asked.append(num_rows)
        return thirds(num_rows)

    block, x = whole(attend), tokens()
    with torch.no_grad(), told(None):
        out = parallel(block, size, TilingAllReduce(plan=plan))(x)
        assert_as_exact_as(out, block(x), exact(block, x))
    assert asked == [33]
    return out


@pytest.mark.parametrize("attend", [causal, window, cached], ids=lambda attend: attend.__name__)
def test_it_computes_what_the_whole_block_does_on_every_rank(team: Team, attend: Attend) -> None:
    first, *others = team.run(in_blocks, team.size, attend)
    assert all(torch.equal(first, other) for other in others)


def short(size: int, limit: str) -> None:
    """Without a plan of one's own, and with the other limit out of the way."""
    block = whole()
    made = parallel(block, size, TilingAllReduce())
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, told(None):
        patch.setattr(f"fastattention.distributed.plan.{limit}", 1)
        patch.setattr(DeferredAttention, "project", lambda *_, **__: pytest.fail("it was divided into blocks"))
        for x in (tokens(3, 1), tokens(1, 1), tokens(3, 11)):
            assert_as_exact_as(made(x), block(x), exact(block, x))


@pytest.mark.parametrize("limit", ["LEAST_BYTES", "LEAST_ROWS"])
def test_calls_too_short_for_blocks_take_the_usual_way_without_a_word(team: Team, limit: str) -> None:
    team.run(short, team.size, limit)


def long(size: int) -> None:
    block = whole()
    made = parallel(block, size, TilingAllReduce())
    calls = []
    project = DeferredAttention.project
    x = torch.randn(2, 600, HIDDEN)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, told(None):
        patch.setattr("fastattention.distributed.plan.LEAST_BYTES", 1)
        patch.setattr(DeferredAttention, "project", lambda *a, **k: calls.append(k["plan"]) or project(*a, **k))
        assert_as_exact_as(made(x), block(x), exact(block, x))
    assert calls == ["auto"]


def test_long_calls_ask_the_planner(team: Team) -> None:
    team.run(long, team.size)


def as_rowwise(size: int, kind: str) -> None:
    """Results and gradients of RowwiseParallel, where TilingAllReduce cannot be."""
    ours = parallel(whole(computed if kind == "tensors" else causal), size, TilingAllReduce(plan=thirds))
    theirs, x = parallel(whole(computed), size, RowwiseParallel()), tokens()
    if kind == "npu":
        ours = parallel(whole(causal), size, TilingAllReduce(transport=npu.NAME, plan=thirds))
        with torch.no_grad(), told("tensors are on cpu; npu_mm_all_reduce_base is an operator of Ascend NPUs"):
            assert torch.equal(ours(x), theirs(x))
        return
    if kind == "dtypes":
        with torch.no_grad(), told("the projection's weight is torch.float32 and attention's output torch.bfloat16"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                given = ours(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(given, theirs(x))
        return
    with told("gradients are wanted" if kind == "gradients" else "the projection was given a tensor"):
        out = ours(x)
    expected = theirs(x)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(weight.grad, DTensor), name
        assert isinstance(other.grad, DTensor), name
        assert torch.equal(weight.grad.full_tensor(), other.grad.full_tensor()), name


@pytest.mark.parametrize("kind", ["gradients", "tensors", "dtypes", "npu"])
def test_what_cannot_be_tiled_is_told_and_computed_as_by_rowwise_parallel(team: Team, kind: str) -> None:
    team.run(as_rowwise, team.size, kind)


@torch.no_grad()
def compiled(size: int) -> None:
    block, x = whole(), tokens()
    made = torch.compile(parallel(block, size, TilingAllReduce(plan=thirds)), backend="eager")
    with told("the call is traced by torch.compile"):
        out = made(x)
    assert_as_exact_as(out, block(x), exact(block, x))


def test_torch_compile_traces_the_usual_way(team: Team) -> None:
    team.run(compiled, team.size)


def wrong_plan(size: int) -> None:
    block = whole()
    made = parallel(block, size, TilingAllReduce(plan=lambda num_rows: [num_rows, 1]))
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"plan=\[33, 1\].*= 33"):
        made(tokens())
    with torch.no_grad():  # and the group still works
        parallel(block, size, TilingAllReduce(plan=thirds))(tokens())


def test_a_wrong_plan_is_an_error_on_every_rank(team: Team) -> None:
    team.run(wrong_plan, team.size)


def copies(size: int) -> None:
    block, x = whole(), tokens()
    made = parallel(block, size, TilingAllReduce(plan=thirds))
    twin = copy.deepcopy(made)
    with torch.no_grad():
        made.o.weight.to_local().zero_()  # type: ignore[operator]
        assert_as_exact_as(twin(x), block(x), exact(block, x))


def test_a_copy_computes_with_its_own_weights(team: Team) -> None:
    team.run(copies, team.size)


def of_another_layer(size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    with pytest.raises(UnsupportedError, match=r"an nn\.Linear, got Embedding"):
        parallelize_module(nn.Embedding(3, 4), mesh, TilingAllReduce())


def test_another_layer_is_refused(team: Team) -> None:
    team.run(of_another_layer, team.size)


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
    ],
)  # fmt: skip
def test_whatever_else_wants_its_numbers_gets_the_tensor(use: Callable[[Any], Tensor]) -> None:
    waiting, out = deferred()
    assert torch.equal(use(waiting), use(out))


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = block(x)
    torch.testing.assert_close(out.double(), exact(block, x), rtol=1e-5, atol=1e-5)


def test_options_that_row_blocks_do_not_have_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ArgumentError, match="dropout_p is no option of deferred attention; known are softmax_scale"):
        deferred_attn(q, q, q, dropout_p=0.1)
    with pytest.raises(ArgumentError, match=r"rotary_cos is no option.*cache_seqlens"):
        deferred_attn_with_kvcache(q, q, q, rotary_cos=q)
