"""A value that a document or the environment says for one of our keys."""

from dataclasses import dataclass

from kvdepot.config.document import KeyPath


@dataclass(frozen=True)
class Said:
    """One key's value as written.

    Attributes:
        field: the key in our own spelling.
        value: the value, unchecked.
        path: where it was written, in the document's spelling.
        variable: the variable of the environment that says it; empty = the document does.
    """

    field: str
    value: object
    path: KeyPath
    variable: str = ""
