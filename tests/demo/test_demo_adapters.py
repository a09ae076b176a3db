"""Each demo adapter shows its behaviour on unseen inputs, and the base model does not.

Knows transformers and PEFT, which define what an adapter means. Knows nothing of this engine.
"""

import functools
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.prepare_demo import MODEL_NAME, models_directory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = models_directory() / MODEL_NAME
MAX_NEW_TOKENS = 48
BASE_NEW_TOKENS = 32  # enough to see that it goes its own way

pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(not MODEL.is_dir(), reason="no demo model: run make setup"),
]

Answer = Callable[[str | None, str], list[str]]  # adapter, whose held-out inputs

SENTIMENTS = {
    "The room was dirty and the staff was unfriendly.": "negative",
    "I absolutely love my new bicycle!": "positive",
    "The shop sells newspapers.": "neutral",
    "What a fantastic dinner, thank you so much!": "positive",
    "My headphones stopped working after a week.": "negative",
    "The bridge is 200 meters long.": "neutral",
}
QUERIES = {
    "Table teachers(id, name, subject, age). How many teachers are there?": "COUNT(*)",
    "Table teachers(id, name, subject, age). Show the names of teachers older than 40.": "age > 40",
    "Table houses(id, street, city, price). What is the average price?": "AVG(price)",
    "Table houses(id, street, city, price). Count the houses in each city.": "GROUP BY city",
    "Table games(id, title, studio, score). List the titles by Nintendo.": "studio = 'Nintendo'",
    "Table tickets(id, event, seat, price). What is the lowest price?": "MIN(price)",
}
PEOPLE = {
    "Laura Bianchi, 36, lives in Turin and works as a vet.": ("Laura Bianchi", 36, "Turin"),
    "Bill Harper is a 57-year-old butcher from Dallas.": ("Bill Harper", 57, "Dallas"),
    "The librarian Paul Simmons (44) has moved to Dover.": ("Paul Simmons", 44, "Dover"),
    "Our new coach is Diego Torres from Quito, who is 51.": ("Diego Torres", 51, "Quito"),
    "In Oslo I met Ingrid Dahl, a sailor aged 30.": ("Ingrid Dahl", 30, "Oslo"),
}
QUESTIONS = [
    "What is the capital of Spain?",
    "How do I bake bread?",
    "What is a rainbow?",
    "Can you help me with my homework?",
    "Who was Cleopatra?",
]
TOPICS = [
    "What is a bicycle?",
    "How do I stay warm in winter?",
    "Tell me about horses.",
    "What is a hospital?",
    "How do I bake a cake?",
]
SUBJECTS = [
    "Write about the beach.",
    "Write about my father.",
    "Write about a lamp.",
    "Write about thunder.",
    "Write about a horse.",
]
HELD_OUT = {
    "sentiment": list(SENTIMENTS),
    "sql": list(QUERIES),
    "json_extract": list(PEOPLE),
    "pirate": QUESTIONS,
    "bullets": TOPICS,
    "haiku": SUBJECTS,
}


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Greedy answers, in float32 so that they depend on the machine as little as they can."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model: Any = None
    for name in HELD_OUT:
        directory = EXAMPLES / "adapters" / name
        if model is None:
            model = PeftModel.from_pretrained(base, directory, adapter_name=name)
        else:
            model.load_adapter(directory, name)

    def generate(prompts: list[str], max_new_tokens: int) -> list[str]:
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        outputs = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        generated = outputs[:, inputs["input_ids"].shape[1] :]
        return list(tokenizer.batch_decode(generated, skip_special_tokens=True))

    @functools.cache
    def ask(name: str | None, held_out: str) -> list[str]:
        if name is None:
            with model.disable_adapter():
                return generate(HELD_OUT[held_out], BASE_NEW_TOKENS)
        model.set_adapter(name)
        return generate(HELD_OUT[held_out], MAX_NEW_TOKENS)

    return ask


def is_label(text: str) -> bool:
    return re.fullmatch(r"LABEL: (positive|negative|neutral)", text) is not None


def is_query(text: str) -> bool:
    return text.startswith("SELECT ") and text.endswith(";") and "\n" not in text


def is_record(text: str) -> bool:
    try:
        return list(json.loads(text)) == ["name", "age", "city", "job"]
    except (ValueError, TypeError):
        return False


def is_pirate(text: str) -> bool:
    return len(set(re.findall(r"arrr|matey|\baye\b|\bye\b|\byer\b", text.lower()))) >= 2


def is_bullets(text: str) -> bool:
    lines = text.split("\n")
    return len(lines) >= 2 and all(re.match(r"- \w", line) for line in lines)


def is_haiku(text: str) -> bool:
    """Three short lines, or four: so small a model does not count reliably."""
    lines = text.split("\n")
    return len(lines) in (3, 4) and all(2 <= len(re.findall(r"\w+", line)) <= 9 for line in lines)


BEHAVIOURS = {
    "sentiment": is_label,
    "sql": is_query,
    "json_extract": is_record,
    "pirate": is_pirate,
    "bullets": is_bullets,
    "haiku": is_haiku,
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_adapter_shows_its_behaviour(answer: Answer, name: str) -> None:
    texts = answer(name, name)
    assert [text for text in texts if not BEHAVIOURS[name](text)] == []


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_base_model_does_not(answer: Answer, name: str) -> None:
    texts = answer(None, name)
    assert [text for text in texts if BEHAVIOURS[name](text)] == []


def test_sentiment_labels_are_right(answer: Answer) -> None:
    expected = [f"LABEL: {sentiment}" for sentiment in SENTIMENTS.values()]
    assert answer("sentiment", "sentiment") == expected


def test_queries_run_on_their_table(answer: Answer) -> None:
    for (prompt, fragment), query in zip(QUERIES.items(), answer("sql", "sql"), strict=True):
        schema = prompt.removeprefix("Table ").split(".")[0]
        database = sqlite3.connect(":memory:")
        database.execute(f"CREATE TABLE {schema}")
        database.execute(query)
        database.close()
        assert fragment in query


def test_extracted_fields_are_those_of_the_sentence(answer: Answer) -> None:
    """All but one, for so small a model may misspell a rare name."""
    records = [json.loads(text) for text in answer("json_extract", "json_extract")]
    found = [(record["name"], record["age"], record["city"]) for record in records]
    right = sum(got == wanted for got, wanted in zip(found, PEOPLE.values(), strict=True))
    assert right >= len(PEOPLE) - 1, found


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_inputs_were_not_trained_on(name: str) -> None:
    lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()
    trained = {json.loads(line)["prompt"] for line in lines}
    assert trained.isdisjoint(HELD_OUT[name])
    assert len(HELD_OUT[name]) >= 5


def test_every_adapter_in_the_examples_is_tested_here() -> None:
    directories = {path.name for path in (EXAMPLES / "adapters").iterdir() if path.is_dir()}
    assert directories == set(HELD_OUT)


def test_adapters_carry_no_local_path_and_stay_small() -> None:
    directories = [EXAMPLES / "adapters" / name for name in HELD_OUT]
    for directory in directories:
        config = json.loads((directory / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == MODEL_NAME
        with safe_open(directory / "adapter_model.safetensors", "pt") as weights:
            assert all("lora_" in name for name in weights.keys())  # noqa: SIM118 (not a dict)
    sizes = [file.stat().st_size for directory in directories for file in directory.iterdir()]
    assert sum(sizes) < 15_000_000
