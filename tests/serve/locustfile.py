"""What Locust does to the demo server: each user streams chats from adapters and the base model.

It runs in a process of its own: Locust replaces the sockets of whatever imports it.
"""

import json
import random

from locust import HttpUser, constant, task

MODELS = ("smollm2-135m-instruct", "sql", "pirate", "haiku")


class Chatter(HttpUser):
    """One request after another."""

    wait_time = constant(0)

    @task(3)
    def stream_a_chat(self) -> None:
        body = {
            "model": random.choice(MODELS),
            "messages": [{"role": "user", "content": "Say something short."}],
            "max_tokens": 8,
            "stream": True,
        }
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="chat"
        ) as response:
            lines = [line.decode() for line in response.iter_lines() if line]
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            if lines[-1:] != ["data: [DONE]"] or any("error" in event for event in events):
                response.failure(f"not a whole stream: {lines[-2:]}")

    @task
    def list_models(self) -> None:
        self.client.get("/v1/models", name="models")
