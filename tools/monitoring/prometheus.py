"""A real Prometheus that scrapes what a test or a tool starts, with the configuration and rules that are deployed."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port
from tools.monitoring.programs import prometheus

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DEPLOYED = ROOT / "deploy" / "docker" / "prometheus.yaml"
SCRAPE_S = 1
START_S = 60.0
ANSWER_S = 30.0


class QueryError(Exception):
    """Prometheus refused a query; the message has its reason."""


class Prometheus(Child):
    """The server; it ends with the ``with`` block."""

    def __init__(self, home: Path, ports: Mapping[str, Sequence[int]]) -> None:
        """Starts it on an empty database in ``home``.

        Args:
            home: directory for its files.
            ports: for each job of the deployed configuration, the ports of this machine to scrape in its place.
        """
        home.mkdir(parents=True)
        file = home / "prometheus.yaml"
        file.write_text(yaml.safe_dump(configuration(ports)))
        self.address = f"{LOOPBACK}:{free_port()}"
        options = {
            "config.file": file,
            "storage.tsdb.path": home / "data",
            "web.listen-address": self.address,
            "log.level": "warn",
        }
        command: list[str | Path] = [prometheus(), *(f"--{name}={value}" for name, value in options.items())]
        super().__init__("Prometheus", command, home / "log", {})
        self.wait_until_ready(self._ready, START_S)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=ANSWER_S):
                return True
        except OSError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """Returns the data of an answer of the API.

        Raises:
            QueryError: the question was wrong.
        """
        query = urllib.parse.urlencode({name.replace("match", "match[]"): one for name, one in parameters.items()})
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{query}", timeout=ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{parameters}: {error.read().decode()}") from error

    def value(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def values(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """Returns the series of a range query."""
        times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:.3f}"}
        found: list[dict[str, Any]] = self.ask("query_range", query=expression, **times)["result"]
        return found

    def alerts(self) -> dict[str, str]:
        """Returns the state of each alert that is pending or firing, by name and instance as in ``Name instance``."""
        found = self.ask("alerts")["alerts"]
        return {f"{one['labels']['alertname']} {one['labels'].get('instance', '')}": one["state"] for one in found}


def configuration(ports: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Returns the deployed configuration with this machine's ports, scraping and evaluating every second."""
    whole: dict[str, Any] = yaml.safe_load(DEPLOYED.read_text("utf-8"))
    whole["global"] = dict.fromkeys(whole["global"], f"{SCRAPE_S}s")
    whole["rule_files"] = [str(RULES)]
    for job in whole["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"{LOOPBACK}:{port}" for port in ports[job["job_name"]]]}]
    return whole
