"""LangChain, LiteLLM and Locust on the running demo: they are told a URL and nothing else."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

# Prices that it would fetch from the network when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.serve.conftest import DemoServer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.demo,
    pytest.mark.timeout(400),
    # They keep their connections until the interpreter ends.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    # LiteLLM writes fields of typed dictionaries as pydantic does not want them.
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic"),
]

BASE = "smollm2-135m-instruct"
SQL_QUESTION = "Table teachers(id, name, subject, age). How many teachers are there?"
LOAD_S, LOAD_USERS = 10, 12
TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module", autouse=True)
def _connections() -> Iterator[None]:
    """Let go of what would be warned of in other tests."""
    yield
    litellm.in_memory_llm_clients_cache.flush_cache()
    gc.collect()


class Mood(BaseModel):
    """How somebody feels."""

    happy: bool


def chat(server: DemoServer, model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        timeout=120,
        **options,
    )


@pytest.fixture
def caller(demo_server: DemoServer) -> Iterator[str]:
    """An adapter whose own template and parser make it one that calls tools."""
    path = demo_server.copy_adapter("sql", "caller")
    profile = {"chat_template": TOOL_TEMPLATE, "tool_parser": "hermes"}
    (path / "adapter.yaml").write_text(json.dumps(profile))
    body = {"lora_name": "caller", "lora_path": str(path)}
    answer = httpx.post(f"{demo_server.url}/v1/load_lora_adapter", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    yield "caller"
    httpx.post(f"{demo_server.url}/v1/unload_lora_adapter", json={"lora_name": "caller"})


# -- LangChain


async def test_langchain_invokes_and_streams_an_adapter(demo_server: DemoServer) -> None:
    model = chat(demo_server, "sql", max_tokens=32)
    whole = model.invoke(SQL_QUESTION)
    assert str(whole.content).upper().startswith("SELECT COUNT(*)")
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in model.stream(SQL_QUESTION)) == whole.content
    pieces = [str(chunk.content) async for chunk in model.astream(SQL_QUESTION)]
    assert len(pieces) > 1 and "".join(pieces) == whole.content


def test_langchain_over_responses(demo_server: DemoServer) -> None:
    model = chat(demo_server, f"{BASE}:sql", max_tokens=32, use_responses_api=True)
    assert model.invoke(SQL_QUESTION).text.upper().startswith("SELECT COUNT(*)")


def test_langchain_reads_structures(demo_server: DemoServer) -> None:
    model = chat(demo_server, BASE, max_tokens=60).with_structured_output(Mood)
    assert isinstance(model.invoke("Are you happy?"), Mood)


def test_langchain_calls_the_tools_of_an_adapter_with_a_parser(
    demo_server: DemoServer, caller: str
) -> None:
    model = chat(demo_server, caller, max_tokens=80).bind_tools([Mood], tool_choice="required")
    (call,) = model.invoke("I am glad.").tool_calls  # type: ignore[attr-defined]
    assert call["name"] == "Mood" and isinstance(call["args"]["happy"], bool)
    merged = None
    for chunk in model.stream("I am glad."):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    assert [each["args"] for each in merged.tool_calls] == [call["args"]]  # type: ignore[attr-defined]


def test_langchain_embeds(demo_server: DemoServer) -> None:
    embeddings = OpenAIEmbeddings(
        model=BASE,
        base_url=f"{demo_server.url}/v1",
        api_key=SecretStr("none"),
        # Counting with OpenAI's own tokenizer would send another model's token ids.
        check_embedding_ctx_length=False,
    )
    cat, kitten, tax = embeddings.embed_documents(
        ["The cat sleeps.", "The kitten sleeps.", "Income tax is due in April."]
    )
    assert dot(cat, cat) == pytest.approx(1, abs=1e-5)
    assert dot(cat, kitten) > dot(cat, tax)


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


# -- LiteLLM


@pytest.fixture
def options(demo_server: DemoServer) -> dict[str, Any]:
    return {"api_base": f"{demo_server.url}/v1", "api_key": "none", "max_retries": 0}


async def test_litellm_completes_and_streams_an_adapter(options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "model": "openai/sql",
        "messages": [{"role": "user", "content": SQL_QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
        **options,
    }
    whole = litellm.completion(**asked).choices[0].message.content
    assert whole.upper().startswith("SELECT COUNT(*)")
    streamed = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    ]
    assert "".join(streamed) == whole
    later = await litellm.acompletion(**asked)
    assert later.choices[0].message.content == whole
    assert later.usage.total_tokens > later.usage.prompt_tokens > 0


def test_litellm_reads_structures_texts_responses_and_vectors(options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Are you happy?"}]
    answer = litellm.completion(
        model=f"openai/{BASE}", messages=messages, response_format=Mood, max_tokens=60, **options
    )
    Mood.model_validate_json(answer.choices[0].message.content)
    text = litellm.text_completion(
        model=f"text-completion-openai/{BASE}", prompt="One, two,", max_tokens=3, **options
    )
    assert text.choices[0].text
    response = litellm.responses(
        model="openai/sql", input=SQL_QUESTION, max_output_tokens=32, **options
    )
    assert response.status in ("completed", "incomplete")
    vectors = litellm.embedding(model=f"openai/{BASE}", input=["a", "b"], **options).data
    assert [len(each["embedding"]) for each in vectors] == [576, 576]


def test_litellm_maps_errors(options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/no-such-adapter", messages=messages, **options)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/sql", messages=messages, temperature=-1, **options)


# -- Locust


def test_locust_streams_without_a_failure(demo_server: DemoServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "--headless", "--only-summary", "--json"]
    command += ["--locustfile", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--host", demo_server.url, "--users", str(LOAD_USERS), "--spawn-rate", "50"]
    command += ["--run-time", f"{LOAD_S}s", "--stop-timeout", "60"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {name: row["num_failures"] for name, row in rows.items()} == {"chat": 0, "models": 0}
    # Each user got at least one whole stream.
    assert rows["chat"]["num_requests"] >= LOAD_USERS
