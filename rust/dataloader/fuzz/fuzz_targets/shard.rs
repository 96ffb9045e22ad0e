//! Fuzz the shard parser: bytes are refused or parsed exactly, and documents are found as by a
//! plain loop.
//!
//! `cargo +nightly fuzz run shard` in `rust/dataloader`, or on a stable compiler with
//! `RUSTC_BOOTSTRAP=1`.
#![no_main]

use jspeed_dataloader_core::{HEADER_BYTES, Tokens, parse_header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // A header of three words is enough: the rest of the 1024 bytes carries no meaning.
    let (head, body) = bytes.split_at(bytes.len().min(12));
    let size = (HEADER_BYTES + body.len()) as u64;
    match parse_header(head, size) {
        Ok((tokens, width)) => {
            assert_eq!(tokens * width.bytes(), body.len());
            let marker = body.iter().fold(0u32, |sum, &byte| sum.wrapping_add(byte.into())) % 300;
            // As aligned as a shard's.
            let mut memory = vec![0; body.len() + 3];
            let start = memory.as_ptr().align_offset(4);
            let aligned = &mut memory[start..start + body.len()];
            aligned.copy_from_slice(body);
            index(Tokens::new(aligned, width), marker);
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
