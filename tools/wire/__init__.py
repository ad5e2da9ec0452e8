"""Counterparts of the wire door: servers under test, InfiniStore's own client in a separate process, raw frames."""
