"""How many tokens a second does continuous batching of Transformers generate, with fast_attention and with sdpa?

    python benchmarks/serving.py                     # this CPU: 100M parameters, 32 requests of 100 to 1500 tokens
    python benchmarks/serving.py --device cuda       # 8B parameters, 64 requests of 200 to 4000 tokens

Random weights, greedy tokens; every request generates the same number of tokens. Each implementation runs at the best
of its settings, in turns with the other. Two bounds are shown. One is the products of the prompts with the weights at
the measured rate of a matrix product. The other is reading memory at its measured bandwidth: all weights once for each
token, and keys and values of every request once for each of its tokens.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from harness import RESULTS, publish, run_again
from pages import serving
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from fastattention.cli import peak_memory
from fastattention.cli.bench.timing import in_turns, time_on_device
from fastattention.cli.bench.whole_model.build import build
from fastattention.integrations.transformers import batching


class Load(NamedTuple):
    """A model and its requests."""

    shape: dict[str, Any]
    dtype: torch.dtype
    requests: int
    prompts: tuple[int, int]  # tokens of the shortest and the longest
    new_tokens: int
    settings: dict[str, list[dict[str, Any]]]  # settings of each implementation, to choose from


def on_cpu() -> Load:
    """About 100M parameters in float32."""
    shape = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True}  # fmt: skip
    settings = [{"page_size": 256, "num_blocks": 256, "max_batch_tokens": tokens} for tokens in (512, 2048)]
    return Load(
        shape, torch.float32, 32, (100, 1500), 64, {"fast_attention": settings, "sdpa": settings[:1]}
    )  # 2048: 0.86x


def on_gpu() -> Load:
    """The shape of LLaMA-3-8B in bfloat16."""
    shape = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
    cache = {"page_size": 256, "num_blocks": 1300, "max_requests_per_batch": 64}
    graphs: list[bool | tuple[bool, bool]] = [
        False,
        (False, True),
        True,
    ]  # (False, True): only steps without prompts
    settings = [{**cache, "max_batch_tokens": 8192, "use_cuda_graph": one} for one in graphs]
    masked = [{**cache, "max_batch_tokens": tokens, "use_cuda_graph": False} for tokens in (1024, 4096)]
    return Load(shape, torch.bfloat16, 64, (200, 4000), 128, {"fast_attention": settings, "sdpa": masked})


def main(
    device: str = "cpu",
    rounds: int = 3,
    output: Annotated[Path, typer.Option(help="Folder for serving_cpu.json or serving_gpu.json.")] = RESULTS,
    save: Annotated[Path | None, typer.Option(help="Folder for model and prompts; measures nothing.")] = None,
    peak_of: Annotated[int | None, typer.Option(help="Prints the peak memory of this run alone.")] = None,
) -> None:
    """Measure, print, write the JSON."""
    load = on_gpu() if device == "cuda" else on_cpu()
    batching.enable()
    model = random_llama(load, device)
    prompts = draw_prompts(load)
    if save is not None:
        model.save_pretrained(save)
        (save / "load.json").write_text(json.dumps({"prompts": prompts, "new_tokens": load.new_tokens}))
        return
    runs = [(name, setting) for name, settings in load.settings.items() for setting in settings]
    if peak_of is not None:
        name, setting = runs[peak_of]
        print(serve(model, name, prompts, load.new_tokens, setting)[1])
        return
    turns = {
        index: partial(serve, model, name, prompts, load.new_tokens, setting)
        for index, (name, setting) in enumerate(runs)
    }
    found = in_turns(turns, rounds)
    records = [
        {
            "implementation": name,
            "settings": setting,
            "seconds": [taken for taken, _ in found[index]],
            "peak_bytes": peak_in_process(index) if device == "cpu" else max(peak for _, peak in found[index]),
        }
        for index, (name, setting) in enumerate(runs)
    ]
    report = {
        "device": device, "shape": load.shape, "dtype": str(load.dtype),
        "requests": load.requests, "prompts": load.prompts, "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": load.new_tokens, "bounds": bounds(model, load, prompts), "records": records,
    }  # fmt: skip
    publish(output / f"serving_{device.replace('cuda', 'gpu')}.json", report, *serving.batching(report))


def peak_in_process(index: int) -> int:
    """The peak of one run in a process whose heap returns freed memory, because kept memory would hide allocations."""
    heap = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return int(run_again(__file__, f"--peak-of={index}", **heap))


def random_llama(load: Load, device: str) -> Any:
    """A model of that shape."""
    config = LlamaConfig(**load.shape, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    return build(config, load.dtype, torch.device(device))


def draw_prompts(load: Load) -> list[list[int]]:
    """Random tokens; lengths from the shortest to the longest in equal steps, shuffled."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*load.prompts, load.requests).int()[torch.randperm(load.requests, generator=generator)]
    return [torch.randint(3, 30000, (int(length),), generator=generator).tolist() for length in lengths]


def serve(
    model: Any, name: str, prompts: list[list[int]], new_tokens: int, settings: dict[str, Any]
) -> tuple[float, int]:
    """Seconds from the first request to the last token, warmed up; and GPU memory beyond weights and cache."""
    model.set_attn_implementation(name)
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),  # type: ignore[no-untyped-call]
        ContinuousBatchingConfig(auto_switch_to_flash=False, **settings),
    )
    manager.warmup()
    manager.batch_processor.cache.cache_tensor.zero_()  # resident from now on
    manager.start()
    on_gpu = model.device.type == "cuda"
    try:
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            peak_memory.reset_peak()
            before = peak_memory.resident_bytes()
        start = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=new_tokens)
        for _ in prompts:
            result = manager.get_result(timeout=600)
            assert result is not None, "no request finished in ten minutes"
            assert result.error is None, result.error
            assert len(result.generated_tokens) == new_tokens
        taken = time.perf_counter() - start
        print(f"{name} {settings}: {len(prompts) * new_tokens / taken:.1f} new tokens/s", file=sys.stderr, flush=True)
        peak = (torch.cuda.max_memory_allocated() if on_gpu else peak_memory.peak_bytes()) - before
    finally:
        manager.stop(block=True)
        manager.destroy()
        del manager
        gc.collect()
    return taken, peak


def bounds(model: Any, load: Load, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds of the prompts' products, and of reading weights, keys and values while tokens are generated."""
    numbers: int = sum(parameter.numel() for parameter in model.parameters())
    heads = load.shape["num_key_value_heads"] * load.shape["hidden_size"] // load.shape["num_attention_heads"]
    token = 2 * heads * load.shape["num_hidden_layers"]
    keys = sum(len(prompt) * load.new_tokens + load.new_tokens**2 // 2 for prompt in prompts)
    vocabulary = load.shape["vocab_size"] * load.shape["hidden_size"]  # a look-up, and prompts need no logits
    products = 2 * (numbers - (1 if load.shape["tie_word_embeddings"] else 2) * vocabulary) * sum(map(len, prompts))
    read = (numbers * load.new_tokens + token * keys) * load.dtype.itemsize
    return {"prefill": products / product_rate(model.device, load.dtype), "decode": read / bandwidth(model.device)}


def bandwidth(device: torch.device) -> float:
    """Bytes a second of reading memory: a sum of 2 GiB, the best of nine."""
    data = torch.ones(1 << 29, dtype=torch.float32, device=device)
    return data.numel() * 4 / min(time_on_device(data.sum, device=device.type) for _ in range(9))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the product of two square matrices, the best of nine."""
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / min(time_on_device(lambda: left @ right, device=device.type) for _ in range(9))


if __name__ == "__main__":
    typer.run(main)
