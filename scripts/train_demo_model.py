"""Train the byte-level model of `fastattention demo` on the Python standard library's own sources.

    python scripts/train_demo_model.py --minutes 2.1

A token is a byte, so there is no tokenizer to ship; byte 0 stands before every file. Whole files go one after another
in path order, so that the modules of a package share a context. One file in twenty, chosen by a hash of its path, is
held out: no gradient ever sees it, and its loss decides which weights are kept. The schedule follows the clock, so
`--minutes` is what a training run costs on any device. Needs torch >= 2.9 (for Muon), matplotlib, and on CUDA a
compiler for torch.compile.

Writes the model and its card to --output-dir; the loss curve, as CSV and as a picture, to --docs-dir.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import transformers
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SEPARATOR, HELD_OUT_ONE_IN = 0, 20  # byte 0 never occurs in a source file
# Tables written by programs (code pages, the text of help()) and third-party packages are left out.
EXCLUDED_DIRECTORIES = frozenset({"__pycache__", "dist-packages", "encodings", "pydoc_data", "site-packages"})

WARMUP_STEPS = 100
WEIGHT_DECAY = 0.3
MAX_GRADIENT_NORM = 1.0
EVALUATIONS = 40  # points on the loss curve
EVALUATION_BYTES = 1 << 17  # in flight during an evaluation
CONTEXT_BUCKETS = 8


@dataclass(frozen=True)
class Options:
    """The command line, parsed. Lengths in bytes (= tokens), time in minutes."""

    stdlib: Path
    output_dir: Path
    docs_dir: Path
    device: str
    minutes: float
    seed: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    seqlen: int
    bytes_per_step: int
    learning_rate: float


@dataclass(frozen=True)
class Corpus:
    """The sources as two uint8 streams on the training device, SEPARATOR before every file."""

    train: torch.Tensor  # (train_bytes,)
    validation: torch.Tensor  # (validation_bytes,)
    train_files: int
    validation_files: int


@dataclass(frozen=True)
class CurvePoint:
    """One row of the loss curve; train_bits_per_byte is the mean since the row before."""

    step: int
    seconds: float
    bytes_seen: int
    learning_rate: float
    train_bits_per_byte: float
    validation_bits_per_byte: float


@dataclass(frozen=True)
class Evaluation:
    """Bits per byte of the stored weights; by_context has CONTEXT_BUCKETS means over the same held-out text."""

    train: float
    validation: float
    by_context: list[float]


def is_held_out(name: str) -> bool:
    """Whether the file of this path, relative to the library and with forward slashes, belongs to validation."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def library_files(stdlib: Path) -> list[Path]:
    """Every module of the library worth learning from, relative to it, in path order."""
    paths = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    return sorted(p for p in paths if not (EXCLUDED_DIRECTORIES & set(p.parts) or p.name.startswith("_sysconfigdata")))


def read_corpus(options: Options) -> Corpus:
    """Read, split and concatenate the library. Raises SystemExit when a part is shorter than one window."""
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in library_files(options.stdlib):
        texts[is_held_out(path.as_posix())].append(bytes([SEPARATOR]) + (options.stdlib / path).read_bytes())
    streams = {}
    for held_out, parts in texts.items():
        stream = torch.frombuffer(bytearray(b"".join(parts) + bytes([SEPARATOR])), dtype=torch.uint8)
        if len(stream) < 2 * options.seqlen:
            found = f"--stdlib {options.stdlib} holds {len(stream)} {'validation' if held_out else 'training'} bytes"
            raise SystemExit(f"{found}; --seqlen {options.seqlen} needs {2 * options.seqlen} or more")
        streams[held_out] = stream.to(options.device)
    return Corpus(streams[False], streams[True], len(texts[False]), len(texts[True]))


