//! Formats log lines as text or JSON.

use std::fmt::{self, Write};

use kvdepot_depot::task_line;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The format of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// `2026-01-31T23:59:59.123456Z [kvdepot][I] … [PID,TID]`
    #[default]
    Text,
    /// One object per line: `time`, `level`, `message`, `fields`, `pid`, `tid`.
    Json,
}

/// The content of a line.
#[derive(Debug)]
pub(super) struct Line {
    level: Level,
    is_of_seeds: bool,
    message: String,
    fields: Vec<(&'static str, String)>,
    left_out: u64,
}

impl Line {
    /// Makes the line of an event, before which `left_out` of its kind were not written.
    pub(super) fn of(event: &Event<'_>, left_out: u64) -> Self {
        let facts = event.metadata();
        let mut line = Self {
            level: *facts.level(),
            is_of_seeds: facts.target() == task_line::TARGET,
            message: String::new(),
            fields: Vec::new(),
            left_out,
        };
        event.record(&mut line);
        line
    }

    /// Returns the complete line with its line break.
    pub(super) fn text(&self, form: Form) -> String {
        let mut time = String::new();
        // Formatting a time into a string cannot fail.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        let (pid, tid) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero());
        match form {
            Form::Text => format!("{time} {} [{pid},{tid}]\n", OneLine(&self.said())),
            Form::Json => {
                let message = if self.is_of_seeds { self.said() } else { self.message.clone() };
                let mut object = serde_json::json!({
                    "time": time, "level": word(self.level), "message": message, "pid": pid, "tid": tid.get(),
                });
                if !self.fields.is_empty() {
                    let fields =
                        self.fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into()));
                    object["fields"] = serde_json::Value::Object(fields.collect());
                }
                if self.left_out > 0 {
                    object["left_out"] = self.left_out.into();
                }
                format!("{object}\n")
            }
        }
    }

    /// Returns the text between time and thread.
    fn said(&self) -> String {
        let from = if self.is_of_seeds { "UC" } else { "kvdepot" };
        let mut said = format!("[{from}][{}] {}", letter(self.level), self.message);
        for (name, value) in &self.fields {
            let _ = write!(said, " {name}={value}");
        }
        if self.left_out > 0 {
            let _ = write!(said, " ({} lines like this were left out before)", self.left_out);
        }
        said
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.fields.push((field.name(), format!("{value:?}")));
        }
    }
}

/// Text with escaped control characters: text from a peer stays on one line.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in self.0.chars() {
            if part.is_control() { write!(f, "{}", part.escape_debug())? } else { f.write_char(part)? }
        }
        Ok(())
    }
}

const fn letter(level: Level) -> char {
    match level {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        Level::INFO => 'I',
        Level::DEBUG => 'D',
        Level::TRACE => 'T',
    }
}

const fn word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}
