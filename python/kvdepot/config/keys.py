"""Facts of a configuration key beside its type: unit, spelling in the seeds, accepted values."""

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import Field, JsonValue
from pydantic.fields import FieldInfo


def home(value: object) -> object:
    """Returns a path whose ``~`` is the user's home; other values unchanged."""
    return os.path.expanduser(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class KeyFacts:
    """Facts of a key that its type annotation cannot express.

    Attributes:
        unit: unit of the value; empty for names and switches.
        seeds: the key's names in a file with ``ucm_connectors``, first the one of ``UcmPipelineStore``.
        half_of_seed: name of the seed's key of which this key is half, rounded up; empty = none.
        by_default: description of the value that ``None`` results in; empty when the default is self-explanatory.
        only: values that this version accepts; empty when it accepts all that the type allows.
        instead: what to do if another value than ``only`` is requested.
    """

    unit: str = ""
    seeds: tuple[str, ...] = ()
    half_of_seed: str = ""
    by_default: str = ""
    only: tuple[object, ...] = ()
    instead: str = ""


@dataclass(frozen=True)
class Key:
    """One row of the table of keys."""

    name: str
    type: str
    default: object
    meaning: str
    facts: KeyFacts


def key(
    default: object,
    meaning: str,
    *,
    unit: str = "",
    seeds: Iterable[str] = (),
    half_of_seed: str = "",
    by_default: str = "",
    only: Iterable[JsonValue] = (),
    instead: str = "",
    type_text: str = "",
    **bounds: Any,
) -> Any:
    """Returns a pydantic field that carries ``KeyFacts``.

    ``type_text`` is the type in the documentation where the annotation does not express it well; ``bounds`` are
    pydantic's own (``ge``, ``le``, ``max_length`` …).
    """
    facts: dict[str, JsonValue] = {
        "unit": unit,
        "seeds": list(seeds),
        "half_of_seed": half_of_seed,
        "by_default": by_default,
        "only": list(only),
        "instead": instead,
        "type": type_text,
    }
    return Field(default, description=meaning, json_schema_extra=facts, **bounds)


def key_of_field(name: str, field: FieldInfo) -> Key:
    """Returns the table's row of a field that ``key`` made."""
    facts: Any = field.json_schema_extra
    table_row = KeyFacts(
        unit=facts["unit"],
        seeds=tuple(facts["seeds"]),
        half_of_seed=facts["half_of_seed"],
        by_default=facts["by_default"],
        only=tuple(facts["only"]),
        instead=facts["instead"],
    )
    return Key(name, facts["type"] or type_text(field), field.default, field.description or "", table_row)


def type_text(field: FieldInfo) -> str:
    """Returns the field's type as the documentation shows it, such as ``int``, ``number`` or ``a | b``."""
    text = str(field.annotation) if not isinstance(field.annotation, type) else field.annotation.__name__
    text = text.replace("typing.", "").removesuffix(" | None")
    if text.startswith("Optional["):
        text = text.removeprefix("Optional[").removesuffix("]")
    if text.startswith("Literal["):
        return (
            text.removeprefix("Literal[")
            .removesuffix("]")
            .replace("'", "")
            .replace(", ", " | ")
            .replace("True | False", "true | false")
        )
    return {"float": "number", "str": "text", "bool": "true | false", "tuple[str, ...]": "list of texts"}.get(
        text, text
    )


def suggestion(name: object, known: Iterable[str], otherwise: str) -> str:
    """Suggests the known name most similar to ``name``; returns ``otherwise`` if none is similar."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else otherwise
