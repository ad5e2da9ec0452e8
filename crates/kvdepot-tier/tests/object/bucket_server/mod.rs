//! A server with the part of S3, Google Cloud Storage or Azure Blob Storage that the tier uses, or a real server of S3, and
//! with failures that a test plans.
#![allow(dead_code, unused_imports, unused_macros, clippy::unwrap_used)]
// Each test uses its part; a test that cannot go on shall panic.

mod azure;
mod http;
mod real;
mod s3;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_tier::ObjectConfig;
use kvdepot_tier::conformance::spec;
use parking_lot::{Condvar, Mutex, MutexGuard};

pub(crate) use http::{Request, Response};

/// The only bucket.
pub(crate) const BUCKET: &str = "bucket";

/// The access key that the servers of S3 know, and its secret.
const KEY_ID: &str = "test";
const SECRET: &str = "secret";

/// Storage account of the container.
const ACCOUNT: &str = "account";

/// What a server speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Dialect {
    #[default]
    S3,
    Google,
    Azure,
    /// S3, spoken by a server that others wrote (`real`).
    RealS3,
}

impl Dialect {
    /// Returns the path of the bucket.
    fn root(self) -> String {
        match self {
            Self::S3 | Self::RealS3 | Self::Google => format!("/{BUCKET}"),
            Self::Azure => format!("/{ACCOUNT}/{BUCKET}"),
        }
    }
}

thread_local! {
    static DIALECT: Cell<Dialect> = const { Cell::new(Dialect::S3) };
}

/// The dialect of the servers that this thread starts, until it is dropped.
pub(crate) struct Speaking;

impl Speaking {
    pub(crate) fn set(dialect: Dialect) -> Self {
        DIALECT.set(dialect);
        Self
    }
}

impl Drop for Speaking {
    fn drop(&mut self) {
        DIALECT.set(Dialect::S3);
    }
}

/// Runs each test with a server of each dialect, and with the real one.
macro_rules! in_every_dialect {
    ($($test:ident)*) => {
        crate::bucket_server::with_every_standin! { $($test)* }
        mod real {
            $(#[test]
            #[ignore = "needs a real S3 server: make test-s3"]
            fn $test() {
                use crate::bucket_server::{Dialect, Speaking};
                let _speaking = Speaking::set(Dialect::RealS3);
                super::$test();
            })*
        }
    };
}
pub(crate) use in_every_dialect;

/// Runs each test with a stand-in of each dialect.
macro_rules! with_every_standin {
    ($($test:ident)*) => {
        crate::bucket_server::with_every_standin! { @ s3 S3 $($test)* }
        crate::bucket_server::with_every_standin! { @ google Google $($test)* }
        crate::bucket_server::with_every_standin! { @ azure Azure $($test)* }
    };
    (@ $name:ident $dialect:ident $($test:ident)*) => {
        mod $name {
            $(#[test]
            fn $test() {
                use crate::bucket_server::{Dialect, Speaking};
                let _speaking = Speaking::set(Dialect::$dialect);
                super::$test();
            })*
        }
    };
}
pub(crate) use with_every_standin;

/// Handling of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// It is served.
    Serve,
    /// It is refused with this status, without effect.
    Refuse(u16),
    /// It is served, and the answer is never sent.
    ServeAndHang,
    /// It is not served, and nothing is sent.
    Hang,
    /// It is served after `serve_all` was called.
    Hold,
    /// It is served, and the answer is sent after `serve_all` was called.
    ServeAndHold,
    /// It is served, and the connection ends without an answer.
    ServeAndClose,
    /// It is not served, and the connection ends.
    Close,
    /// It is served, and the connection ends after this many bytes of the answer's body.
    Cut(usize),
    /// It is served, ignoring its conditions.
    IgnoreConditions,
}

/// Ends every wait for something that must happen, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until something holds.
///
/// # Panics
///
/// If it does not within two minutes.
pub(crate) fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

type Plan = Box<dyn FnMut(&Request) -> Act + Send>;

