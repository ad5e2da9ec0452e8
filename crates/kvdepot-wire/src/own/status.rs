//! How one block fared, in a byte; and error kinds as numbers that stay.

use kvdepot_core::{Error, ErrorKind, Result};

/// Kinds in the order of their numbers, which begin at 16. Only ever appended to.
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

/// How one block of a batch fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Sent, or stored.
    Ok,
    /// The depot had it already, or somebody else is storing it.
    Had,
    /// Not sent or not stored.
    Failed(ErrorKind),
}

impl Status {
    /// Its byte.
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Had => 1,
            Self::Failed(kind) => kind_code(kind),
        }
    }

    /// The status of a byte.
    pub fn from_code(code: u8) -> Result<Self> {
        Ok(match code {
            0 => Self::Ok,
            1 => Self::Had,
            _ => Self::Failed(kind_of(code)?),
        })
    }
}

/// An error kind's number; a kind that came after this version of the protocol travels as `Io`.
pub(super) fn kind_code(kind: ErrorKind) -> u8 {
    let index = KINDS.iter().position(|&known| known == kind).unwrap_or(1);
    FIRST_KIND + index as u8
}

/// The error kind of a number.
pub(super) fn kind_of(code: u8) -> Result<ErrorKind> {
    let kind = code.checked_sub(FIRST_KIND).and_then(|index| KINDS.get(usize::from(index)));
    kind.copied().ok_or_else(|| Error::new(ErrorKind::Protocol, "a status is not known").with("status", code))
}
