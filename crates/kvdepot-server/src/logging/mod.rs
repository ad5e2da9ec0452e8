//! Log lines of the core, to standard error or a file, as text or JSON. They never go through Python's interpreter.

mod burst;
mod file;
mod gate;
mod line;
pub(crate) mod recent;

use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::{Error, ErrorKind, Result};
use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use self::burst::Burst;
use self::file::LogFile;
use self::gate::Gate;
pub use self::line::Form;
use self::line::Line;

/// Destination, format and limits of log lines.
#[derive(Clone, Debug, Default)]
pub struct Settings<'a> {
    /// The file; `None` for standard error.
    pub path: Option<&'a Path>,
    /// Text or JSON.
    pub form: Form,
    /// Size at which the next file begins; 0 = no limit.
    pub max_bytes: u64,
    /// Number of files to keep, including the current one.
    pub max_files: u32,
    /// Number of lines of one kind within ten seconds, for warnings, errors and information; 0 = no limit.
    pub burst_lines: u32,
}

/// Like [`init_with`], as text and without limits.
pub fn init(level: &str, path: Option<&Path>) -> Result<bool> {
    init_with(level, &Settings { path, ..Settings::default() })
}

/// Sets up logging from a level on (`error`, `warn`, `info`, `debug`, `trace`). Only the first call of a process has an
/// effect; returns `false` for the others.
pub fn init_with(level: &str, settings: &Settings<'_>) -> Result<bool> {
    let level = level_filter(level)?;
    let out: Box<dyn Write + Send> = match settings.path {
        None => Box::new(io::stderr()),
        Some(path) => Box::new(LogFile::open(path, settings.max_bytes, settings.max_files)?),
    };
    let lines = Lines::new(out, settings.form, settings.burst_lines);
    Ok(tracing_subscriber::registry().with(lines).with(level).try_init().is_ok())
}

fn level_filter(level: &str) -> Result<LevelFilter> {
    Ok(match level.to_ascii_lowercase().as_str() {
        "error" => LevelFilter::ERROR,
        "warn" | "warning" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        _ => {
            return Err(Error::new(
                ErrorKind::Config,
                "a log level is one of error, warn, info, debug, trace",
            )
            .with("level", level));
        }
    })
}

/// Writes each event as a complete line. Lines that find a gate locked are lost.
struct Lines {
    form: Form,
    burst_lines: u32,
    bursts: Gate<HashMap<Identifier, Burst>>,
    out: Gate<Box<dyn Write + Send>>,
}

impl Lines {
    fn new(out: Box<dyn Write + Send>, form: Form, burst_lines: u32) -> Self {
        Self { form, burst_lines, bursts: Gate::new(HashMap::new()), out: Gate::new(out) }
    }

    /// Returns the number of lines of this kind that were left out, or `None` if this one may not be written now
    /// either.
    fn admit(&self, facts: &Metadata<'_>) -> Option<u64> {
        // Debug lines are only enabled to see all of them.
        if self.burst_lines == 0 || *facts.level() > Level::INFO {
            return Some(0);
        }
        let mut bursts = self.bursts.enter()?;
        bursts.entry(facts.callsite()).or_default().admit(Instant::now(), self.burst_lines)
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(left_out) = self.admit(event.metadata()) else { return };
        let line = Line::of(event, left_out);
        if *event.metadata().level() <= Level::WARN {
            recent::keep(&line.text(Form::Json));
        }
        let text = line.text(self.form);
        if let Some(mut out) = self.out.enter() {
            // There is no place to report that a line cannot be written.
            let _ = out.write_all(text.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Said(Arc<Mutex<Vec<u8>>>);

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn said(form: Form, burst_lines: u32, level: LevelFilter, speak: impl FnOnce()) -> Vec<String> {
        let out = Said::default();
        let lines = Lines::new(Box::new(out.clone()), form, burst_lines);
        let subscriber = tracing_subscriber::registry().with(lines).with(level);
        tracing::subscriber::with_default(subscriber, speak);
        let text = String::from_utf8(out.0.lock().clone()).expect("UTF-8");
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn only_lines_of_the_level_are_written_each_with_time_and_thread() {
        let lines = said(Form::Text, 0, LevelFilter::INFO, || {
            tracing::info!(pool = "Cache", "one");
            tracing::debug!("two");
            tracing::warn!("three");
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
        let ids = format!("[{},{}]", std::process::id(), rustix::thread::gettid().as_raw_nonzero());
        assert!(lines[0].ends_with(&format!("Z [kvdepot][I] one pool=\"Cache\" {ids}")), "{lines:?}");
        assert!(lines[1].ends_with(&format!("Z [kvdepot][W] three {ids}")), "{lines:?}");
        assert_eq!(lines[0].find('T'), Some(10), "RFC 3339: {lines:?}");
    }

    #[test]
    fn json_lines_are_objects_whatever_is_said() {
        let lines = said(Form::Json, 0, LevelFilter::DEBUG, || {
            tracing::error!(count = 3, "a \"quote\"\nand a line");
            tracing::debug!(target: kvdepot_depot::task_line::TARGET, "Cache task(1,DUMP,2,3) dispatching.");
        });
        let read = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
        let (first, second) = (read(&lines[0]), read(&lines[1]));
        assert_eq!(first["level"], "error");
        assert_eq!(first["message"], "a \"quote\"\nand a line");
        assert_eq!(first["fields"]["count"], "3");
        assert_eq!(first["pid"], std::process::id());
        assert_eq!(second["message"], "[UC][D] Cache task(1,DUMP,2,3) dispatching.");
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn a_text_line_stays_one_line() {
        let lines = said(Form::Text, 0, LevelFilter::INFO, || tracing::info!("a\nb\rc\u{1b}[31m"));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(r"a\nb\rc\u{1b}[31m"), "{lines:?}");
    }

    #[test]
    fn a_kind_of_line_that_repeats_is_left_out_and_others_are_not() {
        let lines = said(Form::Text, 2, LevelFilter::DEBUG, || {
            for _ in 0..50 {
                tracing::warn!("again");
                tracing::debug!("all of these");
            }
            tracing::warn!("another kind");
        });
        let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
        assert_eq!((count("again"), count("all of these"), count("another kind")), (2, 50, 1));
    }

    #[test]
    fn an_unknown_level_is_an_error_that_names_the_known_ones() {
        let error = level_filter("loud").expect_err("no level").to_string();
        assert!(error.contains("loud") && error.contains("trace"), "{error}");
    }
}
