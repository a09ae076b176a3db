"""Chooses the next token of each sequence from its logits.

Knows SamplingParams and tokens. Knows nothing of adapters, blocks or text.

The order is vLLM's: logit_bias, min_tokens, penalties, structure, then greedy choice, or
temperature, min_p, top_k, top_p and a draw. Log probabilities are those of the raw logits, before
any of it.

Each sequence owns its random numbers, one uniform number for each token. On a CPU it draws by
inverting the cumulative distribution; on a GPU the number seeds ``kernels.ops.sample_tokens``, so
that all rows are drawn at once and only the tokens come back. So a seeded sequence does not depend
on what else is in the batch, nor on preemption, which keeps tokens that were drawn; its tokens on a
CPU and on a GPU differ.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.errors import EngineError, InvalidRequestError
from engine.grammar import GrammarState
from engine.outputs import PositionLogprobs, TokenLogprob
from engine.request import Request
from engine.sampling_params import SamplingParams
from kernels import ops

# Nearly every distribution has its top_p mass in this many tokens, and selecting them is much
# cheaper than sorting a vocabulary.
_NUCLEUS_GUESS = 1024
# Rows whose log probabilities are computed at once: a few copies of their logits are held.
_LOGPROB_ROWS = 64


class NonFiniteLogitsError(EngineError):
    """The model gave NaN or infinity for this sequence."""

    def __init__(self) -> None:
        super().__init__("the model produced non-finite logits for this request")


@dataclass(slots=True)
class SamplingState:
    """What one sequence must remember between tokens in order to sample the next."""

    params: SamplingParams
    stop_ids: frozenset[int]
    rng: random.Random
    prompt_tokens: frozenset[int] = frozenset()
    output_counts: Counter[int] = field(default_factory=Counter)
    grammar: GrammarState | None = None

    @classmethod
    def create(
        cls,
        request: Request,
        eos_token_ids: frozenset[int],
        fallback: random.Random,
        grammar: GrammarState | None = None,
    ) -> "SamplingState":
        """Start a sequence; without a seed of its own it draws from ``fallback``."""
        params = request.params
        eos = frozenset() if params.ignore_eos else eos_token_ids
        has_seed = params.seed is not None
        needs_prompt = params.repetition_penalty != 1.0
        return cls(
            params=params,
            stop_ids=eos | frozenset(params.stop_token_ids),
            rng=random.Random(f"{params.seed}:{request.index}") if has_seed else fallback,
            prompt_tokens=frozenset(request.prompt_token_ids if needs_prompt else ()),
            grammar=grammar,
        )

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )

    @property
    def changes_logits(self) -> bool:
        params = self.params
        below_minimum = self.output_counts.total() < params.min_tokens and bool(self.stop_ids)
        is_edited = bool(params.logit_bias) or below_minimum or self.has_penalties
        return is_edited or self.grammar is not None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token, or why there is none."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: Exception | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    """Choose one token for each row and count it in the row's state.

    logits   [rows, vocab]  float32, overwritten
    states   one for each row
    """
    raw = _keep_raw(logits, states)
    failures: dict[int, Exception] = {}
    for row, state in enumerate(states):
        if state.changes_logits:
            _apply_biases(logits[row], state)
            _apply_penalties(logits[row], state)
            if state.grammar is not None:
                _apply_grammar(logits, row, state.grammar, failures)
    choose = _choose_on_device if _draws_on_device(logits) else _choose_on_host
    token_ids = choose(logits, states)
    logprobs = _logprobs(raw, token_ids, states)
    results: list[Sampled] = []
    for row, (state, token_id) in enumerate(zip(states, token_ids, strict=True)):
        if token_id < 0:
            results.append(Sampled(-1, error=failures.get(row) or NonFiniteLogitsError()))
            continue
        state.output_counts[token_id] += 1
        if state.grammar is not None and token_id not in state.stop_ids:
            state.grammar.advance(token_id)
        results.append(Sampled(token_id, logprobs.get(row)))
    return results


def _draws_on_device(logits: torch.Tensor) -> bool:
    return logits.device.type != "cpu"


def _choose_on_host(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Choose for each row; -1 where its logits are not finite."""
    # numpy finds the place of a maximum several times as fast as torch.
    values = logits.numpy()
    chosen = values.argmax(axis=1)
    is_finite = np.isfinite(values[np.arange(len(chosen)), chosen])
    token_ids: list[int] = chosen.tolist()
    for row, state in enumerate(states):
        if not is_finite[row]:
            token_ids[row] = -1
        elif not state.params.is_greedy:
            token_ids[row] = _draw(logits[row], state.params, state.rng.random())
    return token_ids


