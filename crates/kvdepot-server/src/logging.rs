//! Log lines of the core: to standard error or a file, level by word. Never through Python's interpreter.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Mutex;

use kvdepot_core::{Error, ErrorKind, Result};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

struct UnixMillis;

impl FormatTime for UnixMillis {
    fn format_time(&self, w: &mut Writer<'_>) -> std::fmt::Result {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        write!(w, "[{}.{:03}] [kvdepot] [{}]", now.as_secs(), now.subsec_millis(), std::process::id())
    }
}

/// Sets where log lines go and from which level on (`error`, `warn`, `info`, `debug`, `trace`). Only the first call of a
/// process counts; false for the others.
pub fn init(level: &str, path: Option<&Path>) -> Result<bool> {
    const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
    let level = level.to_ascii_lowercase();
    let level = if level == "warning" { "warn" } else { level.as_str() };
    if !LEVELS.contains(&level) {
        return Err(Error::new(ErrorKind::Config, "a log level is one of error, warn, info, debug, trace")
            .with("level", level));
    }
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_timer(UnixMillis)
        .with_ansi(false)
        .with_target(false);
    let set = match path {
        None => builder.with_writer(std::io::stderr).try_init(),
        Some(path) => {
            let file = OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map_err(|e| Error::io("cannot open the log file", e).with("path", path.display()))?;
            builder.with_writer(Mutex::new(file)).try_init()
        }
    };
    Ok(set.is_ok())
}
