//! The most recent warnings and errors of this process, for the status page.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde_json::Value;

/// Number of lines kept, and size limit of a line.
const LINES_MAX: usize = 50;
const LINE_BYTES_MAX: usize = 4096;

static RECENT: Recent = Recent::new();

/// A bounded list, newest last.
struct Recent(Mutex<VecDeque<Value>>);

impl Recent {
    const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Keeps a line formatted as JSON. Lines that are too long are left out.
    fn keep(&self, line: &str) {
        if line.len() > LINE_BYTES_MAX {
            return;
        }
        let Ok(value) = serde_json::from_str(line) else { return };
        let mut lines = self.0.lock();
        if lines.len() == LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(value);
    }

    fn list(&self) -> Value {
        self.0.lock().iter().cloned().collect::<Vec<_>>().into()
    }
}

/// Keeps a warning or an error.
pub(super) fn keep(line: &str) {
    RECENT.keep(line);
}

/// Returns the kept lines, oldest first: objects as with `log_format: json`.
pub(crate) fn list() -> Value {
    RECENT.list()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_lines_are_kept_and_long_ones_are_not() {
        let recent = Recent::new();
        for number in 0..LINES_MAX + 3 {
            recent.keep(&format!("{{\"message\":\"{number}\"}}"));
        }
        recent.keep(&format!("{{\"message\":\"{}\"}}", "x".repeat(LINE_BYTES_MAX)));
        recent.keep("no JSON");
        let list = recent.list();
        let lines = list.as_array().expect("a list");
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines[0]["message"], "3");
        assert_eq!(lines[LINES_MAX - 1]["message"], (LINES_MAX + 2).to_string());
    }
}
