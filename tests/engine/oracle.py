"""What PEFT and transformers generate: the truth that the engine is held to."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

# Two logits closer than this are a tie: float32 sums of this size differ by as much.
TIE = 2e-5


def train_like_adapter(base: Path, path: Path, *, seed: int, **config: object) -> None:
    """Let PEFT save an adapter with random weights large enough to change what is generated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        torch.manual_seed(seed)
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.2)
        peft.save_pretrained(str(path))


class PeftOracle:
    """One base model in float32 with all adapters loaded by PEFT, used one at a time."""

    def __init__(self, base: Path, adapters: Mapping[str, Path]) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        names = list(adapters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = PeftModel.from_pretrained(
                model, str(adapters[names[0]]), adapter_name=names[0]
            )
            for name in names[1:]:
                self._model.load_adapter(str(adapters[name]), adapter_name=name)
        self._model.eval()
        self.num_ties = 0
        self._known: dict[tuple[str | None, tuple[int, ...], int], list[int]] = {}

    @torch.inference_mode()
    def generate(self, adapter: str | None, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens after one prompt, alone in its batch; ends with the EOS if there is one.

        Ends before a choice that is a tie in float32: there any order of summation is right.
        """
        key = (adapter, tuple(prompt), num_tokens)
        if key not in self._known:
            with self._active(adapter):
                output = self._model.generate(
                    input_ids=torch.tensor([list(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    repetition_penalty=1.0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            token_ids = output.sequences[0, len(prompt) :].tolist()
            best = torch.cat(output.logits).topk(2).values
            ties = ((best[:, 0] - best[:, 1]) < TIE).nonzero().flatten().tolist()
            self._known[key] = token_ids[: ties[0]] if ties else token_ids
            self.num_ties += bool(ties)
        return self._known[key]

    @torch.inference_mode()
    def logprobs(self, adapter: str | None, token_ids: Sequence[int]) -> torch.Tensor:
        """Log probabilities [len(token_ids), vocab] after each token."""
        with self._active(adapter):
            logits = self._model(input_ids=torch.tensor([list(token_ids)])).logits[0]
        return logits.float().log_softmax(-1)

    @torch.inference_mode()
    def hidden_states(self, adapter: str | None, token_ids: Sequence[int]) -> torch.Tensor:
        """Final hidden states [len(token_ids), hidden], as the output head gets them."""
        with self._active(adapter):
            output = self._model(
                input_ids=torch.tensor([list(token_ids)]), output_hidden_states=True
            )
        return output.hidden_states[-1][0]

    def _active(self, adapter: str | None):  # type: ignore[no-untyped-def]
        if adapter is None:
            return self._model.disable_adapter()
        self._model.set_adapter(adapter)
        return nullcontext()
