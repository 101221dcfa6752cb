"""Result files, and the source of each: device, versions, commit, command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
SOURCE = "../.."  # the source tree, from the pages in docs/benchmarks
# The commit identifies fastattention. NumPy and Transformers are left out, because their speed is not shown.
UNIMPORTANT_VERSIONS = ("fastattention", "numpy", "transformers")


class MissingMetadataError(Exception):
    """Raised for a result file that does not say where its figures come from."""


@dataclass(frozen=True)
class Result:
    """One file of figures."""

    name: str  # relative to RESULTS, without ".json"
    data: dict[str, Any]

    @classmethod
    def load(cls, name: str) -> Result:
        """Read a file. Raises MissingMetadataError where its versions, commit or command are missing."""
        result = cls(name, json.loads((RESULTS / f"{name}.json").read_text()))
        missing = [field for field in ("versions", "commit", "command") if not result.machine.get(field)]
        if missing:
            raise MissingMetadataError(f'{name}.json has no {", ".join(missing)} under "machine"')
        return result

    @cached_property
    def machine(self) -> dict[str, Any]:
        """The result of `fastattention.cli.machine.describe_machine`."""
        machine: dict[str, Any] = self.data.get("machine", {})
        return machine

    @cached_property
    def processor(self) -> str:
        """The CPU, its threads and the widest instruction set that attention uses."""
        flags = self.machine["cpu_flags"]
        widest = "AMX" if "amx_bf16" in flags else "AVX-512" if "avx512f" in flags else "AVX2"
        name = self.machine["cpu"].replace("(R)", "").replace(" Processor", "")
        return f"{name}, {self.machine['num_threads']} threads, {widest}"

    @cached_property
    def gpu(self) -> str:
        """The GPUs by name, counted."""
        gpus = self.machine["gpus"]
        name = gpus[0].replace("NVIDIA ", "").replace(" 80GB HBM3", "")
        return f"{len(gpus)} {name}" if len(gpus) > 1 else name

    @cached_property
    def device(self) -> str:
        """The GPUs; the CPU where there are none."""
        return self.gpu if self.machine["gpus"] else self.processor

    def sourced(self, *blocks: str, device: str | None = None) -> list[str]:
        """The blocks of a page, each table followed by its source.

        device: what the figures were measured on, if not `self.device`
        """
        source = self.provenance(device or self.device)
        return [block for each in blocks for block in ((each, source) if each.startswith("| ") else (each,))]

    def provenance(self, device: str) -> str:
        """The lines under a table. device: that on which the figures were measured."""
        versions = [f"{name} {version}" for name, version in self.machine["versions"].items() if self._shown(name)]
        versions += [
            f"{title} {self.machine[name]}"
            for title, name in (("CUDA", "cuda"), ("driver", "driver"), ("Triton", "triton"))
            if self.machine.get(name)
        ]
        if self.data.get("nccl"):
            versions.append("NCCL " + ".".join(map(str, self.data["nccl"])))
        commit, changed, _ = self.machine["commit"].partition("+")
        commit = f"`{commit[:7]}`" + (" with uncommitted changes" if changed else "")
        how = {field: f" ({how})" for field, how in self.machine.get("recorded", {}).items()}
        file = f"[{self.name}.json]({SOURCE}/benchmarks/results/{self.name}.json)"
        return (
            f"<small>Device: {device}. Versions: {', '.join(versions)}{how.get('versions', '')}. "
            f"Commit: {commit}{how.get('commit', '')}. "
            f"Command: `{self.machine['command']}`{how.get('command', '')}. Data: {file}.</small>"
        )

    def _shown(self, version: str) -> bool:
        return version not in UNIMPORTANT_VERSIONS or len(self.machine["versions"]) == 1
