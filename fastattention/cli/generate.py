"""`fastattention generate`: continue a prompt with any Transformers model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastattention.cli.choices import Attention, ModelDtype
from fastattention.cli.console import MESSAGES, OUTPUT, progress_bar, require_extra

if TYPE_CHECKING:
    from fastattention.cli.generation import Generated
    from fastattention.cli.model_folder import LoadedModel


def generate(
    model: Path,
    prompt: str,
    attention: Attention,
    max_new_tokens: int,
    temperature: float,
    dtype: ModelDtype,
    device: str,
) -> None:
    """Print the prompt and its continuation as it comes, then what it took. The arguments are those of the command."""
    require_extra("transformers", "transformers")
    with MESSAGES.status("loading the model"):
        from fastattention.cli.model_folder import load_folder

        loaded = load_folder(model, attention, dtype, device)
    result = _stream(loaded, prompt, max_new_tokens, temperature)
    OUTPUT.out()
    summary = (
        f"[bold]{attention.value}[/]: prompt of {result.prompt_tokens} tokens in {result.prefill_seconds:.2f} s, "
        f"{result.prefill_tokens_per_s:.0f} tokens/s; {len(result.tokens)} new tokens"
    )
    if result.decode_tokens_per_s is not None:
        summary += f", {result.decode_tokens_per_s:.1f} tokens/s after the first"
    MESSAGES.print(summary, soft_wrap=True)


def _stream(loaded: LoadedModel, prompt: str, max_new_tokens: int, temperature: float) -> Generated:
    """A bar while the prompt is read, then the prompt and its continuation word by word."""
    from fastattention.cli.generation import Events, generate_tokens

    tokens = loaded.codec.encode(prompt)
    with progress_bar() as bar:
        task = bar.add_task(f"reading {tokens.shape[1]} tokens", total=1.0)

        def on_token(count: int) -> None:
            if count == 1:  # the text takes the screen over: a bar would erase a line that has begun
                bar.stop()
                OUTPUT.out(prompt, end="", style="dim")

        events = Events(
            prefill=lambda fraction: bar.update(task, completed=fraction),
            token=on_token,
            text=lambda text: OUTPUT.out(text, end=""),
        )
        return generate_tokens(loaded, tokens, max_new_tokens, temperature=temperature, events=events)
