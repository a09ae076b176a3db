"""One base model with every adapter of the matrix: as PEFT computes it, and as the engine does."""

import copy
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets
from transformers import AutoConfig, AutoModelForCausalLM

from adapters import LoRARequest, adapter_digest, find_adapter_files
from engine import LLM, CacheConfig, LoRAConfig, SamplingParams
from engine.errors import AdapterError
from engine.lora.adapter import LoRAAdapter, load_adapter
from engine.lora.adapter_tokenizer import BaseTokenizer
from engine.models.paged_model import PagedModel
from tests.engine.matrix.architectures import ARCHITECTURES, Architecture
from tests.engine.matrix.features import FEATURES, INVOCATION, Feature
from tests.engine.models.paged_sequences import Sequences, load_paged, run_in_chunks
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.tiny_models import save_random_model

NUM_STEPS = 32
# Longer than a block and than any sliding window.
PROMPT = [17, 5, *INVOCATION, 64, 40, 9, 120, 7, 8, 33, 5, 77, 100, 11, *INVOCATION, 50, 13, 28]
LIMITS = LoRAConfig(max_loras=64, max_cpu_loras=80, max_lora_rank=512)

_GREEDY = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
_SAVED = "saved"
_SERVED = "served"


class Laboratory:
    """Everything that the cells of one architecture share; by default with all of its features."""

    def __init__(self, name: str, root: Path, features: Collection[str] = FEATURES.keys()) -> None:
        self.architecture = ARCHITECTURES[name]
        self._wanted = features
        self._root = root
        self.checkpoint = root / "base"
        save_base(self.architecture, self.checkpoint)
        self.base = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)
        self.model = load_paged(self.checkpoint, lora=LIMITS)
        self.llm = LLM(
            self.checkpoint,
            dtype="float32",
            num_threads=1,
            lora=LIMITS,
            cache=CacheConfig(num_blocks=512, enable_prefix_caching=False),
        )
        self.refusals: dict[str, str] = {}
        self.served: list[str] = []
        for feature_name, feature in self.features.items():
            self._make(feature_name, feature)
        self._mixed: dict[str | None, list[int]] | None = None

    @property
    def features(self) -> dict[str, Feature]:
        """The features that this architecture has."""
        return {
            name: feature
            for name, feature in FEATURES.items()
            if name in self._wanted
            and feature.lacks(self.architecture) is None
            and (feature.with_rope or not self.architecture.rope_only)
        }

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.architecture.settings

    def request(self, feature: str | None) -> LoRARequest | None:
        """The adapter as the engine is asked for it."""
        if feature is None:
            return None
        return LoRARequest(lora_name=feature, lora_path=str(self._path(feature) / _SERVED))

    def saved(self, feature: str) -> Path:
        """What PEFT saved, which PEFT can read."""
        return self._path(feature) / _SAVED

    def forget(self, feature: str) -> None:
        """Let the engine read the adapter anew when it is asked for again."""
        assert self.llm.engine.adapters is not None
        files = find_adapter_files(self._path(feature) / _SERVED)
        self.llm.engine.adapters.remove(adapter_digest(files))

    def alone(self, feature: str) -> list[int]:
        """Greedy tokens after the prompt, with nothing else in the batch."""
        (result,) = self.llm.generate([PROMPT], _GREEDY, lora=[self.request(feature)])
        return result.completions[0].token_ids

    def mixed(self, feature: str | None) -> list[int]:
        """Greedy tokens after the prompt, in one batch with all adapters and the base model."""
        if self._mixed is None:
            names = [None, *self.served]
            requests = [self.request(name) for name in names]
            results = self.llm.generate([PROMPT] * len(names), _GREEDY, lora=requests)
            tokens = [result.completions[0].token_ids for result in results]
            self._mixed = dict(zip(names, tokens, strict=True))
        return self._mixed[feature]

    def prompt_logprobs(self, feature: str, tokens: list[int]) -> tuple[list[float], list[float]]:
        """The engine's log probabilities of a prompt's tokens, and those that PEFT gives."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (result,) = self.llm.generate([tokens], params, lora=[self.request(feature)])
        assert result.prompt_logprobs is not None
        found = [item.chosen.logprob for item in result.prompt_logprobs if item is not None]
        truth = self.truth(feature, tokens).log_softmax(-1)[:-1]
        return found, truth.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def logits(self, feature: str, tokens: list[int]) -> list[torch.Tensor]:
        """The engine's logits of every token: of the base, the adapter and two neighbours."""
        place = self.served.index(feature)
        neighbours = [self.served[(place + step) % len(self.served)] for step in (1, 2)]
        for slot, name in enumerate([feature, *neighbours]):
            request = self.request(name)
            assert request is not None
            self.model.write_slot(slot, load(self.model, request))
        return run_mixed(self.model, tokens, slots={1: 1, 2: 0, 3: 2})

    @torch.inference_mode()
    def truth(self, feature: str | None, tokens: list[int]) -> torch.Tensor:
        """PEFT's logits [tokens, vocab]; the base model's own for None."""
        options = {}
        with quiet():
            model = copy.deepcopy(self.base)
            if feature is not None:
                model = PeftModel.from_pretrained(model, str(self.saved(feature)))
                if model.peft_config["default"].alora_invocation_tokens:
                    # As PEFT's generate does: the prompt's invocation counts, not generated ones.
                    prompt = torch.tensor([PROMPT])
                    (offset,) = calculate_alora_offsets(model.peft_config, "default", prompt)
                    options["alora_offsets"] = [offset + len(tokens) - len(PROMPT)]
            output = model.eval()(input_ids=torch.tensor([tokens]), **options)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _make(self, name: str, feature: Feature) -> None:
        path = self._path(name)
        train(copy.deepcopy(self.base), feature, self.architecture, path / _SAVED, seed=len(name))
        if feature.store is not None:
            feature.store(path / _SAVED)
        shutil.copytree(path / _SAVED, path / _SERVED)
        if feature.edit is not None:
            feature.edit(path / _SERVED)
        request = self.request(name)
        assert request is not None
        tokenizer = self.llm.engine.tokenizer.backend_tokenizer
        try:
            load(self.model, request, BaseTokenizer(tokenizer, self.checkpoint))
        except AdapterError as error:
            self.refusals[name] = str(error)
        else:
            self.served.append(name)

    def _path(self, feature: str) -> Path:
        return self._root / feature.replace(" ", "-")


