"""`fastattention plan offload`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import slow

from .conftest import RunCommand

LLAMA = "plan offload --model llama-2-7b --gpu-memory 16GiB --seqlen 262144".split()
SMALL = "plan offload --model llama-3-8b --gpu-memory 24GiB --seqlen 131072 --hardware desktop".split()


def test_plan_says_where_every_layer_is_and_what_it_predicts(run_command: RunCommand) -> None:
    exit_code, output = run_command(*LLAMA)
    assert exit_code == 0
    for said in (
        "llama-2-7b, 1 x 262144 tokens",
        "0 on the GPU, 32 on the CPU",
        "layers " + 32 * "C",
        "GPU weights 12.55 GiB",
        "GPU staging of uploads 512.00 MiB",
        "GPU newest pages of layers on the CPU 392.00 MiB",
        "host keys and values 128.00 GiB",
        "predicted time a token",
        "Policies, predicted",
        "classical 32 12.5 s as host memory allows",
        "hybrid 32 1.26 s as host memory allows chosen",
        "resident: gpu_memory=17179869184",
        "none is measured",
    ):
        assert said in output


def test_layers_on_both_sides_are_shown(run_command: RunCommand) -> None:
    exit_code, output = run_command(*SMALL, "--layers-cpu", 20, "--policy", "cooperative", "--cpu-memory", "11GB")
    assert exit_code == 0
    assert "layers " + 4 * "GCGCGCCC" in output
    assert "policy cooperative" in output
    assert "uploaded a token" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--seqlen 8192", "policy resident"),
        ("--policy classical", "100% of the layers on the CPU"),
        ("--cache int8", "131072 tokens, quantized on the CPU"),
        ("--batch 2", "2 x 131072 tokens"),
        ("--batch 2", "(MicroBatchedCache)"),
        ("--tp 2 --cpu-memory 32GiB", "llama-3-8b, one of 2 GPUs"),
        ("--tp 2 --hardware desktop", "CPU attention 30, host memory 35"),
        ("--gpu-bandwidth 1TB/s --link-bandwidth 30GB/s", "GPU memory 1000, link 30"),
        ("--cpu-bandwidth 100GB/s --dram-bandwidth 110GB/s", "CPU attention 100, host memory 110"),
    ],
)
def test_options_are_heeded(arguments: str, said: str, run_command: RunCommand) -> None:
    _, output = run_command(*SMALL, *arguments.split())
    assert said in output


def test_models_of_folders_are_planned(run_command: RunCommand, byte_model: Path) -> None:
    exit_code, output = run_command(*SMALL, "--model", byte_model, "--layers-cpu", 1)
    assert exit_code == 0, output
    assert f"{byte_model.name}, 1 x 131072 tokens" in output
    assert "1 on the GPU, 1 on the CPU" in output
    assert "host keys and values 16.00 MiB" in output  # 131072 tokens x 2 heads x (8 + 8) elements x 4 bytes


def test_host_memory_is_shared_by_the_gpus(run_command: RunCommand) -> None:
    arguments = "plan offload --model pangu-38b --tp 8 --gpu-memory 32GiB --seqlen 262144 --cpu-memory".split()
    assert run_command(*arguments, "208GiB")[0] == 0
    exit_code, output = run_command(*arguments, "199GiB")
    assert exit_code == 1
    assert "cpu_memory=26709327872 (24.88 GiB) is too small for 26 layers" in output


@pytest.mark.parametrize(
    ("policy", "name", "begins"),
    [("auto", "plan.svg", b"<?xml"), pytest.param("hybrid", "[plan].PNG", b"\x89PNG", marks=slow)],
)
def test_plan_draws_the_time_against_the_length(
    policy: str, name: str, begins: bytes, run_command: RunCommand, tmp_path: Path
) -> None:
    exit_code, output = run_command(*LLAMA, "--cpu-memory", "129GiB", "--policy", policy, "--output", name)
    assert exit_code == 0
    assert f"picture: {name}" in output
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_without_a_limit_the_picture_goes_beyond_the_plan(run_command: RunCommand, tmp_path: Path) -> None:
    assert run_command(*SMALL, "--output", "plan.svg")[0] == 0
    assert "512K" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gpt", "model='gpt' is not known; choose from llama-2-7b, llama-2-70b"),
        ("--gpu-memory 16", "gpu_memory=16 (16 B) is too small"),
        ("--gpu-memory plenty", "gpu_memory='plenty' is no size; use a number of bytes"),
        ("--cpu-memory 1Gb/s", "cpu_memory='1Gb/s' is no size"),
        ("--link-bandwidth fast", "link_bandwidth='fast' is no bandwidth in bytes a second"),
        ("--link-bandwidth 16Gb/s", "link_bandwidth='16Gb/s' is no bandwidth in bytes a second"),
        ("--gpu-memory 16Gib", "gpu_memory='16Gib' is no size; use a number of bytes"),
        ("--link-bandwidth 1TB/s", "link_bandwidth=1e+12 of desktop is more than dram_bandwidth=7e+10"),
    ],
)
def test_plan_refuses_what_it_cannot_do(arguments: str, message: str, run_command: RunCommand) -> None:
    exit_code, output = run_command(*SMALL, *arguments.split())
    assert exit_code == 1
    assert output.startswith(f"error: {message}")
