//! Maps Rust's error kinds to Python exceptions. Each is also a subclass of the standard exception that it resembles.

use std::ffi::CString;

use kvdepot_core::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

/// The classes, with each base before its subclasses. `kind` is that of most errors of a class; the core sets that of each.
const SOURCE: &str = r#"
class KVDepotError(Exception):
    """Base of every failure of the store; ``kind`` is its stable lower-case name."""
    kind: str = "error"
class ConfigError(KVDepotError, ValueError):
    """A value or an argument is wrong; nothing was done."""
    kind = "config"
class StorageError(KVDepotError, OSError):
    """The operating system refused or failed an operation."""
    kind = "io"
class NoSpaceError(StorageError):
    """A cap, a disk or the pool has no room."""
    kind = "no_space"
class CorruptError(StorageError):
    """Bytes do not match their checksum."""
    kind = "corrupt"
class BlockNotFoundError(KVDepotError, KeyError):
    """The block is not there."""
    kind = "not_found"
    __str__ = Exception.__str__
class DepotTimeoutError(KVDepotError, TimeoutError):
    """A deadline passed."""
    kind = "timeout"
class BusyError(KVDepotError):
    """A bounded queue is full."""
    kind = "busy"
class ProtocolError(KVDepotError):
    """The other side does not follow the protocol, or speaks another version."""
    kind = "protocol"
class UnavailableError(KVDepotError, ConnectionError):
    """No depot is attached, or a tier is switched off."""
    kind = "unavailable"
class UnsupportedError(KVDepotError):
    """This build or machine cannot do it."""
    kind = "unsupported"
"#;

const NAMES: [&str; 11] = [
    "KVDepotError",
    "ConfigError",
    "StorageError",
    "NoSpaceError",
    "CorruptError",
    "BlockNotFoundError",
    "DepotTimeoutError",
    "BusyError",
    "ProtocolError",
    "UnavailableError",
    "UnsupportedError",
];

const fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Config => "ConfigError",
        ErrorKind::Io | ErrorKind::Permission => "StorageError",
        ErrorKind::NoSpace => "NoSpaceError",
        ErrorKind::Corrupt => "CorruptError",
        ErrorKind::NotFound => "BlockNotFoundError",
        ErrorKind::Timeout => "DepotTimeoutError",
        ErrorKind::Busy => "BusyError",
        ErrorKind::Protocol | ErrorKind::Version => "ProtocolError",
        ErrorKind::Unavailable | ErrorKind::Closed => "UnavailableError",
        ErrorKind::Unsupported => "UnsupportedError",
        _ => "KVDepotError",
    }
}

fn classes(py: Python<'_>) -> PyResult<&Py<PyDict>> {
    CLASSES.get_or_try_init(py, || {
        let globals = PyDict::new(py);
        globals.set_item("__name__", "kvdepot._native")?;
        let source =
            CString::new(SOURCE).map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))?;
        py.run(&source, Some(&globals), None)?;
        Ok(globals.unbind())
    })
}

/// Adds the classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let classes = classes(module.py())?.bind(module.py());
    for name in NAMES {
        module.add(name, classes.get_item(name)?)?;
    }
    Ok(())
}

/// Returns the exception for an error, with `kind` as an attribute.
pub(crate) fn raise(error: &Error) -> PyErr {
    Python::attach(|py| {
        let make = || -> PyResult<PyErr> {
            let class = classes(py)?.bind(py).get_item(class_name(error.kind()))?;
            let class =
                class.ok_or_else(|| pyo3::exceptions::PyRuntimeError::new_err("no such exception class"))?;
            let value = class.call1((error.to_string(),))?;
            value.setattr("kind", error.kind().as_str())?;
            Ok(PyErr::from_value(value))
        };
        make().unwrap_or_else(|failure| failure)
    })
}

/// Lets `?` convert our errors to Python's.
pub(crate) trait OrRaise<T> {
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvdepot_core::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| raise(&error))
    }
}
