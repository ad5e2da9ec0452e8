//! The part of HTTP/1.1 that a store's client uses.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A complete request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: BTreeMap<String, String>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    /// The bytes before the body.
    pub(crate) head: Vec<u8>,
}

fn decoded(text: &str) -> String {
    let (mut out, bytes) = (Vec::new(), text.as_bytes());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            out.push(u8::from_str_radix(&text[at + 1..at + 3], 16).unwrap());
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).unwrap()
}

impl Request {
    /// Reads a request; `None` if the client has disconnected.
    pub(crate) fn read(connection: &mut TcpStream) -> Option<Self> {
        // Nothing after the request is buffered: the client sends the next one after the answer.
        let mut reader = BufReader::new(connection);
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let (mut headers, mut head) = (BTreeMap::new(), line.into_bytes());
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
            head.extend_from_slice(line.as_bytes());
            let Some((name, value)) = line.trim().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (name.to_owned(), decoded(value))
        };
        let query = query.split('&').filter(|part| !part.is_empty()).map(pair).collect();
        Some(Self { method, path: decoded(path), query, headers, body, head })
    }

    fn says(&self, name: &str, value: &str) -> bool {
        self.query.get(name).is_some_and(|said| said == value)
    }

    /// Returns the request's billing category.
    pub(crate) fn line(&self) -> &str {
        match self.method.as_str() {
            "GET" if self.is_list() => "list_requests",
            "GET" => "get_requests",
            "HEAD" => "head_requests",
            "DELETE" => "delete_requests",
            "POST" if self.query.contains_key("delete") || self.says("comp", "batch") => "delete_requests",
            _ => "put_requests",
        }
    }

    pub(crate) fn is_list(&self) -> bool {
        self.query.contains_key("list-type") || self.says("comp", "list")
    }

    /// Whether it makes an object of parts.
    pub(crate) fn completes_parts(&self) -> bool {
        self.says("comp", "blocklist") || self.method == "POST" && self.query.contains_key("uploadId")
    }

    pub(crate) fn is_block(&self) -> bool {
        self.path.contains("/blocks/")
    }

    pub(crate) fn is_epoch(&self) -> bool {
        self.path.contains("/epochs/") && !self.path.contains("trial")
    }
}

/// A response of the server.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The bytes before the body, if another server made them.
    pub(crate) head: Option<String>,
}

impl Response {
    pub(crate) fn new(status: u16, body: String) -> Self {
        Self { status, headers: Vec::new(), body: body.into_bytes(), head: None }
    }

    /// Returns what another server said before it closed the connection; `None` if that is not even a head. This
    /// connection stays open.
    pub(crate) fn passed_on(said: &[u8]) -> Option<Self> {
        let end = said.windows(4).position(|four| four == b"\r\n\r\n")?;
        let head = std::str::from_utf8(&said[..end]).unwrap();
        let status = head.split(' ').nth(1)?.parse().unwrap();
        let lines = head.lines().filter(|line| !line.to_ascii_lowercase().starts_with("connection:"));
        let head = lines.map(|line| format!("{line}\r\n")).collect::<String>() + "\r\n";
        Some(Self { status, headers: Vec::new(), body: said[end + 4..].into(), head: Some(head) })
    }

    /// Whether the head promises more than there is.
    pub(crate) fn is_cut(&self, request: &Request) -> bool {
        let Some(head) = self.head.as_ref().filter(|_| request.method != "HEAD") else { return false };
        let length = head.lines().filter_map(|line| line.split_once(':'));
        let mut length = length.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        length.next().is_some_and(|(_, length)| length.trim().parse() != Ok(self.body.len()))
    }

    pub(crate) fn error(status: u16, code: &str) -> Self {
        Self::new(status, format!("<Error><Code>{code}</Code></Error>"))
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    /// Leaves the bytes of an object that the request asks for.
    pub(crate) fn keep_range(&mut self, request: &Request) {
        let Some(range) = request.headers.get("range").filter(|_| self.status == 200 && self.head.is_none())
        else {
            return;
        };
        let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let total = self.body.len();
        if from.parse::<usize>().unwrap() >= total {
            *self = Self::error(416, "InvalidRange");
            return;
        }
        let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse::<usize>().unwrap().min(total - 1));
        self.body = self.body[from..=to].to_vec();
        self.status = 206;
        self.headers.push(("Content-Range", format!("bytes {from}-{to}/{total}")));
    }

    /// Sends it, or only some bytes of its body; `None` if the client has disconnected.
    pub(crate) fn write(
        &self,
        connection: &mut TcpStream,
        request: &Request,
        cut: Option<usize>,
    ) -> Option<()> {
        let more: String = self.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let head = self.head.clone().unwrap_or_else(|| {
            format!(
                "HTTP/1.1 {} X\r\nContent-Length: {}\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n{more}\r\n",
                self.status,
                self.body.len()
            )
        });
        let body: &[u8] = if request.method == "HEAD" { &[] } else { &self.body };
        let body = &body[..cut.unwrap_or(body.len()).min(body.len())];
        connection.write_all(&[head.as_bytes(), body].concat()).ok()
    }
}
