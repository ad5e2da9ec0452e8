//! What only a real S3 server can tell: it computes signatures, and it refuses parts that are too small.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;

use crate::bucket_server::{BucketServer, Dialect, Speaking, aws_keys};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::{ObjectConfig, ObjectTier, Tier};

fn start() -> (BucketServer, Speaking) {
    let speaking = Speaking::set(Dialect::RealS3);
    (BucketServer::start(), speaking)
}

fn open(config: ObjectConfig) -> Arc<dyn Tier> {
    Arc::new(ObjectTier::open(config).unwrap())
}

#[test]
#[ignore = "needs a real S3 server: make test-s3"]
fn wrong_keys_are_refused_and_not_shown() {
    let (server, _speaking) = start();
    let keys = tempfile::NamedTempFile::new().unwrap();
    // Of a key that it does not know this server says 404, where S3 says 403.
    for (id, code, kind) in [
        ("test", "SignatureDoesNotMatch", ErrorKind::Permission),
        ("nobody", "XAdminUserNotFound", ErrorKind::Unavailable),
    ] {
        std::fs::write(keys.path(), aws_keys(id, "not-the-key")).unwrap();
        let mut config = server.config("kv");
        config.credentials_file = Some(keys.path().to_owned());
        let tier = open(config);
        let one = spec("one", BlockLayout::new(vec![vec![100]]).unwrap());
        let error = tier.open_and_wait(&one, 0).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains("credentials"), "it says where to look: {error}");
        let told = format!("{error} {error:?} {tier:?} {:?}", tier.servers());
        assert!(told.contains(code) && !told.contains("not-the-key"), "{told}");
    }
    assert!(server.names("").is_empty(), "nothing was stored");
}

#[test]
#[ignore = "needs a real S3 server: make test-s3"]
fn large_blocks_in_parts_are_whole_for_other_depots() {
    let (server, _speaking) = start();
    let (spec, part_bytes) = server.in_parts();
    let mut config = server.config("kv");
    config.part_bytes = part_bytes;
    let writer = Bench::with(open(config), spec.clone());
    let puts = || server.with(|bucket| bucket.served["put_requests"]);
    let before = puts();
    writer.write_all(2);
    assert_eq!(puts() - before, 2 * 5, "a beginning, three parts and an end for each");
    let other = Bench::with(open(server.config("kv")), spec);
    assert!(other.read_is_right(0) && other.read_is_right(1));
    assert_eq!(server.uploads(), 0);
}

#[test]
#[ignore = "needs a real S3 server: make test-s3"]
fn parts_that_are_too_small_are_no_object() {
    let (server, _speaking) = start();
    let mut config = server.config("kv");
    config.part_bytes = 5000;
    let bench = Bench::new(open(config));
    let error = bench.write(0).unwrap_err();
    assert!(format!("{error:?}").contains("EntityTooSmall"), "{error:?}");
    assert!(server.names("/blocks/").is_empty());
    bench.drain();
    crate::bucket_server::until("its parts are dropped", || server.uploads() == 0);
}
