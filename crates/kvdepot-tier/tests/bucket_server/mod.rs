//! A server with the part of S3 that the tier uses, and with failures that a test plans.
#![allow(dead_code, clippy::unwrap_used)] // each test uses its part; a test that cannot go on shall panic

mod http;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_tier::ObjectConfig;
use parking_lot::{Condvar, Mutex, MutexGuard};

pub(crate) use http::{Request, Response};

/// The only bucket.
pub(crate) const BUCKET: &str = "bucket";

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
pub(crate) fn until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

type Plan = Box<dyn FnMut(&Request) -> Act + Send>;

pub(crate) struct Object {
    pub(crate) bytes: Vec<u8>,
    tag: String,
}

#[derive(Default)]
pub(crate) struct Bucket {
    pub(crate) objects: BTreeMap<String, Object>,
    pub(crate) uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    tags: u64,
    plan: Option<Plan>,
    /// Number of requests that wait for `serve_all`.
    pub(crate) held: u32,
    /// Served requests by billing category.
    pub(crate) served: BTreeMap<String, u64>,
    connections: Vec<TcpStream>,
    is_stopping: bool,
}

struct Inner {
    bucket: Mutex<Bucket>,
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
        let inner = Arc::new(Inner { bucket: Mutex::default(), changed: Condvar::new() });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let keys = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(keys.path(), "[default]\naws_access_key_id=test\naws_secret_access_key=secret\n")
            .unwrap();
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

    /// Ends all connections; new ones are refused.
    pub(crate) fn stop(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
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
        ObjectConfig {
            endpoint: Some(format!("http://{}", self.address)),
            credentials_file: Some(self.keys.path().to_owned()),
            timeout: Duration::from_secs(30),
            present_ttl: Duration::from_secs(3600),
            absent_ttl: Duration::from_secs(3600),
            ..ObjectConfig::new(&format!("s3://{BUCKET}/{prefix}")).unwrap()
        }
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
        self.with(|bucket| bucket.objects.keys().filter(|name| name.contains(part)).cloned().collect())
    }
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
            let response = match act {
                Act::Refuse(status) => Response::new(
                    status,
                    format!("<Error><Code>Test{status}</Code><Token>secret</Token></Error>"),
                ),
                Act::Hang | Act::Close => Response::new(200, String::new()),
                _ => bucket.serve(&request, act == Act::IgnoreConditions),
            };
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
                let _ = connection.shutdown(std::net::Shutdown::Both);
                return;
            }
            let cut = if let Act::Cut(bytes) = act { Some(bytes) } else { None };
            if response.write(&mut connection, &request, cut).is_none() || cut.is_some() {
                let _ = connection.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
    }
}

impl Bucket {
    fn store(&mut self, name: &str, bytes: Vec<u8>) -> Response {
        self.tags += 1;
        let tag = format!("\"{}\"", self.tags);
        self.objects.insert(name.to_owned(), Object { bytes, tag: tag.clone() });
        Response::new(200, String::new()).with_tag(&tag)
    }

    fn serve(&mut self, request: &Request, is_blind: bool) -> Response {
        let Some(name) = request.path.strip_prefix(&format!("/{BUCKET}")) else {
            return Response::new(404, "<Error><Code>NoSuchBucket</Code></Error>".into());
        };
        let name = name.trim_start_matches('/');
        *self.served.entry(request.line().to_owned()).or_default() += 1;
        let upload = request.query.get("uploadId").cloned();
        match (request.method.as_str(), upload) {
            ("PUT", Some(id)) => {
                let part = request.query["partNumber"].parse().unwrap();
                let tag = format!("\"part{part}\"");
                let Some(parts) = self.uploads.get_mut(&id) else { return Response::new(404, String::new()) };
                parts.insert(part, request.body.clone());
                Response::new(200, String::new()).with_tag(&tag)
            }
            ("POST", Some(id)) => match self.uploads.remove(&id) {
                Some(parts) => {
                    let mut done = self.store(name, parts.into_values().flatten().collect());
                    done.body =
                        b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
                            .into();
                    done
                }
                None => Response::new(404, String::new()),
            },
            ("DELETE", Some(id)) => {
                self.uploads.remove(&id);
                Response::new(204, String::new())
            }
            ("POST", None) if request.query.contains_key("uploads") => {
                self.tags += 1;
                let id = format!("upload{}", self.tags);
                self.uploads.insert(id.clone(), BTreeMap::new());
                Response::new(
                    200,
                    format!(
                        "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                    ),
                )
            }
            ("POST", None) => self.delete(request),
            ("PUT", None) => self.put(request, name, is_blind),
            ("GET", None) if request.query.contains_key("list-type") => self.list(request),
            ("GET" | "HEAD", None) => match self.objects.get(name) {
                Some(object) => Response { body: object.bytes.clone(), ..Response::new(200, String::new()) }
                    .with_tag(&object.tag),
                None => Response::new(404, "<Error><Code>NoSuchKey</Code></Error>".into()),
            },
            _ => Response::new(405, String::new()),
        }
    }

    fn put(&mut self, request: &Request, name: &str, is_blind: bool) -> Response {
        let there = self.objects.get(name).map(|object| object.tag.clone());
        let is_refused = match (request.headers.get("if-none-match"), request.headers.get("if-match")) {
            (Some(_), _) => there.is_some(),
            (_, Some(tag)) => there.as_ref() != Some(tag),
            _ => false,
        };
        if is_refused && !is_blind {
            return Response::new(412, "<Error><Code>PreconditionFailed</Code></Error>".into());
        }
        self.store(name, request.body.clone())
    }

    fn delete(&mut self, request: &Request) -> Response {
        let text = String::from_utf8_lossy(&request.body).into_owned();
        let names = text.split("<Key>").skip(1).filter_map(|part| part.split("</Key>").next());
        let mut out = String::from("<DeleteResult>");
        for name in names {
            self.objects.remove(name);
            out += &format!("<Deleted><Key>{name}</Key></Deleted>");
        }
        Response::new(200, out + "</DeleteResult>")
    }

    fn list(&self, request: &Request) -> Response {
        let prefix = request.query.get("prefix").cloned().unwrap_or_default();
        let has_delimiter = request.query.contains_key("delimiter");
        let mut out = String::from("<ListBucketResult>");
        let mut last = String::new();
        for (name, object) in self.objects.iter().filter(|(name, _)| name.starts_with(&prefix)) {
            match name[prefix.len()..].split_once('/').filter(|_| has_delimiter) {
                Some((dir, _)) if dir == last => {}
                Some((dir, _)) => {
                    last = dir.to_owned();
                    out += &format!("<CommonPrefixes><Prefix>{prefix}{dir}/</Prefix></CommonPrefixes>");
                }
                None => {
                    let bytes = object.bytes.len();
                    out += &format!(
                        "<Contents><Key>{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>\
                         <Size>{bytes}</Size><ETag>{}</ETag></Contents>",
                        object.tag.replace('"', "&quot;")
                    );
                }
            }
        }
        Response::new(200, out + "</ListBucketResult>")
    }
}
