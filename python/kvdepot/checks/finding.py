"""Results of checks."""

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
        state: ``ok``; ``warn``: it works, but slower or with a risk; ``fail``: kvdepot cannot work like this.
        found: what was found.
        why: why it matters.
        mend: what to do; empty with ``ok``.
    """

    check: str
    state: State
    found: str
    why: str
    mend: str = ""


def worst(findings: list[Finding]) -> State:
    """Returns the worst state of all findings; ``ok`` if there are none."""
    states = {finding.state for finding in findings}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def bounded(findings: Iterable[Finding], what: str, seconds: float) -> list[Finding]:
    """Returns all findings; on timeout those so far and one that reports it: access to a dead mount hangs forever.

    Args:
        findings: evaluated on a separate thread, which is left behind if it hangs.
        what: what is checked.
        seconds: time limit for all of them.
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
        mend = "check mounts, name servers and the kernel's log: the server of a network file system may be unreachable"
        found.append(Finding(what, "fail", f"no answer within {seconds:g} s", why, mend))
    if failures:
        raise failures[0]
    return found
