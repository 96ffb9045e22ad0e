//! The shard header: 256 little-endian int32, of which three carry meaning.

use crate::error::Fault;

/// Size of the header in bytes.
pub const BYTES: usize = 1024;
/// The first header word.
pub const MAGIC: i32 = 20_240_520;
/// The second header word; version 1 holds uint16 tokens.
pub const VERSION: i32 = 1;

/// Size in bytes of a shard with `count` tokens.
#[must_use]
pub fn file_bytes(count: i32) -> u64 {
    BYTES as u64 + 2 * u64::from(count.max(0).unsigned_abs())
}

/// Check the first bytes of a file of `size` bytes and return how many tokens it holds.
///
/// # Errors
/// The fault, with the byte offset at which it lies.
pub fn parse(bytes: &[u8], size: u64) -> Result<usize, (u64, Fault)> {
    let (Some(magic), Some(version), Some(count), true) =
        (word(bytes, 0), word(bytes, 1), word(bytes, 2), size >= BYTES as u64)
    else {
        return Err((size, Fault::NoHeader(size)));
    };
    if magic != MAGIC {
        return Err((0, Fault::Magic(magic)));
    }
    if version != VERSION {
        return Err((4, Fault::Version(version)));
    }
    let tokens = match usize::try_from(count) {
        Ok(tokens) if tokens > 0 => tokens,
        _ => return Err((8, Fault::Count(count))),
    };
    match size.cmp(&file_bytes(count)) {
        std::cmp::Ordering::Less => Err((size, Fault::Short { count, size })),
        std::cmp::Ordering::Greater => Err((file_bytes(count), Fault::Long { count, size })),
        std::cmp::Ordering::Equal => Ok(tokens),
    }
}

fn word(bytes: &[u8], index: usize) -> Option<i32> {
    let word = bytes.get(4 * index..4 * index + 4)?;
    Some(i32::from_le_bytes(word.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(magic: i32, version: i32, count: i32) -> Vec<u8> {
        let mut bytes: Vec<u8> = [magic, version, count].iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.resize(BYTES, 0);
        bytes
    }

    #[test]
    fn each_fault_is_told_apart() {
        let good = header(MAGIC, VERSION, 5);
        assert_eq!(parse(&good, 1034), Ok(5));
        assert_eq!(parse(&good, 1033), Err((1033, Fault::Short { count: 5, size: 1033 })));
        assert_eq!(parse(&good, 1035), Err((1034, Fault::Long { count: 5, size: 1035 })));
        assert_eq!(parse(&good[..1023], 1023), Err((1023, Fault::NoHeader(1023))));
        assert_eq!(parse(&[], 0), Err((0, Fault::NoHeader(0))));
        assert_eq!(parse(&header(7, 1, 5), 1034), Err((0, Fault::Magic(7))));
        assert_eq!(parse(&header(MAGIC, 7, 5), 1034), Err((4, Fault::Version(7))));
        assert_eq!(parse(&header(MAGIC, 1, 0), 1024), Err((8, Fault::Count(0))));
        assert_eq!(parse(&header(MAGIC, 1, -1), 1022), Err((1022, Fault::NoHeader(1022))));
        assert_eq!(parse(&header(MAGIC, 1, -1), 1024), Err((8, Fault::Count(-1))));
    }

    proptest! {
        #[test]
        fn never_panics_and_accepts_only_exact_sizes(
            bytes in proptest::collection::vec(any::<u8>(), 0..1100),
            size in any::<u64>(), magic in any::<bool>(), count in any::<i32>(),
        ) {
            let bytes = if magic { header(MAGIC, VERSION, count) } else { bytes };
            if let Ok(tokens) = parse(&bytes, size) {
                prop_assert_eq!(size, 1024 + 2 * tokens as u64);
                prop_assert!(tokens > 0);
            }
        }

        #[test]
        fn a_good_header_gives_its_count(count in 1..i32::MAX) {
            prop_assert_eq!(parse(&header(MAGIC, VERSION, count), file_bytes(count)), Ok(usize::try_from(count).unwrap()));
        }
    }
}