def windows(stream: torch.Tensor, seqlen: int, batch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield (batch_size, seqlen + 1) int64 forever: each epoch cuts the stream at a new phase and shuffles the cuts."""
    offsets = torch.arange(seqlen + 1)
    while True:
        phase = int(torch.randint(seqlen, (1,), generator=generator))
        starts = phase + seqlen * torch.randperm((len(stream) - 1 - phase) // seqlen, generator=generator)
        for rows in torch.split(starts, min(batch_size, len(starts))):
            if len(rows) == batch_size:  # a last, smaller batch would compile the model again
                yield stream[(rows[:, None] + offsets).to(stream.device)].long()


def build_model(options: Options) -> LlamaForCausalLM:
    """A float32 Llama over bytes: heads of 64, two query heads for each key head, tied embeddings."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=options.hidden_size // 128,
        head_dim=64,
        max_position_embeddings=options.seqlen,
        # With a larger base than the usual 10,000, more dimensions of a head hardly rotate within a window, and can
        # match content.
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=SEPARATOR,
        eos_token_id=SEPARATOR,
    )
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config)
    nn.Module.to(model, options.device)
    return model


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms; each step sets the rates."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def next_byte_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """(batch_size, seqlen + 1) bytes -> (batch_size, seqlen) float32, nats per byte; bfloat16 products on CUDA."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # (batch_size, seqlen, 256)
    losses = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return losses.view(len(batch), -1)


@torch.no_grad()
def bits_by_position(model: LlamaForCausalLM, stream: torch.Tensor, seqlen: int, stride: int) -> torch.Tensor:
    """Mean bits per byte at each position of a window, (seqlen,) float32, over windows `stride` bytes apart."""
    pieces = stream.unfold(0, seqlen + 1, stride)  # (count, seqlen + 1), a view
    total = torch.zeros(seqlen, device=stream.device)
    # The compiled layers know the training shapes only; an evaluation is too short to be worth another compilation.
    with torch.compiler.set_stance("force_eager"):
        for batch in torch.split(pieces, max(1, EVALUATION_BYTES // seqlen)):
            total += next_byte_loss(model, batch.long()).sum(0)
    return total / len(pieces) / math.log(2)


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors, in bfloat16."""
    stored = LlamaForCausalLM(model.config)
    nn.Module.to(stored, torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    special = {"bos_token_id": SEPARATOR, "eos_token_id": SEPARATOR, "pad_token_id": SEPARATOR}
    stored.generation_config = GenerationConfig.from_dict(special)
    stored.save_pretrained(directory)


def training_step(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor, rate: float
) -> torch.Tensor:
    """One update at this learning rate; returns the mean loss in nats, a scalar still on the device."""
    loss = next_byte_loss(model, batch).mean()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def train(model: LlamaForCausalLM, corpus: Corpus, options: Options) -> list[CurvePoint]:
    """Train until the minutes are over, keeping the weights of the best validation loss in the output directory."""
    optimizers = build_optimizers(model)
    curve: list[CurvePoint] = []
    losses: list[torch.Tensor] = []
    batch_size = options.bytes_per_step // options.seqlen
    batches = windows(corpus.train, options.seqlen, batch_size, torch.Generator().manual_seed(options.seed))
    start, step, progress, evaluations = time.monotonic(), 0, 0.0, 0
    while progress < 1:
        rate = options.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - progress)
        losses.append(training_step(model, optimizers, next(batches), rate))
        step += 1
        if step % 8 == 0 and corpus.train.is_cuda:
            torch.cuda.synchronize()  # the clock sets the schedule: the queue must not run far ahead of it
        seconds = time.monotonic() - start
        progress = seconds / (60 * options.minutes)
        if int(progress * EVALUATIONS) > evaluations:
            evaluations = int(progress * EVALUATIONS)
            trained = float(torch.stack(losses).mean()) / math.log(2)
            held_out = float(bits_by_position(model, corpus.validation, options.seqlen, options.seqlen).mean())
            if held_out < min((point.validation_bits_per_byte for point in curve), default=math.inf):
                save_model(model, options.output_dir)
            bytes_seen = step * batch_size * options.seqlen
            curve.append(CurvePoint(step, seconds, bytes_seen, rate, trained, held_out))
            losses = []
            print(f"{seconds:4.0f} s  step {step}  train {trained:.4f}  held out {held_out:.4f} bits/byte", flush=True)
    return curve


def evaluate_stored(corpus: Corpus, options: Options) -> Evaluation:
    """Load the stored weights and measure them. Windows overlap, so that every context bucket scores the same text."""
    model = LlamaForCausalLM.from_pretrained(options.output_dir, dtype=torch.float32)
    nn.Module.to(model, options.device)
    by_position = bits_by_position(model, corpus.validation, options.seqlen, options.seqlen // CONTEXT_BUCKETS)
    # Spread over the whole training text, as many windows as the held-out text has.
    train_stride = max(1, len(corpus.train) // (len(corpus.validation) // options.seqlen))
    return Evaluation(
        train=float(bits_by_position(model, corpus.train, options.seqlen, train_stride).mean()),
        validation=float(bits_by_position(model, corpus.validation, options.seqlen, options.seqlen).mean()),
        by_context=by_position.reshape(CONTEXT_BUCKETS, -1).mean(1).tolist(),
    )


def write_curve(curve: list[CurvePoint], path: Path) -> None:
    """Write the curve as CSV, one row an evaluation."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(CurvePoint)], lineterminator="\n")
        writer.writeheader()
        for point in curve:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(point).items()})


