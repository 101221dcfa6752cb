"""The indexer on npu_lightning_indexer: arguments in the real schema, results beside the reference, and refusals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ascend.vendor import host_npu, selection
from ascend.vendor.environment import skip_without_torch_npu
from ascend.vendor.recorder import Recorded, Recorder, on_meta, shapes
from fastattention import explain
from fastattention.backends.ascend import indexer as backend
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.vendor.indexer import index_call
from fastattention.backends.ascend.vendor.operators import INDEXER, OperatorCall, run
from fastattention.engine.operator import forget_plans
from fastattention.indexer import fast_indexer_func
from fastattention.indexer.backend import INDEXER_BACKENDS
from fastattention.indexer.problem import IndexerInputs, IndexerProblem
from fastattention.indexer.reference import index, scores_of_queries
from fastattention.indexer.validation import prepare, read_options

skip_without_torch_npu()
host_npu.install()

HEADDIM, PAGE = 128, 16
LENGTHS_Q = {"batch": (5, 5, 5, 5), "varlen": (3, 0, 7, 1)}
LENGTHS_K = (40, 0, 3, 33)  # two sequences have fewer keys than queries, or none
QUERIES = list(LENGTHS_Q)
KEYS = ["rows", "used-rows", "varlen", "used-varlen", "pages"]


class Sizes(NamedTuple):
    """What a case may change."""

    nheads: int = 6
    topk: int = 8
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.float32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def keys_of(layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """k and where its tokens lie. NaN wherever there is no key of a sequence."""
    lengths = (40,) * 4 if layout == "rows" else LENGTHS_K
    keys = [draw(length, HEADDIM, seed=number).to(dtype) for number, length in enumerate(lengths)]
    used = torch.tensor(lengths, dtype=torch.int32)
    if layout == "varlen":
        return {"k": torch.cat(keys)[None], "cu_seqlens_k": ends(lengths)}
    if layout == "used-varlen":
        room = tuple(length + gap for length, gap in zip(lengths, (0, 2, 5, 1), strict=True))
        k = torch.full((1, sum(room), HEADDIM), torch.nan, dtype=dtype)
        for first, one in zip(ends(room).tolist(), keys, strict=False):
            k[0, first : first + len(one)] = one
        return {"k": k, "cu_seqlens_k": ends(room), "seqused_k": used}
    if layout != "pages":
        k = torch.full((4, 40 if layout == "rows" else 43, HEADDIM), torch.nan, dtype=dtype)
        for row, one in zip(k, keys, strict=True):
            row[: len(one)] = one
        return {"k": k} if layout == "rows" else {"k": k, "seqused_k": used}
    pages = torch.full((9, PAGE, HEADDIM), torch.nan, dtype=dtype)
    table = torch.tensor([[7, 2, 5, 99], [-1, -1, -1, -1], [0, 99, -1, 3], [8, 1, 4, -5]], dtype=torch.int32)
    for sequence, one in enumerate(keys):
        for number, part in enumerate(one.split(PAGE)):
            pages[table[sequence, number], : len(part)] = part
    return {"k": pages, "seqused_k": used, "block_table": table}


def call_of(queries: str, keys: str, sizes: Sizes) -> tuple[IndexerProblem, IndexerInputs]:
    lengths = LENGTHS_Q[queries]
    q = draw(sum(lengths), sizes.nheads, HEADDIM, seed=5).to(sizes.dtype)
    weights = draw(sum(lengths), sizes.nheads, seed=6).to(sizes.weights_dtype)
    offsets = ends(lengths) if queries == "varlen" else None
    given = IndexerInputs(q=q, weights=weights, cu_seqlens_q=offsets, **keys_of(keys, sizes.dtype))
    return prepare(given, read_options(sizes.topk, sizes.causal, 4))


def check(problem: IndexerProblem, inputs: IndexerInputs, found: Tensor) -> None:
    """The scores are those of the reference's keys: of equal scores any may be taken. Keys rise, then comes -1."""
    wanted = index(problem, inputs).indices
    assert found.shape == wanted.shape
    assert found.dtype is torch.int32
    assert torch.equal(found < 0, wanted < 0)
    for row, scores in scores_of_queries(problem, inputs):
        chosen, right = (one[row][one[row] >= 0].long() for one in (found, wanted))
        assert (chosen.diff() > 0).all()
        assert torch.equal(scores[chosen].sort().values, scores[right].sort().values)


