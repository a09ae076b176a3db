"""The document of keys: what it may say, and that no error repeats a secret."""

import hashlib

import pytest

from deployments.access.key_document import KeysError, parse_keys

SECRET = "sk-secret-0123456789"


def document(entry: str, tail: str = "") -> str:
    return f"keys:\n- name: team\n  secrets: [{SECRET}]\n{entry}\n{tail}"


def test_secrets_are_given_plainly_by_environment_or_by_hash() -> None:
    hashed = hashlib.sha256(b"sk-hashed-0123456789").hexdigest()
    text = f'keys: [{{name: a, secrets: [{SECRET}, "env:KEY", "sha256:{hashed}"]}}]'
    keys = parse_keys(text, environ={"KEY": "sk-environ-0123456789"})
    plain = [SECRET, "sk-environ-0123456789", "sk-hashed-0123456789"]
    assert set(keys.holders) == {hashlib.sha256(each.encode()).digest() for each in plain}
    assert {holder.name for holder in keys.holders.values()} == {"a"}


def test_patterns_span_slashes_and_name_the_base_model_too() -> None:
    (holder,) = parse_keys(document("  adapters: ['team/*', base, 'sql-v?']")).holders.values()
    names = ["team/sql", "team/a/b", "base", "sql-v1", "teams/sql", "sql-v10", "base2", "Base", ""]
    assert list(filter(holder.adapters.match, names)) == names[:4]


def test_limits_are_divided_among_ingresses_and_never_sum_to_more() -> None:
    text = document("  limits: {requests_per_minute: 100, concurrent_requests: 5}")
    (holder,) = parse_keys(text, num_ingresses=3).holders.values()
    assert holder.limits.requests_per_minute == 33
    assert holder.limits.concurrent_requests == 1
    assert holder.limits.tokens_per_minute is None
    with pytest.raises(KeysError, match="concurrent_requests 5 cannot be divided among 6"):
        parse_keys(text, num_ingresses=6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "document"),
        ("keys: []", "keys"),
        ("keys: {", "not YAML at line 1"),
        ("- " + SECRET, "document"),
        (f"keys: [{{name: a, secrets: [{SECRET}], rol: admin}}]", "keys.0.rol"),
        (f"keys: [{{name: a, secrets: {SECRET}}}]", "keys.0.secrets"),
        (f"keys: [{{name: a, secrets: [], {SECRET}: 1}}]", r"keys.0.\?"),
        (f"keys: [{{name: 'a b', secrets: [{SECRET}]}}]", "keys.0.name"),
        (f"keys: [{{name: admin-key, secrets: [{SECRET}]}}]", "is taken"),
        ("keys: [{name: a, secrets: [sk-short]}]", "16 or more"),
        (f"keys: [{{name: a, secrets: ['{SECRET} x']}}]", "visible ASCII"),
        (f"keys: [{{name: a, secrets: ['{SECRET}\u00e9']}}]", "visible ASCII"),
        ("keys: [{name: a, secrets: ['env:NOWHERE']}]", "16 or more"),
        ("keys: [{name: a, secrets: ['sha256:abc']}]", "64 lower-case hex"),
        (document("", f"- {{name: team, secrets: [{SECRET}2]}}"), "two keys have one name"),
        (document("", f"- {{name: other, secrets: [{SECRET}]}}"), "share a secret"),
        (document("  limits: {requests_per_minute: 0}"), "keys.0.limits.requests_per_minute"),
        (document("  limits: {tokens_per_minute: 1.5}"), "keys.0.limits.tokens_per_minute"),
        (document("  limits: {requests: 5}"), "keys.0.limits.requests"),
        (f"keys: [{{name: a, secrets: [{SECRET}]]", "not YAML"),
        (f"keys: !!python/object:{SECRET} x", "not YAML"),
    ],
)
def test_whatever_is_wrong_is_said_without_the_secret(text: str, problem: str) -> None:
    with pytest.raises(KeysError, match=problem) as caught:
        parse_keys(text, environ={})
    assert "sk-s" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
