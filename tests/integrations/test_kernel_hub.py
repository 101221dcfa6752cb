"""The exported kernel folder, served to Transformers: by the kernels package if it is installed, and without it.

Transformers calls a kernel through wrappers of its own, however it was loaded. Without the kernels package, a
stand-in for its `get_kernel` imports the folder; everything else is Transformers' code.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiers import sampled, slow
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, modeling_flash_attention_utils
from transformers.generation.continuous_batching import initialization
from transformers.integrations import hub_kernels
from transformers.integrations.flash_attention import flash_attention_forward

from fastattention.attention.reference import reference_attention
from fastattention.attention.validation.common import Options
from fastattention.attention.validation.prefill import prepare_dense
from fastattention.cli.export_kernel import BACKENDS, KERNEL, export_kernel
from integrations.models import VOCABULARY, assert_same, assert_varied, greedy, padding_mask, pair, prompts
from integrations.test_flash_attn import SIGNATURES

# GPT-OSS and other models with sinks take only the kernels they list. LOCAL_KERNELS may serve those names, too.
LISTED_KERNEL = "kernels-community/vllm-flash-attn3"
FLASH_ATTENTION_2 = "kernels-community/flash-attn2"  # Transformers loads it where flash-attn is not installed
NAMES = (KERNEL, LISTED_KERNEL, FLASH_ATTENTION_2)
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
NEEDS_KERNELS = pytest.mark.skipif(
    not hub_kernels.is_kernels_available(),
    reason=f"Transformers {transformers.__version__} needs kernels from {hub_kernels.KERNELS_MIN_VERSION} on and "
    f"before {hub_kernels.KERNELS_MAX_VERSION}, which is not installed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    export_kernel(path)
    return path


def imported(folder: Path, backend: str = "cpu") -> ModuleType:
    """The package of a backend, imported as the kernels package does."""
    package = folder / "build" / f"torch-{backend}"
    metadata = json.loads((package / "metadata.json").read_text())
    spec = importlib.util.spec_from_file_location(metadata["id"], package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers finds the folder under NAMES, without the kernels package."""
    modules = dict.fromkeys(NAMES, imported(folder))
    for owner in (hub_kernels, transformers.modeling_utils):
        monkeypatch.setattr(owner, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: modules[name])
    with loaded_anew():
        yield


