"""A real ``vllm serve --otlp-traces-endpoint``: its collector gets kvdepot's spans, in the trace of the client."""

import itertools
import json
import os
import signal
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_lab import Lab
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_serve import ANSWER_TOKENS, CLEAN_S, EXIT_S, HIT_TOKENS, PROMPT_TOKENS, depot_home

from tools.demo.__main__ import wait_until_healthy
from tools.demo.client import Client
from tools.demo.server import BLOCK_TOKENS, MODEL_NAME, Server
from tools.lab.depot import DepotHome, depot_stats, wait_until_clean
from tools.lab.models import prompt
from tools.lab.ports import LOOPBACK

ARRIVE_S = 60.0
OTHER_TOKENS = 64
CALLER = "b7ad6b7169203331"
COLD, WARM, RESTARTED = "1" * 32, "2" * 32, "3" * 32
"""Traces of the requests: the last one is sent after the depot was killed, so its blocks come from disk."""


class Collector:
    """An OTLP collector that keeps every span: name, trace, parent and attributes."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.endpoint = f"http://{LOOPBACK}:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        found = [
            {
                "name": span.name,
                "scope": scope.scope.name,
                "trace": span.trace_id.hex(),
                "id": span.span_id.hex(),
                "parent": span.parent_span_id.hex(),
                **{one.key: one.value.int_value or one.value.string_value for one in span.attributes},
            }
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.spans += found
            self._changed.notify_all()

    def wait_for(self, trace: str, names: set[str]) -> dict[str, dict[str, Any]]:
        """Returns the spans of a trace by name, once there is one of each of these names."""

        def found() -> dict[str, dict[str, Any]]:
            return {span["name"]: span for span in self.spans if span["trace"] == trace}

        with self._changed:
            arrived = self._changed.wait_for(lambda: names <= found().keys(), ARRIVE_S)
            assert arrived, f"{names - found().keys()} missing, found {found()}"
            return found()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def complete(port: int, trace: str) -> None:
    body = {"model": MODEL_NAME, "prompt": prompt(1, PROMPT_TOKENS), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace}-{CALLER}-01"}
    request = urllib.request.Request(f"http://{LOOPBACK}:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=EXIT_S) as answer:
        assert answer.status == 200


def restart_depot(home: DepotHome, client: Client) -> None:
    """Kills the depot, and sends other prompts until the engine has attached to the next one with both sides."""
    killed = depot_stats(home.socket)
    assert killed is not None
    os.kill(killed["pid"], signal.SIGKILL)
    until_s = time.monotonic() + ARRIVE_S
    for seed in itertools.count(2):
        client.complete(prompt(seed, OTHER_TOKENS), 1)
        stats = depot_stats(home.socket)
        # The worker has dumped to it, and the scheduler has asked it.
        if stats and stats["pid"] != killed["pid"] and stats["pool_blocks"] and stats["lookup_blocks"]:
            return
        assert time.monotonic() < until_s, "the engine does not come back to a depot"


def test_a_request_is_traced_from_its_client_to_each_rank(real_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    collector = Collector()
    try:
        with depot_home(real_lab.root / "home") as home:
            values = yaml.safe_load(home.config.read_text())
            home.configure({**values, "pipeline": "Cache|Posix", "directories": [str(home.blocks)]})
            model, log = Path(real_lab.model("llama")), real_lab.root / "vllm.log"
            more = {"otlp-traces-endpoint": collector.endpoint}
            with Server(model, home.config, "float32", PROMPT_TOKENS + ANSWER_TOKENS, log, more) as server:
                client = Client(server.port)
                wait_until_healthy(server, client)
                complete(server.port, COLD)
                wait_until_clean(home.socket, CLEAN_S)
                complete(server.port, WARM)  # its steps notice that the dump has ended
                cold = collector.wait_for(COLD, {"llm_request", "kvdepot.lookup", "kvdepot.depot.find", "kvdepot.dump"})
                names = {"llm_request", "kvdepot.lookup", "kvdepot.depot.find", "kvdepot.load", "kvdepot.copy"}
                warm = collector.wait_for(WARM, names)
                wait_until_clean(home.socket, CLEAN_S)
                restart_depot(home, client)
                complete(server.port, RESTARTED)
                restarted = collector.wait_for(RESTARTED, names | {"kvdepot.depot.fetch", "kvdepot.tier.read"})
                os.kill(server.pid, signal.SIGTERM)
                server.wait_for_end(EXIT_S)
    finally:
        collector.close()
    assert (cold["kvdepot.lookup"]["kvdepot.miss_reason"], cold["kvdepot.dump"]["parent"]) == ("unknown", CALLER)
    lookup, load, copy = (warm[f"kvdepot.{name}"] for name in ("lookup", "load", "copy"))
    assert lookup["kvdepot.hit_tokens"] == load["kvdepot.load_tokens"] == HIT_TOKENS
    assert (lookup["parent"], load["parent"], copy["parent"]) == (CALLER, CALLER, load["id"])
    assert warm["llm_request"]["parent"] == CALLER
    assert not {"kvdepot.depot.fetch", "kvdepot.tier.read"} & warm.keys(), "the pool had it"
    for spans in (cold, warm, restarted):
        assert spans["kvdepot.depot.find"]["parent"] == spans["kvdepot.lookup"]["id"]
    assert lookup["kvdepot.request.id"] == copy["kvdepot.request.id"]
    assert lookup["scope"] == copy["scope"] == "kvdepot"
    lookup, fetch, read = (restarted[f"kvdepot.{name}"] for name in ("lookup", "depot.fetch", "tier.read"))
    assert lookup["kvdepot.hit_tokens"] == lookup["kvdepot.tier_tokens"] == HIT_TOKENS
    assert (fetch["parent"], read["parent"]) == (lookup["id"], fetch["id"])
    blocks = HIT_TOKENS // BLOCK_TOKENS
    assert (fetch["kvdepot.blocks"], read["kvdepot.blocks"], read["kvdepot.tier"]) == (blocks, blocks, "posix")
