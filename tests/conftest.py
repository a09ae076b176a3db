"""Fixtures for every test: tiny base models, made once a session."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import MakeModel, save_tiny_model


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return a function from a model type (and config overrides) to a checkpoint's directory."""
    made: dict[str, Path] = {}

    def make(model_type: str, *, dtype: torch.dtype = torch.float32, **overrides: object) -> Path:
        key = f"{model_type} {dtype} {sorted(overrides.items())}"
        if key not in made:
            path = tmp_path_factory.mktemp(model_type)
            save_tiny_model(path, model_type, dtype=dtype, **overrides)
            made[key] = path
        return made[key]

    return make
