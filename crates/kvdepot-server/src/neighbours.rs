//! Other depots of this user that use directories of this one without a common limit. Each of them counts what it writes itself,
//! so that together they exceed the limit of either, and each has a pool of its own.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvdepot_core::limits::TIER_DIRECTORIES_MAX;
use kvdepot_depot::DepotConfig;
use kvdepot_io::socket::peer_process;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;

use crate::peer::ensure_own_user;

/// How long one depot may take to tell its configuration.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Sockets that are asked, at most, and files among which they are looked for.
const ASKED_MAX: usize = 64;
const FILES_MAX: usize = 10_000;
/// Bytes of an answer, at most.
const ANSWER_MAX: u64 = 1 << 20;
/// What the name of a depot's HTTP socket ends with.
const HTTP: &str = ".http";

/// The directories of a depot's Posix tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Directories {
    paths: Vec<PathBuf>,
    /// Whether all depots that use them keep one limit.
    have_one_limit: bool,
}

impl Directories {
    /// Takes them out of the tier's settings: no more than a tier can have.
    fn of(settings: &Value) -> Self {
        let paths = settings["directories"].as_array().into_iter().flatten();
        let paths = paths.filter_map(Value::as_str).take(TIER_DIRECTORIES_MAX).map(PathBuf::from).collect();
        Self { paths, have_one_limit: settings["capacity_shared"] == true }
    }

    /// Whether both keep a common limit, so that nothing is contested.
    const fn are_fair(&self, other: &Self) -> bool {
        self.have_one_limit && other.have_one_limit
    }

    /// Follows links, so that one directory has one name. Waits for ever for a file system that hangs.
    fn resolved(mut self) -> Self {
        for path in &mut self.paths {
            if let Ok(real) = path.canonicalize() {
                *path = real;
            }
        }
        self
    }

    /// Returns the directories that another depot uses, too, without a common limit.
    fn contested(&self, other: &Self) -> Vec<PathBuf> {
        let both = self.paths.iter().filter(|path| !self.are_fair(other) && other.paths.contains(path));
        both.cloned().collect()
    }
}

/// Another depot that uses directories of this one without a common limit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Neighbour {
    socket: PathBuf,
    /// Its process, if it is visible from here.
    pid: Option<i32>,
    directories: Vec<PathBuf>,
}

/// A depot that answered.
struct Answer {
    socket: PathBuf,
    pid: Option<i32>,
    directories: Directories,
}

impl Answer {
    /// Returns what is to be warned of.
    fn neighbour(&self, ours: &Directories) -> Option<Neighbour> {
        let directories = ours.contested(&self.directories);
        let is_one = !directories.is_empty();
        is_one.then(|| Neighbour { socket: self.socket.clone(), pid: self.pid, directories })
    }
}

/// Warns of such depots, in a thread of its own: a depot does not start later for it, and nothing waits for the thread. A depot
/// that starts later looks itself.
pub(crate) fn look(socket: &Path, config: &DepotConfig) {
    let ours = directories_of(config);
    if ours.paths.is_empty() {
        return;
    }
    let socket = socket.to_path_buf();
    let looking = std::thread::Builder::new().name("kvd-neighbours".to_owned()).spawn(move || {
        find(&socket, ours, ANSWER_WAIT, |neighbour| {
            tracing::warn!("{}", warning(&socket, &neighbour));
        });
    });
    if let Err(error) = looking {
        tracing::debug!("other depots are not looked for: {error}");
    }
}

fn directories_of(config: &DepotConfig) -> Directories {
    config.tiers.get("Posix").map(Directories::of).unwrap_or_default()
}

fn warning(socket: &Path, neighbour: &Neighbour) -> String {
    let pid = neighbour.pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    let directories: Vec<_> = neighbour.directories.iter().map(|path| path.display().to_string()).collect();
    format!(
        "this depot (pid {}, {}) and another one (pid {pid}, {}) both use {}: each counts only what it writes itself, so together \
         they exceed posix_capacity_gb, and each has its own pool. Give engines that shall share a pool the same configuration, \
         or set posix_capacity_shared for both, or give them different directories",
        std::process::id(),
        socket.display(),
        neighbour.socket.display(),
        directories.join(", ")
    )
}

