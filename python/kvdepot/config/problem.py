"""What is wrong with a configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong: at which key, and what to do. The value is the key's."""

    key: str
    text: str
