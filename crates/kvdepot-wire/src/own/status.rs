//! The outcome for one block, in a byte, and stable numbers of error kinds.

use kvdepot_core::{Error, ErrorKind, Result};

/// Error kinds in the order of their numbers, which begin at 16. Only ever append to it.
const KINDS: [ErrorKind; 13] = [
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
const FIRST_KIND: u8 = 16;

/// The outcome for one block of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Sent, or stored.
    Ok,
    /// The depot had it already, or another client is storing it.
    Had,
    /// Not sent or not stored.
    Failed(ErrorKind),
}

impl Status {
    /// Encodes the status.
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Had => 1,
            Self::Failed(kind) => kind_code(kind),
        }
    }

    /// Decodes a status.
    pub fn from_code(code: u8) -> Result<Self> {
        Ok(match code {
            0 => Self::Ok,
            1 => Self::Had,
            _ => Self::Failed(kind_of(code)?),
        })
    }
}

/// Returns an error kind's number. Kinds newer than this version of the protocol are sent as `Io`.
pub(super) fn kind_code(kind: ErrorKind) -> u8 {
    let index = KINDS.iter().position(|&known| known == kind).unwrap_or(1);
    FIRST_KIND + index as u8
}

/// Returns the error kind of a number.
pub(super) fn kind_of(code: u8) -> Result<ErrorKind> {
    let kind = code.checked_sub(FIRST_KIND).and_then(|index| KINDS.get(usize::from(index)));
    kind.copied().ok_or_else(|| Error::new(ErrorKind::Protocol, "a status is not known").with("status", code))
}