def save_base(architecture: Architecture, path: Path) -> None:
    config = AutoConfig.for_model(architecture.model_type, **architecture.settings)
    save_random_model(path, config, torch.float32)
    save_tiny_tokenizer(path, vocab_size=131)


def train(
    base: torch.nn.Module, feature: Feature, architecture: Architecture, path: Path, *, seed: int
) -> None:
    """Let PEFT save an adapter of which everything that can be trained has moved."""
    config = {"r": 5, "lora_alpha": 9, "task_type": "CAUSAL_LM", **feature.config(architecture)}
    torch.manual_seed(seed)
    with quiet():
        model = get_peft_model(base, LoraConfig(**config))
        conversion = {}
        if feature.converted:
            conversion["path_initial_model_for_weight_conversion"] = str(path.parent / "initial")
            model.peft_config["default"].init_lora_weights = True
            model.save_pretrained(conversion["path_initial_model_for_weight_conversion"])
            model.peft_config["default"].init_lora_weights = config["init_lora_weights"]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn_like(parameter) * _spread(parameter)
        model.save_pretrained(str(path), **conversion)


def _spread(parameter: torch.Tensor) -> float:
    return 0.2 if parameter.dim() > 1 else 0.3


def load(
    model: PagedModel, request: LoRARequest, tokenizer: BaseTokenizer | None = None
) -> LoRAAdapter:
    return load_adapter(
        request,
        model.targets,
        LIMITS,
        model.spec.dtype,
        base_weight=model.base_weight,
        tokenizer=tokenizer,
    )


def run_mixed(
    model: PagedModel, tokens: list[int], slots: dict[int, int] | None
) -> list[torch.Tensor]:
    """Logits of four copies of one sequence, prefilled in chunks, then decoded."""
    sequences = Sequences([len(tokens)] * 4, model.spec.vocab_size)
    sequences.tokens = [torch.tensor(tokens)] * 4
    return run_in_chunks(model, sequences, [len(tokens) - 8] * 4, 16, slots)


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns about tied weights and about what it saves; neither matters here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