def draw_curve(curve: list[CurvePoint], evaluation: Evaluation, options: Options, path: Path) -> None:
    """Draw two panels: the loss against the bytes seen, and against the context before the predicted byte."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, context = figure.subplots(1, 2)
    megabytes = [point.bytes_seen / 1e6 for point in curve]
    loss.semilogx(megabytes, [point.train_bits_per_byte for point in curve], label="training files")
    loss.semilogx(megabytes, [point.validation_bits_per_byte for point in curve], label="held-out files")
    loss.set(xlabel="bytes seen (MB)", ylabel="bits per byte", title="Training")
    loss.legend()
    width = options.seqlen // CONTEXT_BUCKETS
    context.plot([(i + 0.5) * width for i in range(CONTEXT_BUCKETS)], evaluation.by_context, marker="o")
    context.set(xlabel="bytes of context", ylabel="bits per byte", title="What context is worth, held-out files")
    figure.savefig(path, dpi=120)


CARD = """\
# The demo model

A small byte-level language model of Python source, for `fastattention demo`. It writes plausible Python, not correct
Python.

| | |
|---|---|
| architecture | Llama (`LlamaForCausalLM`), tied embeddings |
| layers, width, feed-forward width | {config.num_hidden_layers}, {config.hidden_size}, {config.intermediate_size} |
| heads | {config.num_attention_heads} of {config.head_dim}, on {config.num_key_value_heads} key heads |
| context | {options.seqlen} bytes |
| size | {parameters:,} parameters in bfloat16, {weights:,} bytes |

A token is a byte, so there is no tokenizer: a file is `[0, *data]`. Byte 0 stands before every file and ends the text.

## Training

    python scripts/train_demo_model.py {arguments}

- Data: the `.py` files of the standard library of CPython (`{options.stdlib.name}`), without `site-packages`,
  `encodings` and `pydoc_data`: {corpus.train_files:,} files, {train_bytes:,} bytes.
- Held out, by a hash of the path: {corpus.validation_files:,} files, {validation_bytes:,} bytes.
- Device: {device}; torch {torch}, transformers {transformers}.
- {last.step:,} steps over {megabytes:,.0f} MB ({epochs:.1f} epochs) in {last.seconds:.0f} s. Stored: the weights of
  step {best.step:,}, the best on the held-out files. Curve: `docs/assets/demo_model_loss.csv` and `.png` beside it.

## Result

