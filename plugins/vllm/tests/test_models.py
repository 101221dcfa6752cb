"""Whole models inside vLLM on a CPU, with chunked prefill and prefix cache.

In float32 greedy tokens must equal those of Transformers' eager attention, and vLLM's own. In half precision near ties
differ at random, so log-probabilities of the prompts are compared instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from engine import greedy_tokens, in_engine, prompt_logprobs
from models import CONFIGS, VOCAB_SIZE, eager_logprobs, eager_model, eager_tokens, save_model

NEW_TOKENS = 24
IN_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


def make_prompts() -> list[list[int]]:
    """Prompts of a few to more than two chunks of tokens, of which two share a prefix of five blocks."""
    generator = torch.Generator().manual_seed(3)

    def random_tokens(count: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()

    prefix = random_tokens(160)
    return [random_tokens(length) for length in (3, 17, 50, 130, 64)] + [[*prefix, 7, 8], [*prefix, 9]]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def tokens_twice(llm: Any) -> list[list[list[int]]]:
    """Tokens after each prompt, the second time with the prompts' blocks in the prefix cache."""
    return [greedy_tokens(llm, PROMPTS, NEW_TOKENS) for _ in range(2)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "gpt_oss", "bloom"])
def test_tokens_equal_those_of_eager_and_of_vllm(folders: dict[str, Path], name: str) -> None:
    model = eager_model(folders[name])
    expected, exact = eager_tokens(model, PROMPTS, NEW_TOKENS), eager_logprobs(model, PROMPTS)
    assert len({token for tokens in expected for token in tokens}) > 20  # a model that repeats itself tests nothing

    def tokens_and_logprobs(llm: Any) -> tuple[list[list[list[int]]], Tensor]:
        return tokens_twice(llm), prompt_logprobs(llm, PROMPTS)

    distances = []
    for ours in (False, True):
        tokens, logprobs = in_engine(folders[name], ours, tokens_and_logprobs)
        assert tokens == [expected, expected]
        distances.append(rms(logprobs - exact))
    assert distances[1] <= 2 * distances[0]


@pytest.mark.parametrize(
    ("name", "block_size"), [("llama_head24", 16), ("mistral", 48)], ids=["head24-block16", "window-block48"]
)
def test_tokens_equal_where_vllm_has_no_kernel(folders: dict[str, Path], name: str, block_size: int) -> None:
    expected = eager_tokens(eager_model(folders[name]), PROMPTS, NEW_TOKENS)
    assert in_engine(folders[name], True, tokens_twice, block_size=block_size) == [expected, expected]


def test_tokens_equal_under_torch_compile(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traces the model, without waiting for a C++ compiler
    expected = eager_tokens(eager_model(folders["llama"]), PROMPTS, NEW_TOKENS)
    assert in_engine(folders["llama"], True, tokens_twice, enforce_eager=False) == [expected, expected]


def test_tokens_equal_with_speculative_decoding(folders: dict[str, Path]) -> None:
    prompts = [prompt * 2 for prompt in PROMPTS[:4]]  # repetitions, from which drafts are taken
    expected = eager_tokens(eager_model(folders["mistral"]), prompts, NEW_TOKENS)
    # It runs in a process of its own, because vLLM 0.32 cannot start another engine after importing numba.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(speculated_tokens, folders["mistral"], prompts).result() == expected


def speculated_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return in_engine(folder, True, lambda llm: greedy_tokens(llm, prompts, NEW_TOKENS), speculative_config=ngram)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "stored"),
    [("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.float8_e4m3fn)],
    ids=["int8", "fp8"],
)
def test_quantized_cache_gives_tokens_of_rounded_eager(
    folders: dict[str, Path], kv_cache_dtype: str, stored: torch.dtype
) -> None:
    model = eager_model(folders["mistral"], stored)
    expected = eager_tokens(model, PROMPTS, NEW_TOKENS)
    unrounded = eager_tokens(eager_model(folders["mistral"]), PROMPTS, NEW_TOKENS)
    assert expected != unrounded  # otherwise the cache might be in float32
    assert in_engine(folders["mistral"], True, tokens_twice, kv_cache_dtype=kv_cache_dtype) == [expected, expected]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "bfloat16"), ("llama", "float16"), ("gemma2", "bfloat16")],
    ids=["llama-bfloat16", "llama-float16", "gemma2-bfloat16"],
)
def test_half_precision_is_as_near_to_float32_as_vllm(folders: dict[str, Path], name: str, dtype: str) -> None:
    exact = eager_logprobs(eager_model(folders[name]), PROMPTS)

    def distance(ours: bool) -> float:
        logprobs = in_engine(folders[name], ours, lambda llm: prompt_logprobs(llm, PROMPTS), dtype)
        return rms(logprobs - exact)

    ours, own = distance(True), distance(False)
    assert 0 < ours <= 1.2 * own, (ours, own)


def test_encoders_stay_with_vllm(folders: dict[str, Path]) -> None:
    def embed(llm: Any) -> Tensor:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
        return torch.tensor([output.outputs.embedding for output in outputs])

    options = {"runner": "pooling", "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    ours, own = (in_engine(folders["bert"], ours, embed, **options) for ours in (True, False))
    assert torch.equal(ours, own)
    assert ours.std() > 0


def test_installed_plugin_takes_over_in_all_processes(folders: dict[str, Path]) -> None:
    """Runs it as users do: the engine in a process of its own, without naming a backend."""
    script = Path(__file__).with_name("serve_once.py")
    default = {name: value for name, value in os.environ.items() if name not in ("FASTATTENTION_VLLM", IN_ONE_PROCESS)}
    for setting, expected in ((None, "FastAttentionCpuImpl"), ("0", "CPUAttentionBackendImpl")):
        environment = default if setting is None else {**default, "FASTATTENTION_VLLM": setting}
        command = [sys.executable, str(script), str(folders["llama"])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == expected
