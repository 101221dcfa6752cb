"""`fastattention bench`: measures this machine against every other implementation that is installed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import fastattention
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.cli.bench import gpu, gpu_backward, gpu_decode, linear, npu
from fastattention.cli.bench.session import answer, publish, show_header, start_session
from fastattention.cli.bench.suite import full_suite, quick_suite
from fastattention.cli.bench.workload import BenchWorkload
from fastattention.cli.console import require_extra
from fastattention.errors import ArgumentError

DEVICES = {
    "gpu": gpu.answer,
    "gpu_decode": gpu_decode.answer,
    "gpu_backward": gpu_backward.answer,
    "npu": npu.answer,
}
DEVICE_ROUNDS = 9
LINEAR, MODEL = "linear", "model"
FULL_SECONDS, QUICK_SECONDS = 7.0, 2.5  # for each workload; in all, 3 to 5 minutes and less than one on two cores


def bench(
    questions: list[str],
    quick: bool,
    seqlen: int | None,
    seconds: float | None,
    num_threads: int | None,
    model: tuple[str, int | None],
    output: Path,
) -> None:
    """Run the questions and publish each; all but LINEAR and MODEL when none is named.

    Raises ArgumentError for an unknown question. seqlen: length of the longest prefill of the quick suite, which it
    selects.
    seconds: for each workload. num_threads: None follows torch. model: name or folder of the model of MODEL, and the
        number of its layers.
    """
    short = quick or seqlen is not None
    suite = quick_suite(seqlen or 2048) if short else full_suite()
    for question in questions:
        if question not in (choices := [*suite, *DEVICES, LINEAR, MODEL]):
            raise ArgumentError(f"question {question!r} is not known; choose from {', '.join(choices)}")
    _check_folder(output)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    fastattention.set_num_threads(num_threads)
    has_gpu = torch.cuda.is_available()
    has_npu = AscendBackend().why_unavailable() is None
    for device, answer_on in DEVICES.items():
        if device in questions or (not questions and (has_npu if device == "npu" else has_gpu)):
            answer_on(gpu.QUICK_SEQLENS if short else gpu.FULL_SEQLENS, DEVICE_ROUNDS, output)
    if LINEAR in questions:
        linear.answer(DEVICE_ROUNDS, output)
    if MODEL in questions:
        require_extra("transformers", "transformers")
        from fastattention.cli.bench.whole_model import command as whole_model

        whole_model.answer(*model, short, output)
    of_processor = [question for question in questions or suite if question in suite]
    if of_processor:
        _bench_processor(of_processor, suite, seconds or (QUICK_SECONDS if short else FULL_SECONDS), output)


def _check_folder(output: Path) -> None:
    """Makes the folder. Raises ArgumentError where results could not be written after minutes of measuring."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} is no folder to write to: {error.strerror}") from error


def _bench_processor(questions: list[str], suite: dict[str, list[BenchWorkload]], seconds: float, output: Path) -> None:
    session = start_session()
    show_header(session)
    for question in questions:
        publish(answer(session, question, suite[question], seconds), output)
