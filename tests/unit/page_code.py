"""The Python code of README.md and of pages of docs/: finds its blocks, and runs them.

    python tests/unit/page_code.py PAGE ...    # runs blocks, in one process, and prints how many ran

Blocks of a page share their names, in order. A block that cannot run everywhere has the comment
`<!-- not run: REASON -->` before it. Models and tokenizers of the hub are replaced by tiny random ones. GIVEN lists
names that a page leaves to its reader.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/index.md",
    *(
        page.relative_to(ROOT).as_posix()
        for folder in ("get-started", "guides")
        for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
GIVEN = {"docs/guides/serving.md": {"model", "prompts"}}  # a model and lists of tokens, says the page
FENCE = re.compile(r"^[ \t>]*(?:```|~~~)\s*(?:python|py)", re.MULTILINE | re.IGNORECASE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- not run: (\S.*?) -->\s*\Z")


class Block(NamedTuple):
    """Python code of a page."""

    page: str
    line: int  # of its first line
    code: str
    not_run: str | None  # the reason; None for a block that runs

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree. An error names the page and the line."""
        return ast.parse("\n" * (self.line - 1) + self.code, self.page)

    def unknown(self, known: set[str]) -> set[str]:
        """Names that it uses and that neither it nor `known` nor Python defines. Its own names join `known`."""
        used, given = set(), set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else given).add(node.id)
            elif isinstance(node, ast.alias):
                given.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                given.add(node.name)
            elif isinstance(node, ast.arg):
                given.add(node.arg)
        known |= given
        return used - known - set(dir(builtins))


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        mark = MARK.search(text, 0, match.start())
        found.append(Block(page, text.count("\n", 0, match.start(1)) + 1, match[1], mark and mark[1]))
    return found


def run(pages: list[str]) -> int:
    """Runs the blocks of pages that are not marked, and returns their number."""
    replace_the_hub()
    from transformers import AutoModelForCausalLM

    given = {"model": AutoModelForCausalLM.from_pretrained("any"), "prompts": [[1, 2], [2]]}
    count = 0
    for page in pages:
        names: dict[str, Any] = {"__name__": page, **{name: given[name] for name in GIVEN.get(page, ())}}
        for block in blocks_of(page):
            if block.not_run is None:
                exec(compile(block.tree, block.page, "exec"), names)
                count += 1
    return count


def replace_the_hub() -> None:
    """Has `from_pretrained` of the classes that pages use make a tiny random Llama, and a tokenizer of three words."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=7, pad_token_id=7,
    )  # fmt: skip

    def model(name: str, **options: Any) -> Any:
        return AutoModelForCausalLM.from_config(config, **options).eval()

    def tokenizer(name: str) -> PreTrainedTokenizerFast:
        words = Tokenizer(WordLevel({"[UNK]": 0, "Once": 1, "upon": 2}, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")

    AutoModelForCausalLM.from_pretrained = model
    AutoTokenizer.from_pretrained = tokenizer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
