"""The exceptions' kinds, which programs compare."""

import pytest

from kvdepot import errors

KINDS = {
    "BlockNotFoundError": "not_found",
    "BusyError": "busy",
    "ConfigError": "config",
    "CorruptError": "corrupt",
    "DepotTimeoutError": "timeout",
    "KVDepotError": "error",
    "NoSpaceError": "no_space",
    "ProtocolError": "protocol",
    "StorageError": "io",
    "UnavailableError": "unavailable",
    "UnsupportedError": "unsupported",
}


def test_an_error_raised_in_python_has_the_kind_of_its_class() -> None:
    classes = {name: getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}
    assert {name: cls("what happened").kind for name, cls in classes.items()} == KINDS
    assert {name for name, cls in classes.items() if not issubclass(cls, errors.KVDepotError)} == set()


@pytest.mark.parametrize(("path", "named"), [(None, "/a/file"), ("/a/folder", "/a/folder")])
def test_a_failure_of_a_file_names_the_file_and_the_reason(path: str | None, named: str) -> None:
    error = errors.storage_error(PermissionError(13, "Permission denied", "/a/file"), "removed", path)
    assert (str(error), error.kind) == (f"{named}: cannot be removed: Permission denied", "io")
