"""A value that a document says for one of our keys."""

from dataclasses import dataclass

from kvdepot.config.document import KeyPath


@dataclass(frozen=True)
class Said:
    """One key's value as written.

    Attributes:
        field: the key in our own spelling.
        value: the value, unchecked.
        path: where it was written, in the document's spelling.
    """

    field: str
    value: object
    path: KeyPath
