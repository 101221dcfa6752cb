"""Models of Transformers with linear layers compute the same by fastattention.linear as by torch's operations."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import transformers
from tiers import slow
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.integrations import hub_kernels
from transformers.models.qwen3_next import modeling_qwen3_next

from fastattention.errors import ArgumentError
from fastattention.integrations.transformers import linear_attention, linear_layers, serve_linear_attention
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.models import VOCABULARY, assert_same, greedy, padding_mask, prompts, sharpen

# One model of each rule is tested every time, the others with all tests.
NAMES = [
    *("qwen3_next", "kimi_linear", "bamba"),
    *(pytest.param(name, marks=slow) for name in ("qwen3_5", "olmo_hybrid")),
    *(pytest.param(name, marks=slow) for name in ("mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2")),
]
RULES = ("gated_delta_rule", "kda", "ssd")
LENGTH = 75  # more than a chunk of 64
NUM_LINEAR = 2  # layers
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {
    **{name: size for name, size in _SIZES.items() if name != "layer_types" and not name.startswith("linear_")},
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5": _SIZES,
    # No groups of heads; beta is up to 2.
    "olmo_hybrid": {**_SIZES, "linear_num_value_heads": 2, "linear_allow_neg_eigval": True},
    # Kimi delta attention, with a gate for every key dimension, and latent attention.
    "kimi_linear": {
        **{name: size for name, size in _SIZES.items() if not name.startswith("linear_") and name != "head_dim"},
        "linear_head_dim": 24, "linear_num_heads": 3, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 3,
    },
    # Mamba-2, with heads in groups.
    "mamba2": {
        **_MAMBA, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "nemotron_h": {
        **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 24,
    },
    "zamba2": {
        **_MAMBA, "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8,
        "mamba_ngroups": 2, "num_key_value_heads": 4, "adapter_rank": 8,
    },
}  # fmt: skip


def model_with(name: str, **changed: Any) -> Any:
    config = CONFIG_MAPPING["qwen3_5_text" if name == "qwen3_5" else name](**_CONFIGS[name] | changed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    sharpen(model)
    return model


@functools.cache
def model_of(name: str) -> Any:
    """Shared by all tests: leave it as it is."""
    return model_with(name)


class Calls(NamedTuple):
    """Mocks that count calls of our functions of every rule, and compute."""

    chunk: list[Mock]
    recurrent: list[Mock]

    @property
    def counts(self) -> tuple[int, int]:
        return sum(mock.call_count for mock in self.chunk), sum(mock.call_count for mock in self.recurrent)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls([], [])
    for kind, mocks in calls._asdict().items():
        for rule in RULES:
            mocks.append(Mock(wraps=getattr(linear_layers, f"{kind}_{rule}")))
            monkeypatch.setattr(linear_layers, f"{kind}_{rule}", mocks[-1])
    return calls


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Records warnings of Transformers and ours."""
    mock = Mock()
    monkeypatch.setattr(hub_kernels.logger, "warning_once", mock)
    monkeypatch.setattr(linear_layers._log, "warning_once", mock)
    return mock


def by_torch(compute: Callable[[], Any]) -> Any:
    """The result of `compute` with torch's functions."""
    serve_linear_attention(False)
    try:
        return compute()
    finally:
        serve_linear_attention()


def arguments(seqlen: int = 9, headdim: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Arguments of a gated delta rule, as models give them: 2 heads for queries and keys, 4 for values."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, seqlen, 2, headdim, generator=generator, dtype=dtype) for _ in range(2))
    value = torch.randn(1, seqlen, 4, headdim, generator=generator, dtype=dtype)
    g, beta = (torch.rand(1, seqlen, 4, generator=generator) for _ in range(2))
    last = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "cu_seqlens": None, "max_length_q": 3}
    return {"query": query, "key": key, "value": value, "g": -g, "beta": beta, **last}


