//! The hello, and the proof on both sides that they share a token. The token itself is never sent.
//!
//! ```text
//!   client                                                    server
//!   HELLO  version, features, client nonce          ─────▶
//!          ◀─────  WELCOME  version, features, auth wanted?, limits, depot, server nonce
//!   AUTH   HMAC(token, "client" | hello | welcome)  ─────▶                       where wanted
//!          ◀─────  AUTHENTIC  HMAC(token, "server" | hello | welcome)
//! ```
//!
//! Both proofs cover all earlier fields, so a man in the middle cannot change them unnoticed. Later messages are not
//! protected; use TLS for that.

use std::fmt;

use hmac::{Hmac, Mac};
use kvdepot_core::{Error, ErrorKind, Result};
use sha2::Sha256;

use super::{Request, Response};

/// The version of this protocol.
pub const VERSION: u32 = 1;
/// Length of each side's nonce.
pub const NONCE_BYTES: usize = 32;
/// Length of a proof.
pub const PROOF_BYTES: usize = 32;
/// Shortest token: a shorter one can be guessed from a recorded handshake.
const TOKEN_BYTES_MIN: usize = 16;
const TOKEN_BYTES_MAX: usize = 4096;

const CLIENT: &[u8] = b"kvdepot wire v1 client\0";
const SERVER: &[u8] = b"kvdepot wire v1 server\0";

/// A secret shared by client and server. Its `Debug` reveals nothing about it.
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// Takes the secret's bytes. Surrounding white space, as in files, is stripped.
    pub fn new(secret: &[u8]) -> Result<Self> {
        let secret = secret.trim_ascii();
        if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&secret.len()) {
            return Err(Error::new(
                ErrorKind::Config,
                "a token has 16 to 4096 bytes: make one with `openssl rand -hex 32`",
            )
            .with("bytes", secret.len()));
        }
        Ok(Self(secret.to_vec()))
    }

    /// Compares with another token in constant time.
    pub fn is(&self, other: &[u8]) -> bool {
        let tag = |secret: &[u8]| Self::mac(secret, b"equal").finalize().into_bytes();
        Self::mac(&self.0, b"equal").verify_slice(&tag(other)).is_ok()
    }

    fn mac(secret: &[u8], domain: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of every length");
        mac.update(domain);
        mac
    }

    fn proof(&self, domain: &[u8], said: &[u8]) -> Hmac<Sha256> {
        let mut mac = Self::mac(&self.0, domain);
        mac.update(said);
        mac
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::Permission, what.to_owned())
}

fn out_of_turn(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, what.to_owned())
}

/// The client's side.
#[derive(Debug)]
pub struct ClientHandshake {
    token: Option<Token>,
    /// Hello and welcome as they were sent.
    said: Vec<u8>,
    welcomed: Option<Welcomed>,
    state: ClientState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    Hello,
    Auth,
    Over,
}

/// The result of a client's handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcomed {
    /// The features that both sides support.
    pub features: u64,
    /// Number of requests that may be in flight.
    pub requests_in_flight_max: u32,
    /// The depot's random id: if it changes after a reconnect, the pool is another one, too.
    pub depot: u64,
}

impl ClientHandshake {
    /// Starts a handshake. `nonce` must be random and new. Appends the hello to `out`.
    pub fn begin(
        token: Option<Token>,
        features: u64,
        nonce: [u8; NONCE_BYTES],
        out: &mut Vec<u8>,
    ) -> Result<Self> {
        let start = out.len();
        Request::Hello { version: VERSION, features, nonce }.encode(0, out)?;
        Ok(Self { token, said: out[start..].to_vec(), welcomed: None, state: ClientState::Hello })
    }

