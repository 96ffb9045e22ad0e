//! Fuzz the shard parser: bytes are refused or parsed exactly, and documents are found as by a
//! plain loop.
//!
//! `cargo +nightly fuzz run shard` in `rust/dataloader`, or on a stable compiler with
//! `RUSTC_BOOTSTRAP=1`.
#![no_main]

use jspeed_dataloader_core::{HEADER_BYTES, Tokens, Width, parse_header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // A header of three words is enough: the rest of the 1024 bytes carries no meaning.
    let (head, body) = bytes.split_at(bytes.len().min(12));
    let size = (HEADER_BYTES + body.len()) as u64;
    match parse_header(head, size) {
        Ok((tokens, width)) => {
            assert_eq!(tokens * width.bytes(), body.len());
            let marker = body.iter().fold(0u32, |sum, &byte| sum.wrapping_add(byte.into())) % 300;
            match width {
                Width::Two => {
                    let tokens: Vec<u16> = body
                        .chunks_exact(2)
                        .map(|two| u16::from_le_bytes([two[0], two[1]]))
                        .collect();
                    index(Tokens::U16(&tokens), marker);
                }
                Width::Four => {
                    let four =
                        |four: &[u8]| u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
                    index(Tokens::U32(&body.chunks_exact(4).map(four).collect::<Vec<_>>()), marker);
                }
            }
        }
        Err(fault) => assert!(!fault.contains('\n')),
    }
    // Whatever the size of the file is said to be.
    let _ = parse_header(bytes, u64::from(bytes.first().copied().unwrap_or_default()) * 512);
});

fn index(tokens: Tokens<'_>, marker: u32) {
    let all: Vec<usize> = (0..tokens.len()).filter(|&at| tokens.at(at) == marker).collect();
    assert_eq!(tokens.find(marker), all.first().copied());
    assert_eq!(tokens.positions(marker).collect::<Vec<_>>(), all);
    assert_eq!(tokens.find_outside(marker), (0..tokens.len()).find(|&at| tokens.at(at) >= marker));
}
