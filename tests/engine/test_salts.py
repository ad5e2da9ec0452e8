"""Tenants that share an engine and a depot (P8): ``cache_salt`` keeps their blocks apart."""

from engine_lab import Lab
from test_vllm import LONG, RESET, SHORT, generate

PROMPTS = [LONG, SHORT]
HITS = [576, 320]


def test_a_request_never_hits_what_another_salt_stored(lab: Lab) -> None:
    """Neither in the engine that stored it nor after a restart; each salt, and no salt, finds its own blocks."""
    salts = {"no salt": {}, "first": {"cache_salt": "tenant-1"}, "second": {"cache_salt": "tenant-2"}}
    cold = [step for name, salt in salts.items() for step in (RESET, {**generate(f"{name} cold", PROMPTS), **salt})]
    warm = [step for name, salt in salts.items() for step in (RESET, {**generate(f"{name} warm", PROMPTS), **salt})]
    stranger = {**generate("stranger", PROMPTS), "cache_salt": "tenant-3"}
    first = lab.run("llama", [*cold, *warm])
    second = lab.run("llama", [stranger, *warm])
    tokens = first["no salt cold"]["tokens"]
    for run in (first, second):
        for name, result in run.results.items():
            if name != "metrics":
                assert result["tokens"] == tokens, name
                assert result["cached"] == (HITS if name.endswith("warm") else [0, 0]), name
