"""A hit that SGLang has taken from the linker cannot become a miss: what happens if its depot dies or hangs (P1, P4).

SGLang aborts the requests of that batch. All others go on, none gets wrong tokens, and the server serves.
"""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import cores_of_ranks
from test_engine import TOKENS, until
from test_server import PAGE, WHOLE, started, stored

from tools.lab.depot import DepotHome
from tools.sglang.engine_child import prompts
from tools.sglang.faulty_linker import TRAP
from tools.sglang.server import Server

PROMPTS = prompts(7, 8, TOKENS)
CLIENTS = 3
ANSWERS = 4
SMALL = ["--max-total-tokens", "5120"]
"""Less than the clients' prompts together, so that each comes from the depot again."""


class Client:
    """Asks a server for the same prompts, over and over, until it is stopped."""

    def __init__(self, server: Server, first: int) -> None:
        self._server = server
        self._stopped = threading.Event()
        self.seen: list[tuple[int, int, dict[str, Any]]] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(first,))
        self._thread.start()

    def _run(self, number: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        try:
            while not self._stopped.is_set():
                asked = {"input_ids": PROMPTS[number % len(PROMPTS)], "sampling_params": sampling}
                status, text = self._server.call("POST", "/generate", asked)
                self.seen.append((number % len(PROMPTS), status, json.loads(text)))
                number += 1
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def from_depot(answer: dict[str, Any]) -> int:
    found: int = (answer["meta_info"].get("cached_tokens_details") or {}).get("host", 0)
    return found


def go_on(clients: list[Client], *, hits: bool) -> None:
    """Waits until every client has more answers, or, with ``hits``, more that came from the depot."""
    before = [len(client.seen) for client in clients]

    def new(client: Client, seen: int) -> int:
        answers = [answer for _, status, answer in client.seen[seen:] if status == 200]
        return sum(1 for answer in answers if not hits or from_depot(answer))

    def all_have_more() -> bool:
        failed = [client.error for client in clients if client.error is not None]
        assert not failed
        return all(new(client, seen) >= ANSWERS for client, seen in zip(clients, before, strict=True))

    until(all_have_more, "every client has more answers")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("SIGKILL", 1),
        pytest.param("SIGSTOP", 1, marks=pytest.mark.full),
        pytest.param("SIGKILL", 2, marks=pytest.mark.full),
    ],
)
def test_a_depot_that_fails_after_a_hit_was_taken_fails_that_batch_alone(
    tmp_path: Path, home: DepotHome, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    trap = tmp_path / "trap"
    monkeypatch.setenv(TRAP, str(trap))
    for variable, value in cores_of_ranks(ranks).items():
        monkeypatch.setenv(variable, value)
    with home.start() as depot:
        server, _ = started(tmp_path, home, "FaultyLinker", [*SMALL, "--tp-size", str(ranks)])
        with server:
            cold = [server.ask(prompt)["output_ids"] for prompt in PROMPTS]
            stored(depot, ranks * len(PROMPTS) * WHOLE // PAGE)
            depot.wait_until_clean(60)
            clients = [Client(server, number * 2) for number in range(CLIENTS)]
            try:
                go_on(clients, hits=True)
                armed = tmp_path / "armed"
                armed.write_text(f"{name} {depot.pid}")
                armed.rename(trap)
                until(lambda: not trap.exists(), "the depot fails between a lookup and its copy")
                go_on(clients, hits=False)
                if name == "SIGSTOP":
                    os.kill(depot.pid, signal.SIGCONT)
                    go_on(clients, hits=True)
                else:
                    with home.start():
                        go_on(clients, hits=True)
            finally:
                for client in clients:
                    client.stop()
            server.check()
    seen = [one for client in clients for one in client.seen]
    aborted = [answer for _, status, answer in seen if status != 200]
    print(json.dumps({"answers": len(seen), "aborted": aborted}))
    assert {status for _, status, _ in seen} <= {200, 503}
    assert 1 <= len(aborted) <= CLIENTS
    assert all(answer["output_ids"] == cold[number] for number, status, answer in seen if status == 200)
