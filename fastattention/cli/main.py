"""The options of the command line. Each command imports its implementation when it runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastattention import __version__
from fastattention.cli.choices import (
    AttnImplementation,
    CacheFormat,
    CheckedDevice,
    KernelDtype,
    ModelDtype,
    ToolFormat,
)
from fastattention.cli.console import errors_as_messages
from fastattention.threads import MOST_THREADS

# Options accept lengths, numbers of sequences and times up to these limits.
LONGEST, MOST, MOST_SECONDS = 2**27, 2**31 - 1, 3600.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

plan = typer.Typer(no_args_is_help=True, help="Predict what a device would do, without it.")
app.add_typer(plan, name="plan")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastattention {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact attention for the hardware FlashAttention leaves behind."""
    # Text of a model, and names of files, may hold characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@app.command()
def info() -> None:
    """Show hardware, versions, backends with their reasons, and environment variables."""
    from fastattention.cli import info as command

    with errors_as_messages():
        command.info()


@app.command()
def check(
    device: Annotated[
        CheckedDevice | None, typer.Option(help="Default: an NPU or GPU that torch sees, else the CPU.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The report to write, as JSON.")] = Path("fastattention-check.json"),
) -> None:
    """Compare a list of calls with float64 on this machine's device, and write a report to send back.

    Exits with status 1 if a result was wrong or a call failed.
    """
    from fastattention.cli.check import command

    with errors_as_messages():
        command.check(None if device is None else device.value, output)


