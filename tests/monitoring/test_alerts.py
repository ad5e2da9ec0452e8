"""The alert rules, by Prometheus's own tool: they are valid, and each one fires and stays silent as it should."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.monitoring.programs import promtool
from tools.monitoring.prometheus import DEPLOYED, RULES

CASES = Path(__file__).with_name("alerts.yaml")
RUN_S = 100
ALERTS = [rule["alert"] for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([promtool(), *arguments], capture_output=True, text=True, timeout=RUN_S)


def test_the_rules_are_valid() -> None:
    ran = run("check", "rules", RULES)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_deployed_configuration_is_valid(tmp_path: Path) -> None:
    """With the rules where the container has them."""
    whole = yaml.safe_load(DEPLOYED.read_text("utf-8"))
    assert whole["rule_files"] == ["/etc/prometheus/alerts.yaml"]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump({**whole, "rule_files": [str(RULES)]}))
    ran = run("check", "config", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alerts_fire_when_they_should_and_only_then() -> None:
    ran = run("test", "rules", CASES)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    for case in yaml.safe_load(CASES.read_text("utf-8"))["tests"]:
        for one in case["alert_rule_test"]:
            asked[bool(one.get("exp_alerts"))].add(one["alertname"])
    assert asked == {True: set(ALERTS), False: set(ALERTS)}


@pytest.mark.parametrize("alert", ALERTS)
def test_the_cases_notice_a_rule_that_never_fires(alert: str, tmp_path: Path) -> None:
    whole: dict[str, Any] = yaml.safe_load(RULES.read_text("utf-8"))
    for rule in whole["groups"][0]["rules"]:
        if rule["alert"] == alert:
            rule["expr"] = f"({rule['expr']}) and on () vector(1) == 0"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(whole))
    cases = yaml.safe_load(CASES.read_text("utf-8")) | {"rule_files": ["rules.yaml"]}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    ran = run("test", "rules", tmp_path / "cases.yaml")
    assert ran.returncode != 0
    assert alert in ran.stdout + ran.stderr
