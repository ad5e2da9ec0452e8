//! Keys against vectors that Python computed (`vectors/make_keys.py`). A change here makes every stored block
//! unreachable, or worse, reachable by another name (P8).
#![allow(clippy::unwrap_used, reason = "the vectors are our own file")]

use kvdepot_core::{BlockHash, BlockKey, BlockLayout, ErrorKind, NamespaceId, NamespaceSpec};
use serde_json::Value;

fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors/keys.json")).unwrap()
}

fn list<'a>(of: &'a Value, name: &str) -> &'a Vec<Value> {
    of[name].as_array().unwrap()
}

fn text<'a>(of: &'a Value, name: &str) -> &'a str {
    of[name].as_str().unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn block_hashes_are_as_python_has_them() {
    let vectors = vectors();
    for vector in list(&vectors, "block_hashes") {
        let hash = BlockHash::from_engine(&bytes(text(vector, "engine_hex"))).unwrap();
        assert_eq!(hash.to_string(), text(vector, "block_hash_hex"), "{vector}");
        assert_eq!(BlockHash::from_hex(text(vector, "block_hash_hex")), Some(hash));
    }
    let lengths: Vec<usize> =
        list(&vectors, "block_hashes").iter().map(|v| text(v, "engine_hex").len() / 2).collect();
    assert!([1, 16, 32, 64].iter().all(|length| lengths.contains(length)));
}

#[test]
fn engine_hashes_have_1_to_64_bytes() {
    for length in [0, 65, 4096] {
        assert_eq!(BlockHash::from_engine(&vec![0; length]).unwrap_err().kind(), ErrorKind::Config);
    }
}

#[test]
fn namespaces_are_as_python_has_them() {
    let vectors = vectors();
    for vector in list(&vectors, "namespaces") {
        let shards = serde_json::from_value(vector["shards"].clone()).unwrap();
        let spec = NamespaceSpec::new(text(vector, "facts_json"), BlockLayout::new(shards).unwrap()).unwrap();
        assert_eq!(spec.canonical(), text(vector, "canonical"));
        assert_eq!(spec.root().to_string(), text(vector, "root"));
        for (epoch, id) in vector["ids_by_epoch"].as_object().unwrap() {
            assert_eq!(spec.id(epoch.parse().unwrap()).to_string(), id.as_str().unwrap(), "epoch {epoch}");
        }
        assert_eq!(NamespaceSpec::from_canonical(text(vector, "canonical")).unwrap(), spec);
    }
}

#[test]
fn block_keys_are_as_python_has_them() {
    let vectors = vectors();
    assert!(!list(&vectors, "block_keys").is_empty());
    for vector in list(&vectors, "block_keys") {
        let namespace = NamespaceId::from_hex(text(vector, "namespace")).unwrap();
        let key = BlockKey { namespace, hash: BlockHash::from_hex(text(vector, "block_hash")).unwrap() };
        assert_eq!(key.to_bytes().as_slice(), bytes(text(vector, "key_hex")));
        assert_eq!(BlockKey::from_bytes(&key.to_bytes()), key);
        assert_eq!(key.to_string(), format!("{namespace}/{}", key.hash));
    }
}

#[test]
fn facts_that_languages_write_differently_are_refused() {
    let layout = || BlockLayout::uniform(1, &[1]).unwrap();
    for facts in
        ["[]", "1", "", "{\"x\": 0.5}", "{\"x\": [1e2]}", "{\"x\": 18446744073709551616}", "{\"x\": NaN}"]
    {
        assert_eq!(NamespaceSpec::new(facts, layout()).unwrap_err().kind(), ErrorKind::Config, "{facts}");
    }
}
