"""Malformed and awkward traffic, one function per fault; each checks whether the server kept its invariants.

A fault gets its own server, which holds ``WITNESSES``. Whatever the fault does, the server must stay alive and answer,
and the witnesses must keep their bytes. The fault itself checks everything else, by raising ``BrokenError``.
"""

from tools.wire.faults.harness import WITNESSES, BrokenError, Fault, Outcome, all_faults, run

__all__ = ["WITNESSES", "BrokenError", "Fault", "Outcome", "all_faults", "run"]
