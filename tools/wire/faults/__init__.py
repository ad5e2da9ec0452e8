"""Malformed and awkward traffic, one function a fault; each says whether the server kept what must hold.

A fault gets a server of its own that holds ``WITNESSES``. Whatever it does, the server must live and answer, and the
witnesses must keep their bytes; what else must hold is said by the fault itself, by raising ``BrokenError``.
"""

from tools.wire.faults.harness import WITNESSES, BrokenError, Fault, Outcome, all_faults, run

__all__ = ["WITNESSES", "BrokenError", "Fault", "Outcome", "all_faults", "run"]
