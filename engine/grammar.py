"""Restrictions on text as token masks, computed beside the engine's steps.

Knows grammars, vocabularies and masks. Knows nothing of logits, batches or HTTP.

The mask of a sequence's next token is begun on another thread as soon as the token before it is
known, so it is ready, as a rule, when the forward pass that it is needed for has ended.
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequestError
from engine.grammar_trial import GrammarTrial
from engine.structured import StructuredOutput

logger = logging.getLogger(__name__)

_NUM_MASK_THREADS = 2
_MAX_COMPILED = 128
_MAX_CHOICES = 10_000
_MAX_SOURCE_CHARS = 1 << 20
# A mask behind a literal of L characters takes time in proportion to L, of every step.
_MAX_PATTERN_CHARS = 1 << 16
_MAX_LITERAL_CHARS = 1 << 13
_MAX_MESSAGE_CHARS = 500

# Whitespace between JSON's tokens, bounded: a model must not be able to idle there for ever.
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_REGEX_META = re.compile(r"[\\.^$*+?()\[\]{}|/]")


class GrammarFailedError(InvalidRequestError):
    """A grammar outgrew its limits while text was being generated."""


class Grammar:
    """A compiled restriction, from which sequences start."""

    def __init__(self, start: Callable[[], "GrammarState"]) -> None:
        self._start = start

    def start(self) -> "GrammarState":
        """Begin a sequence; its first mask is computed from here on."""
        return self._start()


class GrammarCompiler:
    """Compiles restrictions for one vocabulary and remembers the last ones. Any thread may use it.

    The vocabulary is prepared at the first use, which takes about a second.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(_NUM_MASK_THREADS, thread_name_prefix="grammar-mask")
        self._limits = LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._trial = GrammarTrial()
        self._compiled: OrderedDict[StructuredOutput, LLMatcher | InvalidRequestError] = (
            OrderedDict()
        )

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Prepare a restriction; InvalidRequestError for one that cannot be enforced."""
        after_id = self._token_id(structured, structured.after)
        opens_id = self._token_id(structured, structured.opens)
        with self._lock:
            matcher = self._compiled.pop(structured, None)
            if matcher is None:
                try:
                    matcher = self._compile(structured)
                except InvalidRequestError as error:
                    # Remembered too: finding out may have taken seconds.
                    matcher = error
            self._compiled[structured] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        if isinstance(matcher, InvalidRequestError):
            raise InvalidRequestError(matcher.message, param=matcher.param)

        def start() -> GrammarState:
            return GrammarState(
                matcher.deep_copy(),
                self._threads,
                self._vocab_size,
                after_id=after_id,
                opens_id=opens_id,
            )

        return Grammar(start)

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        vocabulary = self._prepare_vocabulary(structured)
        try:
            source = _to_lark(structured)
        except InvalidRequestError:
            raise
        except Exception as error:
            # The converters raise what they like.
            raise _refused(structured, str(error)) from error
        if not self._trial.survives(source):
            raise _refused(structured, "it takes too much time or memory")
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        return matcher

    def _prepare_vocabulary(self, structured: StructuredOutput) -> LLTokenizer:
        if self._vocabulary is not None:
            return self._vocabulary
        if not self._eos_token_ids:
            raise InvalidRequestError(
                "structured output needs a model that has an end-of-sequence token",
                param=structured.field,
            )
        try:
            self._vocabulary = from_tokenizer(
                self._tokenizer,
                n_vocab=max(self._vocab_size, len(self._tokenizer)),
                eos_token=sorted(self._eos_token_ids),
            )
        except Exception as error:
            logger.exception("this tokenizer cannot be used for structured output")
            raise InvalidRequestError(
                "structured output is not possible with this model's tokenizer",
                param=structured.field,
            ) from error
        return self._vocabulary

    def _token_id(self, structured: StructuredOutput, token: str) -> int | None:
        if not token:
            return None
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise InvalidRequestError(
                f"this model has no token {token!r} behind which structured output could begin",
                param=structured.field,
            )
        return int(token_id)


class GrammarState:
    """Where one sequence stands in its grammar. Used by one thread.

    The grammar begins behind the token ``after_id``; with ``opens_id``, at once unless the first
    token is that one.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        threads: Executor,
        vocab_size: int,
        *,
        after_id: int | None,
        opens_id: int | None,
    ) -> None:
        self._matcher = matcher
        self._threads = threads
        self._vocab_size = vocab_size
        self._after_id = after_id
        self._opens_id = opens_id
        self._mask: Future[torch.Tensor] | None = None
        if after_id is None or opens_id is not None:
            self._mask = threads.submit(self._compute, None, opens_id)

    def forbidden(self) -> torch.Tensor | None:
        """Which tokens must not come next, bool [vocab]; None while everything may."""
        return None if self._mask is None else self._mask.result()

    def advance(self, token_id: int) -> None:
        """Account for a token that was chosen, and begin the next mask."""
        opens, self._opens_id = token_id == self._opens_id, None
        if opens:
            self._mask = None
        elif self._mask is not None:
            # A matcher does one thing at a time; mostly this is done long ago.
            wait([self._mask])
            self._mask = self._threads.submit(self._compute, token_id)
        elif token_id == self._after_id:
            self._mask = self._threads.submit(self._compute, None)

    def _compute(self, token_id: int | None, also_allowed: int | None = None) -> torch.Tensor:
        if token_id is not None and not self._matcher.consume_token(token_id):
            raise _failed(self._matcher.get_error())
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _failed(self._matcher.get_error())
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        if also_allowed is not None:
            bits[also_allowed] = 1
        return torch.from_numpy(bits == 0)