pub(crate) struct Object {
    pub(crate) bytes: Vec<u8>,
    version: u64,
}

#[derive(Default)]
pub(crate) struct Bucket {
    pub(crate) dialect: Dialect,
    pub(crate) objects: BTreeMap<String, Object>,
    /// Parts by upload and number; at Azure by object and the writer's name of the part.
    pub(crate) uploads: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    versions: u64,
    plan: Option<Plan>,
    /// Number of requests that wait for `serve_all`.
    pub(crate) held: u32,
    /// Answers of a token server, by path.
    pub(crate) tokens: BTreeMap<String, String>,
    /// Served requests by billing category.
    pub(crate) served: BTreeMap<String, u64>,
    connections: Vec<TcpStream>,
    is_stopping: bool,
}

struct Inner {
    bucket: Mutex<Bucket>,
    /// Serves the requests instead of `bucket`, which then has no objects.
    real: Option<real::Real>,
    /// Signalled when the server stops, and when it serves all.
    changed: Condvar,
}

/// The server. It stops when it is dropped; its objects survive `stop`.
pub(crate) struct BucketServer {
    inner: Arc<Inner>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
    keys: tempfile::NamedTempFile,
}

impl BucketServer {
    pub(crate) fn start() -> Self {
        let dialect = DIALECT.get();
        let bucket = Bucket { dialect, ..Bucket::default() };
        let real = (dialect == Dialect::RealS3).then(real::Real::start);
        let inner = Arc::new(Inner { bucket: Mutex::new(bucket), real, changed: Condvar::new() });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let keys = tempfile::NamedTempFile::new().unwrap();
        let text = match dialect {
            Dialect::S3 | Dialect::RealS3 => aws_keys(KEY_ID, SECRET),
            Dialect::Google => r#"{"type": "service_account", "disable_oauth": true}"#.to_owned(),
            Dialect::Azure => {
                format!("AccountName={ACCOUNT};AccountKey=c2VjcmV0;BlobEndpoint=http://{address}/{ACCOUNT}")
            }
        };
        std::fs::write(keys.path(), text).unwrap();
        let mut server = Self { inner, address, accepting: None, keys };
        server.accept(listener);
        server
    }

    fn accept(&mut self, listener: TcpListener) {
        let inner = Arc::clone(&self.inner);
        self.accepting = Some(std::thread::spawn(move || {
            for connection in listener.incoming() {
                let Ok(connection) = connection else { continue };
                let mut bucket = inner.bucket.lock();
                if bucket.is_stopping {
                    return;
                }
                bucket.connections.push(connection.try_clone().unwrap());
                let inner = Arc::clone(&inner);
                std::thread::spawn(move || inner.talk(connection));
            }
        }));
    }

