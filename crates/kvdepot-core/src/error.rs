//! The workspace's one error type: its kind, what happened, where, with which value, and why.

use std::fmt;
use std::sync::Arc;

/// Result of every fallible call of the workspace.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of a failure, for callers to act on. Engines see every kind but `Config` and `Protocol` as a miss (P2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A configuration value or a call's argument is wrong; nothing was done.
    Config,
    /// The operating system refused or failed an operation.
    Io,
    /// A cap, a disk or the pool has no space left.
    NoSpace,
    /// Bytes do not match their checksum, or a header does not parse (P1).
    Corrupt,
    /// There is no such block.
    NotFound,
    /// A deadline passed (P2).
    Timeout,
    /// A bounded queue is full (P7).
    Busy,
    /// A peer sent something that does not follow the protocol.
    Protocol,
    /// The other side speaks another version.
    Version,
    /// The operation is not permitted.
    Permission,
    /// The depot or a tier is lost or disabled.
    Unavailable,
    /// This build or machine does not support the request.
    Unsupported,
    /// The other side closed, or this side is shutting down.
    Closed,
}

impl ErrorKind {
    /// Stable lower-case name: a metric's label and a frame's field.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Io => "io",
            Self::NoSpace => "no_space",
            Self::Corrupt => "corrupt",
            Self::NotFound => "not_found",
            Self::Timeout => "timeout",
            Self::Busy => "busy",
            Self::Protocol => "protocol",
            Self::Version => "version",
            Self::Permission => "permission",
            Self::Unavailable => "unavailable",
            Self::Unsupported => "unsupported",
            Self::Closed => "closed",
        }
    }

    /// Returns the kind with the name that `as_str` returns, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        const ALL: [ErrorKind; 13] = [
            ErrorKind::Config,
            ErrorKind::Io,
            ErrorKind::NoSpace,
            ErrorKind::Corrupt,
            ErrorKind::NotFound,
            ErrorKind::Timeout,
            ErrorKind::Busy,
            ErrorKind::Protocol,
            ErrorKind::Version,
            ErrorKind::Permission,
            ErrorKind::Unavailable,
            ErrorKind::Unsupported,
            ErrorKind::Closed,
        ];
        ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure with the values that it happened with. Cheap to clone, because many waiters share one failure.
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Makes an error. `message` is a sentence that says what happened and, if possible, what to do.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), context: Vec::new(), source: None }
    }

    /// Wraps an operating system error. `NoSpace` and `Permission` are distinguished from other `Io` errors.
    pub fn io(message: impl Into<String>, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
                ErrorKind::Permission
            }
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => ErrorKind::Timeout,
            _ => ErrorKind::Io,
        };
        Self::new(kind, message).with_source(source)
    }

    /// Adds a value of the failure's context: `("path", …)`, `("offset_bytes", …)`.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((name, value.to_string()));
        self
    }

    /// Adds the underlying error.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Returns the kind.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the sentence without context and source.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        for (i, (name, value)) in self.context.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " [" } else { ", " })?;
        }
        if !self.context.is_empty() {
            f.write_str("]")?;
        }
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_says_what_with_which_value_and_why() {
        let e = Error::io("cannot open the block file", std::io::Error::from_raw_os_error(28))
            .with("path", "/a/b")
            .with("offset_bytes", 4096);
        assert_eq!(e.kind(), ErrorKind::NoSpace);
        let text = e.to_string();
        assert!(text.starts_with("cannot open the block file [path=/a/b, offset_bytes=4096]: "), "{text}");
    }

    #[test]
    fn kinds_survive_their_names() {
        for kind in [ErrorKind::Config, ErrorKind::NoSpace, ErrorKind::Corrupt, ErrorKind::Closed] {
            assert_eq!(ErrorKind::from_name(kind.as_str()), Some(kind));
        }
        assert_eq!(ErrorKind::from_name("nothing"), None);
    }
}
