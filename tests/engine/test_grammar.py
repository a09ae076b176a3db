"""Masks against what the grammars say, token by token, on a vocabulary of single bytes."""

import json
import pickle
import resource
from pathlib import Path
from string import ascii_letters

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.errors import InvalidRequestError
from engine.grammar import Grammar, GrammarCompiler, GrammarFailedError
from engine.grammar_trial import MAX_CPU_S
from engine.structured import JSON_OBJECT, StructuredOutput
from tests.engine.tiny_tokenizer import save_tiny_tokenizer

VOCAB_SIZE = 300
EOS = 2
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path, vocab_size=VOCAB_SIZE)
    return GrammarCompiler(AutoTokenizer.from_pretrained(path), VOCAB_SIZE, frozenset({EOS}))


def spell(compiler: GrammarCompiler, text: str) -> list[int]:
    return list(compiler._tokenizer(text, add_special_tokens=False)["input_ids"])


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether every token of the text, and then the end, is allowed."""
    state = grammar.start()
    for token_id in [*spell(compiler, text), EOS]:
        forbidden = state.forbidden()
        assert forbidden is not None and forbidden.shape == (VOCAB_SIZE,)
        if forbidden[token_id]:
            return False
        state.advance(token_id)
    return True


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (
            StructuredOutput(kind="json_schema", source=SCHEMA),
            ['{"n":1,"kind":"a"}', '{ "n": -20,\n "kind": "b" }'],
            ['{"n":1}', '{"n":1.5,"kind":"a"}', '{"n":1,"kind":"c"}', '{"n":1,"kind":"a","x":1}'],
        ),
        (
            StructuredOutput(kind="json_schema", source=JSON_OBJECT),
            ["{}", '{"a":[1,null,{"b":"c"}]}'],
            ["[]", "1", '{"a"}', "{} "],
        ),
        (
            StructuredOutput(kind="regex", source="[a-c]{2,3}"),
            ["ab", "abc"],
            ["a", "abcd", "xy"],
        ),
        (
            StructuredOutput(kind="choice", source=("yes", "no")),
            ["yes", "no"],
            ["ye", "maybe", "yesno"],
        ),
        (
            StructuredOutput(kind="grammar", source='root ::= "a" rest\nrest ::= "b" | "c" rest\n'),
            ["ab", "accb"],
            ["a", "ac", "b"],
        ),
        (
            StructuredOutput(kind="grammar", source='start: "x" /[0-9]+/'),
            ["x1", "x123"],
            ["x", "1"],
        ),
    ],
    ids=["schema", "object", "regex", "choice", "gbnf", "lark"],
)
def test_masks_allow_what_matches_and_nothing_else(
    compiler: GrammarCompiler, structured: StructuredOutput, good: list[str], bad: list[str]
) -> None:
    grammar = compiler.compile(structured)
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(codec="ascii"), min_size=1, max_size=6), min_size=1))
def test_choices_are_taken_literally(compiler: GrammarCompiler, choices: list[str]) -> None:
    grammar = compiler.compile(StructuredOutput(kind="choice", source=tuple(choices)))
    spellable = [text for text in choices if text.isprintable() and " " not in text]
    assert all(accepts(compiler, grammar, text) for text in spellable)
    assert not accepts(compiler, grammar, "another text that nobody chose")


def test_a_complete_text_leaves_only_the_end(compiler: GrammarCompiler) -> None:
    state = compiler.compile(StructuredOutput(kind="choice", source=("ok",))).start()
    for token_id in spell(compiler, "ok"):
        state.advance(token_id)
    forbidden = state.forbidden()
    assert forbidden is not None
    assert (~forbidden).nonzero().flatten().tolist() == [EOS]


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    forbidden = compiler.compile(StructuredOutput(kind="regex", source=".*")).start().forbidden()
    assert forbidden is not None
    assert forbidden[:3].tolist() == [True, True, False]


def test_before_its_marker_everything_may_come(compiler: GrammarCompiler) -> None:
    structured = StructuredOutput(kind="choice", source=("ok",), after="<s>")
    state = compiler.compile(structured).start()
    state.advance(7)
    assert state.forbidden() is None
    state.advance(1)
    forbidden = state.forbidden()
    assert forbidden is not None and not forbidden[spell(compiler, "o")[0]]
    assert forbidden.sum() == VOCAB_SIZE - 1


def test_only_a_text_that_opens_so_has_a_free_part(compiler: GrammarCompiler) -> None:
    structured = StructuredOutput(kind="choice", source=("ok",), opens="<s>", after="<pad>")
    letter = spell(compiler, "o")[0]
    free, bound = compiler.compile(structured).start(), compiler.compile(structured).start()
    first = free.forbidden()
    assert first is not None
    assert (~first).nonzero().flatten().tolist() == [1, letter]
    for token_id in (1, 50, 1):
        free.advance(token_id)
        assert free.forbidden() is None
    free.advance(0)
    bound.advance(letter)
    for state, expected in ((free, letter), (bound, spell(compiler, "k")[0])):
        forbidden = state.forbidden()
        assert forbidden is not None
        assert (~forbidden).nonzero().flatten().tolist() == [expected]


def test_sequences_of_one_grammar_do_not_disturb_each_other(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutput(kind="choice", source=("ab", "cd")))
    first, second = grammar.start(), grammar.start()
    first.advance(spell(compiler, "a")[0])
    second.advance(spell(compiler, "c")[0])
    for state, letter in ((first, "b"), (second, "d")):
        forbidden = state.forbidden()
        assert forbidden is not None
        assert (~forbidden).nonzero().flatten().tolist() == spell(compiler, letter)


def test_a_token_against_the_grammar_is_an_error(compiler: GrammarCompiler) -> None:
    state = compiler.compile(StructuredOutput(kind="choice", source=("ok",))).start()
    state.advance(spell(compiler, "x")[0])
    with pytest.raises(GrammarFailedError):
        state.forbidden()


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(kind="json_schema", source='{"type":"nothing"}'),
        StructuredOutput(kind="json_schema", source="not json"),
        StructuredOutput(kind="json_schema", source='{"type":"array","uniqueItems":true}'),
        StructuredOutput(kind="json_schema", source='{"$ref":"file:///etc/hostname"}'),
        StructuredOutput(kind="regex", source="(a"),
        StructuredOutput(kind="regex", source="(?=a)b"),
        StructuredOutput(kind="grammar", source="start: nowhere"),
        StructuredOutput(kind="grammar", source="root ::= nowhere"),
        StructuredOutput(kind="choice", source=()),
        StructuredOutput(kind="choice", source=("a", "")),
        StructuredOutput(kind="choice", source=("a",), after="<no such token>"),
        StructuredOutput(kind="regex", source="a" * ((1 << 16) + 1)),
        StructuredOutput(kind="grammar", source="start: /" + "a" * (1 << 16) + "/"),
        StructuredOutput(kind="grammar", source='start: "' + "a" * ((1 << 13) + 1) + '"'),
        StructuredOutput(kind="json_schema", source='{"const":"' + "a" * ((1 << 13) + 1) + '"}'),
        StructuredOutput(kind="json_schema", source='{"enum":[' + "1," * (1 << 19) + "1]}"),
        StructuredOutput(kind="choice", source=("b", "a" * ((1 << 13) + 1))),
        StructuredOutput(kind="choice", source=("a" * (1 << 13),) * 129),
    ],
    ids=lambda structured: str(structured.source)[:24],
)
def test_what_cannot_be_enforced_is_refused(
    compiler: GrammarCompiler, structured: StructuredOutput
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(structured)
    assert caught.value.param == "structured_outputs"


def test_a_grammar_without_bounds_costs_seconds_once_and_nothing_afterwards(
    compiler: GrammarCompiler,
) -> None:
    parts = [{"type": "string", "pattern": f".*{letter}.*"} for letter in ascii_letters]
    bomb = StructuredOutput(kind="json_schema", source=json.dumps({"allOf": parts}))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        compiler.compile(bomb)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * MAX_CPU_S
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        compiler.compile(bomb)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime == after.ru_utime
    assert accepts(compiler, compiler.compile(StructuredOutput(kind="regex", source="ab")), "ab")


def test_a_model_without_an_end_cannot_be_restricted(compiler: GrammarCompiler) -> None:
    endless = GrammarCompiler(compiler._tokenizer, VOCAB_SIZE, frozenset())
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        endless.compile(StructuredOutput(kind="regex", source="a"))


def test_a_failure_travels_between_processes(compiler: GrammarCompiler) -> None:
    state = compiler.compile(StructuredOutput(kind="choice", source=("ok",))).start()
    state.advance(spell(compiler, "x")[0])
    with pytest.raises(GrammarFailedError) as caught:
        state.forbidden()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.param) == (GrammarFailedError, "structured_outputs")
