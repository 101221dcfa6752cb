"""`fastattention bench`: this machine, against every peer that is installed."""

from __future__ import annotations

from pathlib import Path

import torch

import fastattention
from fastattention.cli.bench.session import answer, publish, show_header, start_session
from fastattention.cli.bench.suite import full_suite, quick_suite
from fastattention.errors import ArgumentError

FULL_SECONDS, QUICK_SECONDS = 7.0, 2.5  # a workload: 3 to 5 minutes and less than one in all on two cores


def bench(
    questions: list[str],
    quick: bool,
    seqlen: int | None,
    seconds: float | None,
    num_threads: int | None,
    output: Path,
) -> None:
    """Run the questions (all when none is named) and publish each. Raises ArgumentError for an unknown one.

    seqlen: length of the longest prefill of the quick suite, which it selects. seconds: for each workload.
    num_threads: None follows torch.
    """
    suite = full_suite() if seqlen is None and not quick else quick_suite(seqlen or 2048)
    for question in questions:
        if question not in suite:
            raise ArgumentError(f"question {question!r} is not known; choose from {', '.join(suite)}")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    fastattention.set_num_threads(num_threads)
    default_seconds = QUICK_SECONDS if quick or seqlen is not None else FULL_SECONDS
    session = start_session()
    show_header(session)
    for question in questions or suite:
        report = answer(session, question, suite[question], default_seconds if seconds is None else seconds)
        publish(report, output)
