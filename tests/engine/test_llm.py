"""Offline use: what goes wrong with one call does not reach the next."""

from pathlib import Path

import pytest

from engine import LLM, CacheConfig, SamplingParams
from engine.errors import InvalidRequestError


def test_a_refused_prompt_leaves_nothing_behind(checkpoint: Path) -> None:
    with LLM(
        checkpoint,
        dtype="float32",
        num_threads=1,
        max_model_len=32,
        cache=CacheConfig(num_blocks=16),
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        alone = llm.generate([[1, 2, 3]], params)
        with pytest.raises(InvalidRequestError):
            llm.generate([[1, 2, 3], [1] * 100], params)
        assert not llm.engine.has_work
        assert llm.generate([[1, 2, 3]], params) == alone