# ---- whole models


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_torch(name: str, side: str, calls: Calls) -> None:
    model, ids, mask = model_of(name), prompts(length=LENGTH), padding_mask(side, length=LENGTH)

    @torch.no_grad()
    def logits() -> Tensor:
        return model(ids, attention_mask=mask).logits

    ours = logits()
    assert calls.counts == (NUM_LINEAR, 0)
    assert_same(ours, by_torch(logits), mask, 1e-4)
    assert calls.counts == (NUM_LINEAR, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_parts_and_decoding_are_those_of_torch(name: str, calls: Calls) -> None:
    model, ids = model_of(name), prompts(length=LENGTH)

    @torch.no_grad()
    def logits() -> Tensor:
        cache = DynamicCache(config=model.config)
        parts = ids.split([70, 3, 1, 1], dim=1)
        return torch.cat([model(part, **{CACHE_ARGUMENT: cache}).logits for part in parts], dim=1)

    ours = logits()
    assert calls.counts == (2 * NUM_LINEAR, 2 * NUM_LINEAR)
    assert_same(ours, by_torch(logits), tolerance=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_torch(name: str, calls: Calls) -> None:
    given = model_of(name), prompts(length=20), padding_mask("left", length=20), 20
    ours = greedy(*given)
    assert calls.counts == (NUM_LINEAR, 19 * NUM_LINEAR)
    assert ours == by_torch(lambda: greedy(*given))


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_has_the_loss_and_gradients_of_torch(name: str, calls: Calls) -> None:
    model, ids = model_of(name), prompts(length=LENGTH)

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = model(ids, labels=ids, use_cache=False).loss
        return loss, torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    loss, grads = step()
    assert calls.counts == (NUM_LINEAR, 0)
    loss_of_torch, grads_of_torch = by_torch(step)
    torch.testing.assert_close(loss, loss_of_torch, rtol=1e-5, atol=1e-5)
    largest = max(grad.abs().max() for grad in grads_of_torch).item()
    for one, other in zip(grads, grads_of_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5 * largest)


@pytest.mark.parametrize(
    "name", ["qwen3_5", "olmo_hybrid", "bamba"]
)  # experts of Qwen3-Next are chosen: errors may leap
def test_bfloat16_is_as_near_to_float32_as_torch(name: str) -> None:
    rounded = copy.deepcopy(model_of(name)).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    ids = prompts(length=LENGTH)
    with torch.no_grad():
        wanted = by_torch(lambda: exact(ids).logits)
        ours, others = rounded(ids).logits, by_torch(lambda: rounded(ids).logits)
    errors = [(logits.float() - wanted).square().mean().sqrt().item() for logits in (ours, others)]
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", pytest.param("granitemoehybrid", marks=slow)])
def test_a_model_keeps_concatenated_sequences_apart(name: str, calls: Calls, warned: Mock) -> None:
    model = model_with(name)
    model.set_attn_implementation("fast_attention")
    ids = prompts(batch_size=1, length=LENGTH)
    offsets = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    lengths = {f"cu_seq_lens_{each}": offsets for each in "qk"} | {f"max_length_{each}": LENGTH - 5 for each in "qk"}
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    with torch.no_grad():
        logits = model(ids, position_ids=positions, use_cache=False, **lengths).logits
        assert calls.counts == (NUM_LINEAR, 0)
        apart = torch.cat([model(part, use_cache=False).logits for part in ids.split([5, LENGTH - 5], dim=1)], dim=1)
    assert_same(logits, apart, tolerance=1e-4)
    assert not warned.called


@slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_calls_our_operator() -> None:
    model, ids = model_of("qwen3_5"), prompts(length=12)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        ours = compiled(ids, use_cache=False).logits
    assert graphs[0].count("fastattention.linear_attention") == NUM_LINEAR
    assert_same(ours, by_torch(lambda: model(ids, use_cache=False).logits.detach()), tolerance=1e-4)


# ---- whether modules are found


def names_of_models(function: str) -> list[str]:
    """Names of models whose code has a function."""
    folder = Path(transformers.__file__).parent / "models"
    return sorted(path.parent.name for path in folder.glob("*/modeling_*.py") if f"def {function}(" in path.read_text())


def modeling_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@slow
@pytest.mark.parametrize("name", names_of_models("torch_chunk_gated_delta_rule"))
def test_every_model_with_gated_delta_rules_is_served(name: str, calls: Calls, warned: Mock) -> None:
    modeling_of(name).torch_chunk_gated_delta_rule(**arguments())
    modeling_of(name).torch_recurrent_gated_delta_rule(**arguments())
    assert calls.counts == (1, 1)
    assert not warned.called


@pytest.mark.parametrize("name", names_of_models("chunk_kimi_delta_attention"))
def test_every_model_with_kimi_delta_attention_is_served(name: str, calls: Calls, warned: Mock) -> None:
    given = arguments()
    given |= {name: given[name].repeat_interleave(2, dim=2) for name in ("query", "key")}
    given["g"] = given["g"][..., None].expand(-1, -1, -1, 8)
    ours = (
        modeling_of(name).chunk_kimi_delta_attention(**given),
        modeling_of(name).recurrent_kimi_delta_attention(initial_state=None, **given),
    )
    assert calls.counts == (1, 1)
    assert not warned.called
    for one, other in zip(*ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def arguments_of_mamba(seqlen: int = 70) -> dict[str, Any]:
    """Arguments of a prompt of Mamba-2, as models give them: 4 heads of 8 in 2 groups, states of 6."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "hidden_states": normal(2, seqlen, 4, 8), "dt": normal(2, seqlen, 4), "A": -normal(4).exp(),
        "B": normal(2, seqlen, 2, 6), "C": normal(2, seqlen, 2, 6), "chunk_size": 32, "D": normal(4), "z": None,
        "return_final_states": True, "dt_bias": normal(4), "dt_softplus": True, "initial_states": normal(2, 4, 8, 6),
        "dt_limit": (0.1, 2.0),
    }  # fmt: skip


def token_of_mamba(**changed: Any) -> dict[str, Any]:
    """The arguments of a token, and a copy of the state. Everything of a head is repeated, as models do."""
    given = arguments_of_mamba(1)
    return {
        "state": given["initial_states"].clone(), "hidden_states": given["hidden_states"][:, 0],
        "dt": given["dt"].transpose(1, 2).expand(-1, -1, 8), "A": given["A"][:, None, None].expand(-1, 8, 6),
        "B": given["B"][:, 0], "C": given["C"][:, 0], "D": given["D"][:, None].expand(-1, 8), "z": None,
        "dt_bias": given["dt_bias"][:, None].expand(-1, 8), "dt_softplus": True,
    } | changed  # fmt: skip


@pytest.mark.parametrize("name", names_of_models("mamba2_chunk_scan"))
def test_every_model_with_mamba_2_is_served(name: str, calls: Calls, warned: Mock) -> None:
    modeling, given = modeling_of(name), arguments_of_mamba()
    token, of_torch = (token_of_mamba(z=torch.linspace(-2, 2, 64).reshape(2, 4, 8)) for _ in range(2))
    ours = *modeling.mamba2_chunk_scan(**given), modeling.mamba2_selective_state_update(**token), token["state"]
    assert calls.counts == (1, 1)
    assert not warned.called
    prompt = by_torch(lambda: modeling.mamba2_chunk_scan(**given))
    wanted = *prompt, by_torch(lambda: modeling.mamba2_selective_state_update(**of_torch)), of_torch["state"]
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dt": torch.rand(2, 4, 8)}, "leaves Mamba-2 to the model itself: dt differs within a head"),
        ({"A": -torch.rand(4, 8, 6)}, "A differs within a head"),
        ({"hidden_states": torch.rand(2, 4, 8).half()}, "hidden_states, B and C are torch.float16, torch.float32"),
    ],
    ids=["dt", "A", "mixed"],
)
def test_a_token_of_mamba_2_that_is_refused_is_computed_by_the_model(
    changed: dict[str, Any], reason: str, calls: Calls, warned: Mock
) -> None:
    given, of_torch = token_of_mamba(**changed), token_of_mamba(**changed)
    out = modeling_of("bamba").mamba2_selective_state_update(**given)
    assert calls.counts == (0, 0)
    assert any(reason in call.args[0] for call in warned.call_args_list)
    assert torch.equal(out, by_torch(lambda: modeling_of("bamba").mamba2_selective_state_update(**of_torch)))
    assert torch.equal(given["state"], of_torch["state"])


def test_states_of_mamba_2_stay_as_kernels_read_them() -> None:
    """A cache copies a state of the same memory layout, so kernels read and write it without another copy."""
    model, ids = model_of("bamba"), prompts(length=9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    assert cache.get_recurrent_state(0).mT.is_contiguous()


def another_copy(name: str) -> ModuleType:
    """The modelling module of Qwen3-Next, executed once more under another name."""
    path = modeling_qwen3_next.__file__
    assert path is not None
    spec = importlib.util.spec_from_file_location(f"{modeling_qwen3_next.__package__}.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("first", ["module", "integration"])
def test_the_order_of_imports_does_not_matter(
    first: str, calls: Calls, warned: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first == "module":
        factory = hub_kernels.use_kernel_func_from_hub_with_fallback.__wrapped__  # as it was
        monkeypatch.setattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", factory)
        monkeypatch.setattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback", factory)
    module = another_copy(f"imported_before_{first}")
    try:
        if first == "module":
            module.torch_chunk_gated_delta_rule(**arguments())
            assert calls.counts == (0, 0)
            assert "falling back" in warned.call_args.args[0]
            warned.reset_mock()
            serve_linear_attention()
        module.torch_chunk_gated_delta_rule(**arguments())
        module.torch_recurrent_gated_delta_rule(**arguments())
    finally:
        del sys.modules[module.__name__]
    assert calls.counts == (1, 1)
    assert not warned.called


def test_repeated_calls_wrap_once() -> None:
    before = modeling_qwen3_next.torch_chunk_gated_delta_rule, hub_kernels.use_kernel_func_from_hub_with_fallback
    serve_linear_attention()
    after = modeling_qwen3_next.torch_chunk_gated_delta_rule, hub_kernels.use_kernel_func_from_hub_with_fallback
    assert before == after


def test_functions_of_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(torch_chunk_gated_delta_rule=arguments)
    monkeypatch.setitem(sys.modules, "a_model_of_a_user", module)
    serve_linear_attention()
    assert module.torch_chunk_gated_delta_rule is arguments


def test_ours_comes_before_flash_linear_attention(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: None = None, beta: Tensor | None = None) -> Any:
        return g, gk, beta

    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(fused_recurrent_gated_delta_rule=theirs))
    decorator = hub_kernels.use_kernel_func_from_hub_with_fallback("fused_recurrent_gated_delta_rule", "fla")
    function = decorator(modeling_qwen3_next.torch_recurrent_gated_delta_rule.__wrapped__)
    given = arguments()
    qkv = [given.pop(name) for name in ("query", "key", "value")]
    function(*qkv, **given)
    assert calls.counts == (0, 1)
    assert by_torch(lambda: function(*qkv, **given)) == (given["g"], None, given["beta"])


@pytest.mark.parametrize("first", ["module", "integration"])
def test_functions_that_kernels_made_modules_are_served(
    first: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package `kernels` makes an instance of a class of its own, and replaces the forward of the instance."""

    def as_kernels_do(function: Callable[..., Any]) -> nn.Module:
        class Func(nn.Module):
            kernel_layer_name = "chunk_gated_delta_rule"

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

        return Func()

    if first == "integration":
        monkeypatch.setattr(hub_kernels, "use_kernel_forward_from_hub", lambda name: as_kernels_do)
        decorator = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
        layer = decorator(lambda query, *_, **__: query)
    else:
        layer = as_kernels_do(lambda query, *_, **__: query)
        monkeypatch.setitem(sys.modules, "a_module", SimpleNamespace(torch_chunk_gated_delta_rule=layer))
        for _ in range(2):
            serve_linear_attention()
    given = arguments()
    assert layer(**given)[0].shape == given["value"].shape
    assert calls.counts == (1, 0)
    assert by_torch(lambda: layer(**given)) is given["query"]
    layer.forward = lambda **_: "of the hub"
    assert layer(**given) == "of the hub"
    assert calls.counts == (1, 0)


def test_a_transformers_without_the_decorator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hub_kernels, "use_kernel_func_from_hub_with_fallback")
    warning = Mock()
    monkeypatch.setattr(linear_attention._log, "warning", warning)
    serve_linear_attention()
    assert "has no use_kernel_func_from_hub_with_fallback" in warning.call_args.args[0]


# ---- single calls


def test_switched_off_models_compute_as_before(calls: Calls, warned: Mock) -> None:
    by_torch(lambda: modeling_qwen3_next.torch_chunk_gated_delta_rule(**arguments() | {"max_length_q": None}))
    assert calls.counts == (0, 0)
    assert "falling back" in warned.call_args.args[0]
    modeling_qwen3_next.torch_chunk_gated_delta_rule(**arguments())
    assert calls.counts == (1, 0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (arguments(headdim=300), "a head dimension is 300; allowed are 1 to 256"),
        (arguments(dtype=torch.float64), "query is torch.float64"),
        (
            arguments() | {"value": arguments()["value"].half()},
            "query, key and value are torch.float32, torch.float32 and torch.float16",
        ),
    ],
    ids=["headdim", "float64", "mixed"],
)
@pytest.mark.parametrize("kind", Calls._fields)
def test_what_is_refused_is_computed_by_the_model_with_a_warning(
    kind: str, given: dict[str, Any], reason: str, calls: Calls, warned: Mock
) -> None:
    function = getattr(modeling_qwen3_next, f"torch_{kind}_gated_delta_rule")
    out, state = function(**given)
    assert calls.counts == (0, 0)
    assert any(reason in call.args[0] for call in warned.call_args_list)
    out_of_torch, state_of_torch = by_torch(lambda: function(**given))
    assert torch.equal(out, out_of_torch)
    assert torch.equal(state, state_of_torch)


def test_a_reason_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    given = arguments(headdim=301)
    with caplog.at_level(logging.WARNING, logger=linear_layers.__name__):
        for _ in range(2):
            modeling_qwen3_next.torch_chunk_gated_delta_rule(**given)
    assert sum("head dimension is 301" in record.message for record in caplog.records) == 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_call_gives_its_reason_too(warned: Mock) -> None:
    given = arguments(headdim=302)
    compiled = torch.compile(modeling_qwen3_next.torch_recurrent_gated_delta_rule, backend="eager", fullgraph=True)
    out, _ = compiled(**given)
    assert any("head dimension is 302" in call.args[0] for call in warned.call_args_list)
    assert torch.equal(out, by_torch(lambda: modeling_qwen3_next.torch_recurrent_gated_delta_rule(**given))[0])


@pytest.mark.parametrize("kind", Calls._fields)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_states_of_any_dtype_are_taken_and_float32_is_returned(kind: str, dtype: torch.dtype) -> None:
    state = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = arguments() | {"initial_state": state}
    function = getattr(modeling_qwen3_next, f"torch_{kind}_gated_delta_rule")
    ours, theirs = function(**given), by_torch(lambda: function(**given))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_arguments_may_be_positional() -> None:
    given = arguments()
    five = [given[name] for name in ("query", "key", "value", "g", "beta")]
    state = torch.ones(1, 4, 8, 8)
    for function, rest in (
        (modeling_qwen3_next.torch_chunk_gated_delta_rule, (16, state, True, True)),
        (modeling_qwen3_next.torch_recurrent_gated_delta_rule, (state, True, True)),
    ):
        ours, theirs = function(*five, *rest), by_torch(functools.partial(function, *five, *rest))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", Calls._fields)
def test_concatenated_sequences_are_kept_apart(kind: str, warned: Mock) -> None:
    function = getattr(modeling_qwen3_next, f"torch_{kind}_gated_delta_rule")
    first, second = arguments(5, seed=1), arguments(7, seed=2)
    both = {name: torch.cat([first[name], second[name]], dim=1) for name in ("query", "key", "value", "g", "beta")}
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    rows = {"seq_idx": torch.tensor([5 * [0] + 7 * [1]], dtype=torch.int32)}
    for sequences in ({"cu_seqlens": offsets}, rows):
        out, states = function(**first | both | sequences)
        for part, state, given in zip(out.split([5, 7], dim=1), states.split(1), (first, second), strict=True):
            wanted = function(**given)
            torch.testing.assert_close(part, wanted[0])
            torch.testing.assert_close(state, wanted[1])
    assert not warned.called
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        function(**first | both | {"cu_seqlens": offsets + 1})


def arguments_of_convolution(**changed: Any) -> dict[str, Any]:
    """Arguments of a convolution of 12 tokens, as models give them: 6 channels, four weights each."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 12, 6), (6, 4), (6,)))
    return {"hidden_states": x.transpose(1, 2), "weight": weight, "bias": bias, "activation": "silu"} | changed


@pytest.mark.parametrize("name", names_of_models("causal_conv1d_fn"))
def test_every_causal_convolution_is_served(name: str, warned: Mock) -> None:
    modeling, given = modeling_of(name), arguments_of_convolution()
    torch.testing.assert_close(
        modeling.causal_conv1d_fn(**given), by_torch(lambda: modeling.causal_conv1d_fn(**given)), rtol=1e-5, atol=1e-5
    )
    states = [torch.linspace(-1, 1, 24).reshape(1, 6, 4) for _ in range(2)]
    tokens = [given | {"hidden_states": given["hidden_states"][..., :1], "conv_state": state} for state in states]
    warned.reset_mock()
    ours = modeling.causal_conv1d_update(**tokens[0])
    assert not warned.called
    torch.testing.assert_close(ours, by_torch(lambda: modeling.causal_conv1d_update(**tokens[1])), rtol=1e-5, atol=1e-5)
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "sequences",
    [
        {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)},
        {"seq_idx": torch.tensor([5 * [0] + 7 * [1]], dtype=torch.int32)},
    ],
    ids=["cu_seq_lens_q", "seq_idx"],
)
def test_a_convolution_keeps_concatenated_sequences_apart(sequences: dict[str, Tensor], warned: Mock) -> None:
    given = arguments_of_convolution()
    out = modeling_qwen3_next.causal_conv1d_fn(**given, **sequences)
    for part, x in zip(*(x.split([5, 7], dim=-1) for x in (out, given["hidden_states"])), strict=True):
        torch.testing.assert_close(part, modeling_qwen3_next.causal_conv1d_fn(**given | {"hidden_states": x}))
    assert not warned.called


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weight": torch.ones(6, 5)}, "leaves a causal convolution to the model itself: a filter has 5 weights"),
        ({"activation": "gelu"}, "activation='gelu'; allowed are None, 'silu' and 'swish'"),
        (
            {"activation": "gelu", "cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)},
            "there, neighbouring sequences mix",
        ),
    ],
    ids=["width", "activation", "sequences"],
)
def test_a_convolution_that_is_refused_is_computed_by_the_model(
    changed: dict[str, Any], reason: str, warned: Mock
) -> None:
    given = arguments_of_convolution(**changed)
    out = modeling_qwen3_next.causal_conv1d_fn(**given)
    assert any(reason in call.args[0] for call in warned.call_args_list)
    assert torch.equal(out, by_torch(lambda: modeling_qwen3_next.causal_conv1d_fn(**given)))


def test_sequences_in_several_rows_are_refused(warned: Mock) -> None:
    """Transformers raises, as its own function cannot keep them apart."""
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        modeling_qwen3_next.causal_conv1d_fn(**arguments_of_convolution(seq_idx=torch.zeros(2, 12)))
    assert any("seq_idx has 2 rows" in call.args[0] for call in warned.call_args_list)


def test_a_token_of_a_convolution_with_gradients_is_left_to_the_model(warned: Mock) -> None:
    given = arguments_of_convolution()
    given["weight"].requires_grad_()
    given["hidden_states"] = given["hidden_states"][..., :1]
    out = modeling_qwen3_next.causal_conv1d_update(**given, conv_state=torch.zeros(1, 6, 4))
    assert out.requires_grad
    assert any("a token is decoded with gradients" in call.args[0] for call in warned.call_args_list)


def test_export_keeps_the_form_of_torch(calls: Calls) -> None:
    class Rule(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return modeling_qwen3_next.torch_recurrent_gated_delta_rule(query, key, value, g=g, beta=beta)[0]

    given = {name: value for name, value in arguments(3).items() if isinstance(value, Tensor)}
    program = torch.export.export(Rule(), (), given)
    assert calls.counts == (0, 0)
    assert "fastattention" not in program.graph_module.code
