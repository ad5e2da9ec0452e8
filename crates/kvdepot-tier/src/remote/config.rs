//! Settings of a Remote tier, and their parser.

use std::fs;
use std::path::Path;
use std::time::Duration;

use kvdepot_core::limits::{REMOTE_CONNECTIONS_MAX, REMOTE_SERVERS_MAX};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_wire::own::Token;
use serde_json::Value;

use super::settings::{SETTINGS, TIMEOUT_MS_MAX};
use super::tls::RemoteTls;
use crate::settings::Fields;

/// Maximum size of a token file.
const TOKEN_FILE_BYTES_MAX: u64 = 64 << 10;

/// Protocol of the servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoteProtocol {
    /// Ours if the server answers our hello, otherwise InfiniStore's. With a token: ours only.
    #[default]
    Auto,
    /// Ours.
    Kvdepot,
    /// InfiniStore's: no token, no namespaces, and no checksums other than those in the values.
    Infinistore,
}

/// Settings of a Remote tier.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// `host:port` of every server. A block is stored on one of them, chosen by its key and these spellings, so all
    /// nodes that share servers must spell them alike. Their order does not matter.
    pub servers: Vec<String>,
    /// Secret shared by client and servers; `None` for servers without a token.
    pub token: Option<Token>,
    /// Certificates to trust servers by; `None` for servers without TLS.
    pub tls: Option<RemoteTls>,
    /// Maximum silence of a server that owes an answer, and maximum time to connect.
    pub timeout: Duration,
    /// Number of connections to each server.
    pub connections: usize,
    /// Protocol of the servers.
    pub protocol: RemoteProtocol,
    /// Time for which a block is assumed to be present without asking. A server may evict it at any time.
    pub present_ttl: Duration,
    /// Time for which a block is assumed to be absent without asking. Another node's new block may stay unseen for that
    /// long.
    pub absent_ttl: Duration,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            servers: Vec::new(),
            token: None,
            tls: None,
            timeout: Duration::from_secs(2),
            connections: 4,
            protocol: RemoteProtocol::Auto,
            present_ttl: Duration::from_secs(60),
            absent_ttl: Duration::from_millis(100),
        }
    }
}

impl RemoteConfig {
    /// Returns the defaults for these servers.
    pub fn new(servers: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { servers: servers.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Parses an object of the tier's settings.
    pub fn from_json(value: &Value) -> Result<Self> {
        let fields = Fields::new("Remote", value, &SETTINGS)?;
        let mut config = Self::new(fields.texts("servers")?);
        let mut timeout_ms = u64::try_from(config.timeout.as_millis()).unwrap_or(TIMEOUT_MS_MAX);
        fields.u64("timeout_ms", &mut timeout_ms)?;
        config.timeout = Duration::from_millis(timeout_ms);
        fields.usize("connections", &mut config.connections)?;
        config.protocol = match fields.text("protocol")?.as_deref() {
            None | Some("auto") => RemoteProtocol::Auto,
            Some("kvdepot") => RemoteProtocol::Kvdepot,
            Some("infinistore") => RemoteProtocol::Infinistore,
            Some(other) => {
                return Err(bad("protocol is auto, kvdepot or infinistore").with("protocol", other));
            }
        };
        config.token = fields.text("token_file")?.map(|path| read_token(&path)).transpose()?;
        let server_name = fields.text("tls_server_name")?;
        config.tls = match fields.text("tls_ca_file")? {
            Some(path) => Some(RemoteTls::new(Path::new(&path), server_name.as_deref())?),
            None if server_name.is_some() => {
                return Err(bad(
                    "tls_server_name has no use without TLS: name its certificates by tls_ca_file",
                ));
            }
            None => None,
        };
        config.check()?;
        Ok(config)
    }

    /// Rejects values that cannot work (P10).
    pub fn check(&self) -> Result<()> {
        if self.servers.is_empty() || self.servers.len() > REMOTE_SERVERS_MAX {
            return Err(bad("a Remote tier needs 1 to 64 servers, each host:port")
                .with("servers", self.servers.len()));
        }
        for (index, server) in self.servers.iter().enumerate() {
            let port = server.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            if port.is_none_or(|(_, port)| !port.parse::<u16>().is_ok_and(|port| port > 0)) {
                return Err(bad("a server is written host:port").with("server", server));
            }
            if self.servers[..index].contains(server) {
                return Err(bad("a server is listed twice").with("server", server));
            }
        }
        if !(1..=REMOTE_CONNECTIONS_MAX).contains(&self.connections) {
            return Err(bad("connections must be between 1 and 64").with("connections", self.connections));
        }
        if self.token.is_some() && self.protocol == RemoteProtocol::Infinistore {
            return Err(bad("InfiniStore's protocol knows no token: remove one of the two settings"));
        }
        if let Some(tls) = &self.tls {
            for server in &self.servers {
                tls.name_of(server)?;
            }
        }
        Ok(())
    }
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::Config, what.to_owned()).with("tier", "Remote")
}

fn read_token(path: &str) -> Result<Token> {
    let read = || -> std::io::Result<Vec<u8>> {
        if fs::metadata(path)?.len() > TOKEN_FILE_BYTES_MAX {
            return Err(std::io::Error::other("it is too long for a token"));
        }
        fs::read(path)
    };
    let bytes =
        read().map_err(|e| bad("the token's file cannot be read").with("path", path).with_source(e))?;
    Token::new(&bytes).map_err(|e| e.with("path", path))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wrong_settings_say_what_is_right() {
        for (value, wants) in [
            (json!({}), "servers"),
            (json!({"servers": []}), "1 to 64"),
            (json!({"servers": ["host"]}), "host:port"),
            (json!({"servers": ["host:0"]}), "host:port"),
            (json!({"servers": [":1"]}), "host:port"),
            (json!({"servers": ["h:1", "h:1"]}), "twice"),
            (json!({"servers": ["h:1"], "connections": 0}), "between 1 and 64"),
            (json!({"servers": ["h:1"], "timeout_ms": 0}), "between 1 and 3600000"),
            (json!({"servers": ["h:1"], "protocol": "rdma"}), "auto, kvdepot or infinistore"),
            (json!({"servers": ["h:1"], "token_file": "/nowhere/token"}), "/nowhere/token"),
            (json!({"servers": ["h:1"], "tokenfile": "x"}), "nearest=token_file"),
        ] {
            let error = RemoteConfig::from_json(&value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{value}");
            assert!(error.to_string().contains(wants), "{value}: {error}");
        }
    }

    #[test]
    fn a_token_comes_from_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let config = |protocol: &str| {
            RemoteConfig::from_json(
                &json!({"servers": ["[::1]:7", "b:8"], "token_file": path, "protocol": protocol}),
            )
        };
        fs::write(&path, "0123456789abcdef0123456789abcdef\n").unwrap();
        let read = config("auto").unwrap();
        assert!(read.token.unwrap().is(b"0123456789abcdef0123456789abcdef"));
        assert!(config("infinistore").unwrap_err().to_string().contains("no token"));
        fs::write(&path, "short").unwrap();
        assert!(config("kvdepot").unwrap_err().to_string().contains("16 to 4096"));
    }
}
