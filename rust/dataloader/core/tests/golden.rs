//! Hash of the first 1000 batches of a three-stage schedule (modded-nanogpt's shapes), equal in
//! Python and everywhere.
//!
//! The shards come from integers alone: token `i` of shard `k` is drawn from `mix(2^32 k + i)`,
//! `SplitMix64`'s finaliser. It is the document start 50256 when the draw is a multiple of 690,
//! `FineWeb`'s mean length, and otherwise the draw shifted right by 16, modulo 50256.
//! `tests/data/test_golden.py` makes the same bytes.

mod common;

use common::{Folder, config, loader, next};
use jspeed_dataloader_core::Backend;
use sha2::{Digest, Sha256};

/// Made by `tests/data/test_golden.py`'s `NumPy` model of recipe 1.3, not by this loader.
const DIGEST: &str = "cd5041a3e2c2ff483025eca6267e2f76d79805695b0fd262e95c47e4b2304c39";
const SHARDS: u64 = 4;
const TOKENS: u64 = 3_000_000;
const BOS: u16 = 50_256;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn token(shard: u64, index: u64) -> u16 {
    let draw = mix((shard << 32) | index);
    if draw % 690 == 0 { BOS } else { u16::try_from((draw >> 16) % u64::from(BOS)).unwrap() }
}

#[test]
fn a_thousand_parity_batches_have_the_known_hash() {
    let folder = Folder::new();
    let shards: Vec<Vec<u16>> =
        (0..SHARDS).map(|shard| (0..TOKENS).map(|index| token(shard, index)).collect()).collect();
    let paths = folder.write(&shards);
    let mut given = config(
        8,
        &[(333, 16_384, Some(896)), (333, 32_768, Some(2048)), (334, 49_152, Some(2048))],
    );
    let docs = [128, 256, 512];
    given.stages.iter_mut().zip(docs).for_each(|(stage, docs)| stage.max_docs = Some(docs));
    (given.bos_id, given.epochs, given.prefetch) = (BOS.into(), None, 2);
    let made = loader(&paths, &given, Backend::Map).unwrap();
    let mut hash = Sha256::new();
    let mut batches = 0;
    while let Some(batch) = next(&made).unwrap() {
        hash.update(batch.tokens().as_bytes());
        batches += 1;
    }
    assert_eq!(batches, 1000);
    assert_eq!(format!("{:x}", hash.finalize()), DIGEST);
}
