"""An environment variable for every key, derived from the table of keys: ``KVDEPOT_`` and its name in capitals."""

import re
from collections.abc import Iterator, Mapping, Sequence

import yaml

from kvdepot.config.keys import Key, suggestion
from kvdepot.config.said import Said

PREFIX = "KVDEPOT_"
OTHERS = ("KVDEPOT_LOG", "KVDEPOT_TOKEN_FILE")
"""Variables that do not belong to a key."""
_TESTS = ("KVDEPOT_REQUIRE_", "KVDEPOT_SIM_", "KVDEPOT_STANDIN_", "KVDEPOT_TEST_")
# Kubernetes sets variables for each Service in every container, also for a Service named kvdepot or kvdepot-metrics.
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")
_SERVICE_NAME = re.compile(r"KVDEPOT_(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")


def variable_of(name: str) -> str:
    """Returns the name of a key's variable."""
    return PREFIX + name.upper()


def from_environment(keys: Sequence[Key], environ: Mapping[str, str]) -> list[Said]:
    """Returns the keys that the environment sets, unchecked. Empty variables are ignored."""
    found = []
    for key in keys:
        variable = variable_of(key.name)
        text = environ.get(variable, "").strip()
        if text and not _SERVICE_VALUE.match(text):
            found.append(Said(key.name, _value(key, text), (key.name,), variable))
    return found


def unknown_variables(keys: Sequence[Key], environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each variable that has our prefix but is not known."""
    known = {variable_of(key.name) for key in keys} | set(OTHERS)
    for name, value in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in known or name.startswith(_TESTS):
            continue
        if _SERVICE_VALUE.match(value) or _SERVICE_NAME.fullmatch(name):
            continue
        said = suggestion(name, known, "unset it, or name another key")
        yield f"environment variable {name} belongs to no key and is not read: {said}"


def _value(key: Key, text: str) -> object:
    """Returns the text as the value that a file would have; the key's own check finds invalid ones."""
    if key.type in ("list of paths", "list of host:port"):
        return text  # with ":" or "," between them, as in a file
    if key.type.startswith("list of "):
        return [part.strip() for part in text.split(",")]
    words = key.type.split(" | ")
    if text.lower() in ("true", "false") and text.lower() in words:
        return text.lower() == "true"
    if key.type in ("int", "number"):
        try:
            number = yaml.safe_load(text)
        except yaml.YAMLError:
            return text
        return number if isinstance(number, int | float) and not isinstance(number, bool) else text
    return text
