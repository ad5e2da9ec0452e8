"""A client of vLLM's OpenAI server: streamed answers with the time to their first token, and the server's counters."""

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo.server import MODEL_NAME
from tools.lab.metrics import counter
from tools.lab.ports import LOOPBACK

REQUEST_S = 300.0
ASK_S = 60.0
COUNTER_POLLS = 300
COUNTER_POLL_S = 0.1
HITS = "vllm:external_prefix_cache_hits_total"
QUERIES = "vllm:external_prefix_cache_queries_total"


class RequestError(Exception):
    """The server refused a request, or ended an answer early."""


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of a prompt."""

    ttft_s: float
    tokens: tuple[int, ...]


class Client:
    """Client of the server at a port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Sends a prompt and reads the answer token by token."""
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        started_s = time.perf_counter()
        first_s: float | None = None
        tokens: list[int] = []
        for event in self._stream("/v1/completions", body):
            if "error" in event:
                raise RequestError(str(event["error"]))
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                if new and first_s is None:
                    first_s = time.perf_counter()
                tokens += new
        if first_s is None or len(tokens) != max_tokens:
            raise RequestError(f"the answer has {len(tokens)} tokens instead of {max_tokens}")
        return Answer(first_s - started_s, tuple(tokens))

    def counters(self, queried_tokens: int = 0) -> dict[str, int]:
        """Returns counters of vLLM: tokens that were looked up in the connector and found there.

        The server publishes them after an answer; waits a little until ``queried_tokens`` have been counted.
        """
        found: dict[str, int] = {}
        for _ in range(COUNTER_POLLS):
            found = {name: self.counter(name) for name in (HITS, QUERIES)}
            if found[QUERIES] >= queried_tokens:
                break
            time.sleep(COUNTER_POLL_S)
        return found

    def counter(self, name: str) -> int:
        """Returns a counter of the server, summed over its labels."""
        return counter(self._get("/metrics"), name)

    def healthy(self) -> bool:
        """Returns whether the server answers yet."""
        try:
            self._get("/health")
        except (OSError, http.client.HTTPException, RequestError):
            return False
        return True

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=ASK_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != http.client.OK:
                raise RequestError(f"GET {path}: {response.status}")
            return text
        finally:
            connection.close()

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=REQUEST_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RequestError(f"POST {path}: {response.status} {response.read().decode(errors='replace')}")
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)
        finally:
            connection.close()
