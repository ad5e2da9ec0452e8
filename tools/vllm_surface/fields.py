"""The fields of vLLM's configuration, and the variables of its environment.

Each either changes the bytes of a block, and is a fact, or does not.
"""

import ast

from tools.vllm_surface.sources import Release

ROOT_CONFIG = "vllm.config.vllm"
ROOT_NAME = "VllmConfig"
VARIABLES = "environment_variables"

Fields = dict[str, list[str]]


def fields_of(release: Release) -> Fields:
    """Returns the fields of ``VllmConfig``, and of each configuration class that it may hold, at any depth."""
    found: Fields = {}
    waiting = [(ROOT_CONFIG, ROOT_NAME)]
    while waiting:
        module_name, name = waiting.pop()
        module = release.module(module_name)
        node = module.definitions.get(name) if module is not None else None
        if not isinstance(node, ast.ClassDef) or name in found or not module_name.startswith("vllm.config."):
            continue
        fields = [
            one
            for one in node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and not ast.unparse(one.annotation).startswith("ClassVar")
        ]
        if not fields:
            continue
        found[name] = sorted(ast.unparse(one.target) for one in fields)
        nodes = (inner for one in fields for inner in ast.walk(_parsed(one.annotation)))
        used = {inner.id for inner in nodes if isinstance(inner, ast.Name)}
        used |= {ast.unparse(base) for base in node.bases}
        for one in sorted(used):
            place = release.find(module_name, one)
            if place is not None and release.is_own(place[0]):
                waiting.append(place)
    return found


def variables_of(release: Release) -> list[str]:
    """Returns the variables that ``vllm.envs`` reads, sorted; none for a release that lists them otherwise."""
    module = release.module("vllm.envs")
    node = module.definitions.get(VARIABLES) if module is not None else None
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    keys = value.keys if isinstance(value, ast.Dict) else []
    return sorted(str(key.value) for key in keys if isinstance(key, ast.Constant))


def _parsed(annotation: ast.expr) -> ast.AST:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value)
    return annotation