@pytest.fixture(params=["stand-in", pytest.param("kernels", marks=NEEDS_KERNELS)])
def served(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers finds the folder under NAMES, without the kernels package and by it."""
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
        yield
    else:
        monkeypatch.setenv("LOCAL_KERNELS", ":".join(f"{name}={folder}" for name in NAMES))
        with loaded_anew():
            yield


@contextmanager
def loaded_anew() -> Iterator[None]:
    """Clears the kernel that Transformers has cached, before and after a test."""
    modeling_flash_attention_utils._loaded_implementation = None
    yield
    modeling_flash_attention_utils._loaded_implementation = None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_those_of_flash_attn(name: str, backend: str, folder: Path) -> None:
    """Arguments have its order and defaults. Transformers inspects their names, and s_aux, which is ours."""
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(imported(folder, backend), name)).parameters
    positional = [key for key, value in parameters.items() if value.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [*required.split(), *optional]
    assert {key: parameters[key].default for key in optional} == optional
    assert parameters["s_aux"].default is None
    assert "sinks" not in parameters


class Tokens(NamedTuple):
    """One sequence: q (seqlen_q, nheads, headdim), k and v (seqlen_k, nheads_k, headdim)."""

    q: Tensor
    k: Tensor
    v: Tensor


SCALE = 0.3
WINDOW = 5
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])  # of four heads
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"sliding_window": WINDOW},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": SINKS},
    "all": {"sliding_window": WINDOW, "softcap": 1.5, "s_aux": SINKS},
    "not causal": {"is_causal": False},
    "window to both sides": {"is_causal": False, "sliding_window": WINDOW},
}


def draw(lengths: list[tuple[int, int]]) -> list[Tokens]:
    """Sequences of (seqlen_q, seqlen_k) tokens, float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [((seqlen_q, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 16)) for seqlen_q, seqlen_k in lengths]
    return [Tokens(*(2 * torch.randn(shape, generator=generator) for shape in one)) for one in shapes]


def expected(
    tokens: Tokens,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    compute_dtype: torch.dtype | None = torch.float64,
) -> Tensor:
    """The exact result for one sequence under Transformers' arguments. A window counts the token itself."""
    left = -1 if sliding_window is None else sliding_window - 1
    options = Options(SCALE, is_causal, left, 0 if is_causal else left, softcap or 0.0)
    problem, inputs = prepare_dense(*(tensor[None] for tensor in tokens), options, sinks=s_aux)
    return reference_attention(problem, inputs, compute_dtype).out[0]


class Layer(nn.Module):
    """The attributes of an attention layer that Transformers' wrapper reads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=KERNEL)
        self.is_causal = True
        self.projection = nn.Linear(1, 1)


def wrapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Transformers' flash_attention_forward. All tensors (batch_size, seqlen, heads, headdim)."""
    modeling_flash_attention_utils.lazy_import_flash_attention(KERNEL)
    states = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out: Tensor = flash_attention_forward(Layer(), *states, mask, scaling=SCALE, **kwargs)[0]
    return out


def attend_equal_lengths(batch: list[Tokens], **options: Any) -> list[Tensor]:
    """Attention by flash_attn_func."""
    return list(wrapped(*map(torch.stack, zip(*batch, strict=True)), None, **options))


def attend_padded(batch: list[Tokens], **options: Any) -> list[Tensor]:
    """Attention by flash_attn_varlen_func, with padding on the left that must not be read."""

    def stacked(tensors: tuple[Tensor, ...]) -> Tensor:
        longest = max(map(len, tensors))
        return torch.stack([F.pad(one, (0, 0, 0, 0, longest - len(one), 0), value=torch.nan) for one in tensors])

    q, k, v = map(stacked, zip(*batch, strict=True))
    mask = torch.stack([torch.arange(k.shape[1]) >= k.shape[1] - len(one.k) for one in batch])
    out = wrapped(q, k, v, mask, **options)
    return [row[-len(one.q) :] for row, one in zip(out, batch, strict=True)]


def attend_positions(batch: list[Tokens], **options: Any) -> list[Tensor]:
    """Attention by flash_attn_varlen_func, with concatenated sequences in one row. max_seqlen are tensors then."""
    positions = torch.cat([torch.arange(len(one.q)) for one in batch])
    out = wrapped(*_in_one_row(batch), None, position_ids=positions[None], **options)
    return list(out[0].split([len(one.q) for one in batch]))


def attend_offsets(batch: list[Tokens], **options: Any) -> list[Tensor]:
    """Attention by flash_attn_varlen_func, with the offsets of the sequences."""
    seqlens_q, seqlens_k = ([len(one[index]) for one in batch] for index in (0, 1))
    return list(wrapped(*_in_one_row(batch), None, **_lengths(seqlens_q, seqlens_k), **options)[0].split(seqlens_q))


def attend_pages(batch: list[Tokens], **options: Any) -> list[Tensor]:
    """Attention by flash_attn_with_kvcache, which appends each sequence's last token, as in continuous batching."""
    page_size, pages_each = 4, 3
    k_cache, v_cache = (
        torch.full((pages_each * len(batch), page_size, 2, 16), torch.nan, dtype=batch[0].k.dtype) for _ in range(2)
    )
    block_table = torch.full((len(batch), pages_each), -1, dtype=torch.int32)
    free = iter(torch.randperm(len(k_cache), generator=torch.Generator().manual_seed(1)).tolist())
    for row, one in zip(block_table, batch, strict=True):
        for index in range(-(-len(one.k) // page_size)):
            row[index] = page = next(free)
            for cache, tokens in ((k_cache, one.k[:-1]), (v_cache, one.v[:-1])):
                part = tokens[index * page_size : (index + 1) * page_size]
                cache[page, : len(part)] = part
    last = [Tokens(*(tensor[-1:] for tensor in one)) for one in batch]
    paged = {"block_table": block_table, "k_cache": k_cache, "v_cache": v_cache}
    lengths = _lengths([1] * len(batch), [len(one.k) for one in batch]) | {"max_length_k": 1}  # as Transformers has it
    out = wrapped(*_in_one_row(last), None, **paged, **lengths, **options)
    for row, one in zip(block_table.long(), batch, strict=True):
        used = row[: -(-len(one.k) // page_size)]
        assert torch.equal(k_cache[used].flatten(0, 1)[: len(one.k)], one.k)
        assert torch.equal(v_cache[used].flatten(0, 1)[: len(one.v)], one.v)
    return list(out[0].split(1))


def _in_one_row(batch: list[Tokens]) -> Iterator[Tensor]:
    return (torch.cat(tensors)[None] for tensors in zip(*batch, strict=True))


def _lengths(seqlens_q: list[int], seqlens_k: list[int]) -> dict[str, Any]:
    """The arguments that say where sequences in a row end."""
    found: dict[str, Any] = {"max_length_q": max(seqlens_q), "max_length_k": max(seqlens_k)}
    for name, seqlens in (("q", seqlens_q), ("k", seqlens_k)):
        found[f"cu_seq_lens_{name}"] = F.pad(torch.tensor(seqlens).cumsum(0, dtype=torch.int32), (1, 0))
    return found


LAYOUTS: dict[str, tuple[Callable[..., list[Tensor]], list[tuple[int, int]]]] = {
    "prefill": (attend_equal_lengths, [(13, 13), (13, 13)]),
    "chunk": (attend_equal_lengths, [(3, 13), (3, 13)]),
    "decoding": (attend_equal_lengths, [(1, 13), (1, 13)]),
    "padded prefill": (attend_padded, [(13, 13), (8, 8)]),
    "padded chunk": (attend_padded, [(3, 13), (3, 8)]),
    "padded decoding": (attend_padded, [(1, 13), (1, 8)]),
    "positions": (attend_positions, [(4, 4), (9, 9), (1, 1)]),
    "offsets": (attend_offsets, [(4, 4), (2, 9), (1, 7), (3, 3)]),
    "pages": (attend_pages, [(1, 9), (1, 12), (1, 1)]),
}


# Transformers decodes without pages where a model has windows.
CALLS = [
    (layout, name)
    for layout in LAYOUTS
    for name in OPTIONS
    if layout != "pages" or "sliding_window" not in OPTIONS[name]
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("layout", "options"), CALLS, ids=[f"{layout}-{name}" for layout, name in CALLS])
def test_wrapper_of_transformers_computes_what_its_arguments_mean(layout: str, options: str) -> None:
    attend, lengths = LAYOUTS[layout]
    given = OPTIONS[options]
    batch = draw(lengths)
    for found, tokens in zip(attend(batch, **given), batch, strict=True):
        assert found.dtype is torch.float32
        assert_same(found, expected(tokens, **given).float(), tolerance=2e-6)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["prefill", "offsets", "pages"])
def test_sinks_may_be_of_a_half_type(layout: str, dtype: torch.dtype) -> None:
    """Transformers casts them to the dtype of q."""
    attend, lengths = LAYOUTS[layout]
    batch = [Tokens(*(tensor.to(dtype) for tensor in one)) for one in draw(lengths)]
    for found, tokens in zip(attend(batch, s_aux=SINKS), batch, strict=True):
        exact = expected(tokens, s_aux=SINKS.to(dtype))
        usual = expected(tokens, s_aux=SINKS.to(dtype), compute_dtype=None)
        error, allowed = ((out.double() - exact).abs().max().item() for out in (found, usual))
        assert found.dtype is dtype
        assert error <= 2 * allowed + torch.finfo(dtype).eps


def test_lse_is_returned_as_flash_attn_does(folder: Path) -> None:
    kernel = imported(folder)
    q, k, v = (tensor[None] for tensor in draw([(3, 9)])[0])
    out, lse, mask = kernel.flash_attn_func(q, k, v, return_attn_probs=True, s_aux=SINKS)
    assert mask is None
    assert torch.equal(out, kernel.flash_attn_func(q, k, v, s_aux=SINKS))
    cached, cached_lse = kernel.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, s_aux=SINKS)
    torch.testing.assert_close((cached, cached_lse), (out, lse), atol=1e-6, rtol=1e-6)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) * 16**-0.5
    scores = torch.cat([scores, SINKS[:, None, None].expand(1, 4, 3, 1)], dim=-1)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_torch_compile_makes_one_graph_of_a_call(folder: Path) -> None:
    """Transformers promises that for kernels that it has loaded before."""
    kernel = imported(folder)
    q, k, v = (tensor[None] for tensor in draw([(3, 9)])[0])

    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Any:
        return kernel.flash_attn_func(q, k, v, causal=True, s_aux=s_aux)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, SINKS), call(q, k, v, SINKS))


