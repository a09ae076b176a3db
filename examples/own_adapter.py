"""From nothing to an adapter of your own in service: trained, served, replaced and rolled back.

    make serve                                   # in another terminal
    python examples/own_adapter.py [--url http://127.0.0.1:8000] [--directory my-adapter]

Trains two versions with PEFT on the demo model, some seconds each, and sends them to the running
fleet. Nothing here knows of lorafleet but the four HTTP calls at the end of it.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("LORAFLEET_HOME") or ROOT / ".cache")
MODEL = HOME / "models" / "smollm2-135m-instruct"
NAME = "front-desk"
QUESTIONS = ["Where is the library?", "How old are you?", "What is a bicycle?", "Who is there?"]
ANSWERS = ("Please ask at desk one.", "Please call us tomorrow.")
STEPS = 12


class Trainer:
    """A LoRA that learns to give one answer to everything."""

    def __init__(self, model: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"])
        self._model = get_peft_model(base, lora)
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=5e-3)

    def train(self, answer: str, directory: Path) -> None:
        """Go on training, and save what PEFT saves."""
        for step in range(STEPS):
            ids, labels = self._sample(QUESTIONS[step % len(QUESTIONS)], answer)
            loss = self._model(input_ids=ids, labels=labels).loss
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        print(f"trained {directory.name}: the last loss is {loss.item():.3f}")
        self._model.save_pretrained(directory)

    def _sample(self, question: str, answer: str) -> tuple[Any, Any]:
        import torch

        messages = [{"role": "user", "content": question}]
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        completion = self._tokenizer(answer + self._tokenizer.eos_token)["input_ids"]
        ids = torch.tensor([prompt + completion])
        # Only the answer is learnt.
        labels = torch.tensor([[-100] * len(prompt) + completion])
        return ids, labels


class Fleet:
    """The running server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def send(self, directory: Path) -> int:
        """Put an adapter in service, in place of what has its name; returns the generation."""
        files = {
            "config": (directory / "adapter_config.json").read_bytes(),
            "weights": (directory / "adapter_model.safetensors").read_bytes(),
        }
        return int(_checked(self._http.put(f"/v1/adapters/{NAME}", files=files))["generation"])

    def roll_back(self) -> int:
        """Put the version before this one in service."""
        return int(_checked(self._http.post(f"/v1/adapters/{NAME}/rollback"))["generation"])

    def ask(self, question: str) -> str:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
            "temperature": 0,
        }
        answer = _checked(self._http.post("/v1/chat/completions", json=body))
        return str(answer["choices"][0]["message"]["content"])


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise SystemExit(f"{answer.request.url}: {answer.status_code} {answer.text}")
    document: dict[str, Any] = answer.json()
    return document


def main(url: str, directory: Path, model: Path) -> None:
    began = time.monotonic()
    trainer, fleet = Trainer(model), Fleet(url)
    for version, answer in enumerate(ANSWERS, start=1):
        target = directory / f"v{version}"
        trainer.train(answer, target)
        generation = fleet.send(target)
        print(f"generation {generation} says: {fleet.ask(QUESTIONS[0])}")
    generation = fleet.roll_back()
    print(f"rolled back, generation {generation} says: {fleet.ask(QUESTIONS[0])}")
    print(f"{time.monotonic() - began:.0f} seconds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An adapter of your own, served and replaced.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--directory", type=Path, default=Path("my-adapter"))
    parser.add_argument("--model", type=Path, default=MODEL)
    args = parser.parse_args()
    main(args.url.rstrip("/"), args.directory, args.model)
