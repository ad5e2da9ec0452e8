"""Reads a configuration from a file, a dict or the defaults, in either spelling."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvdepot.config import core
from kvdepot.config.document import Document, read_document
from kvdepot.config.keys import suggestion
from kvdepot.config.machine import Machine
from kvdepot.config.model import KVDepotConfig
from kvdepot.config.pipeline import normal_pipeline, split_pipeline
from kvdepot.config.problem import Problem
from kvdepot.config.said import Said
from kvdepot.config.seeds import SeedReader
from kvdepot.config.tier_keys import names_of
from kvdepot.config.tier_table import TIERS
from kvdepot.config.variables import from_environment
from kvdepot.errors import ConfigError

ConfigSource = str | os.PathLike[str] | Mapping[str, object] | KVDepotConfig | None


def load_config(
    source: ConfigSource = None, *, machine: Machine | None = None, owns_pool: bool = True
) -> KVDepotConfig:
    """Reads a configuration and checks all of it.

    Args:
        source: path of a YAML file, a dict like such a file, a configuration (returned as it is), or ``None`` for
            defaults sized to the machine. Files and dicts may be in our own spelling (``docs/configuration.md``) or
            in the seeds' (``ucm_connectors``). Environment variables (``KVDEPOT_POOL_GB``) override a file's keys
            and defaults, but not the keys of a dict, which the program itself sets. With a dict that has a
            pipeline, variables of tiers that are not in it are ignored.
        machine: machine that sizes are checked against; this machine when left out.
        owns_pool: whether the pool will be of this machine's memory. False for a process that attaches to a depot:
            it checks the pool's size only if it may start that depot itself (``start_depot``).

    Returns:
        The configuration; ``origins`` has the file and line of each key that was set.

    Raises:
        ConfigError: every mistake found, one per line, each with file, line, key, value and what to do.
    """
    machine = machine or Machine.here()
    if isinstance(source, KVDepotConfig):
        config, document = source, Document("configuration", {})
        said: list[Said] = []
    else:
        document = _document(source)
        said, found = _read(document)
        said = _with_environment(said, machine, before_document=not isinstance(source, Mapping))
        config = _validate(document, said, found)
    # Lite mode only simulates a pool.
    has_pool = (owns_pool or config.start_depot) and not config.use_lite
    problem = core.memory_problem(config, machine) if has_pool else None
    if problem:
        raise ConfigError(_problem_text(document, said, problem))
    return config


def _with_environment(said: Sequence[Said], machine: Machine, *, before_document: bool) -> list[Said]:
    variables = from_environment(KVDepotConfig.key_table(), machine.environ)
    if not before_document:
        pipeline = next((one.value for one in said if one.field == "pipeline"), None)
        unused = _keys_of_other_tiers(pipeline) if isinstance(pipeline, str) else set()
        variables = [one for one in variables if one.field not in unused]
    first, then = (variables, said) if before_document else (said, variables)
    fields = {one.field for one in first}
    return [*first, *(one for one in then if one.field not in fields)]


def _keys_of_other_tiers(pipeline: str) -> set[str]:
    used = split_pipeline(normal_pipeline(pipeline))[1]
    return {name for tier in TIERS if tier.name not in used for name in names_of(tier)}


def _document(source: str | os.PathLike[str] | Mapping[str, object] | None) -> Document:
    if source is None or isinstance(source, Mapping):
        return Document("configuration", source or {})
    return read_document(Path(source))


def _read(document: Document) -> tuple[list[Said], list[str]]:
    """Returns the values of known keys, and the problems of the others."""
    if "ucm_connectors" in document.root:
        reader = SeedReader(document, KVDepotConfig.key_table())
        reader.read()
        if reader.problems:
            raise ConfigError("\n".join(reader.problems))
        said, problems = reader.said, []
    else:
        known = {key.name for key in KVDepotConfig.key_table()}
        said = [Said(name, value, (name,)) for name, value in document.root.items() if name in known]
        problems = [_unknown_text(document, name) for name in document.root if name not in known]
    return said, problems


def _unknown_text(document: Document, name: str) -> str:
    keys = KVDepotConfig.key_table()
    for key in keys:
        if name in key.facts.seeds:
            return f"{document.at((name,))}: unknown key: outside of ucm_connector_config it is spelled {key.name}"
    known = [*(key.name for key in keys), "ucm_connectors"]
    said = suggestion(name, known, "`kvdepot config keys` lists the known ones")
    return f"{document.at((name,))}: unknown key: {said}"


def _validate(document: Document, said: Sequence[Said], found: list[str]) -> KVDepotConfig:
    problems, wrong = list(found), set[str]()
    while True:
        try:
            config = KVDepotConfig.model_validate({one.field: one.value for one in said if one.field not in wrong})
            break
        except ValidationError as error:
            errors = error.errors()
            # A rule that names a key whose value was left out would complain about its default.
            problems += [text for details in errors for text in _texts(document, said, details, wrong)]
            bad = {str(details["loc"][0]) for details in errors if details["type"] != "rules"}
            if not bad - wrong:
                raise ConfigError("\n".join(dict.fromkeys(problems))) from None
            wrong |= bad
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    origins = {one.field: _origin(document, one) for one in said}
    return config.with_origins(origins)


def _origin(document: Document, said: Said) -> str:
    return f"environment {said.variable}" if said.variable else document.where(said.path)


def _texts(document: Document, said: Sequence[Said], details: ErrorDetails, wrong: set[str]) -> list[str]:
    if details["type"] == "rules":
        problems = details["ctx"]["problems"]
        known = [one for one in problems if one.key not in wrong and not any(key in one.text for key in wrong)]
        return [_problem_text(document, said, problem) for problem in known]
    name = str(details["loc"][0])
    text = details["msg"].replace("Input should be", "must be").replace("Input should have", "must have")
    return [_problem_text(document, said, Problem(name, text))]


def _problem_text(document: Document, said: Sequence[Said], problem: Problem) -> str:
    for one in said:
        if one.field == problem.key and one.variable:
            return f"environment variable {one.variable}: {problem.text}, got {_shown(one.value)}"
        if one.field == problem.key:
            return f"{document.at(one.path)}: {problem.text}, got {_shown(one.value)}"
    return f"{document.name}: {problem.key}: {problem.text}"


def _shown(value: object) -> str:
    """Returns a value as an error shows it, without what stands before an ``@`` in a URL: it may hold a password."""
    return re.sub("://.*@", "://…@", repr(value))
