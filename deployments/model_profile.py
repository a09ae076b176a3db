"""How a model wants to be talked to: its template, formats, stops and sampling defaults.

The same fields describe the base model in the settings and an adapter in ``adapter.yaml`` beside
its weights; what an adapter says goes before what the base model's settings say.
"""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deployments.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from engine.errors import InvalidAdapterError, InvalidRequestError
from engine.sampling_params import SamplingParams

PROFILE_FILE = "adapter.yaml"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_MAX_FILE_BYTES = 1 << 20
# It lists every special token, which makes a megabyte for some models.
_MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
_MAX_STOPS = 64

# transformers' own tag, around what the assistant said.
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


class SamplingDefaults(BaseModel):
    """What a request gets that does not say otherwise; SamplingParams' names and ranges."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    @model_validator(mode="after")
    def _check(self) -> "SamplingDefaults":
        try:
            SamplingParams(**self.model_dump(exclude_none=True))
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        return self


class ModelProfile(BaseModel):
    """What is said of one model. None and empty say nothing.

    ``stop`` strings and ``stop_token_ids`` end every text, beside those of the request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    stop: Annotated[tuple[str, ...], Field(max_length=_MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=_MAX_STOPS)] = ()
    generation: SamplingDefaults = SamplingDefaults()

    @field_validator("tool_parser")
    @classmethod
    def _known_tool_parser(cls, name: str | None) -> str | None:
        return _known(name, TOOL_FORMATS)

    @field_validator("reasoning_parser")
    @classmethod
    def _known_reasoning_parser(cls, name: str | None) -> str | None:
        return _known(name, REASONING_FORMATS)

    @field_validator("chat_template")
    @classmethod
    def _parsable(cls, template: str | None) -> str | None:
        if template is not None:
            try:
                environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
                environment.parse(_GENERATION_TAG.sub("", template))
            except (TemplateError, RecursionError) as error:
                raise ValueError(f"no Jinja template: {error}") from None
        return template

    @model_validator(mode="after")
    def _check_stops(self) -> "ModelProfile":
        try:
            SamplingParams(stop=self.stop, stop_token_ids=self.stop_token_ids)
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        return self

    def over(self, base: "ModelProfile") -> "ModelProfile":
        """This profile, completed by the base model's."""
        said = {
            name: getattr(self, name)
            for name in ("chat_template", "tool_parser", "reasoning_parser")
            if getattr(self, name) is not None
        }
        generation = base.generation.model_copy(
            update=self.generation.model_dump(exclude_none=True)
        )
        return base.model_copy(
            update={
                **said,
                "stop": (*base.stop, *self.stop),
                "stop_token_ids": (*base.stop_token_ids, *self.stop_token_ids),
                "generation": generation,
            }
        )

    def apply(self, params: SamplingParams, given: Collection[str]) -> SamplingParams:
        """Sampling parameters of a request that itself gave only those named."""
        changes: dict[str, Any] = {
            name: value
            for name, value in self.generation.model_dump(exclude_none=True).items()
            if name not in given
        }
        if self.stop:
            changes["stop"] = tuple(dict.fromkeys((*params.stop, *self.stop)))
        if self.stop_token_ids:
            ids = (*params.stop_token_ids, *self.stop_token_ids)
            changes["stop_token_ids"] = tuple(dict.fromkeys(ids))
        return replace(params, **changes) if changes else params


def read_profile(directory: Path) -> ModelProfile:
    """An adapter's profile from its directory; InvalidAdapterError naming what is wrong in it."""
    fields = _read_yaml(directory / PROFILE_FILE)
    template = directory / TEMPLATE_FILE
    if template.is_file():
        if "chat_template" in fields:
            raise InvalidAdapterError(
                f"the adapter has a chat template both in {PROFILE_FILE} and in {TEMPLATE_FILE}"
            )
        fields["chat_template"] = _read_text(template)
    elif "chat_template" not in fields:
        fields["chat_template"] = _tokenizer_template(directory / TOKENIZER_CONFIG_FILE)
    try:
        return ModelProfile.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        raise InvalidAdapterError(f"{PROFILE_FILE}: {where}: {first['msg']}") from None


def _tokenizer_template(path: Path) -> object:
    """The template in a tokenizer's configuration, where transformers kept it before."""
    if not path.is_file():
        return None
    try:
        fields = json.loads(_read_text(path, _MAX_TOKENIZER_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError(f"{path.name} is not valid JSON: {error}") from None
    template = fields.get("chat_template") if isinstance(fields, dict) else None
    if not isinstance(template, list):
        return template
    several = [item for item in template if isinstance(item, dict)]
    return next((item.get("template") for item in several if item.get("name") == "default"), None)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = yaml.safe_load(_read_text(path))
    # Beside its own errors, what Python says of nesting and of numbers without end.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidAdapterError(f"{path.name} is not valid YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidAdapterError(f"{path.name} must hold fields with values")
    return document


def _read_text(path: Path, max_bytes: int = _MAX_FILE_BYTES) -> str:
    if path.stat().st_size > max_bytes:
        raise InvalidAdapterError(f"{path.name} is larger than {max_bytes} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidAdapterError(f"{path.name} is not UTF-8") from None


def _known(name: str | None, names: Collection[str]) -> str | None:
    if name is not None and name not in names:
        raise ValueError(f"must be one of {', '.join(sorted(names))}")
    return name
