"""One laboratory at a time: the cells are ordered by architecture."""

from collections.abc import Callable

import pytest

from tests.engine.matrix.architectures import ARCHITECTURES
from tests.engine.matrix.laboratory import Laboratory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring all tests of one architecture together, so that its laboratory is made once."""
    places = [place for place, item in enumerate(items) if _architecture(item) is not None]
    ordered = sorted((items[place] for place in places), key=_order)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _architecture(item: pytest.Item) -> str | None:
    if not isinstance(item, pytest.Function) or item.path.name != "test_matrix.py":
        return None
    parameters = getattr(item, "callspec", None)
    return None if parameters is None else parameters.params.get("architecture")


def _order(item: pytest.Item) -> int:
    return list(ARCHITECTURES).index(_architecture(item) or "")


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Laboratory]:
    made: dict[str, Laboratory | Exception] = {}

    def get(name: str) -> Laboratory:
        if name not in made:
            made.clear()
            try:
                made[name] = Laboratory(name, tmp_path_factory.mktemp("matrix"))
            except Exception as error:
                # Every cell of the architecture fails, but only the first one has to wait for it.
                made[name] = error
                raise
        found = made[name]
        if isinstance(found, Exception):
            raise found
        return found

    return get