/// Asks the depots whose sockets are beside `socket`, each for `wait` at most. Directories are compared by their names first:
/// their links are followed when all depots have been asked and those with equal names have been told of.
fn find(socket: &Path, ours: Directories, wait: Duration, mut tell: impl FnMut(Neighbour)) {
    let mut own = socket.as_os_str().to_owned();
    own.push(HTTP);
    let files = socket.parent().and_then(|directory| directory.read_dir().ok()).into_iter().flatten();
    let names = files.take(FILES_MAX).filter_map(|file| Some(file.ok()?.path().into_os_string()));
    let doors = names.filter(|name| name.to_string_lossy().ends_with(HTTP) && *name != own).take(ASKED_MAX);
    let answers = doors.filter_map(|door| {
        let (directories, pid) = ask(Path::new(&door), wait).ok()?;
        let socket = PathBuf::from(door.to_string_lossy().strip_suffix(HTTP)?);
        let is_open = !directories.paths.is_empty() && !ours.are_fair(&directories);
        is_open.then_some(Answer { socket, pid, directories })
    });
    let mut answers: Vec<Answer> = answers.collect();
    answers.retain(|answer| match answer.neighbour(&ours) {
        Some(neighbour) => {
            tell(neighbour);
            false
        }
        None => true,
    });
    if answers.is_empty() {
        return;
    }
    let ours = ours.resolved();
    for mut answer in answers {
        answer.directories = answer.directories.resolved();
        if let Some(neighbour) = answer.neighbour(&ours) {
            tell(neighbour);
        }
    }
}

