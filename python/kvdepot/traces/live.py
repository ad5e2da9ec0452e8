"""What an engine notes about its requests while it runs.

``Recorder`` writes them into the files of a trace. ``Meter`` counts the hits that depots of several sizes would give.
Both work on threads of their own, and never wait for a disk.
"""

from kvdepot._native import Meter, Recorder

__all__ = ["Meter", "Recorder"]
