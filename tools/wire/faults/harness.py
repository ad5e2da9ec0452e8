"""Runs a fault against a server, and judges the result."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tools.wire.frames import FINISH, ClosedError, Raw
from tools.wire.servers import Server

KIB, MIB = 1 << 10, 1 << 20
# A server that does not answer hangs, unless its process ends in the meantime.
END_S = 2.0
MODULES = ("malformed", "interrupted", "traffic")


class BrokenError(Exception):
    """An invariant was broken."""


@dataclass(frozen=True)
class Fault:
    """An action on the server; it returns the server's answer as text."""

    name: str
    promise: str
    act: Callable[[Server], str]
    rdma: bool


@dataclass(frozen=True)
class Outcome:
    """State after a fault."""

    answer: str
    alive: bool
    answers: bool
    kept_data: bool
    broken: str | None

    @property
    def survived(self) -> bool:
        """Whether the server is alive and serves others."""
        return self.alive and self.answers

    @property
    def good(self) -> bool:
        """Whether all invariants held."""
        return self.survived and self.kept_data and self.broken is None


def witness(number: int) -> tuple[str, bytes]:
    """Returns a key and its value."""
    nbytes = [1, 100 * KIB, 64 * KIB, 3 * MIB + 5, 70_001][number % 5]
    return f"witness-{number}", random.Random(number).randbytes(nbytes)


WITNESSES = dict(witness(number) for number in range(10))
_FAULTS: list[Fault] = []


def fault(*, rdma: bool = False) -> Callable[[Callable[[Server], str]], Callable[[Server], str]]:
    """Registers a fault; the first line of its docstring says what must hold."""

    def register(act: Callable[[Server], str]) -> Callable[[Server], str]:
        promise = (act.__doc__ or "").strip().splitlines()[0]
        _FAULTS.append(Fault(act.__name__, promise, act, rdma))
        return act

    return register


def all_faults() -> list[Fault]:
    """Returns all faults, in the order of their files."""
    for module in MODULES:
        import_module(f"tools.wire.faults.{module}")
    return list(_FAULTS)


def must(holds: object, text: str) -> None:
    """Raises ``BrokenError`` unless the condition holds."""
    if not holds:
        raise BrokenError(text)


def answer_code(raw: Raw) -> str:
    """Returns the next code in words, or what came in its place."""
    try:
        return str(raw.code())
    except ClosedError:
        return "closed"
    except TimeoutError:
        return "silence"


def refused(answer: str) -> str:
    """Returns the answer if it is a refusal: an error's code, or the end of the connection."""
    must(answer not in {str(FINISH), "silence"}, f"not refused: {answer}")
    return answer


def run(fault: Fault, server: Server) -> Outcome:
    """Runs the fault on a server that has just been started."""
    with Raw(server.port) as raw:
        for key, value in WITNESSES.items():
            raw.put(key, value)
    answer, broken = "", None
    try:
        answer = fault.act(server)
    except BrokenError as error:
        broken = str(error)
    except (OSError, ClosedError, ValueError) as error:
        broken = f"{type(error).__name__}: {error}"
    answers = server.answers()
    return Outcome(
        answer, answers or not server.ends_within(END_S), answers, answers and _witnesses_are_whole(server.port), broken
    )


def _witnesses_are_whole(port: int) -> bool:
    try:
        with Raw(port) as raw:
            return all(raw.get(key) == value for key, value in WITNESSES.items())
    except (OSError, ClosedError, ValueError):
        return False
