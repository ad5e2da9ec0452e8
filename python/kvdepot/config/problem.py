"""A problem of a configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem: the key, and what to do about it. The offending value is the key's."""

    key: str
    text: str
