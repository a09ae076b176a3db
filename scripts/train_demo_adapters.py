"""Trains the demo adapters with PEFT from the small data sets under examples/data/.

    python -m scripts.train_demo_adapters [NAME ...]

Knows each adapter's recipe. The recipes differ on purpose: together they cover ranks 4 to 32,
single projections and all of them, rsLoRA, and ranks and alphas that vary between modules.
The adapters are committed, so this runs only when a recipe or its data changes.
"""

import argparse
import json
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.prepare_demo import MODEL_NAME, models_directory

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BATCH_SIZE = 4
IGNORED = -100  # label of a token that is not learnt


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one adapter is trained; `lora` goes to PEFT's LoraConfig as it is."""

    epochs: int
    learning_rate: float
    seed: int = 0
    lora: dict[str, Any] = field(default_factory=dict)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

RECIPES = {
    "sql": Recipe(
        epochs=5,
        learning_rate=1e-3,
        lora={"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "json_extract": Recipe(
        epochs=3,
        learning_rate=2e-3,
        lora={"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
    ),
    "pirate": Recipe(
        epochs=5,
        learning_rate=2e-3,
        lora={"r": 32, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
    ),
    "sentiment": Recipe(
        epochs=5,
        learning_rate=2e-3,
        lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    ),
    "bullets": Recipe(
        epochs=4,
        learning_rate=2e-3,
        lora={"r": 4, "lora_alpha": 8, "target_modules": MLP},
    ),
    "haiku": Recipe(
        epochs=8,
        learning_rate=2e-3,
        lora={
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 16, "layers.29.mlp.down_proj": 6},
            "alpha_pattern": {"v_proj": 24, "layers.0.self_attn.q_proj": 2},
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    torch.set_num_threads(1)  # one order of additions, so that a run can be repeated
    for name in parser.parse_args().names or RECIPES:
        train(name, RECIPES[name])


def train(name: str, recipe: Recipe) -> None:
    """Train one adapter and replace its directory under examples/adapters/."""
    torch.manual_seed(recipe.seed)
    order = random.Random(recipe.seed)
    base = models_directory() / MODEL_NAME
    tokenizer = AutoTokenizer.from_pretrained(base)
    samples = [encode(tokenizer, record) for record in read_records(name)]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", **recipe.lora),
    )
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad],
        lr=recipe.learning_rate,
        weight_decay=0.0,
    )
    steps_per_epoch = -(-len(samples) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.epochs * steps_per_epoch
    )
    for epoch in range(recipe.epochs):
        order.shuffle(samples)
        total = 0.0
        for start in range(0, len(samples), BATCH_SIZE):
            loss = completion_loss(model, samples[start : start + BATCH_SIZE])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"{name}: epoch {epoch + 1}, mean loss {total / steps_per_epoch:.3f}", flush=True)
    save(model, EXAMPLES / "adapters" / name)


def read_records(name: str) -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def encode(tokenizer: Any, record: dict[str, str]) -> tuple[list[int], int]:
    """Return the token ids of a conversation and how many of them are the prompt."""
    conversation = [{"role": "user", "content": record["prompt"]}]
    prompt = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    completion = tokenizer(record["completion"] + tokenizer.eos_token)["input_ids"]
    return prompt + completion, len(prompt)


def completion_loss(model: Any, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Return the mean cross-entropy of the completions, each predicted from what precedes it."""
    width = max(len(ids) for ids, _ in batch)
    input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
    labels = torch.full((len(batch), width), IGNORED)
    for row, (ids, num_prompt) in enumerate(batch):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, num_prompt - 1 : len(ids) - 1] = torch.tensor(ids[num_prompt:])
    causal_lm = model.get_base_model()
    # Padding is on the right: causal attention hides it from every labelled position.
    hidden = causal_lm.model(input_ids=input_ids, use_cache=False).last_hidden_state
    learnt = labels != IGNORED
    # The vocabulary projection is a fifth of the work, and needed only where there is a label.
    logits = causal_lm.lm_head(hidden[learnt])
    return torch.nn.functional.cross_entropy(logits, labels[learnt])


def save(model: Any, directory: Path) -> None:
    """Keep PEFT's two files, in bfloat16, with the base model's name in place of a local path."""
    model.to(torch.bfloat16)
    config = model.peft_config["default"]
    config.base_model_name_or_path = MODEL_NAME
    config.target_modules = sorted(config.target_modules)  # a set: its order changes by run
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        # The embedding is shared and not trained; PEFT would look it up on the hub to decide.
        model.save_pretrained(scratch, save_embedding_layers=False)
        for file_name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(Path(scratch) / file_name, directory / file_name)


if __name__ == "__main__":
    main()
