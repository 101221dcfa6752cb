"""One implementation of `fastattention demo`, in its own process so that its peak memory is its own.

    python -m fastattention.cli.demo_worker

The first line of standard input is the JSON of a DemoRequest. It is answered by {"ready": true} once the model is
loaded. Every further line runs the request, and is answered by {"progress": 0 to 1} any number of times, then
{"result": the Result}. Each answer is a line of standard output. {"error": message} comes before status 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import fastattention
from fastattention.cli import peak_memory
from fastattention.cli.choices import AttnImplementation, ModelDtype
from fastattention.cli.console import reason_of
from fastattention.cli.demo_messages import DemoRequest, Result
from fastattention.cli.generation import Events, generate_tokens
from fastattention.cli.model_folder import LoadedModel, load_folder

# The first call of a process also starts threads, loads code and touches memory for the first time.
WARM_UP_CHARACTERS, WARM_UP_TOKENS = 64, 4


def main() -> None:
    """Load the model of the request, then run it whenever the parent asks."""
    request = DemoRequest(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(request.num_threads)
    loaded = load_folder(Path(request.model), AttnImplementation(request.attention), ModelDtype.FLOAT32, "cpu")
    generate_tokens(loaded, loaded.codec.encode(request.prompt[:WARM_UP_CHARACTERS]), WARM_UP_TOKENS)
    emit("ready", True)
    for _ in sys.stdin:
        emit("result", asdict(run(request, loaded)))


def run(request: DemoRequest, loaded: LoadedModel) -> Result:
    """Greedy generation in float32, where every implementation should choose the same tokens."""
    prompt = loaded.codec.encode(request.prompt)
    # The prompt takes half of the bar, and the tokens that follow the other half.
    events = Events(
        prefill=lambda fraction: emit("progress", fraction / 2),
        token=lambda count: emit("progress", 0.5 + count / request.max_new_tokens / 2),
    )
    measurable = peak_memory.why_unavailable() is None
    before = peak_memory.resident_bytes() if measurable else 0
    made = generate_tokens(loaded, prompt, request.max_new_tokens, min_new_tokens=request.max_new_tokens, events=events)
    extra_bytes = peak_memory.peak_bytes() - before if measurable else None
    text = loaded.codec.decode(made.tokens)
    return Result(
        request.attention, made.tokens, text, made.prompt_tokens, made.prefill_seconds, made.decode_seconds, extra_bytes
    )


def emit(name: str, value: object) -> None:
    """Write one line for the parent process."""
    print(json.dumps({name: value}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (fastattention.FastAttentionError, OSError, MemoryError, RuntimeError) as failure:
        if (reason := reason_of(failure)) is None:
            raise
        emit("error", reason)
        sys.exit(1)
