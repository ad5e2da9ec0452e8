"""What the connector uses of vLLM, collected from its syntax trees."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "python" / "kvdepot" / "engines"
PROBES = ("getattr", "hasattr")


@dataclass
class Used:
    """Names that the connector uses.

    Attributes:
        imports: names by module of vLLM.
        mentioned: every attribute and every name of a probe, of whatever object; an upper bound of what is used.
        probes: names that ``getattr`` and ``hasattr`` look for, with the places in the source.
        alone: classes of which nothing but these members is used, whatever else is mentioned.
    """

    imports: dict[str, set[str]] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    probes: dict[str, list[str]] = field(default_factory=dict)
    alone: dict[str, set[str]] = field(default_factory=dict)


def used_by_connector() -> Used:
    """Returns what the connector, its plugin and the tier use, with what they reach through stack frames."""
    found = used_names(ENGINES / "vllm", ENGINES / "vllm_plugin.py", ENGINES / "offloading")
    imported_classes = {f"{module}.{name}" for module, names in found.imports.items() for name in names}
    for entry in listed("BY_HAND"):
        module, _, path = entry.partition(":")
        owner, _, member = path.partition(".")
        found.imports.setdefault(module, set()).add(owner)
        found.mentioned.add(member)
        if f"{module}.{owner}" not in imported_classes:
            found.alone.setdefault(f"{module}.{owner}", set()).add(member)
    return found


def listed(name: str) -> tuple[str, ...]:
    """Returns a tuple of ``releases/refusal.py``, which cannot be imported without a vLLM."""
    tree = ast.parse((ENGINES / "vllm" / "releases" / "refusal.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            found: tuple[str, ...] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"releases/refusal.py has no {name}")


def used_names(*sources: Path, package: str = "vllm") -> Used:
    """Returns what Python files use of a package: ``sources`` are files, or folders of files."""
    found = Used()
    for path in sorted(file for source in sources for file in ([source] if source.is_file() else source.rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for module, name in imported(tree, package):
            found.imports.setdefault(module, set()).add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found.mentioned.add(node.attr)
            elif isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("__")):
                found.mentioned.add(node.name)
            elif isinstance(node, ast.keyword) and node.arg:
                found.mentioned.add(node.arg)
            elif isinstance(node, ast.Call) and (name := probed(node)):
                found.mentioned.add(name)
                found.probes.setdefault(name, []).append(f"{path.name}:{node.lineno}")
    return found


def imported(tree: ast.AST, package: str = "vllm") -> Iterator[tuple[str, str]]:
    """Yields each import from a package as module and name; the name is empty for ``import vllm``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and _is_of(node.module, package):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if _is_of(alias.name, package))


def probed(call: ast.Call) -> str:
    """Returns the literal name that a ``getattr`` or ``hasattr`` looks for; empty for other calls."""
    if not (isinstance(call.func, ast.Name) and call.func.id in PROBES and len(call.args) >= 2):
        return ""
    name = call.args[1]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
