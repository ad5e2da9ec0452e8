"""Starts InfiniStore's own server; run by the interpreter of .venv-infinistore, with the server's own options.

Its start needs CAP_SYS_RESOURCE, to protect itself from the out-of-memory killer; containers lack that.
"""

from infinistore import server


def protect_nothing() -> None:
    """Replaces the server's call that needs the capability."""


if __name__ == "__main__":
    server.prevent_oom = protect_nothing
    server.main()
