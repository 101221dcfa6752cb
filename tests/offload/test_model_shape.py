"""Models by their dimensions: parameters, keys and values, shards; and machines by their bandwidths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastattention.errors import ArgumentError
from fastattention.offload.hardware import PRESETS as MACHINES
from fastattention.offload.hardware import find_hardware
from fastattention.offload.model_shape import PRESETS, ModelShape, find_model

LLAMA = PRESETS["llama-3-8b"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("pangu-38b", pytest.approx(38e9, rel=0.01)),  # without published dimensions: those of the name
        ("pangu-71b", pytest.approx(71e9, rel=0.01)),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: float) -> None:
    assert find_model(name).weight_bytes / 2 == parameters


def test_weights_are_layers_and_vocabulary() -> None:
    shape = ModelShape("tiny", 2, 4, 2, 8, 32, 64, 100)
    attention = 32 * 4 * 8 * 2 + 32 * 2 * 8 * 2
    layer = 2 * (attention + 3 * 32 * 64 + 2 * 32)
    assert shape.layer_weight_bytes == layer
    assert shape.weight_bytes == 2 * layer + 2 * 2 * 100 * 32 + 2 * 32
    assert replace(shape, tied_embeddings=True).weight_bytes == shape.weight_bytes - shape.logits_weight_bytes
    assert replace(shape, gated_mlp=False).layer_weight_bytes == layer - 2 * 32 * 64
    assert replace(shape, dtype_bytes=4).weight_bytes == 2 * shape.weight_bytes


def test_a_token_takes_two_bytes_an_element_or_one_and_two_scales() -> None:
    assert LLAMA.kv_bytes_per_token() == 8 * (128 + 128) * 2
    assert LLAMA.kv_bytes_per_token(quantized=True) == 8 * (128 + 128 + 4 + 4)
    narrow = replace(LLAMA, headdim_v=64)
    assert narrow.kv_bytes_per_token() == 8 * (128 + 64) * 2
    assert narrow.kv_bytes_per_token(quantized=True) == 8 * (128 + 64 + 4 + 4)


@pytest.mark.parametrize("name", PRESETS)
def test_shards_hold_all_of_the_model(name: str) -> None:
    whole = PRESETS[name]
    shard = whole.sharded(8)
    norms = 2 * (2 * whole.num_layers + 1) * whole.hidden_size  # every rank has them
    assert 8 * (shard.weight_bytes - norms) == whole.weight_bytes - norms
    assert 8 * shard.kv_bytes_per_token() == whole.kv_bytes_per_token()
    assert whole.sharded(1) == whole


def test_key_heads_fewer_than_ranks_are_replicated() -> None:
    shard = LLAMA.sharded(16)
    assert (shard.nheads, shard.nheads_k) == (2, 1)


@pytest.mark.parametrize(
    ("shape", "tp", "said"),
    [
        (LLAMA, 0, "tp=0 is not positive"),
        (LLAMA, 3, "tp=3 does not divide nheads=32"),
        (replace(LLAMA, intermediate_size=14337), 2, "tp=2 does not divide intermediate_size=14337"),
        (replace(LLAMA, vocab_size=128257), 2, "tp=2 does not divide vocab_size=128257"),
        (replace(LLAMA, nheads=36, nheads_k=6), 4, "tp=4 and nheads_k=6 of llama-3-8b: neither divides the other"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(shape: ModelShape, tp: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        shape.sharded(tp)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 0}, "num_layers=0 of llama-3-8b is not positive"),
        ({"nheads_k": 5}, "nheads_k=5 of llama-3-8b does not divide nheads=32"),
        ({"window": 512}, "do not go together"),
        ({"window_layers": frozenset({1})}, "do not go together"),
        ({"window": 0, "window_layers": frozenset({1})}, "do not go together"),
        ({"window": 512, "window_layers": frozenset({32})}, r"window_layers=\[32\] .* from 0 to 31"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(LLAMA, **change)


def test_layers_without_a_window_keep_every_token() -> None:
    shape = replace(LLAMA, num_layers=5, window=512, window_layers=frozenset({0, 1, 3}))
    assert shape.full_layers == (2, 4)


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ArgumentError, match="model='gpt' is not known; choose from llama-2-7b, llama-2-70b"):
        find_model("gpt")
    with pytest.raises(ArgumentError, match="hardware='abacus' is not known; choose from h200, v100, t4, desktop"):
        find_hardware("abacus")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu_bandwidth": 0.0}, "gpu_bandwidth=0.0 of v100 is not positive"),
        ({"handover_seconds": -1.0}, "handover_seconds=-1.0 of v100 is negative"),
        ({"cpu_bandwidth": 129e9}, r"cpu_bandwidth=1.29e\+11 of v100 is more than dram_bandwidth=1.28e\+11"),
        ({"link_bandwidth": 129e9}, r"link_bandwidth=1.29e\+11 of v100 is more than dram_bandwidth=1.28e\+11"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(MACHINES["v100"], **change)


def test_gpus_of_a_host_share_its_processor_and_memory_but_not_their_links() -> None:
    whole, part = MACHINES["v100"], MACHINES["v100"].shared(8)
    assert (part.gpu_bandwidth, part.link_bandwidth) == (whole.gpu_bandwidth, whole.link_bandwidth)
    assert (8 * part.cpu_bandwidth, 8 * part.dram_bandwidth) == (whole.cpu_bandwidth, whole.dram_bandwidth)
    # Sixteen links could carry more than the memory of the host delivers.
    assert whole.shared(16).link_bandwidth == whole.dram_bandwidth / 16
    with pytest.raises(ArgumentError, match="num_gpus=0 is not positive"):
        whole.shared(0)
