"""Result files say where their figures come from."""

from __future__ import annotations

import json
from pathlib import Path

from fastattention.cli.bench.record import SCHEMA, write_record
from fastattention.cli.machine import describe_machine


def test_a_record_names_machine_versions_and_commit(tmp_path: Path) -> None:
    write_record(tmp_path / "new" / "speed.json", {"rows": [1]})
    record = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert (record["schema"], record["question"], record["rows"]) == (SCHEMA, "speed", [1])
    assert {"cpu", "gpus", "versions", "commit", "command"} <= set(record["machine"])


def test_a_record_keeps_its_own_machine_and_question(tmp_path: Path) -> None:
    machine = {**describe_machine(), "capability": 90}
    write_record(tmp_path / "speed_gpu.json", {"question": "speed", "machine": machine})
    record = json.loads((tmp_path / "speed_gpu.json").read_text())
    assert (record["question"], record["machine"]["capability"]) == ("speed", 90)