def recorded(problem: IndexerProblem, inputs: IndexerInputs) -> tuple[Recorded, Tensor]:
    assert vendor.why_not_index(problem, 9) is None
    with Recorder() as recorder:
        found = vendor.index(problem, inputs).indices
    (call,) = recorder.calls
    return call, found


@pytest.fixture(params=selection.FILLS)
def fill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator gives where a query sees fewer keys than asked for: nothing says."""
    monkeypatch.setattr(selection, "fill", request.param)


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all-keys"])
@pytest.mark.parametrize("topk", [1, 8, 100])
def test_keys_are_those_of_the_reference(queries: str, keys: str, causal: bool, topk: int) -> None:
    problem, inputs = call_of(queries, keys, Sizes(topk=topk, causal=causal))
    check(problem, inputs, recorded(problem, inputs)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("nheads", [1, 64])
def test_weights_reach_the_operator_as_they_were_given(dtype: torch.dtype, weights: str, nheads: int) -> None:
    given = getattr(torch, weights)
    problem, inputs = call_of("batch", "pages", Sizes(nheads=nheads, dtype=dtype, weights_dtype=given))
    call, found = recorded(problem, inputs)
    check(problem, inputs, found)
    # The operator takes no other 16-bit dtype than that of q.
    assert call.arguments["weights"].dtype is (dtype if given is dtype else torch.float32)
    assert torch.equal(call.arguments["weights"].float().flatten(0, 1), inputs.weights)


@functools.cache
def calls() -> dict[tuple[str, str, bool], Recorded]:
    return {
        (queries, keys, causal): recorded(*call_of(queries, keys, Sizes(causal=causal)))[0]
        for queries, keys, causal in itertools.product(QUERIES, KEYS, (True, False))
    }


def arguments(call: Recorded) -> dict[str, Any]:
    """All arguments of the real schema. Dispatch drops those that equal the schema's defaults."""
    schema = call.operator._schema.arguments
    return {one.name: one.default_value for one in schema if one.has_default_value()} | call.arguments


def test_every_argument_is_in_the_real_schema() -> None:
    (operator,) = {call.operator for call in calls().values()}
    known = {argument.name: argument for argument in operator._schema.arguments}
    positional = ["query", "key", "weights"]
    assert [name for name, one in known.items() if not one.has_default_value()] == positional
    assert [name for name, one in known.items() if not one.kwarg_only] == positional
    made = set().union(*(index_call(*call_of("batch", keys, Sizes())).arguments for keys in KEYS))
    # The others are reserved: each has one value that is allowed, its default, or asks for scores too.
    assert set(known) - made == {"pre_tokens", "next_tokens", "return_value"}
    assert made <= set(known)


def test_the_real_shape_inference_agrees() -> None:
    for call in calls().values():
        inferred = call.operator(**{name: on_meta(value) for name, value in call.arguments.items()})
        assert shapes(inferred) == shapes(call.results)


def test_layouts_are_those_of_queries_and_keys() -> None:
    made = {names[:2]: arguments(call) for names, call in calls().items()}
    assert {names: (given["layout_query"], given["layout_key"]) for names, given in made.items()} == {
        ("batch", "rows"): ("BSND", "BSND"),
        ("batch", "used-rows"): ("BSND", "BSND"),
        ("batch", "pages"): ("BSND", "PA_BSND"),
        ("varlen", "pages"): ("TND", "PA_BSND"),
        **{
            (queries, keys): ("TND", "TND")
            for queries, keys in itertools.product(QUERIES, KEYS)
            if keys != "pages" and (queries == "varlen" or "varlen" in keys)
        },
    }


def test_sparse_mode_is_the_mask() -> None:
    assert {names[2]: arguments(call)["sparse_mode"] for names, call in calls().items()} == {True: 3, False: 0}


