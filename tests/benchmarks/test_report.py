"""The tables of the performance page are those of the committed results."""

import pytest

from benchmarks.report import TABLES, tables
from tests.docs.code_blocks import ROOT


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table_of_the_committed_results(name: str) -> None:
    assert dict(tables())[name] in (ROOT / "docs" / "performance.md").read_text()
