"""The wire door's counterparts: servers under test, InfiniStore's own client in a process of its own, raw frames."""