    /// Ends all connections; new ones are refused. A real server is killed.
    pub(crate) fn stop(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
        if let Some(real) = &self.inner.real {
            real.kill();
        }
        self.inner.bucket.lock().is_stopping = true;
        self.inner.changed.notify_all();
        let _ = TcpStream::connect(self.address);
        accepting.join().unwrap();
        for connection in std::mem::take(&mut self.inner.bucket.lock().connections) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Restarts at the same address and with the same objects.
    pub(crate) fn come_back(&mut self) {
        if let Some(real) = &self.inner.real {
            real.come_back();
        }
        self.inner.bucket.lock().is_stopping = false;
        // A connection of another process may use the port for a moment.
        let end = std::time::Instant::now() + Duration::from_secs(60);
        let listener = loop {
            match TcpListener::bind(self.address) {
                Ok(listener) => break listener,
                Err(error) => assert!(std::time::Instant::now() < end, "{error}"),
            }
            std::thread::yield_now();
        };
        self.accept(listener);
    }

    /// Returns settings of a tier below a prefix that do not depend on the speed of this machine.
    pub(crate) fn config(&self, prefix: &str) -> ObjectConfig {
        let (scheme, path) = match self.dialect() {
            Dialect::S3 | Dialect::RealS3 => ("s3", String::new()),
            Dialect::Google => ("gs", String::new()),
            Dialect::Azure => ("az", format!("/{ACCOUNT}")),
        };
        ObjectConfig {
            endpoint: Some(format!("http://{}{path}", self.address)),
            credentials_file: Some(self.keys.path().to_owned()),
            timeout: Duration::from_secs(30),
            present_ttl: Duration::from_secs(3600),
            absent_ttl: Duration::from_secs(3600),
            pack_bytes: 0,
            ..ObjectConfig::new(&format!("{scheme}://{BUCKET}/{prefix}")).unwrap()
        }
    }

    /// Returns a namespace, and the size of parts by which its blocks are written in three parts or more. The real server
    /// refuses small ones.
    pub(crate) fn in_parts(&self) -> (NamespaceSpec, usize) {
        let part_bytes = if self.dialect() == Dialect::RealS3 { 5 << 20 } else { 5000 };
        let layout = BlockLayout::new(vec![vec![part_bytes as u64, 904], vec![part_bytes as u64]]).unwrap();
        (spec("in parts", layout), part_bytes)
    }

    pub(crate) fn dialect(&self) -> Dialect {
        self.inner.bucket.lock().dialect
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the function that decides about each request from now on.
    pub(crate) fn plan(&self, plan: impl FnMut(&Request) -> Act + Send + 'static) {
        self.inner.bucket.lock().plan = Some(Box::new(plan));
    }

    pub(crate) fn serve_all(&self) {
        self.inner.bucket.lock().plan = None;
        self.inner.changed.notify_all();
    }

    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut Bucket) -> T) -> T {
        look(&mut self.inner.bucket.lock())
    }

    /// Returns the names that contain this part.
    pub(crate) fn names(&self, part: &str) -> Vec<String> {
        let names = match &self.inner.real {
            Some(real) => real.names(),
            None => self.with(|bucket| bucket.objects.keys().cloned().collect()),
        };
        names.into_iter().filter(|name| name.contains(part)).collect()
    }

    /// Returns how many uploads in parts are neither completed nor aborted.
    pub(crate) fn uploads(&self) -> usize {
        match &self.inner.real {
            Some(real) => real.uploads(),
            None => self.with(|bucket| bucket.uploads.len()),
        }
    }

    /// Changes the stored bytes of an object.
    pub(crate) fn change(&self, name: &str, how: impl FnOnce(&mut Vec<u8>)) {
        match &self.inner.real {
            Some(real) => real.change(name, how),
            None => self.with(|bucket| how(&mut bucket.objects.get_mut(name).unwrap().bytes)),
        }
    }

    /// Gives an object another name, as if it had been written with that.
    pub(crate) fn rename(&self, name: &str, to: &str) {
        match &self.inner.real {
            Some(real) => real.rename(name, to),
            None => self.with(|bucket| {
                let object = bucket.objects.remove(name).unwrap();
                bucket.objects.insert(to.to_owned(), object);
            }),
        }
    }

    /// Deletes an object without any depot noticing.
    pub(crate) fn lose(&self, name: &str) {
        match &self.inner.real {
            Some(real) => real.lose(name),
            None => drop(self.with(|bucket| bucket.objects.remove(name))),
        }
    }
}

/// Returns the text of a file with an access key of S3.
pub(crate) fn aws_keys(id: &str, secret: &str) -> String {
    format!("[default]\naws_access_key_id={id}\naws_secret_access_key={secret}\n")
}

impl Drop for BucketServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Inner {
    fn hold(&self, bucket: &mut MutexGuard<'_, Bucket>) {
        bucket.held += 1;
        while !bucket.is_stopping && bucket.plan.is_some() {
            self.changed.wait(bucket);
        }
        bucket.held -= 1;
    }