@app.command()
def bench(
    questions: Annotated[
        list[str] | None,
        typer.Argument(
            help="prefill, decode, packed, backward, overhead (CPU); gpu, gpu_decode, gpu_backward; npu; linear. "
            "Default: all for this machine. model: a whole model."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller problems, measured for less time.")] = False,
    seqlen: Annotated[
        int | None,
        typer.Option(min=16, max=LONGEST, help="Tokens of the longest prompt; others follow. Implies --quick."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, max=MOST_SECONDS, help="Time to spend on each problem.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="Threads of each contender. Default: torch's.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="For question model: llama-2-7b, llama-2-70b, llama-3-8b, pangu-38b or pangu-71b, "
            "with /8 after it for one rank of eight; or a folder with the shape."
        ),
    ] = "llama-2-7b",
    layers: Annotated[int | None, typer.Option(min=1, help="For question model: fewer layers than it has.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for JSON and pictures.")] = Path("fastattention-bench"),
) -> None:
    """Benchmark this machine's GPU or NPU, and its CPU, against every peer that is installed."""
    from fastattention.cli.bench import command

    with errors_as_messages():
        command.bench(questions or [], quick, seqlen, seconds, threads, (model, layers), output)


@app.command()
def generate(
    model: Annotated[
        Path, typer.Option(help="A Transformers model folder, as `hf download` makes. Nothing is downloaded.")
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    attn: Annotated[
        AttnImplementation, typer.Option(help="Attention implementation.")
    ] = AttnImplementation.FAST_ATTENTION,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LONGEST, help="Most tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.0,
    dtype: Annotated[
        ModelDtype, typer.Option(help="Dtype of the weights; auto keeps the stored one.")
    ] = ModelDtype.AUTO,
    device: Annotated[str, typer.Option(help="As torch names it, e.g. cpu or cuda:0.")] = "cpu",
    kv_budget: Annotated[
        str | None,
        typer.Option(help="GPU memory for keys and values, e.g. 8GiB; layers beyond it are kept by the CPU."),
    ] = None,
) -> None:
    """Continue a prompt with any Transformers model folder, and report the speed."""
    from fastattention.cli import generate as command

    with errors_as_messages():
        command.generate(model, prompt, attn, max_new_tokens, temperature, dtype, device, kv_budget)


@app.command()
def demo(
    file: Annotated[
        Path | None, typer.Option(help="The text file to continue. Default: a module of this Python.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, max=MOST, help="Bytes of the file to read.")] = 6000,
    new_tokens: Annotated[int, typer.Option(min=1, max=LONGEST, help="Tokens to add.")] = 200,
    model: Annotated[
        Path, typer.Option(help="A Transformers model folder. The default is in the source tree, not in the package.")
    ] = Path("examples/demo_model"),
) -> None:
    """Continue a source file with eager, sdpa and fast_attention: same tokens, times, peak memory. Offline."""
    from fastattention.cli import demo as command

    with errors_as_messages():
        command.demo(file or command.DEFAULT_SOURCE, context, new_tokens, model)


@app.command("compile")
def compile_variant(
    arch: Annotated[int, typer.Option(help="Code path: 60, 70, 75 or 80, which serves everything newer too.")],
    headdim: Annotated[int, typer.Option(help="Head dimension of queries and keys.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    headdim_v: Annotated[int | None, typer.Option(help="Head dimension of values. Default: that of keys.")] = None,
    target: Annotated[
        int | None,
        typer.Option(help="Compute capability to compile for, e.g. 86 or 120. Default: that of the code path."),
    ] = None,
    dtype: Annotated[KernelDtype, typer.Option(help="Of q, k and v.")] = KernelDtype.FLOAT16,
    softcap: Annotated[bool, typer.Option("--softcap", help="For a softcap from 1e-6 to 128.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="For ALiBi slopes.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="For an attn_bias.")] = False,
    paged: Annotated[bool, typer.Option("--paged", help="For keys and values in pages.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="For one query over a cache, rather than many.")] = False,
    cache: Annotated[CacheFormat | None, typer.Option(help="With --decode: dtype of a quantized cache.")] = None,
) -> None:
    """Compile one GPU kernel into a file and print its resource usage. Needs no GPU.

    Causal and window masks, variable-length sequences and sinks are chosen at run time: every kernel has them.
    """
    from fastattention.cli import compile as command

    flags = {"softcap": softcap, "alibi": alibi, "bias": bias, "paged": paged}
    with errors_as_messages():
        command.compile_variant(
            arch=arch,
            target=arch if target is None else target,
            headdim=headdim,
            headdim_v=headdim if headdim_v is None else headdim_v,
            dtype=dtype.value,
            features=[name for name, given in flags.items() if given],
            decode=decode,
            cache=None if cache is None else cache.value,
            output=output,
        )


@app.command()
def warmup(
    device: Annotated[str, typer.Option(help="As torch names it, e.g. cuda:0.")] = "cuda:0",
    headdim: Annotated[
        list[int] | None, typer.Option(help="Head dimension; may be repeated. Default: 64, 96, 128 and 256.")
    ] = None,
    dtype: Annotated[
        list[KernelDtype] | None, typer.Option(help="Of q, k and v; may be repeated. Default: both.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Those of gradients and dropout too.")] = False,
) -> None:
    """Compile and load the GPU kernels that calls will need, and print where each came from."""
    from fastattention.cli import warmup as command

    with errors_as_messages():
        command.warmup(device, headdim or [64, 96, 128, 256], [one.value for one in dtype or KernelDtype], training)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A Transformers model folder, or a name on the hub.")],
    name: Annotated[str | None, typer.Option(help="What clients call the model. Default: MODEL.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes any that is free.")] = 8000,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:0, ... Default: a GPU if there is one.")] = None,
    dtype: Annotated[ModelDtype, typer.Option(help="Of the model; auto is as it was saved.")] = ModelDtype.AUTO,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values, e.g. 8GiB. Default: a quarter of free host memory, or the GPU's."
        ),
    ] = None,
    cpu_kv_memory: Annotated[
        str | None,
        typer.Option(help="Host memory for keys and values of requests that the GPU has no room for, e.g. 64GiB."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, max=MOST_SECONDS, help="Seconds for requests under way when the server is to end.")
    ] = 30.0,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must send. Default: FASTATTENTION_API_KEY, or none.")
    ] = None,
    max_request_bytes: Annotated[str, typer.Option(help="Size of a request at most, e.g. 16MiB.")] = "4MiB",
    max_waiting: Annotated[
        int, typer.Option(min=1, max=MOST, help="Answers that may wait to begin; more get 429.")
    ] = 256,
    tool_format: Annotated[
        ToolFormat, typer.Option(help="How the model writes tool calls; auto reads its chat template.")
    ] = ToolFormat.AUTO,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="RUN PYTHON CODE that comes with MODEL: it can do all you can.")
    ] = False,
) -> None:
    """Serve a model by the OpenAI API, with requests batched on fast_attention."""
    from fastattention.cli import serve as command

    with errors_as_messages():
        command.serve(
            model=model,
            name=name,
            host=host,
            port=port,
            device=device,
            dtype=dtype.value,
            kv_memory=kv_memory,
            cpu_kv_memory=cpu_kv_memory,
            grace_seconds=grace,
            api_key=api_key,
            max_request_bytes=max_request_bytes,
            max_waiting=max_waiting,
            tool_format=tool_format.value,
            trust_remote_code=trust_remote_code,
        )


@app.command("export-kernel")
def export_kernel(
    folder: Annotated[Path, typer.Argument(help="Folder to write: a new or an empty one, or an earlier export.")],
) -> None:
    """Write a folder from which Transformers loads fastattention as a hub kernel, through LOCAL_KERNELS."""
    from fastattention.cli import export_kernel as command

    with errors_as_messages():
        command.export_kernel(folder)


@plan.command("ascend")
def plan_ascend(
    seqlen: Annotated[int, typer.Option(min=1, max=LONGEST, help="Length of every sequence: keys, and queries too.")],
    seqlen_q: Annotated[
        int | None, typer.Option(min=1, max=LONGEST, help="Queries per sequence; 1 for decoding. Default: --seqlen.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")] = 1,
    heads_k: Annotated[int | None, typer.Option(min=1, max=MOST, help="Key/value heads. Default: --heads.")] = None,
    headdim: Annotated[int, typer.Option(help="Head dimension.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="Apply a causal mask.")] = False,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    chip: Annotated[str, typer.Option(help="910B1 to 910B4, 910B4-1, or a die of an A3: 910C, ...")] = "910B2",
    output: Annotated[Path | None, typer.Option(help="Draw the timeline: a file ending in .png or .svg.")] = None,
) -> None:
    """Predict tiles, latency, gains and timeline of attention on an Ascend NPU. Needs no NPU."""
    from fastattention.cli.plan import ascend as command

    with errors_as_messages():
        command.plan(
            seqlen=seqlen,
            seqlen_q=seqlen_q,
            nheads=heads,
            nheads_k=heads_k,
            headdim=headdim,
            batch_size=batch,
            causal=causal,
            dtype=dtype,
            chip_name=chip,
            output=output,
        )


@plan.command("offload")
def plan_offload(
    model: Annotated[
        str,
        typer.Option(
            help="llama-2-7b, llama-2-70b, llama-3-8b, pangu-38b or pangu-71b; or a folder with a model's config.json."
        ),
    ],
    gpu_memory: Annotated[str, typer.Option(help="Memory of a GPU that may be used, e.g. 16GiB.")],
    seqlen: Annotated[
        int, typer.Option(min=1, max=LONGEST, help="Tokens of every sequence, prompt and answer together.")
    ],
    cpu_memory: Annotated[
        str | None,
        typer.Option(help="Host memory for keys and values, divided among the GPUs. Default: as much as it takes."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="GPUs of the host that share the model, by tensor parallelism.")] = 1,
    hardware: Annotated[str, typer.Option(help="Assumed bandwidths: h200, v100, t4 or desktop.")] = "v100",
    policy: Annotated[
        str, typer.Option(help="auto, resident, classical, cooperative or hybrid; auto is the fastest that fits.")
    ] = "auto",
    layers_cpu: Annotated[
        int | None, typer.Option(min=0, help="Layers in host memory. Default: as few as possible.")
    ] = None,
    cache: Annotated[CacheFormat | None, typer.Option(help="Dtype of a quantized cache in host memory.")] = None,
    gpu_bandwidth: Annotated[str | None, typer.Option(help="GPU memory bandwidth, e.g. 800GB/s.")] = None,
    link_bandwidth: Annotated[str | None, typer.Option(help="Bandwidth from the host to a GPU.")] = None,
    cpu_bandwidth: Annotated[str | None, typer.Option(help="Bandwidth of attention on the host's CPU.")] = None,
    dram_bandwidth: Annotated[str | None, typer.Option(help="Host memory bandwidth.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Draw the time against the length: a file ending in .png or .svg.")
    ] = None,
) -> None:
    """Plan which layers keep their KV cache in host memory, and predict the time per token. Needs no GPU."""
    from fastattention.cli.plan import offload as command

    bandwidths = {
        "gpu_bandwidth": gpu_bandwidth,
        "link_bandwidth": link_bandwidth,
        "cpu_bandwidth": cpu_bandwidth,
        "dram_bandwidth": dram_bandwidth,
    }
    options = command.OffloadOptions(
        model=model,
        hardware=hardware,
        seqlen=seqlen,
        batch_size=batch,
        tp=tp,
        gpu_memory=gpu_memory,
        cpu_memory=cpu_memory,
        policy=policy,
        num_layers_cpu=layers_cpu,
        quantized=cache is not None,
        bandwidths={name: value for name, value in bandwidths.items() if value is not None},
    )
    with errors_as_messages():
        command.plan(options, output)


@plan.command("allreduce")
def plan_allreduce(
    model: Annotated[
        str,
        typer.Option(
            help="llama-2-7b, llama-2-70b, llama-3-8b, pangu-38b or pangu-71b; or a folder with a model's config.json."
        ),
    ],
    tp: Annotated[int, typer.Option(min=2, help="Devices that share the model, by tensor parallelism.")],
    seqlen: Annotated[int, typer.Option(min=1, max=LONGEST, help="Tokens of every prompt.")],
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")] = 1,
    hardware: Annotated[str, typer.Option(help="Assumed rates: h200, v100-pcie or ascend-910b.")] = "h200",
    output: Annotated[Path | None, typer.Option(help="Draw the timeline: a file ending in .png or .svg.")] = None,
) -> None:
    """Predict row blocks of a tensor-parallel prompt, and how much of the all-reduce they hide. Needs no device."""
    from fastattention.cli.plan import allreduce as command

    options = command.AllReduceOptions(model=model, tp=tp, seqlen=seqlen, batch_size=batch, hardware=hardware)
    with errors_as_messages():
        command.plan(options, output)


@plan.command("traffic")
def plan_traffic(
    seqlen: Annotated[int, typer.Option(min=1, max=LONGEST, help="Length of every sequence: keys, and queries too.")],
    seqlen_q: Annotated[
        int | None,
        typer.Option(min=1, max=LONGEST, help="Queries over a cache of --seqlen keys; 1 for decoding."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")] = 32,
    heads_k: Annotated[int | None, typer.Option(min=1, max=MOST, help="Key/value heads. Default: --heads.")] = None,
    headdim: Annotated[int, typer.Option(help="Head dimension.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="Apply a causal mask.")] = False,
    dtype: Annotated[KernelDtype, typer.Option(help="Of q, k and v.")] = KernelDtype.FLOAT16,
    gpu: Annotated[str, typer.Option(help="P100, GTX 1080, V100, T4, A100, RTX 3090, RTX 4090 or H100.")] = "H100",
) -> None:
    """Predict the main-memory traffic of attention on a GPU, beside its lower bound. Needs no GPU."""
    from fastattention.cli.plan import traffic as command

    options = command.TrafficOptions(
        batch_size=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen,
        nheads=heads,
        nheads_k=heads_k or heads,
        headdim=headdim,
        causal=causal,
        dtype=dtype.value,
        gpu=gpu,
    )
    with errors_as_messages():
        command.plan(options)
