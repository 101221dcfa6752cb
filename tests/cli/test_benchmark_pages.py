"""The benchmark pages and charts agree with the result files, and every figure has a source."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import typer
from pages import int8_products, markdown, results
from pages.__main__ import BUILDERS, DOCS, main
from pages.chart import GAIN, LOSS, Bar, Chart, Group
from pages.results import MissingMetadataError, Result

PAGES = [name for name in BUILDERS if name.endswith(".md")]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    main(docs=tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", BUILDERS)
def test_committed_page_agrees_with_the_results(name: str, built: dict[str, str]) -> None:
    assert (DOCS / name).read_text() == built[name]


def test_check_passes_on_what_was_just_written(docs: Path) -> None:
    main(check=True, docs=docs)


@pytest.mark.parametrize("name", BUILDERS)
def test_check_fails_and_names_a_page_that_differs(name: str, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = docs / name
    path.write_text(path.read_text().replace("1.", "7.", 1) + "\n")
    with pytest.raises(typer.Exit) as exit_:
        main(check=True, docs=docs)
    assert exit_.value.exit_code == 1
    assert capsys.readouterr().err == f"{path} differs from benchmarks/results: run `python benchmarks/pages`\n"


def test_check_fails_where_a_page_is_missing(docs: Path) -> None:
    (docs / PAGES[0]).unlink()
    with pytest.raises(typer.Exit):
        main(check=True, docs=docs)


def test_every_result_file_is_on_a_page(built: dict[str, str]) -> None:
    names = [str(path.relative_to(results.RESULTS)) for path in results.RESULTS.rglob("*.json")]
    assert [name for name in names if not any(f"[{name}]" in text for text in built.values())] == []


@pytest.mark.parametrize("name", [name for name in PAGES if not name.endswith("index.md")])
def test_every_table_is_followed_by_its_source(name: str, built: dict[str, str]) -> None:
    blocks = built[name].split("\n\n")
    tables = [index for index, block in enumerate(blocks) if block.startswith("| ")]
    assert tables
    for index in tables:
        source = blocks[index + 2] if blocks[index + 1].startswith("Limits") else blocks[index + 1]
        assert all(f"{part}: " in source for part in ("Device", "Versions", "Commit", "Command", "Data")), blocks[index]


@pytest.mark.parametrize("name", PAGES)
def test_rows_have_as_many_cells_as_headings(name: str, built: dict[str, str]) -> None:
    for block in built[name].split("\n\n"):
        if block.startswith("| "):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


def write_result(folder: Path, **machine: object) -> None:
    (folder / "one.json").write_text(json.dumps({"machine": machine}))


def test_source_line_holds_what_the_run_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    versions = {"fastattention": "0.1.0", "torch": "2.11.0", "numpy": "2.0"}
    recorded = {"command": "found later"}
    commit = "a" * 40 + "+changes"
    write_result(tmp_path, versions=versions, commit=commit, command="run it", driver="580.1", recorded=recorded)
    assert Result.load("one").provenance("a GPU") == (
        "<small>Device: a GPU. Versions: torch 2.11.0, driver 580.1. Commit: `aaaaaaa` with uncommitted changes. "
        "Command: `run it` (found later). "
        "Data: [one.json](../../benchmarks/results/one.json).</small>"
    )


def test_times_of_int8_products_are_shown_once_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = (results.RESULTS / "int8_errors.json").read_text()
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "int8_errors.json").write_text(errors)
    assert "Times" not in int8_products.build()
    call = {"path": "amx_bf16", "dtype": "bfloat16", "nheads": 2, "headdim": 128, "seqlen": 4096, "causal": True}
    report = {
        "machine": json.loads(errors)["machine"],
        "records": [{**call, "seconds": {"exact": 0.3, "int8": 0.2, "rest": 0.1}}],
    }
    (tmp_path / "int8_products_cpu.json").write_text(json.dumps(report))
    row = "| amx_bf16 | bfloat16, 2 heads of 128, 4K tokens, causal | 300 ms | 200 ms | 1.50x | 3.00x |"
    assert row in int8_products.build().split("## Times on a CPU")[1]


@pytest.mark.parametrize("missing", ["versions", "commit", "command"])
def test_result_without_a_source_is_refused(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    machine = {"versions": {"torch": "2"}, "commit": "a", "command": "b"}
    write_result(tmp_path, **{name: value for name, value in machine.items() if name != missing})
    with pytest.raises(MissingMetadataError, match=f"one.json has no {missing}"):
        Result.load("one")


FIGURES = {
    "ratio": {None: "-", 1.234: "1.23x", 58.1: "58x", 0.994: "**0.99x**", 0.996: "1.00x"},
    "number": {0.0: "0", 0.68: "0.680", 0.01046: "0.0105", 12.34: "12.3", 4227.4: "4227", 1.0: "1.00"},
    "seconds": {1.36e-5: "13.6 us", 0.783: "783 ms", 0.9999: "1.00 s", 4.65e-6: "4.65 us"},
    "tokens": {131072: "128K", 1 << 20: "1M", 819: "819", 1500: "1500"},
    "error": {-0.0003: "+0.0%", 0.0647: "+6.5%", -0.145: "-14.5%"},
}


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_are_written_for_readers(kind: str) -> None:
    assert {value: getattr(markdown, kind)(value) for value in FIGURES[kind]} == FIGURES[kind]


def test_bars_of_losses_end_at_one_and_of_gains_begin_there() -> None:
    bars = [Bar("half", "", 0.5), Bar("twice <b>", "faint", 2.0)]
    chart = Chart("title", "subtitle", (0.25, 1, 4), [Group("group", "", bars)], ["note"])
    root = ElementTree.fromstring(chart.svg())
    lines = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "1.5"]
    (one,) = (float((path.get("d") or "")[1:].split()[0]) for path in lines)
    found = {rect.get("fill"): rect for rect in root.iter(f"{SVG}rect")}
    loss, gain = (
        (float(found[colour].get("x") or ""), float(found[colour].get("width") or "")) for colour in (LOSS, GAIN)
    )
    assert loss[0] + loss[1] == pytest.approx(one, abs=0.2)
    assert gain[0] == pytest.approx(one, abs=0.1)
    assert loss[1] == pytest.approx(gain[1], abs=0.2)  # half as fast and twice as fast are equally far
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"0.50x", "2.00x", "twice <b>"} <= set(texts)