    fn talk(&self, mut connection: TcpStream) {
        while let Some(request) = Request::read(&mut connection) {
            let mut bucket = self.bucket.lock();
            let act = bucket.plan.as_mut().map_or(Act::Serve, |plan| plan(&request));
            if act == Act::Hold {
                self.hold(&mut bucket);
            }
            let mut response = match act {
                Act::Refuse(status) => Response::new(
                    status,
                    format!("<Error><Code>Test{status}</Code><Token>secret</Token></Error>"),
                ),
                Act::Hang | Act::Close => Response::new(200, String::new()),
                _ => match self.serve(&mut bucket, &request, act == Act::IgnoreConditions) {
                    Some(response) => response,
                    // The real server has died.
                    None => break,
                },
            };
            response.keep_range(&request);
            if act == Act::ServeAndHold {
                self.hold(&mut bucket);
            }
            if matches!(act, Act::Hang | Act::ServeAndHang) {
                while !bucket.is_stopping {
                    self.changed.wait(&mut bucket);
                }
                return;
            }
            drop(bucket);
            if matches!(act, Act::Close | Act::ServeAndClose) {
                break;
            }
            let cut = match act {
                Act::Cut(bytes) => Some(bytes),
                _ => response.is_cut(&request).then_some(response.body.len()),
            };
            if response.write(&mut connection, &request, cut).is_none() || cut.is_some() {
                break;
            }
        }
        let _ = connection.shutdown(std::net::Shutdown::Both);
    }

    /// Returns the answer to a request; `None` if a real server gave none.
    fn serve(
        &self,
        bucket: &mut MutexGuard<'_, Bucket>,
        request: &Request,
        is_blind: bool,
    ) -> Option<Response> {
        let Some(real) = &self.real else { return Some(bucket.serve(request, is_blind)) };
        let response = MutexGuard::unlocked(bucket, || real.forward(request))?;
        *bucket.served.entry(request.line().to_owned()).or_default() += 1;
        Some(response)
    }
}

impl Bucket {
    /// Returns a number like Google's generations: microseconds.
    fn next(&mut self) -> u64 {
        self.versions += 1;
        1_700_000_000_000_000 + self.versions
    }

    /// Stores an object and returns its version.
    fn store(&mut self, name: &str, bytes: Vec<u8>) -> u64 {
        let version = self.next();
        self.objects.insert(name.to_owned(), Object { bytes, version });
        version
    }

    /// Returns the name of an object from a request's path; empty for the bucket itself.
    fn name_of(&self, path: &str) -> Option<String> {
        let root = self.dialect.root();
        Some(path.strip_prefix(&root)?.trim_start_matches('/').to_owned())
    }

    fn serve(&mut self, request: &Request, is_blind: bool) -> Response {
        if let Some(token) = self.tokens.get(&request.path) {
            return Response::new(200, token.clone());
        }
        let Some(name) = self.name_of(&request.path) else {
            return Response::error(404, "NoSuchBucket");
        };
        *self.served.entry(request.line().to_owned()).or_default() += 1;
        match self.dialect {
            Dialect::S3 | Dialect::RealS3 | Dialect::Google => s3::serve(self, request, &name, is_blind),
            Dialect::Azure => azure::serve(self, request, &name, is_blind),
        }
    }

    /// Returns the directories and the objects that a request lists.
    fn below(&self, request: &Request) -> (BTreeSet<String>, Vec<(&String, &Object)>) {
        let prefix = request.query.get("prefix").cloned().unwrap_or_default();
        let has_delimiter = request.query.contains_key("delimiter");
        let after = request.query.get("start-after");
        // Azure's includes the name itself.
        let from = request.query.get("startFrom");
        let is_later = |name: &String| after.is_none_or(|at| name > at) && from.is_none_or(|at| name >= at);
        let (mut directories, mut found) = (BTreeSet::new(), Vec::new());
        for (name, object) in
            self.objects.iter().filter(|(name, _)| name.starts_with(&prefix) && is_later(name))
        {
            match name[prefix.len()..].split_once('/').filter(|_| has_delimiter) {
                Some((directory, _)) => drop(directories.insert(format!("{prefix}{directory}/"))),
                None => found.push((name, object)),
            }
        }
        (directories, found)
    }
}
