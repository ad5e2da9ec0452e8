"""What a check found."""

import threading
from collections.abc import Iterable
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


def bounded(findings: Iterable[Finding], what: str, seconds: float) -> list[Finding]:
    """All findings, or those that came in time and one that says that the rest did not: a dead mount hangs for ever.

    Args:
        findings: are asked for on a thread of their own, which is left behind when it hangs.
        what: what is checked.
        seconds: how long to wait for all of them.
    """
    come: list[Finding] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            come.extend(findings)
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    found = list(come)
    if thread.is_alive():
        why = "a depot's reads and writes there would hang until their deadline, and count as misses"
        mend = "look at the mounts and the kernel's log: the server of a network file system may be away"
        found.append(Finding(what, "fail", f"no answer within {seconds:g} s", why, mend))
    if failures:
        raise failures[0]
    return found
