"""Slots of selected keys, from torch, from the native library and on a GPU; and errors of wrong indices."""

from __future__ import annotations

import pytest
import torch

from fastattention import ArgumentError, set_num_threads
from fastattention.attention.selection.backend import SELECTION_BACKENDS
from fastattention.attention.selection.operators import SELECTION
from selection.cases import CASES, Case, check, slots_of, wanted

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_backend = pytest.mark.parametrize("name", ["cpu", "torch"])


@every_backend
@every_case
def test_slots_are_those_of_the_keys_that_indices_name(name: str, case: Case) -> None:
    check(SELECTION_BACKENDS.get(name), case)


@every_case
def test_a_gpu_finds_the_same(case: Case) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for name in ("cuda", "torch"):
        check(SELECTION_BACKENDS.get(name), case, "cuda")


def test_threads_share_the_queries() -> None:
    case = Case(queries=(900, 0, 101), keys=(3000, 5, 700), topk=257, causal=True, layout="varlen")
    call = case.arguments()
    expected = wanted(*call)
    for num_threads in (1, 2, 16):
        set_num_threads(num_threads)
        try:
            assert slots_of(SELECTION_BACKENDS.get("cpu"), *call) == expected
        finally:
            set_num_threads(None)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("case", "wrong", "message"),
    [
        (Case(), 3, "indices name key 3 for query 3, whose sequence has 3 keys; -1 is none"),
        (Case(), -2, "indices name key -2 for query 3, whose sequence has 3 keys; -1 is none"),
        (Case(key_block=2), 2, "indices name block of 2 keys 2 for query 3, whose sequence has 3 keys; -1 is none"),
        (Case(layout="pages", heads=3), 2**31 - 1, "indices name key 2147483647 for query 3, whose .* 3 keys"),
        (Case(layout="varlen", used=True), 2, "indices name key 2 for query 3, whose sequence has 2 keys"),
    ],
    ids=["key", "negative", "block", "large", "used"],
)
def test_the_first_wrong_index_is_an_error(name: str, dtype: torch.dtype, case: Case, wrong: int, message: str) -> None:
    given, options = case.arguments()
    given = given._replace(indices=given.indices.to(dtype))
    given.indices[3, -1, 6] = wrong  # the only query of the third sequence
    given.indices[5, 0, 0] = 99  # of the next one
    with pytest.raises(ArgumentError, match=message):
        SELECTION(given, options, name)


@every_backend
def test_an_index_beyond_32_bits_is_not_taken_for_another(name: str) -> None:
    given, options = Case(dtype=torch.int64).arguments()
    given.indices[0, 0, 0] = 2**32
    with pytest.raises(ArgumentError, match="indices name key 4294967296 for query 0, whose sequence has 40 keys"):
        SELECTION(given, options, name)


def test_a_causal_query_may_name_keys_behind_it() -> None:
    """They are dropped, as by a mask, and are no error."""
    given, options = Case(queries=(3,), keys=(5,), causal=True, share=0.0).arguments()
    given.indices[:, 0, :5] = torch.arange(5)
    for name in ("cpu", "torch"):
        assert slots_of(SELECTION_BACKENDS.get(name), given, options) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_offsets_lengths_and_pages_are_checked_in_every_call() -> None:
    given, options = Case(layout="pages", topk=2, share=0.0).arguments()
    SELECTION(given, options, "auto")
    for name, wrong in (("cu_seqlens_q", -1), ("seqused_k", 1000), ("block_table", 1000)):
        tensor = getattr(given, name)
        before = tensor.clone()
        tensor.view(-1)[0] = wrong
        with pytest.raises(ArgumentError, match=name):
            SELECTION(given, options, "auto")
        tensor.copy_(before)
    SELECTION(given, options, "auto")


def test_no_kernel_follows_a_transform() -> None:
    given, options = Case().arguments()

    def served(x: torch.Tensor) -> torch.Tensor:
        return x * SELECTION(given, options, "auto").counts

    counts = SELECTION(given, options, "auto").counts
    assert torch.equal(torch.func.jacfwd(served)(torch.tensor(2.0)), counts.float())
