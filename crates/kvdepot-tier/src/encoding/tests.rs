use proptest::prelude::*;

use super::*;

fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    }
}

fn random(bytes: usize, seed: u64) -> Vec<u8> {
    let mut next = numbers(seed);
    (0..bytes).map(|_| (next() >> 23) as u8).collect()
}

/// Numbers like those of a KV cache: exponents of a few values, random mantissas.
fn halves(bytes: usize, seed: u64) -> Vec<u8> {
    let mut next = numbers(seed);
    let mut out: Vec<u8> = (0..bytes.div_ceil(2))
        .flat_map(|_| {
            let (exponent, rest) = (118 + next().trailing_zeros().min(9) as u16, next() as u16);
            ((rest & 0x807f) | (exponent << 7)).to_le_bytes()
        })
        .collect();
    out.truncate(bytes);
    out
}

fn encode(encoding: Encoding, block: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut out = vec![0xa5; most];
    let read = |at: usize, piece: &mut [u8]| piece.copy_from_slice(&block[at..at + piece.len()]);
    let stored = Encoder::new(encoding).unwrap().block(block.len(), read, &mut out)?;
    out.truncate(stored);
    Some(out)
}

fn decoded(encoding: Encoding, payload: &[u8], block_bytes: usize) -> Result<Vec<u8>> {
    let mut block = vec![0xa5; block_bytes];
    decode(encoding, payload, block_bytes, |at, piece| block[at..at + piece.len()].copy_from_slice(piece))?;
    Ok(block)
}

#[test]
fn numbers_of_an_encoding_are_its_own() {
    for encoding in Encoding::ALL {
        assert_eq!(Encoding::of(encoding.number()), Some(encoding));
    }
    assert_eq!([Encoding::of(0), Encoding::of(3)], [None, None]);
}

#[test]
fn bfloat16_blocks_save_a_fifth_and_come_back() {
    for bytes in [2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 77] {
        let block = halves(bytes, 7);
        let payload = encode(Encoding::Halves, &block, bytes * 4 / 5).expect("it fits");
        assert_eq!(decoded(Encoding::Halves, &payload, bytes).unwrap(), block);
    }
}

#[test]
fn random_bytes_are_given_up_after_a_few_chunks() {
    let bytes = 100 * CHUNK_BYTES;
    let mut pieces = 0;
    let read = |_: usize, piece: &mut [u8]| {
        pieces += 1;
        piece.copy_from_slice(&random(piece.len(), pieces as u64));
    };
    let mut out = vec![0; 2 * bytes];
    assert_eq!(Encoder::new(Encoding::Halves).unwrap().block(bytes, read, &mut out), None);
    assert_eq!(pieces, CHUNKS_TRIED);
}

/// A plane that got smaller once is tried again after chunks in which it did not.
#[test]
fn a_plane_is_tried_again() {
    let bytes = 24 * CHUNK_BYTES;
    let mut block = vec![0; bytes];
    block[CHUNK_BYTES..2 * CHUNK_BYTES].copy_from_slice(&random(CHUNK_BYTES, 1));
    let payload = encode(Encoding::Bytes, &block, bytes).expect("it fits");
    assert!(payload.len() < 10 * CHUNK_BYTES, "{}", payload.len());
    assert_eq!(decoded(Encoding::Bytes, &payload, bytes).unwrap(), block);
}

#[test]
fn lengths_that_lie_are_corrupt() {
    let block = halves(CHUNK_BYTES + 1000, 3);
    for encoding in Encoding::ALL {
        let payload = encode(encoding, &block, block.len() + 64).expect("it fits");
        let kind = |payload: &[u8], bytes| decoded(encoding, payload, bytes).map_err(|e| e.kind());
        let bad = Err(ErrorKind::Corrupt);
        let bytes = block.len();
        assert_eq!(kind(&payload, bytes), Ok(block.clone()));
        for other in [bytes - 1, bytes + 1, bytes + CHUNK_BYTES, CHUNK_BYTES] {
            assert_eq!(kind(&payload, other), bad, "{encoding:?} {other}");
        }
        for cut in [0, 1, 3, 4, 5, payload.len() - 1] {
            assert_eq!(kind(&payload[..cut], bytes), bad, "{encoding:?} {cut}");
        }
        assert_eq!(kind(&[&payload[..], &[0]].concat(), bytes), bad);
        for word in [0, 1, u32::MAX, RAW, RAW - 1, RAW | 5] {
            let mut payload = payload.clone();
            payload[..4].copy_from_slice(&word.to_le_bytes());
            assert_eq!(kind(&payload, bytes), bad, "{encoding:?} {word:#x}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_block_comes_back(
        bytes in prop_oneof![1_usize..5000, CHUNK_BYTES - 3..CHUNK_BYTES + 3],
        seed in any::<u64>(),
        is_bytes in any::<bool>(),
        is_random in any::<bool>(),
    ) {
        let encoding = if is_bytes { Encoding::Bytes } else { Encoding::Halves };
        let block = if is_random { random(bytes, seed) } else { halves(bytes, seed) };
        let payload = encode(encoding, &block, bytes + 64).expect("it fits");
        prop_assert_eq!(decoded(encoding, &payload, bytes).unwrap(), block);
        prop_assert!(encode(encoding, &halves(bytes, seed), 4).is_none());
    }

    /// Changed payloads never panic, and never write more than the block.
    #[test]
    fn a_changed_payload_decodes_to_something_or_not(
        seed in any::<u64>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
        is_bytes in any::<bool>(),
    ) {
        let encoding = if is_bytes { Encoding::Bytes } else { Encoding::Halves };
        let block = halves(6000, seed);
        let mut payload = encode(encoding, &block, 6064).expect("it fits");
        for (at, byte) in changes {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        if is_cut {
            payload.truncate(cut.index(payload.len()));
        }
        if let Err(error) = decoded(encoding, &payload, block.len()) {
            prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
        }
    }

    /// Nor do arbitrary bytes.
    #[test]
    fn arbitrary_bytes_decode_to_something_or_not(
        payload in prop::collection::vec(any::<u8>(), 0..600),
        bytes in 1_usize..2000,
    ) {
        for encoding in Encoding::ALL {
            if let Err(error) = decoded(encoding, &payload, bytes) {
                prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
            }
        }
    }
}
