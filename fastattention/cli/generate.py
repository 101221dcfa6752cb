"""`fastattention generate`: continue a prompt with any Transformers model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastattention.cli.choices import AttnImplementation, ModelDtype
from fastattention.cli.console import (
    MESSAGES,
    OUTPUT,
    check_model_folder,
    progress_bar,
    require_extra,
    status,
    usable_devices,
)
from fastattention.errors import ArgumentError
from fastattention.sizes import format_bytes, read_bytes

if TYPE_CHECKING:
    from fastattention.cli.generation import Generated
    from fastattention.cli.model_folder import LoadedModel
    from fastattention.integrations.transformers.cache import FastAttentionCache

TEMPERATURES = 0.001, 1000.0  # outside these, logits over the temperature are infinite, or all alike


def generate(
    model: Path,
    prompt: str,
    attention: AttnImplementation,
    max_new_tokens: int,
    temperature: float,
    dtype: ModelDtype,
    device: str,
    kv_budget: str | None,
) -> None:
    """Print the prompt and its continuation as it comes, then the speed. The arguments are those of the command."""
    require_extra("transformers", "transformers")
    if kv_budget is not None and attention is not AttnImplementation.FAST_ATTENTION:
        raise ArgumentError(f"kv_budget={kv_budget!r} is for --attn fast_attention, got {attention.value}")
    _check_numbers(prompt, temperature, kv_budget, device)
    _check_model(model)
    with status("loading the model"):
        from fastattention.cli.model_folder import load_folder

        loaded = load_folder(model, attention, dtype, device)
    cache = None if kv_budget is None else _make_cache(loaded, kv_budget)
    result = _stream(loaded, prompt, max_new_tokens, temperature, cache)
    OUTPUT.out()
    summary = (
        f"[bold]{attention.value}[/]: prompt of {result.prompt_tokens} tokens in {result.prefill_seconds:.2f} s, "
        f"{result.prefill_tokens_per_s:.0f} tokens/s; {len(result.tokens)} new tokens"
    )
    if result.decode_tokens_per_s is not None:
        summary += f", {result.decode_tokens_per_s:.1f} tokens/s after the first"
    MESSAGES.print(summary, soft_wrap=True)
    if cache is not None:
        MESSAGES.print(_where(cache), soft_wrap=True)


def _check_numbers(prompt: str, temperature: float, kv_budget: str | None, device: str) -> None:
    """Checks arguments before a model is loaded. Raises ArgumentError."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"prompt={prompt!r} is not UTF-8") from error
    if temperature != 0.0 and not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        raise ArgumentError(f"temperature={temperature} must be 0, or from {TEMPERATURES[0]} to {TEMPERATURES[1]}")
    if kv_budget is not None:
        read_bytes("kv_budget", kv_budget)
        if not device.startswith("cuda"):
            raise ArgumentError(
                f"kv_budget={kv_budget!r} limits the memory of a GPU, and the model is on {device}; --device takes "
                f"{usable_devices()} here"
            )


def _check_model(model: Path) -> None:
    """Raises ArgumentError for a folder without a model, and says how to get one of the hub."""
    try:
        check_model_folder(model)
    except ArgumentError as error:
        if model.exists():
            raise
        raise ArgumentError(
            f"{error}; generate downloads nothing: `hf download {model} --local-dir FOLDER` fetches a model of the hub"
        ) from error


def _make_cache(loaded: LoadedModel, kv_budget: str) -> FastAttentionCache:
    from fastattention.integrations.transformers.cache import FastAttentionCache

    return FastAttentionCache(loaded.model.config, kv_budget=kv_budget)


def _where(cache: FastAttentionCache) -> str:
    """Where the cache lives."""
    usage = cache.usage
    text = f"[bold]cache[/]: {usage.num_layers_gpu} layers on the GPU, {format_bytes(usage.gpu_bytes)}"
    if usage.num_layers_cpu:
        text += (
            f"; {usage.num_layers_cpu} on the CPU, {format_bytes(usage.cpu_bytes)}, attended to by the "
            f"{cache.policy.value} policy"
        )
    return text


def _stream(
    loaded: LoadedModel, prompt: str, max_new_tokens: int, temperature: float, cache: FastAttentionCache | None
) -> Generated:
    """Shows a bar while the prompt is read, then the prompt and its continuation word by word."""
    from fastattention.cli.generation import Events, generate_tokens

    tokens = loaded.codec.encode(prompt)
    with progress_bar() as bar:
        task = bar.add_task(f"reading {tokens.shape[1]} tokens", total=1.0)

        def on_token(count: int) -> None:
            if count == 1:  # text follows: the bar would erase a line that has begun
                bar.stop()
                OUTPUT.out(prompt, end="", style="dim")

        events = Events(
            prefill=lambda fraction: bar.update(task, completed=fraction),
            token=on_token,
            text=lambda text: OUTPUT.out(text, end=""),
        )
        return generate_tokens(loaded, tokens, max_new_tokens, temperature=temperature, cache=cache, events=events)