Bits per byte of the stored weights in windows of {options.seqlen} bytes: {evaluation.train:.3f} on training files,
{evaluation.validation:.3f} on held-out files. The same held-out text by the bytes of context before it:

| context | bits per byte |
|---|---|
{contexts}

## Licence

The training text is the Python standard library, by the Python Software Foundation and contributors, under the PSF
License Version 2. No file of it is included here; short passages that the model writes may repeat it.
"""


def write_card(
    model: LlamaForCausalLM, corpus: Corpus, evaluation: Evaluation, curve: list[CurvePoint], options: Options
) -> None:
    """Write README.md beside the weights; this run measured every number in it."""
    width = options.seqlen // CONTEXT_BUCKETS
    bounds = [f"{i * width} to {(i + 1) * width}" for i in range(CONTEXT_BUCKETS)]
    local = {"stdlib", "output_dir", "docs_dir", "device"}
    arguments = {name: value for name, value in asdict(options).items() if name not in local}
    card = CARD.format(
        config=model.config,
        corpus=corpus,
        evaluation=evaluation,
        options=options,
        last=curve[-1],
        best=min(curve, key=lambda point: point.validation_bits_per_byte),
        parameters=model.num_parameters(),
        weights=(options.output_dir / "model.safetensors").stat().st_size,
        arguments=" ".join(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items()),
        train_bytes=len(corpus.train),
        validation_bytes=len(corpus.validation),
        device=torch.cuda.get_device_name(corpus.train.device) if corpus.train.is_cuda else "CPU",
        torch=torch.__version__,
        transformers=transformers.__version__,
        megabytes=curve[-1].bytes_seen / 1e6,
        epochs=curve[-1].bytes_seen / len(corpus.train),
        contexts="\n".join(f"| {b} | {bits:.3f} |" for b, bits in zip(bounds, evaluation.by_context, strict=True)),
    )
    (options.output_dir / "README.md").write_text(card, encoding="utf-8")


def parse_options() -> Options:
    """Read the command line; exits with a message when a size does not fit the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="the library's folder")
    parser.add_argument("--output-dir", type=Path, default=root / "examples" / "demo_model")
    parser.add_argument("--docs-dir", type=Path, default=root / "docs" / "assets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=2.1, help="training time, compilation included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--intermediate-size", type=int, default=640)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=8192, help="context of the model, in bytes; a multiple of 8")
    parser.add_argument("--bytes-per-step", type=int, default=1 << 17)
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="peak, for Muon and AdamW alike")
    options = Options(**vars(parser.parse_args()))
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes} is not positive")
    if options.hidden_size <= 0 or options.hidden_size % 128:
        parser.error(f"--hidden-size {options.hidden_size} is not a multiple of 128 (two heads of 64 share a key head)")
    if options.seqlen <= 0 or options.seqlen % CONTEXT_BUCKETS:
        parser.error(f"--seqlen {options.seqlen} is not a multiple of {CONTEXT_BUCKETS}")
    if options.bytes_per_step < options.seqlen:
        parser.error(f"--bytes-per-step {options.bytes_per_step} is less than one window of --seqlen {options.seqlen}")
    return options


def main() -> None:
    """Train, measure what was stored, write the curve and the card."""
    options = parse_options()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    corpus = read_corpus(options)
    model = build_model(options)
    print(f"{model.num_parameters():,} parameters; {len(corpus.train):,} bytes, {len(corpus.validation):,} held out")
    if corpus.train.is_cuda:
        # Layers are compiled one by one: outside a compiled part Transformers lets SDPA make the causal mask.
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    curve = train(model, corpus, options)
    evaluation = evaluate_stored(corpus, options)
    print(evaluation)
    options.docs_dir.mkdir(parents=True, exist_ok=True)
    write_curve(curve, options.docs_dir / "demo_model_loss.csv")
    draw_curve(curve, evaluation, options, options.docs_dir / "demo_model_loss.png")
    write_card(model, corpus, evaluation, curve, options)


if __name__ == "__main__":
    main()
