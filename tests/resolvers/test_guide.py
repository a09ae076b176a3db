"""The resolver of docs/resolvers.md is short and works as it stands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from resolvers.base import SourceUnavailableError
from resolvers.chain import Link, ResolverChain
from tests.resolvers.adapter_files import write_adapter

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "resolvers.md"


async def test_resolver_of_the_guide_works(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) < 20
    names: dict[str, Any] = {}
    exec(code, names)
    catalogue = tmp_path / "catalogue.json"
    resolver = names["CatalogueResolver"](str(catalogue))
    chain = ResolverChain([Link("catalogue", resolver)])
    with pytest.raises(SourceUnavailableError, match="the catalogue cannot be read"):
        await chain.resolve_lora("base", "sql")
    write_adapter(tmp_path / "sql")
    catalogue.write_text(json.dumps({"sql": str(tmp_path / "sql")}))
    found = await chain.resolve_lora("base", "sql")
    assert found is not None and found.lora_path == str(tmp_path / "sql")
    assert await chain.resolve_lora("base", "unknown") is None