def _to_lark(structured: StructuredOutput) -> str:
    """A restriction in the one notation that matchers read."""
    source = structured.source
    _check_size(structured)
    if isinstance(source, tuple):
        pattern = "|".join(_REGEX_META.sub(r"\\\g<0>", choice) for choice in source)
        return str(LLMatcher.grammar_from_regex(f"({pattern})"))
    if structured.kind == "json_schema":
        return str(
            LLMatcher.grammar_from_json_schema(
                source, overrides={"whitespace_pattern": _JSON_WHITESPACE}
            )
        )
    if structured.kind == "regex":
        return str(LLMatcher.grammar_from_regex(source))
    is_lark = structured.kind == "lark"
    return str(LLMatcher.grammar_from_lark(source if is_lark else any_to_lark(source)))


def _check_size(structured: StructuredOutput) -> None:
    """Refuse what would make every step slow, for everybody."""
    source = structured.source
    if isinstance(source, tuple):
        if not source or len(source) > _MAX_CHOICES or not all(source):
            raise _refused(structured, f"it needs 1 to {_MAX_CHOICES} non-empty texts")
        num_chars, max_chars = sum(map(len, source)), _MAX_SOURCE_CHARS
        longest = max(map(len, source))
    else:
        is_pattern = structured.kind in ("regex", "grammar")
        num_chars, max_chars = len(source), _MAX_PATTERN_CHARS if is_pattern else _MAX_SOURCE_CHARS
        longest = 0
        if num_chars <= max_chars and structured.kind != "regex":
            longest = max(map(len, _QUOTED.findall(source)), default=2) - 2
    if num_chars > max_chars:
        raise _refused(structured, f"it has more than {max_chars} characters")
    if longest > _MAX_LITERAL_CHARS:
        raise _refused(structured, f"a text in it has more than {_MAX_LITERAL_CHARS} characters")


def _failed(reason: str) -> GrammarFailedError:
    return GrammarFailedError(
        f"the structured output could not go on: {reason[:_MAX_MESSAGE_CHARS]}",
        param="structured_outputs",
    )


def _refused(structured: StructuredOutput, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured output: the {structured.kind} cannot be enforced: "
        f"{reason.strip()[:_MAX_MESSAGE_CHARS]}",
        param=structured.field,
    )