@pytest.mark.parametrize(
    ("queries", "keys", "of_queries", "of_keys"),
    [
        ("batch", "rows", [5, 5, 5, 5], [40, 40, 40, 40]),
        ("batch", "used-rows", [5, 5, 5, 5], [40, 0, 3, 33]),
        ("varlen", "pages", [3, 3, 10, 11], [40, 0, 3, 33]),
        ("varlen", "varlen", [3, 3, 10, 11], [40, 40, 43, 76]),
        ("varlen", "rows", [3, 3, 10, 11], [40, 80, 120, 160]),
        ("batch", "varlen", [5, 10, 15, 20], [40, 40, 43, 76]),
        # Unused tokens are sequences without queries.
        ("varlen", "used-varlen", [3, 3, 3, 3, 10, 10, 11, 11], [40, 40, 40, 42, 45, 50, 83, 84]),
        ("varlen", "used-rows", [3, 3, 3, 3, 10, 10, 11, 11], [40, 43, 43, 86, 89, 129, 162, 172]),
    ],
)
def test_lengths_are_counts_in_batches_and_ends_in_varlen(
    queries: str, keys: str, of_queries: list[int], of_keys: list[int]
) -> None:
    given = calls()[queries, keys, True].arguments
    assert given["actual_seq_lengths_query"].tolist() == of_queries
    assert given["actual_seq_lengths_key"].tolist() == of_keys


def test_keys_are_not_copied_where_they_are_contiguous() -> None:
    for queries, keys in itertools.product(QUERIES, KEYS):
        problem, inputs = call_of(queries, keys, Sizes())
        assert recorded(problem, inputs)[0].arguments["key"].data_ptr() == inputs.k.data_ptr()


def test_other_strides_are_copied_for_the_operator() -> None:
    problem, inputs = call_of("varlen", "pages", Sizes())
    wide = inputs.k.new_full((*inputs.k.shape[:2], 200), torch.nan)
    wide[..., :HEADDIM] = inputs.k
    strided = inputs._replace(k=wide[..., :HEADDIM], q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    check(problem, inputs, recorded(problem, strided)[1])


@pytest.mark.parametrize(
    "changed",
    [{"q": (0, 6, 128), "weights": (0, 6)}, {"k": (0, 16, 128)}, {"block_table": (4, 0)}],
    ids=["no-queries", "no-pages", "no-columns"],
)
def test_nothing_to_choose_from_calls_nothing(changed: dict[str, tuple[int, ...]]) -> None:
    _, inputs = call_of("batch", "pages", Sizes())
    empty = {name: getattr(inputs, name).new_zeros(shape) for name, shape in changed.items()}
    inputs = inputs._replace(**empty, seqused_k=torch.zeros(4, dtype=torch.int32))
    problem, inputs = prepare(inputs, read_options(8, True, 4))
    with Recorder() as recorder:
        found = vendor.index(problem, inputs).indices
    assert recorder.calls == []
    assert found.tolist() == [[-1] * 8] * problem.total_q


@pytest.mark.parametrize(
    ("fields", "cann", "named"),
    [
        ({}, 8, None),
        ({"dtype": torch.float32}, 9, "dtype torch.float32"),
        ({"headdim": 64}, 9, "headdim=64"),
        ({"nheads": 65}, 9, "nheads=65"),
        ({"k_seqlen": 24}, 9, "page_block_size=24"),
        ({"k_seqlen": 1040}, 9, "page_block_size=1040"),
        ({"k_seqlen": 24, "paged": False}, 9, None),
        ({"topk": 2048}, 8, None),
        ({"topk": 2049}, 9, r"topk=2049.*multiples of 1024 up to 8192"),
        ({"topk": 9216}, 9, "topk=9216"),
        ({"topk": 4096}, 8, "topk=4096.*CANN before 9"),
        ({"topk": 4096}, 9, None),
        ({"weights_dtype": torch.float32}, 8, r"weights in torch\.float32.*CANN before 9"),
        ({"weights_dtype": torch.float16}, 0, r"weights in torch\.float16.*newer CANN"),
        ({"weights_dtype": torch.float32}, 9, None),
    ],
)
def test_what_the_operator_does_not_take_is_refused(fields: dict[str, Any], cann: int, named: str | None) -> None:
    problem, _ = call_of("batch", "pages", Sizes(weights_dtype=torch.bfloat16))
    reason = vendor.why_not_index(replace(problem, **fields), cann)
    if named is None:
        assert reason is None
    else:
        assert reason is not None
        with pytest.raises(ValueError, match=named):
            raise ValueError(reason)
        assert "backend='torch'" in reason


def test_a_torch_npu_without_the_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = call_of("batch", "pages", Sizes())
    monkeypatch.setattr(vendor.indexer, "INDEXER", "npu_no_such_indexer")
    assert "no npu_no_such_indexer is registered" in (vendor.why_not_index(problem, 9) or "")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sparse_mode": 4}, "sparse_mode=4"),
        ({"layout_key": "TND"}, "keys in TND need queries in it, got BSND"),
        ({"weights": torch.zeros(4, 5, 3)}, "must agree"),
        ({"key": torch.zeros(9, PAGE, 2, HEADDIM, dtype=torch.bfloat16)}, "one key head"),
    ],
    ids=["mode", "layouts", "weights", "key-heads"],
)
def test_what_shape_inference_would_take_is_refused_here(changed: dict[str, Any], named: str) -> None:
    call = OperatorCall(INDEXER, index_call(*call_of("batch", "pages", Sizes())).arguments | changed)
    torch.ops.npu.npu_lightning_indexer(**{name: on_meta(value) for name, value in call.arguments.items()})
    with pytest.raises(ValueError, match=named):
        run(call)


