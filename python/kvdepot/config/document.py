"""A YAML document that remembers the line of every key and rejects duplicate keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kvdepot.errors import ConfigError

FILE_BYTES_MAX = 1 << 20

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A mapping, and where it was written.

    Attributes:
        name: path of the file, or ``configuration`` for a dict.
        root: the mapping itself.
        lines: 1-based line of every key, by path from the root; empty for a dict.
    """

    name: str
    root: Mapping[str, object]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Returns the ``file:line`` of a key, as editors understand it; ``argument`` for a dict."""
        line = self.lines.get(path)
        return f"{self.name}:{line}" if line else "argument"

    def at(self, path: KeyPath) -> str:
        """Returns the beginning of an error message: ``file:line: key path``."""
        line = self.lines.get(path)
        return f"{self.name}{f':{line}' if line else ''}: {path_text(path)}"


def path_text(path: KeyPath) -> str:
    """Formats ``("a", 0, "b")`` as ``a[0].b``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def read_document(file: Path) -> Document:
    """Reads and parses a YAML file.

    Raises:
        ConfigError: the file cannot be read, is larger than 1 MiB, is not YAML, is empty, has a duplicate key or is not
            a mapping.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the configuration: {error.strerror or error}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: has {len(raw)} bytes, a configuration at most {FILE_BYTES_MAX}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    return parse_document(text, str(file))


def parse_document(text: str, name: str) -> Document:
    """Parses YAML text; ``name`` is the document's name in errors. Raises the same errors as ``read_document``."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{name}: is empty: write at least one key, or give no file to run on defaults")
        lines: dict[KeyPath, int] = {}
        _note_lines(node, (), lines, set(), name)
        root = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: is not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if type(error).__module__.startswith("kvdepot"):
            raise
        raise ConfigError(f"{name}: is not valid YAML: {str(error) or type(error).__name__}") from error
    if not isinstance(root, dict):
        raise ConfigError(f"{name}: must be a mapping of keys to values, but is a {type(root).__name__}")
    return Document(name, root, lines)


def _note_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], seen: set[int], name: str) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines.setdefault((*path, index), item.start_mark.line + 1)
            _note_lines(item, (*path, index), lines, seen, name)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                raise ConfigError(f"{name}:{line}: {path_text(path) or 'the file'}: keys must be plain names")
            key_path = (*path, key_node.value)
            if key_path in lines:
                raise ConfigError(
                    f"{name}:{line}: {path_text(key_path)}: is written twice, "
                    f"first in line {lines[key_path]}: remove one"
                )
            lines[key_path] = line
            _note_lines(value_node, key_path, lines, seen, name)