/// Connects without waiting: a socket whose queue of connections is full fails at once.
fn connect(door: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(door)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Asks a depot at its HTTP socket for its directories, and the kernel for its process.
fn ask(door: &Path, wait: Duration) -> io::Result<(Directories, Option<i32>)> {
    let until = Instant::now() + wait;
    let mut stream = connect(door)?;
    ensure_own_user(stream.as_fd(), "another user's depot is not asked").map_err(io::Error::other)?;
    stream.set_write_timeout(Some(wait))?;
    stream.write_all(b"GET /config HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut piece = [0; 8192];
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            count => answer.extend_from_slice(&piece[..count]),
        }
        if answer.len() as u64 > ANSWER_MAX || Instant::now() >= until {
            break;
        }
    }
    let pid = peer_process(stream.as_fd()).map(|pid| pid.as_raw_nonzero().get());
    let body = answer.windows(4).position(|end| end == b"\r\n\r\n").map_or(&[][..], |end| &answer[end + 4..]);
    let config: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    Ok((Directories::of(&config["posix"]), pid))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvdepot_depot::Depot;
    use serde_json::json;

    use super::*;
    use crate::StatusDoor;

    /// Reached only by a hang.
    const HANG: Duration = Duration::from_secs(60);

    fn found(socket: &Path, ours: Directories, wait: Duration) -> Vec<Neighbour> {
        let mut all = Vec::new();
        find(socket, ours, wait, |neighbour| all.push(neighbour));
        all
    }

    fn directories(paths: &[&str], have_one_limit: bool) -> Directories {
        Directories { paths: paths.iter().map(PathBuf::from).collect(), have_one_limit }
    }

    #[test]
    fn only_common_directories_without_a_common_limit_are_contested() {
        let contested = |ours: &Directories, theirs: &Directories| ours.contested(theirs).len();
        let (alone, shared) = (directories(&["/a", "/b"], false), directories(&["/b", "/c"], true));
        assert_eq!(alone.contested(&shared), [Path::new("/b")]);
        assert_eq!(contested(&shared, &alone), 1, "one of them does not know of the limit");
        assert_eq!(contested(&shared, &shared.clone()), 0);
        assert_eq!(contested(&alone, &directories(&["/c"], false)), 0);
        assert_eq!(contested(&alone, &Directories::default()), 0);
    }

    #[test]
    fn a_running_depot_with_the_same_directory_is_found_by_whatever_name() {
        let place = tempfile::tempdir().expect("a directory");
        let path = |name: &str| place.path().join(name);
        for name in ["blocks", "other"] {
            std::fs::create_dir(path(name)).expect("a directory");
        }
        std::os::unix::fs::symlink(path("blocks"), path("link")).expect("a link");
        let config = |directory: &str, shared: bool| {
            let posix = json!({"directories": [path(directory)], "capacity_bytes": 1 << 26, "capacity_shared": shared});
            let config = json!({"pipeline": "Cache|Posix", "pool_bytes": 8 << 20, "posix": posix});
            DepotConfig::from_json(&config.to_string()).expect("a configuration")
        };
        let depot = Arc::new(Depot::start_private(config("blocks", false)).expect("a depot"));
        let _door = StatusDoor::open(&path("one.sock"), &depot);
        let found = |socket: &str, directory: &str, shared| {
            found(&path(socket), directories_of(&config(directory, shared)), HANG)
        };
        let neighbour = |directory| Neighbour {
            socket: path("one.sock"),
            pid: Some(std::process::id().cast_signed()),
            directories: vec![directory],
        };
        let real = path("blocks").canonicalize().expect("a path");
        for (directory, shared, told) in
            [("blocks", false, path("blocks")), ("link", false, real), ("blocks", true, path("blocks"))]
        {
            assert_eq!(found("two.sock", directory, shared), [neighbour(told)], "{directory} {shared}");
        }
        assert_eq!(found("two.sock", "other", false), []);
        assert_eq!(found("one.sock", "blocks", false), [], "its own socket");
    }

    #[test]
    fn a_warning_names_both_depots_and_what_to_do() {
        let neighbour =
            Neighbour { socket: "/run/two.sock".into(), pid: Some(7), directories: vec!["/mnt/kv".into()] };
        let text = warning(Path::new("/run/one.sock"), &neighbour);
        let own = format!("pid {}, /run/one.sock", std::process::id());
        for part in [own.as_str(), "pid 7, /run/two.sock", "/mnt/kv", "posix_capacity_shared"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn what_is_no_depot_is_no_neighbour() {
        let place = tempfile::tempdir().expect("a directory");
        std::fs::write(place.path().join("x.sock.http"), "").expect("a file");
        let _deaf =
            std::os::unix::net::UnixListener::bind(place.path().join("y.sock.http")).expect("a socket");
        // No answer comes, however long is waited.
        let wait = Duration::from_millis(20);
        assert_eq!(found(&place.path().join("own.sock"), directories(&["/a"], false), wait), []);
    }

    #[test]
    fn a_socket_with_a_full_queue_is_not_waited_for() {
        let place = tempfile::tempdir().expect("a directory");
        let door = place.path().join("x.sock.http");
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&door).expect("an address")).expect("a name");
        rustix::net::listen(&listener, 0).expect("a queue for one");
        let _waits = UnixStream::connect(&door).expect("the one");
        let (answered, answer) = std::sync::mpsc::channel();
        std::thread::spawn(move || answered.send(ask(&door, HANG).map_err(|error| error.kind())));
        assert_eq!(answer.recv_timeout(HANG), Ok(Err(io::ErrorKind::WouldBlock)));
    }

    #[test]
    fn of_an_answer_no_more_directories_are_taken_than_a_tier_can_have() {
        let paths: Vec<String> = (0..TIER_DIRECTORIES_MAX + 9).map(|n| format!("/{n}")).collect();
        assert_eq!(Directories::of(&json!({"directories": paths})).paths.len(), TIER_DIRECTORIES_MAX);
    }
}
