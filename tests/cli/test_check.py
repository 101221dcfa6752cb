"""`fastattention check`: right, wrong, refused and failed calls are recorded as such, and nothing personal is."""

from __future__ import annotations

import functools
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.backends.sdpa.backend import SdpaBackend
from fastattention.cli.bench import gpu, npu
from fastattention.cli.check import command, facts, run, speeds
from fastattention.cli.check.cases import CHECKS, Check, checks_of
from fastattention.cli.check.privacy import Anonymiser
from fastattention.cli.check.report import CheckReport
from fastattention.errors import UnsupportedError
from fastattention.testing.calls import build_call
from fastattention.testing.case import DenseCase, KvCacheCase
from fastattention.testing.oracle import expected

from .conftest import Finished

TINY = Check(DenseCase(name="tiny", seqlen_q=5, seqlen_k=9, headdim=8), torch.float32)
APPEND = Check(KvCacheCase(name="append", cache_seqlens=(7, 3), headdim=8, seqlen_new=1), torch.float32)
# One or two quick cases of every layout, and one that sdpa runs too.
SMALL = ("causal, more keys than queries", "headdim 1", "one query", "varlen, window", "cache", "int8 cache")
GRADIENTS = replace(TINY, gradients=True)


class Wrong(SdpaBackend):
    """Results that are a little off."""

    name = "tested"

    def make_call(self, problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
        return functools.partial(self.forward, problem)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        result = SdpaBackend().forward(problem, inputs)
        return result._replace(out=result.out + 1e-3)


class NotFinite(Wrong):
    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        return AttentionOutput(torch.full(problem.out_shape, torch.nan), None)


class ForgetsTokens(Wrong):
    """The right result, and a cache without the value that was appended."""

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        v_cache = inputs.v.clone()
        result = SdpaBackend().forward(problem, inputs)
        inputs.v.copy_(v_cache)
        return result


class WritesElsewhere(Wrong):
    """The right result, and a value in a slot that no token has."""

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        result = SdpaBackend().forward(problem, inputs)
        inputs.v[:, -1] = 7.0
        return result


class Raises(Wrong):
    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        raise ValueError(f"no kernel in {Path.home() / 'kernels'} for {getpass.getuser()} on {socket.gethostname()}\nx")


class RefusesAfterAll(Wrong):
    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        raise UnsupportedError("not this one")


class Refuses(Wrong):
    def why_not(self, problem: Problem) -> str | None:
        return "it serves nothing"


class ReadsEnvironment(Wrong):
    """Gives right results only while a variable is set."""

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        assert os.environ["FASTATTENTION_ASCEND"] == "vendor"
        return SdpaBackend().forward(problem, inputs)


# The check runs in a process whose second call kills it.
DYING = """
import os, signal, sys
from pathlib import Path
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.backends.sdpa.backend import SdpaBackend
from fastattention.cli.check import command, run
from fastattention.cli.check.cases import Check
from fastattention.testing.case import DenseCase

class Dies(SdpaBackend):
    def make_call(self, problem, inputs):
        os.kill(os.getpid(), signal.SIGKILL)

ATTENTION_BACKENDS.order["tested"] = "__main__:Dies"
run.IMPLEMENTATIONS["cpu"] = (run.IMPLEMENTATIONS["cpu"][1], run.Implementation("tested", "tested"))
command.check("cpu", Path(sys.argv[1]), [Check(DenseCase(name="tiny", seqlen_q=5, seqlen_k=9, headdim=8))])
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "CPU_SHAPES", ((16, True, 16),))
    monkeypatch.setattr(speeds, "CPU_SECONDS", 0.0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs only calls, without the model and speeds."""
    monkeypatch.setattr(command.model, "run", lambda *arguments: None)
    monkeypatch.setattr(command.speeds, "run", lambda *arguments: None)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    return content


def checked(path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, *checks: Check) -> list[dict[str, Any]]:
    """The entries of a report on a backend of `kind`, which ends with status 1 unless all is right or refused."""
    monkeypatch.setitem(ATTENTION_BACKENDS.order, "tested", f"{__name__}:{kind.__name__}")
    implementation = run.Implementation("tested", "tested", {"FASTATTENTION_ASCEND": "vendor"})
    monkeypatch.setitem(run.IMPLEMENTATIONS, "cpu", (implementation,))
    ATTENTION_BACKENDS.forget()
    try:
        command.check("cpu", path, checks)
        status = 0
    except typer.Exit as ended:
        status = ended.exit_code
    finally:
        ATTENTION_BACKENDS.forget()
    entries: list[dict[str, Any]] = read(path)["entries"]
    assert status == int(any(entry["state"] in ("wrong", "failed") for entry in entries))
    return entries


def test_backends_of_this_machine_are_right(
    run_command: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "checks_of", lambda device: [one for one in CHECKS if one.case.name in SMALL])
    exit_code, output = run_command("check", "--device", "cpu")
    report = read(tmp_path / "fastattention-check.json")
    entries = report["entries"]
    assert {entry["state"] for entry in entries} == {"right", "measured"}, output
    assert exit_code == 0
    right = len(entries) - 1
    assert f"{right} of {right} right, 0 refused, 0 wrong, 0 failed" in output
    assert report["summary"] in output
    assert [entry["kind"] for entry in entries[-2:]] == ["model", "speed"]
    assert {entry["served_by"].partition(":")[0] for entry in entries[:-2]} == {"cpu", "sdpa"}
    assert entries[-2]["served_by"] == "cpu"
    assert all(
        0.0 <= error["error"] <= error["allowed"] for entry in entries[:-1] for error in entry["errors"].values()
    )
    assert entries[-1]["tflops"].keys() == {"fastattention", "SDPA"}
    assert torch.__version__.startswith(report["machine"]["versions"]["torch"])  # which may lack "+cpu"
    assert set(report["backends"]) == set(ATTENTION_BACKENDS.order)
    assert "FASTATTENTION_ASCEND" in report["environment"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "check", "name", "error"),
    [
        (Wrong, TINY, "out", 1e-3),
        (NotFinite, TINY, "out", "inf"),
    ],
    ids=["off", "nan"],
)
def test_a_wrong_result_is_wrong(
    kind: type,
    check: Check,
    name: str,
    error: float | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (entry,) = checked(tmp_path / "report.json", monkeypatch, kind, check)
    assert entry["state"] == "wrong"
    found = entry["errors"][name]["error"]
    assert found == error if error == "inf" else found == pytest.approx(error, rel=0.1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 of 1 right, 0 refused, 1 wrong, 0 failed" in printed
    assert check.case.name in printed


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ForgetsTokens, "new values are not in v_cache"),
        (WritesElsewhere, "v_cache was written where nothing belongs"),
    ],
)
def test_wrong_memory_is_wrong(kind: type, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = checked(tmp_path / "report.json", monkeypatch, kind, APPEND)
    assert (entry["state"], entry["reason"]) == ("wrong", reason)


@pytest.mark.usefixtures("alone")
def test_gradients_are_judged_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = checked(tmp_path / "report.json", monkeypatch, Wrong, GRADIENTS)
    beyond = {name for name, one in entry["errors"].items() if one["error"] > one["allowed"]}
    assert set(entry["errors"]) == {"out", "gradient of q", "gradient of k", "gradient of v"}
    assert beyond == {"out"}  # a constant has no gradient


@pytest.mark.usefixtures("alone")
def test_an_exception_is_recorded_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = checked(tmp_path / "report.json", monkeypatch, Raises, TINY, APPEND)
    assert [entry["state"] for entry in entries] == ["failed", "failed"]
    assert entries[0]["reason"].startswith("ValueError: no kernel in ")
    assert "in forward" in entries[0]["traceback"]


@pytest.mark.usefixtures("alone")
def test_a_refusal_is_recorded_and_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = checked(tmp_path / "report.json", monkeypatch, Refuses, TINY)
    assert (entry["state"], entry["reason"]) == ("refused", "it serves nothing")


@pytest.mark.usefixtures("alone")
def test_a_refusal_of_what_was_accepted_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = checked(tmp_path / "report.json", monkeypatch, RefusesAfterAll, TINY)
    assert (entry["state"], entry["reason"]) == ("failed", "not this one")


@pytest.mark.usefixtures("alone")
def test_variables_are_set_for_an_implementation_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_ASCEND", "triton")
    (entry,) = checked(tmp_path / "report.json", monkeypatch, ReadsEnvironment, TINY)
    assert entry["state"] == "right"
    assert os.environ["FASTATTENTION_ASCEND"] == "triton"


@pytest.mark.usefixtures("alone")
def test_a_device_that_is_lost_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_why_lost", lambda device: "an illegal memory access")
    path = tmp_path / "report.json"
    assert len(checked(path, monkeypatch, Raises, TINY, APPEND)) == 1
    assert "an illegal memory access" in read(path)["stopped"]
    assert "an illegal memory access" in capsys.readouterr().out


def test_a_process_that_dies_leaves_the_call_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ran = subprocess.run([sys.executable, "-c", DYING, path], capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    report = read(path)
    assert [entry["state"] for entry in report["entries"]] == ["right", "running"]
    assert (report["entries"][-1]["name"], report["entries"][-1]["served_by"]) == ("tiny", "tested")
    assert "summary" not in report
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_packages_that_are_not_needed_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "matplotlib", "scipy"):
        monkeypatch.setitem(sys.modules, name, None)
    command.check("cpu", tmp_path / "report.json", [TINY])
    states = {entry["kind"]: entry["state"] for entry in read(tmp_path / "report.json")["entries"]}
    assert states == {"call": "right", "model": "skipped", "speed": "measured"}


@pytest.mark.usefixtures("alone")
def test_nothing_personal_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "jdoe"
    (home / "work").mkdir(parents=True)
    monkeypatch.chdir(home / "work")
    for name, value in {"HOME": str(home), "USER": "jdoe", "LOGNAME": "jdoe"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FASTATTENTION_CACHE", str(home / "cache"))
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.example.org")
    (entry,) = checked(home / "work" / "report.json", monkeypatch, Raises, TINY)
    assert entry["reason"] == "ValueError: no kernel in <home>/kernels for <user> on <host>"
    text = (home / "work" / "report.json").read_text()
    for word in (str(tmp_path), "jdoe", "node17", "example.org", str(Path.cwd())):
        assert word not in text
    assert read(home / "work" / "report.json")["environment"]["FASTATTENTION_CACHE"] == "<home>/cache"


def test_names_are_replaced_where_they_are_words() -> None:
    paths = [(Path("/"), "?"), (Path("/a"), "A"), (Path("/a/b"), "B")]
    anonymise = Anonymiser(paths, [("al", "U"), ("cuda", "U"), ("root", "U")], ["node.one.org", "localhost"])
    assert anonymise({"x": ["/a/b/c:/a/c / /x/a /ab", "al also al_2 root", 3]}) == {
        "x": ["B/c:A/c / /x/a /ab", "U also U_2 root", 3]
    }
    assert anonymise("gcc '-I/a/include' -L/a/b/lib --prefix=/a") == "gcc '-IA/include' -LB/lib --prefix=A"
    assert anonymise("node node.one.org node.two, localhost nodes") == "<host> <host> <host>, localhost nodes"
    assert anonymise({"device": "cuda", "reason": "cuda"}) == {"device": "cuda", "reason": "U"}


def test_processes_are_left_out_of_the_vendor_s_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text('#!/bin/sh\necho "$1: 910B2, OK"\necho "| Process id | Process name |"\necho "| 7 | secret |"\n')
    tool.chmod(0o755)
    assert facts.tool_output("cuda") is None or "Process" not in str(facts.tool_output("cuda"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert facts.tool_output("npu") == {"command": "npu-smi info", "output": "info: 910B2, OK"}


def _speed_of_an_npu(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The entry of a processor whose devices torch names NPUs."""
    fake = SimpleNamespace(get_device_name=lambda *index: "Ascend910B2", device_count=lambda: 2)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(npu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "interleaved_on_device", lambda calls, rounds, device: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(speeds, "SHAPES", ((64, True, 16),))
    monkeypatch.setattr(speeds, "TOKENS", 32)
    report = CheckReport(path, {})
    speeds.run(report, "npu")
    (entry,) = report.entries
    return entry


def test_an_npu_s_speeds_stand_beside_predictions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = _speed_of_an_npu(tmp_path / "report.json", monkeypatch)
    assert entry["state"] == "measured"  # torch_npu and Triton are refused as missing
    assert set(entry["tflops"]) == {"SDPA"}
    assert set(entry["reasons"]) == {npu.OURS, "torch_npu through us", "npu_fusion_attention"}
    assert entry["predicted_tflops"][npu.OURS] > 0.0
    assert facts.device_names("npu") == ["Ascend910B2", "Ascend910B2"]


def test_a_speed_of_ours_that_cannot_be_measured_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: AscendBackend, problem: Problem, inputs: Inputs) -> AttentionOutput:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(AscendBackend, "forward", fail)
    entry = _speed_of_an_npu(tmp_path / "report.json", monkeypatch)
    assert (entry["state"], entry["reason"]) == ("failed", f"{npu.OURS}: an illegal memory access")


def test_cann_s_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert facts.cann_versions() == {}
    (tmp_path / "version.cfg").write_text("8.5.0")
    assert facts.cann_versions() == {"version.cfg": "8.5.0"}


def test_a_device_that_is_not_there_is_refused(run_command: Callable[..., Finished], tmp_path: Path) -> None:
    exit_code, output = run_command("check", "--device", "npu")
    assert exit_code == 1
    assert "error: device='npu': the ascend backend cannot run here: torch_npu is not installed" in output
    assert not list(tmp_path.iterdir())


def test_every_case_is_a_call_of_its_own() -> None:
    assert len({(one.case.name, one.dtype) for one in CHECKS}) == len(CHECKS)
    assert {one.case.stored for one in checks_of("npu") if isinstance(one.case, KvCacheCase)} == {"as_q", "int8"}


@pytest.mark.parametrize("check", [CHECKS[0], CHECKS[7]], ids=["dense", "window"])
def test_a_key_too_few_is_wrong(check: Check) -> None:
    """Tolerances are far smaller than the mistakes that kernels make."""
    call = build_call(check.case, check.dtype)
    call.arguments["v"][:, -1] = 0.0
    error = expected(check.case, check.dtype).errors({"out": call.run_without_lse("sdpa")})["out"]
    assert error.error > 3 * error.allowed