    /// Processes the server's answers in turn and appends the next message to `out`. Returns the result when the
    /// handshake is complete.
    pub fn step(&mut self, response: &Response<'_>, out: &mut Vec<u8>) -> Result<Option<Welcomed>> {
        match (self.state, response) {
            (_, Response::Failed { kind, message }) => Err(Error::new(*kind, *message)),
            (
                ClientState::Hello,
                Response::Welcome { version, features, auth_wanted, requests_in_flight_max, depot, .. },
            ) => {
                if *version != VERSION {
                    return Err(Error::new(
                        ErrorKind::Version,
                        "the server speaks another version of the wire protocol",
                    )
                    .with("server_version", version)
                    .with("client_version", VERSION));
                }
                if *requests_in_flight_max == 0 {
                    return Err(out_of_turn("a server must allow at least one request"));
                }
                response.encode(0, &mut self.said)?;
                let (features, requests_in_flight_max) = (*features, *requests_in_flight_max);
                self.welcomed = Some(Welcomed { features, requests_in_flight_max, depot: *depot });
                match (&self.token, auth_wanted) {
                    (None, true) => Err(refused("the server requires a token, but none is configured")),
                    (Some(_), false) => Err(refused(
                        "a token is configured, and the server does not ask for it: it may be another one",
                    )),
                    (Some(token), true) => {
                        let proof = token.proof(CLIENT, &self.said).finalize().into_bytes().into();
                        Request::Auth { proof }.encode(0, out)?;
                        self.state = ClientState::Auth;
                        Ok(None)
                    }
                    (None, false) => {
                        self.state = ClientState::Over;
                        Ok(self.welcomed)
                    }
                }
            }
            (ClientState::Auth, Response::Authentic { proof }) => {
                let token = self.token.as_ref().ok_or_else(|| out_of_turn("there is no token"))?;
                let good = token.proof(SERVER, &self.said).verify_slice(proof);
                good.map_err(|_| refused("the server could not prove that it knows the token"))?;
                self.state = ClientState::Over;
                Ok(self.welcomed)
            }
            _ => Err(out_of_turn("the server answered the handshake out of turn")),
        }
    }
}

/// The server's part of its welcome.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// The features that the server supports.
    pub features: u64,
    /// Number of requests that a client may have in flight.
    pub requests_in_flight_max: u32,
    /// The depot's random id.
    pub depot: u64,
    /// Random and new for each connection.
    pub nonce: [u8; NONCE_BYTES],
}

/// The server's side.
#[derive(Debug)]
pub struct ServerHandshake {
    token: Option<Token>,
    said: Vec<u8>,
    state: ServerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerState {
    Hello,
    Auth,
    Over,
}

impl ServerHandshake {
    /// Makes a handshake that waits for a hello.
    pub const fn new(token: Option<Token>) -> Self {
        Self { token, said: Vec::new(), state: ServerState::Hello }
    }

    /// Returns whether requests may be served.
    pub fn is_over(&self) -> bool {
        self.state == ServerState::Over
    }

    /// Answers a hello or a proof. The answer is appended to `out`.
    pub fn step(&mut self, id: u64, request: &Request<'_>, offer: Offer, out: &mut Vec<u8>) -> Result<()> {
        match (self.state, request) {
            (ServerState::Hello, Request::Hello { version, features: asked, .. }) => {
                if *version != VERSION {
                    return Err(Error::new(
                        ErrorKind::Version,
                        "client and server speak different versions of the wire protocol: install the same kvdepot in both",
                    )
                    .with("client_version", version)
                    .with("server_version", VERSION));
                }
                request.encode(0, &mut self.said)?;
                let auth_wanted = self.token.is_some();
                let features = offer.features & asked;
                let welcome = Response::Welcome {
                    version: VERSION,
                    features,
                    auth_wanted,
                    requests_in_flight_max: offer.requests_in_flight_max,
                    depot: offer.depot,
                    nonce: offer.nonce,
                };
                welcome.encode(0, &mut self.said)?;
                welcome.encode(id, out)?;
                self.state = if auth_wanted { ServerState::Auth } else { ServerState::Over };
                Ok(())
            }
            (ServerState::Auth, Request::Auth { proof }) => {
                let token = self.token.as_ref().ok_or_else(|| out_of_turn("there is no token"))?;
                let good = token.proof(CLIENT, &self.said).verify_slice(proof);
                good.map_err(|_| refused("the token is not this server's"))?;
                let proof = token.proof(SERVER, &self.said).finalize().into_bytes().into();
                Response::Authentic { proof }.encode(id, out)?;
                self.state = ServerState::Over;
                self.said = Vec::new();
                Ok(())
            }
            _ => Err(out_of_turn("a connection begins with one hello, and a proof where one is wanted")),
        }
    }
}
