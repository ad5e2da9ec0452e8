//! The header parser: what was written is read back, and nothing else is accepted; no input makes it panic.
#![allow(clippy::unwrap_used)] // a failing test panics

use kvdepot_core::{BlockHash, BlockKey, ErrorKind, NamespaceId};
use kvdepot_io::checksum::crc64;
use kvdepot_tier::format::{BlockHeader, FIXED_BYTES, PLAIN, Writer, header_bytes};
use proptest::collection::vec;
use proptest::prelude::*;

fn headers() -> impl Strategy<Value = BlockHeader> {
    let writer = ("[a-zé]{0,20}", any::<u32>(), any::<u64>());
    let writer = writer.prop_map(|(host, pid, created_unix_s)| Writer { host, pid, created_unix_s });
    (any::<[u8; 32]>(), 1u64..=1 << 30, vec(any::<u64>(), 1..600), writer).prop_map(
        |(key, block_bytes, shard_checksums, writer)| BlockHeader {
            key: BlockKey::from_bytes(&key),
            block_bytes,
            slot_bytes: block_bytes.next_multiple_of(4096),
            stored_bytes: block_bytes,
            encoding: PLAIN,
            shard_checksums,
            writer,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read(header in headers(), behind in vec(any::<u8>(), 0..100)) {
        let mut bytes = header.encode().to_vec();
        prop_assert_eq!(bytes.len(), header_bytes(header.shard_checksums.len()));
        bytes.extend(behind);
        let mut expected = header;
        expected.writer.host = BlockHeader::parse(&bytes).unwrap().writer.host;
        prop_assert_eq!(BlockHeader::parse(&bytes).unwrap(), expected);
    }

    #[test]
    fn any_bytes_at_all(bytes in vec(any::<u8>(), 0..9000)) {
        prop_assert_eq!(BlockHeader::parse(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn any_fields_behind_a_right_magic(mut bytes in vec(any::<u8>(), 144..9000), fix: bool) {
        bytes[..8].copy_from_slice(b"KVDBLOCK");
        bytes[8..12].copy_from_slice(&2u32.to_le_bytes());
        if fix && bytes.len() >= 4096 {
            bytes[12..16].copy_from_slice(&4096u32.to_le_bytes());
            let shards = u32::from(bytes[20]) + 1;
            bytes[20..24].copy_from_slice(&shards.to_le_bytes());
            seal(&mut bytes[..4096]);
        }
        prop_assert!(BlockHeader::parse(&bytes).is_err());
    }

    #[test]
    fn one_byte_changed_or_cut(header in headers(), at in any::<prop::sample::Index>(), by in 1u8..=255) {
        let mut bytes = header.encode().to_vec();
        let at = at.index(bytes.len());
        prop_assert!(BlockHeader::parse(&bytes[..at]).is_err());
        bytes[at] ^= by;
        prop_assert!(BlockHeader::parse(&bytes).is_err());
    }
}

fn seal(pages: &mut [u8]) {
    pages[136..144].fill(0);
    let checksum = crc64(pages);
    pages[136..144].copy_from_slice(&checksum.to_le_bytes());
}

/// The example bytes from `docs/format.md`: a change here is a new format version.
#[test]
fn the_documents_example() {
    let header = BlockHeader {
        key: BlockKey { namespace: NamespaceId([0x11; 16]), hash: BlockHash([0x22; 16]) },
        block_bytes: 10_000,
        slot_bytes: 12_288,
        stored_bytes: 10_000,
        encoding: PLAIN,
        shard_checksums: vec![0x0102_0304_0506_0708, 9],
        writer: Writer { host: "node-7".to_owned(), pid: 4242, created_unix_s: 1_750_000_000 },
    };
    let bytes = header.encode();
    let hex: String = bytes[..FIXED_BYTES + 16].iter().map(|byte| format!("{byte:02x}")).collect();
    let document = include_str!("../../../../docs/format.md");
    let example: String = document
        .split("<!-- example -->")
        .nth(1)
        .expect("the document marks its example")
        .lines()
        .filter(|line| line.starts_with("00"))
        .flat_map(|line| line.split_whitespace().skip(1))
        .collect();
    assert_eq!(example, hex);
    assert_eq!(BlockHeader::parse(&bytes).unwrap(), header);
    for (at, what) in
        [(16, "flags"), (84, "reserved"), (132, "reserved"), (56, "block_bytes"), (120, "stored_bytes")]
    {
        let mut changed = bytes.to_vec();
        changed[at + 3] ^= 0x40;
        seal(&mut changed);
        assert!(BlockHeader::parse(&changed).is_err(), "{what}");
    }
}

/// An intact header with another encoding is not damage: another build can read the file.
#[test]
fn another_encoding_is_told_from_damage() {
    let header = BlockHeader {
        key: BlockKey { namespace: NamespaceId([0x11; 16]), hash: BlockHash([0x22; 16]) },
        block_bytes: 10_000,
        slot_bytes: 12_288,
        stored_bytes: 700,
        encoding: 77,
        shard_checksums: vec![1, 2],
        writer: Writer::default(),
    };
    let kind = |header: &BlockHeader| BlockHeader::parse(&header.encode()).unwrap_err().kind();
    assert_eq!(kind(&header), ErrorKind::Unsupported);
    for broken in [
        BlockHeader { stored_bytes: 0, ..header.clone() },
        BlockHeader { stored_bytes: (1 << 30) + 1, ..header.clone() },
        BlockHeader { encoding: PLAIN, ..header.clone() },
        // One of ours that saves no page.
        BlockHeader { encoding: 1, stored_bytes: 8193, ..header.clone() },
    ] {
        assert_eq!(kind(&broken), ErrorKind::Corrupt, "{broken:?}");
    }
    let ours = BlockHeader { encoding: 1, stored_bytes: 8192, ..header.clone() };
    assert_eq!(BlockHeader::parse(&ours.encode()).unwrap().file_bytes(), 4096 + 8192);
    let mut bytes = header.encode().to_vec();
    bytes[128] ^= 2;
    assert_eq!(BlockHeader::parse(&bytes).unwrap_err().kind(), ErrorKind::Corrupt, "its checksum is wrong");
}
