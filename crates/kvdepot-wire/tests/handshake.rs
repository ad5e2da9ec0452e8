//! Only who knows the token gets in, on both sides, even with a man in the middle.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_core::{Error, ErrorKind};
use kvdepot_wire::FrameBuffer;
use kvdepot_wire::own::{ClientHandshake, Offer, Request, Response, ServerHandshake, Token, Welcomed};

fn token(text: &str) -> Option<Token> {
    Some(Token::new(text.as_bytes()).unwrap())
}

/// Runs both sides against each other. `tamper` may change the server's messages.
fn shake(
    client_token: Option<Token>,
    server_token: Option<Token>,
    tamper: fn(&mut Vec<u8>),
) -> Result<(Welcomed, bool), Error> {
    let offer = Offer { features: 0b110, requests_in_flight_max: 5, depot: 77, nonce: [2; 32] };
    let mut server = ServerHandshake::new(server_token);
    let mut to_server = Vec::new();
    let mut client = ClientHandshake::begin(client_token, 0b011, [1; 32], &mut to_server)?;
    loop {
        let mut requests = FrameBuffer::requests();
        requests.extend(&to_server);
        to_server.clear();
        let (id, request) = Request::decode(requests.next_frame()?.unwrap())?;
        let mut to_client = Vec::new();
        server.step(id, &request, offer, &mut to_client)?;
        tamper(&mut to_client);
        let mut responses = FrameBuffer::responses();
        responses.extend(&to_client);
        let (_, response) = Response::decode(responses.next_frame()?.unwrap())?;
        if let Some(welcomed) = client.step(&response, &mut to_server)? {
            return Ok((welcomed, server.is_over()));
        }
    }
}

#[test]
fn the_same_token_or_none_gets_in() {
    let expected = Welcomed { features: 0b010, requests_in_flight_max: 5, depot: 77 };
    assert_eq!(shake(None, None, |_| {}).unwrap(), (expected, true));
    let (a, b) = (token("the token of this test"), token("  the token of this test\n"));
    assert_eq!(shake(a, b, |_| {}).unwrap(), (expected, true));
}

#[test]
fn another_token_or_none_does_not() {
    let cases = [
        (token("the token of this test"), token("another token of tests")),
        (None, token("the token of this test")),
        (token("the token of this test"), None),
    ];
    for (client, server) in cases {
        assert_eq!(shake(client, server, |_| {}).unwrap_err().kind(), ErrorKind::Permission);
    }
}

#[test]
fn who_changes_what_the_server_says_is_noticed() {
    // The limit of requests in the welcome's body, behind id, version, features and flag.
    let limit = |bytes: &mut Vec<u8>| {
        if bytes[4] == kvdepot_wire::own::op::WELCOME {
            bytes[9 + 8 + 4 + 8 + 1] ^= 2;
        }
    };
    let same = || token("the token of this test");
    assert_eq!(shake(same(), same(), limit).unwrap_err().kind(), ErrorKind::Permission);
    // A server that cannot prove that it knows the token.
    let proof = |bytes: &mut Vec<u8>| {
        if bytes[4] == kvdepot_wire::own::op::AUTHENTIC {
            bytes[20] ^= 1;
        }
    };
    assert_eq!(shake(same(), same(), proof).unwrap_err().kind(), ErrorKind::Permission);
}

#[test]
fn requests_before_the_proof_are_refused() {
    let mut server = ServerHandshake::new(token("the token of this test"));
    let offer = Offer { features: 0, requests_in_flight_max: 1, depot: 1, nonce: [0; 32] };
    let hello = Request::Hello { version: 1, features: 0, nonce: [0; 32] };
    for request in [Request::Stat, Request::Auth { proof: [0; 32] }] {
        assert!(server.step(1, &request, offer, &mut Vec::new()).is_err());
    }
    server.step(1, &hello, offer, &mut Vec::new()).unwrap();
    assert!(!server.is_over());
    assert!(server.step(2, &hello, offer, &mut Vec::new()).is_err(), "a second hello");
    let error = server.step(3, &Request::Auth { proof: [0; 32] }, offer, &mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission);
    let later = Request::Hello { version: 2, features: 0, nonce: [0; 32] };
    let error = ServerHandshake::new(None).step(1, &later, offer, &mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Version);
}

#[test]
fn a_token_is_long_and_never_printed() {
    assert_eq!(Token::new(b"short").unwrap_err().kind(), ErrorKind::Config);
    let token = Token::new(b"the token of this test").unwrap();
    assert!(!format!("{token:?}").contains("test"));
    assert!(token.is(b"the token of this test") && !token.is(b"the token of this tesT") && !token.is(b""));
}
