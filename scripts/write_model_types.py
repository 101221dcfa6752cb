"""Writes docs/reference/model-types.md: every model type of Transformers, and whether fast_attention serves it.

    python scripts/write_model_types.py           # write the page
    python scripts/write_model_types.py --check   # exit with 1 if the page is stale

Reads tests/integrations/sweep/results.json, which `python -m integrations.sweep` in tests/ writes. Needs no packages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from generated_page import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "model-types.md"
RESULTS = ROOT / "tests" / "integrations" / "sweep" / "results.json"
LONGEST = 110  # most characters of a reason
INTRODUCTION = """# Model types

Which model types of Transformers `attn_implementation="fast_attention"` serves. `python scripts/write_model_types.py`
generates this page from `tests/integrations/sweep/results.json`: Transformers {transformers}, torch {torch}, on a CPU.

Each type was built as a tiny random model, from Transformers' own lists. Its results were compared with those of eager
attention and of Transformers' own functions for [linear layers](#linear-layers), as far as these compute them:

- padding on no, the left, the right or both sides; gradients
- generation: greedy, with a static cache, with beams
- prompts in chunks, and several sequences in a row

Models with images or sound as main input were compared in a forward pass and in gradients. Models of text and images
were given text alone. Types that are not on this page have not been run.
"""


class Section(NamedTuple):
    """Types with the same outcome."""

    title: str
    about: str
    header: tuple[str, ...]
    row: Callable[[str, dict[str, Any]], tuple[str, ...]]


def outcome(result: dict[str, Any]) -> str:
    """The key in SECTIONS of one result."""
    if "cannot" in result:
        return "untried"
    said = {name: value for name, value in result["checks"].items() if name != "asks"}
    compared = [value for value in said.values() if not value.startswith("eager fails")]
    if any(value.startswith(("error", "differs")) for value in compared):
        return "wrong"
    refused = sum(value.startswith("refused") for value in compared)
    if not compared:
        return "untried"
    if refused:
        return "refused" if refused == len(compared) else "partly"
    return "served" if result["checks"].get("asks") == "yes" else "own"


def _checks(result: dict[str, Any], beginning: str) -> Iterator[tuple[str, str]]:
    """(check, why) of the checks whose result starts with `beginning`."""
    for name, value in result.get("checks", {}).items():
        if value.startswith(beginning):
            yield name, value.partition(": ")[2]


def _reason(text: str) -> str:
    """One line of an error, as a table cell, without the exception's name and its advice."""
    text = text.partition(": ")[2] if text.split(":")[0].isidentifier() else text
    text = text.split("; ")[0].replace("transformers.models.", "").replace("|", "/").replace("`", "'").strip()
    text = text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " ..."
    return f"`{text or 'no reason given'}`"


def _served(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    without = ", ".join(check for check, _ in _checks(result, "eager fails"))
    return f"`{name}`", f"`{result['class']}`", f"all but {without}" if without else "all"


def _refused(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    return f"`{name}`", _reason(next(_checks(result, "refused"))[1])


def _partly(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    found = list(_checks(result, "refused"))
    return f"`{name}`", ", ".join(check for check, _ in found), _reason(found[0][1])


def _wrong(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    found = [*_checks(result, "error"), *((check, "other numbers") for check, _ in _checks(result, "differs"))]
    return f"`{name}`", ", ".join(check for check, _ in found), _reason(found[0][1])


def _untried(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    return f"`{name}`", _reason(result.get("cannot") or next(_checks(result, "eager fails"))[1])


SECTIONS = {
    "wrong": Section("Wrong", "These are faults of ours, to be mended.", ("type", "in", "what"), _wrong),
    "served": Section(
        "Served",
        "The results are those of eager attention. Left out are checks that eager attention itself fails.",
        ("type", "class", "checks"),
        _served,
    ),
    "partly": Section(
        "Served in part", "Some calls are refused, the others are served.", ("type", "refused", "because"), _partly
    ),
    "refused": Section("Refused", "An error says so when the model is made or called.", ("type", "because"), _refused),
    "own": Section(
        "Own attention",
        "These never ask for an implementation, or have no attention. They compute as ever, under any name.",
        ("type", "class"),
        lambda name, result: _served(name, result)[:2],
    ),
    "untried": Section(
        "Not tried",
        "No tiny model could be built and run with eager attention, from default configurations and simple inputs.",
        ("type", "because"),
        _untried,
    ),
}


LINEAR = """
## Linear layers

Types with linear attention, a state space or short convolutions, and which of our functions computed them in the checks
above. They do so [under any attention](../guides/linear-attention.md#in-a-transformers-model). Other functions of these
layers, such as the state space of Mamba, are Transformers' own.
"""


def _linear(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    found = result["linear"]
    reasons = [_reason(text.partition(" leaves ")[2].replace(" to the model itself", "")) for text in found["left"]]
    return f"`{name}`", ", ".join(f"`{one}`" for one in found["ours"]) or "none", ", ".join(reasons) or "-"


LATENTS = """
## Latents and selected keys

Types that cache latents, or whose queries attend to keys of their choice, and what
[our attention](../guides/latent-attention.md) did in the checks above:

- *expanded*: keys and values of all heads were made from latents, as Transformers always does. Gradients need it.
- *absorbed*: queries attended to the latents themselves.
- *selected keys*: only keys that queries had selected were read. *masked keys*: all were read, under a mask.
- *indexer*: `fast_indexer_func` selected the keys. Without it, Transformers' own code did.
"""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))


def render(results: dict[str, Any]) -> str:
    """The whole page."""
    types: dict[str, Any] = results["types"]
    parts = [INTRODUCTION.format(**results["versions"]), "| result | types |\n|---|---|"]
    of = {key: [name for name in types if outcome(types[name]) == key] for key in SECTIONS}
    parts[-1] += "".join(
        f"\n| [{section.title}](#{section.title.lower().replace(' ', '-')}) | {len(of[key])} |"
        for key, section in SECTIONS.items()
        if of[key]
    )
    for key, section in SECTIONS.items():
        if of[key]:
            table = _table(section.header, [section.row(name, types[name]) for name in of[key]])
            parts.append(f"\n## {section.title}\n\n{section.about}\n\n{table}")
    rows = [_linear(name, result) for name, result in types.items() if "linear" in result]
    if rows:
        parts += [LINEAR, _table(("type", "by ours", "left to Transformers"), rows)]
    rows = [(f"`{name}`", ", ".join(result["latents"])) for name, result in types.items() if "latents" in result]
    if rows:
        parts += [LATENTS, _table(("type", "ways"), rows)]
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    """Writes the page, or with --check compares it. Returns 1 if it is stale."""
    return write_or_check(
        PAGE, render(json.loads(RESULTS.read_text(encoding="utf-8"))), arguments, "python scripts/write_model_types.py"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