@pytest.fixture
def cann_9(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's NPU as if on CANN 9; without CANN there is no version."""
    monkeypatch.setattr(backend, "cann_major", lambda: 9)
    INDEXER_BACKENDS.forget_choices()
    forget_plans()
    yield
    INDEXER_BACKENDS.forget_choices()
    forget_plans()


def on_npu(queries: str, keys: str) -> tuple[Tensor, dict[str, Any]]:
    """q, and the other arguments of fast_indexer_func."""
    _, inputs = call_of(queries, keys, Sizes())
    given = {name: None if value is None else value.to("npu") for name, value in inputs._asdict().items()}
    q = given.pop("q")
    if queries == "batch":
        q, given["weights"] = q.unflatten(0, (4, 5)), given["weights"].unflatten(0, (4, 5))
    if "varlen" in keys:
        given["k"] = given["k"][0]
    return q, given | {"topk": 8}


@pytest.mark.usefixtures("cann_9")
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("keys", KEYS)
def test_calls_on_npu_go_to_the_operator_and_wait_for_nothing(queries: str, keys: str) -> None:
    q, given = on_npu(queries, keys)
    explanation = explain(q, **given, function=fast_indexer_func)
    assert "npu_lightning_indexer of torch_npu" in str(explanation)
    fast_indexer_func(q, **given)
    host_npu.waits.clear()
    found = fast_indexer_func(q, **given)
    assert not host_npu.waits
    assert found.device.type == "npu"
    problem, inputs = call_of(queries, keys, Sizes())
    check(problem, inputs, found.cpu().view(problem.out_shape))


def test_where_cann_is_older_or_unknown_torch_serves_weights_in_float32() -> None:
    q, given = on_npu("batch", "pages")
    assert "CANN before 9" in str(explain(q, **given, function=fast_indexer_func))
    problem, inputs = call_of("batch", "pages", Sizes())
    check(problem, inputs, fast_indexer_func(q, **given).cpu().view(problem.out_shape))


@pytest.mark.usefixtures("cann_9")
def test_other_chips_and_our_kernels_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, given = on_npu("batch", "pages")
    with monkeypatch.context() as other:
        other.setattr(backend, "device_name", lambda index: "Ascend310P3")
        assert "used on the 910B and 910C only" in str(explain(q, **given, function=fast_indexer_func))
    INDEXER_BACKENDS.forget_choices()
    monkeypatch.setenv("FASTATTENTION_ASCEND", "triton")
    assert "FASTATTENTION_ASCEND allows no operators" in str(explain(q, **given, function=fast_indexer_func))
