"""What a check found."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        state: ``ok``; ``warn``: it works, but slower or with a risk; ``fail``: kvdepot cannot work so.
        found: what is there.
        why: why it matters.
        mend: what to do; empty with ``ok``.
    """

    check: str
    state: State
    found: str
    why: str
    mend: str = ""


def worst(findings: list[Finding]) -> State:
    """The worst state of all; ``ok`` without any."""
    states = {finding.state for finding in findings}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"
