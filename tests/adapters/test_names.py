"""Adapter names are safe as a path, an object key and a label."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import InvalidAdapterNameError, validate_adapter_name
from adapters.names import MAX_NAME_LENGTH


@pytest.mark.parametrize("name", ["a", "sql-v2", "team/sql", "A.b_c-1/x/y", "0", "a" * 128])
def test_plain_names_are_accepted(name: str) -> None:
    assert validate_adapter_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "a/..",
        "/a",
        "a/",
        "a//b",
        ".hidden",
        "-flag",
        "_x",
        "a b",
        "a\n",
        "a\0b",
        "a:b",
        "a@1",
        "a\\b",
        "é",
        "a" * (MAX_NAME_LENGTH + 1),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidAdapterNameError, match="is not a valid adapter name"):
        validate_adapter_name(name)


def test_the_message_of_a_long_name_is_short() -> None:
    with pytest.raises(InvalidAdapterNameError) as caught:
        validate_adapter_name("x" * 10_000)
    assert len(str(caught.value)) < 400


@given(st.text() | st.from_regex(r"[a-z./_-]{0,12}", fullmatch=True))
def test_an_accepted_name_stays_inside_its_root(name: str) -> None:
    try:
        validate_adapter_name(name)
    except InvalidAdapterNameError:
        return
    parts = PurePosixPath("/root", name).parts
    assert parts[:2] == ("/", "root") and len(parts) > 2
    assert not any(part.startswith(".") for part in parts)
    assert name.isascii() and "//" not in name
