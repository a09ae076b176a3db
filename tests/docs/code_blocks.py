"""The fenced blocks of the documentation, and what becomes of each in the tests.

A block is run, validated, or listed here with the reason why it cannot be run. What is listed is
checked as far as that goes without running it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md")]
)

# Diagrams, and output that is shown.
PLAIN = frozenset({"", "text"})
VALIDATED = frozenset({"yaml", "json"})
RUN = frozenset({"bash", "python"})
# Commands with their output.
TRANSCRIPTS = frozenset({"console"})

# By page and first line.
NOT_RUN = {
    ("README.md", "make serve"): "starts the server that all other blocks talk to",
    ("README.md", "make test"): "runs the tests, this one among them",
    ("docs/operations.md", "lorafleet doctor --config serve_config.yaml"): (
        "finds the port taken while the server of the other blocks runs"
    ),
    (
        "docs/operations.md",
        "lorafleet state export --model smollm2-135m-instruct --output names.json",
    ): "needs the controller stopped; tests/deployments/test_state_transfer.py does it",
    ("docs/consistency.md", "from deployments import AdapterController"): (
        "runs inside a Ray cluster; tests/deployments/test_ray_cluster.py does it"
    ),
}

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.strip().splitlines()[0].strip() if self.text.strip() else ""

    @property
    def reason_not_to_run(self) -> str | None:
        return NOT_RUN.get((self.page, self.first_line))

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """Every fenced block of every page."""
    for path in PAGES:
        text = path.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            page = path.relative_to(ROOT).as_posix()
            yield Block(page, line, match[2], match[3])


BLOCKS = list(blocks())


def blocks_in(*languages: str) -> list[Block]:
    """The blocks in some languages."""
    return [block for block in BLOCKS if block.language in languages]


def blocks_to_run(language: str) -> list[Block]:
    """The blocks of a language that are run."""
    return [block for block in blocks_in(language) if block.reason_not_to_run is None]


def exchanges(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a transcript, each with the output that is shown below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield command, shown
