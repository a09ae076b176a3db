"""How to sample one request: vLLM's names and defaults, validated once."""

import math
from dataclasses import dataclass
from typing import Literal

from engine.errors import InvalidRequestError
from engine.structured import StructuredOutput

MAX_LOGPROBS = 20
MAX_N = 128
# Dividing logits by less than this would overflow float32 before it changed any draw.
GREEDY_TEMPERATURE = 1e-5
_SEED_RANGE = 1 << 63

Pooling = Literal["last", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    ``temperature`` 0 (or below 1e-5) means greedy. ``top_k`` 0 or -1 and ``top_p`` 1 switch the
    filters off.
    ``logprobs`` k asks for the chosen token and the k most likely; ``prompt_logprobs`` likewise for
    each prompt token. ``max_tokens`` None generates until the context is full.
    ``spaces_between_special_tokens`` matters only where special tokens are not skipped, and
    ``shown_special_token_ids`` are shown even where they are.
    ``pooling`` asks for one vector of the prompt's final hidden states and no tokens.
    Raises InvalidRequestError naming the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    shown_special_token_ids: tuple[int, ...] = ()
    structured: StructuredOutput | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_distribution()
        self._check_penalties()
        self._check_stops()
        self._check_structured()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def _check_counts(self) -> None:
        _require(1 <= self.n <= MAX_N, "n", self.n, f"must be in 1..{MAX_N}")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
            fits = self.min_tokens <= self.max_tokens
            _require(fits, "min_tokens", self.min_tokens, "must not exceed max_tokens")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "must not be negative")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or 0 <= value <= MAX_LOGPROBS
            _require(ok, name, value, f"must be in 0..{MAX_LOGPROBS}")
        if self.seed is not None:
            in_range = -_SEED_RANGE <= self.seed < _SEED_RANGE
            _require(in_range, "seed", self.seed, "must fit in 64 bits")

    def _check_distribution(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        _require(finite, "temperature", self.temperature, "must be non-negative")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        _require(self.top_k >= -1, "top_k", self.top_k, "must be -1 (off), 0 (off) or positive")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]")
        if self.n > 1 and self.is_greedy:
            _require(False, "n", self.n, "must be 1 when using greedy sampling")
        if self.pooling is not None:
            _require(self.n == 1, "n", self.n, "must be 1 for an embedding")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, value, "must be in [-2, 2]")
        value = self.repetition_penalty
        _require(
            math.isfinite(value) and value > 0, "repetition_penalty", value, "must be positive"
        )
        for token_id, bias in self.logit_bias:
            _require(token_id >= 0, "logit_bias", token_id, "token ids must not be negative")
            _require(-100 <= bias <= 100, "logit_bias", bias, "must be in [-100, 100]")

    def _check_stops(self) -> None:
        _require(all(self.stop), "stop", list(self.stop), "must not contain an empty string")
        ids_ok = all(token_id >= 0 for token_id in self.stop_token_ids)
        _require(ids_ok, "stop_token_ids", list(self.stop_token_ids), "must not be negative")

    def _check_structured(self) -> None:
        # The end of the text is part of what is enforced.
        if self.structured is not None:
            for name in ("ignore_eos", "min_tokens"):
                value = getattr(self, name)
                _require(not value, name, value, "does not go with structured output")


def _require(condition: bool, param: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} {rule}, got {value}.", param=param)
