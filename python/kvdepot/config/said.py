"""A value that a document or the environment gives for one of our keys."""

from dataclasses import dataclass

from kvdepot.config.document import KeyPath


@dataclass(frozen=True)
class Said:
    """One key's value as written.

    Attributes:
        field: name of the key in our own spelling.
        value: the value, unchecked.
        path: where it was written, in the document's spelling.
        variable: environment variable that gives it; empty = the document gives it.
    """

    field: str
    value: object
    path: KeyPath
    variable: str = ""