def _choose_on_device(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Do the same for all rows at once, with one answer from the device."""
    rows = []
    seeds = []
    for state in states:
        params = state.params
        temperature = 0.0 if params.is_greedy else params.temperature
        rows.append((temperature, float(max(params.top_k, 0)), params.top_p, params.min_p))
        seeds.append(0 if params.is_greedy else int(state.rng.random() * 2**53))
    table = torch.tensor(rows, dtype=torch.float32).to(logits.device, non_blocking=True)
    placed = torch.tensor(seeds, dtype=torch.int64).to(logits.device, non_blocking=True)
    token_ids: list[int] = ops.sample_tokens(logits, table, placed).tolist()
    return token_ids


@torch.inference_mode()
def position_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[PositionLogprobs]:
    """Log probabilities of a token and of some most likely ones, for each row of logits [R, vocab].

    Many rows at once, since a GPU is waited for at each answer.
    """
    found: list[PositionLogprobs] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        logprobs = logits[rows].log_softmax(dim=-1)
        ids = torch.tensor(token_ids[rows], dtype=torch.int64).to(logits.device)
        chosen = logprobs.gather(1, ids.unsqueeze(1))
        ranks = ((logprobs > chosen).sum(dim=1) + 1).tolist()
        best = logprobs.topk(min(max(num_tops[rows]), logits.shape[1]))
        found += [
            PositionLogprobs(
                TokenLogprob(token_id, value, rank),
                tuple(map(TokenLogprob, indices[:num_top], values, range(1, num_top + 1))),
            )
            for token_id, value, rank, indices, values, num_top in zip(
                token_ids[rows],
                chosen.squeeze(1).tolist(),
                ranks,
                best.indices.tolist(),
                best.values.tolist(),
                num_tops[rows],
                strict=True,
            )
        ]
    return found


def _logprobs(
    raw: dict[int, torch.Tensor], token_ids: Sequence[int], states: Sequence[SamplingState]
) -> dict[int, PositionLogprobs]:
    """The log probabilities of the chosen tokens, for the rows that want them and have one."""
    rows = [row for row in raw if token_ids[row] >= 0]
    if not rows:
        return {}
    found = position_logprobs(
        torch.stack([raw[row] for row in rows]),
        [token_ids[row] for row in rows],
        [states[row].params.logprobs or 0 for row in rows],
    )
    return dict(zip(rows, found, strict=True))


def _keep_raw(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, torch.Tensor]:
    """Copy the rows whose log probabilities are wanted, where sampling would overwrite them."""
    return {
        row: logits[row].clone() if state.changes_logits else logits[row]
        for row, state in enumerate(states)
        if state.params.logprobs is not None
    }


def _apply_biases(logits: torch.Tensor, state: SamplingState) -> None:
    if state.params.logit_bias:
        ids, biases = zip(*state.params.logit_bias, strict=True)
        logits.index_add_(0, _ids(ids, logits), logits.new_tensor(biases))
    if state.output_counts.total() < state.params.min_tokens and state.stop_ids:
        logits[_ids(sorted(state.stop_ids), logits)] = -torch.inf


def _apply_grammar(
    logits: torch.Tensor, row: int, grammar: GrammarState, failures: dict[int, Exception]
) -> None:
    """Rule out what the grammar forbids; a row that nothing is left of fails alone."""
    try:
        forbidden = grammar.forbidden()
    except InvalidRequestError as error:
        failures[row] = error
        logits[row] = -torch.inf
        return
    if forbidden is not None:
        logits[row].masked_fill_(forbidden.to(logits.device, non_blocking=True), -torch.inf)


def _apply_penalties(logits: torch.Tensor, state: SamplingState) -> None:
    """Repetition penalty as in CTRL (arXiv:1909.05858), the other two as OpenAI documents them."""
    params = state.params
    if params.repetition_penalty != 1.0:
        ids = _ids(sorted(state.prompt_tokens | state.output_counts.keys()), logits)
        seen = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (params.presence_penalty or params.frequency_penalty) and state.output_counts:
        ids = _ids(list(state.output_counts), logits)
        counts = logits.new_tensor(list(state.output_counts.values()))
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _ids(ids: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)


def _draw(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Draw from one row [vocab], ``uniform`` in [0, 1)."""
    probs = ((logits - logits.max()) / params.temperature).softmax(dim=-1)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(), 0)
    indices = None
    if 0 < params.top_k < probs.shape[0]:
        probs, indices = probs.topk(params.top_k)
    if params.top_p < 1:
        probs, indices = _nucleus(probs, indices, params.top_p)
    cumulative = probs.double().cumsum(0)
    # right=True picks the first token whose cumulative mass exceeds the number: none of mass 0.
    place = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    if place >= probs.shape[0] or probs[place] == 0:
        place = int(probs.argmax())
    return place if indices is None else int(indices[place])


def _nucleus(
    probs: torch.Tensor, indices: torch.Tensor | None, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the fewest most likely tokens whose mass reaches ``top_p`` (arXiv:1904.09751).

    ``indices`` are the token ids of ``probs`` where that is already a selection, best first.
    """
    mass = top_p * probs.double().sum()
    if indices is None:
        guess = min(_NUCLEUS_GUESS, probs.shape[0])
        best, indices = probs.topk(guess)
        if best.double().sum() < mass and guess < probs.shape[0]:
            best, indices = probs.sort(descending=True)
        probs = best
    before = probs.double().cumsum(0) - probs
    keep = int((before < mass).sum())
    return probs[:keep], indices[:keep]