def served_model(name: str, implementation: str | None = None) -> Any:
    """The decoder called `name` on the kernel, made as a user makes it."""
    eager = pair(name).eager
    kernel = implementation or (LISTED_KERNEL if name == "gpt_oss" else KERNEL)
    model = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation=kernel).eval()
    model.load_state_dict(eager.state_dict())
    assert model.config._attn_implementation == kernel
    assert eager.config._attn_implementation == "eager"
    return model


@sampled
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generated_tokens_are_those_of_eager_attention(name: str, side: str) -> None:
    """Windows, softcap, sinks; eight new tokens after eleven, so that windows slide."""
    eager = greedy(pair(name).eager, prompts(), padding_mask(side))
    assert_varied(eager)
    assert greedy(served_model(name), prompts(), padding_mask(side)) == eager


@pytest.mark.usefixtures("served")
def test_flash_attention_2_loads_the_folder_under_that_name() -> None:
    """A model that asks for flash-attn itself gets the kernel that Transformers takes in its place."""
    model = served_model("llama", FLASH_ATTENTION_2)
    model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == FLASH_ATTENTION_2
    assert greedy(model, prompts()) == greedy(pair("llama").eager, prompts())


NEW_TOKENS = 8


def batched_tokens(model: Any, requests: list[list[int]], **options: Any) -> list[list[int]]:
    """Tokens that continuous batching generates for each request, with a cache that holds only some of them at once."""
    found = model.generate_batch(
        requests,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=24, page_size=8, max_batch_tokens=48, **options),
    )
    assert [one.error for one in found.values()] == [None] * len(requests)
    return [one.generated_tokens for one in found.values()]


def eager_tokens(name: str, requests: list[list[int]]) -> list[list[int]]:
    """The same, one request after the other with eager attention."""
    return [greedy(pair(name).eager, torch.tensor([one]), count=NEW_TOKENS)[0][len(one) :] for one in requests]


def draw_requests() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 60, (12,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(each, marks=slow) for each in ("llama", "mistral", "gemma2"))]
)
def test_batched_tokens_are_those_of_eager_attention(name: str) -> None:
    requests = draw_requests()
    assert batched_tokens(served_model(name), requests) == eager_tokens(name, requests)


@pytest.mark.usefixtures("served")
def test_batched_decoding_appends_to_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers decodes that way on GPUs only: here it is told that it may."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    model, calls = served_model("llama"), []
    decode = modeling_flash_attention_utils._flash_with_kvcache_fn

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(sorted(kwargs))
        return decode(*args, **kwargs)

    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_with_kvcache_fn", counted)
    requests = draw_requests()
    assert batched_tokens(model, requests, max_blocks_per_request=16) == eager_tokens("llama", requests)
    assert calls
    assert all({"block_table", "cache_seqlens", "causal", "softmax_scale"} <= set(names) for names in calls)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_has_the_documented_fields(backend: str, folder: Path) -> None:
    metadata = json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text())
    assert set(metadata) == {"id", "name", "version", "license", "python-depends", "backend"}
    assert metadata["id"].isidentifier()
    assert metadata["name"] == KERNEL.split("/")[1]
    assert metadata["version"] == hub_kernels.get_attn_kernel_version(KERNEL)
    assert metadata["backend"] == {"type": backend}


@NEEDS_KERNELS
@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_is_read_by_the_kernels_package(backend: str, folder: Path) -> None:
    import kernels

    metadata = kernels.Metadata.read_from_file(folder / "build" / f"torch-{backend}" / "metadata.json")
    assert metadata.name.python_name == "flash_attn2"
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.backend.archs is None
    assert metadata.python_depends == []


@NEEDS_KERNELS
def test_kernels_package_loads_the_folder(folder: Path) -> None:
    import kernels

    module = kernels.get_local_kernel(folder)
    assert all(callable(getattr(module, name)) for name in FUNCTIONS)
