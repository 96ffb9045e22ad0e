//! The shard header: 256 little-endian int32, of which the first three are used.

use std::fmt;

/// Size of the header in bytes.
pub const BYTES: usize = 1024;

/// The integers that tokens are stored as; the magic number says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// uint16, as `FineWeb`'s shards of GPT-2 tokens.
    Two,
    /// uint32, as llm.c's shards of Llama 3 tokens.
    Four,
}

impl Width {
    /// Bytes of a token.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// The first header word.
    #[must_use]
    pub fn magic(self) -> i32 {
        match self {
            Self::Two => 20_240_520,
            Self::Four => 20_240_801,
        }
    }

    /// The second header word.
    #[must_use]
    pub fn version(self) -> i32 {
        match self {
            Self::Two => 1,
            Self::Four => 7,
        }
    }

    /// The largest id that fits.
    #[must_use]
    pub fn largest(self) -> u32 {
        match self {
            Self::Two => u16::MAX.into(),
            Self::Four => u32::MAX,
        }
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Two { "uint16" } else { "uint32" })
    }
}

/// Size in bytes of a shard with `count` tokens.
#[must_use]
pub fn file_bytes(count: i32, width: Width) -> u64 {
    BYTES as u64 + width.bytes() as u64 * u64::from(count.max(0).unsigned_abs())
}

/// What is wrong with a shard's header or size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderError {
    /// The file is shorter than a header; its size in bytes.
    NoHeader(u64),
    /// The first header word is no magic number.
    Magic(i32),
    /// The second header word is not the version that belongs to the magic number.
    Version {
        /// The tokens that the magic number promises.
        width: Width,
        /// The version found.
        found: i32,
    },
    /// The third header word, the token count, is zero or negative.
    Count(i32),
    /// The file ends before the last token.
    Short {
        /// Tokens that the header counts.
        count: i32,
        /// Size of a token.
        width: Width,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The file continues after the last token.
    Long {
        /// Tokens that the header counts.
        count: i32,
        /// Size of a token.
        width: Width,
        /// Size of the file in bytes.
        size: u64,
    },
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const AGAIN: &str = "copy it again or make it with `jspeed prepare`";
        match self {
            Self::NoHeader(size) => {
                write!(f, "has {size} bytes, fewer than the {BYTES} bytes of a shard header; {AGAIN}")
            }
            Self::Magic(found) => write!(
                f,
                "is not a token shard: its first header word should be the magic number {} ({}) or {} ({}) but is \
                 {found}; {AGAIN}",
                Width::Two.magic(),
                Width::Two,
                Width::Four.magic(),
                Width::Four
            ),
            Self::Version { width, found } => write!(
                f,
                "should be version {} ({width} tokens) but its header says version {found}; {AGAIN}",
                width.version()
            ),
            Self::Count(0) => write!(f, "should hold at least one token but holds zero tokens; {AGAIN}"),
            Self::Count(found) => {
                write!(f, "should hold at least one token but its header counts {found}; {AGAIN}")
            }
            Self::Short { count, width, size } => write!(
                f,
                "is too short: its header counts {count} {width} tokens, which take {} bytes, but the file has {size}; \
                 {AGAIN}",
                file_bytes(*count, *width)
            ),
            Self::Long { count, width, size } => write!(
                f,
                "has trailing bytes: its header counts {count} {width} tokens, which take {} bytes, but the file has \
                 {size}; {AGAIN}",
                file_bytes(*count, *width)
            ),
        }
    }
}

/// The header of a shard with `count` tokens of `width`.
#[must_use]
pub fn encode(count: i32, width: Width) -> Vec<u8> {
    let words = [width.magic(), width.version(), count];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(BYTES, 0);
    bytes
}

/// Check the first bytes of a file of `size` bytes and return how many tokens it holds, and of which width.
///
/// # Errors
/// The fault, with its byte offset.
pub fn parse(bytes: &[u8], size: u64) -> Result<(usize, Width), (u64, HeaderError)> {
    let (Some(magic), Some(version), Some(count), true) =
        (word(bytes, 0), word(bytes, 1), word(bytes, 2), size >= BYTES as u64)
    else {
        return Err((size, HeaderError::NoHeader(size)));
    };
    let Some(width) = [Width::Two, Width::Four].into_iter().find(|width| width.magic() == magic) else {
        return Err((0, HeaderError::Magic(magic)));
    };
    if version != width.version() {
        return Err((4, HeaderError::Version { width, found: version }));
    }
    let tokens = match usize::try_from(count) {
        Ok(tokens) if tokens > 0 => tokens,
        _ => return Err((8, HeaderError::Count(count))),
    };
    match size.cmp(&file_bytes(count, width)) {
        std::cmp::Ordering::Less => Err((size, HeaderError::Short { count, width, size })),
        std::cmp::Ordering::Greater => {
            Err((file_bytes(count, width), HeaderError::Long { count, width, size }))
        }
        std::cmp::Ordering::Equal => Ok((tokens, width)),
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
        let good = header(20_240_520, 1, 5);
        let width = Width::Two;
        assert_eq!(parse(&good, 1034), Ok((5, width)));
        assert_eq!(parse(&good, 1033), Err((1033, HeaderError::Short { count: 5, width, size: 1033 })));
        assert_eq!(parse(&good, 1035), Err((1034, HeaderError::Long { count: 5, width, size: 1035 })));
        assert_eq!(parse(&good[..1023], 1023), Err((1023, HeaderError::NoHeader(1023))));
        assert_eq!(parse(&[], 0), Err((0, HeaderError::NoHeader(0))));
        assert_eq!(parse(&header(7, 1, 5), 1034), Err((0, HeaderError::Magic(7))));
        assert_eq!(
            parse(&header(20_240_520, 7, 5), 1034),
            Err((4, HeaderError::Version { width, found: 7 }))
        );
        assert_eq!(parse(&header(20_240_520, 1, 0), 1024), Err((8, HeaderError::Count(0))));
        assert_eq!(parse(&header(20_240_520, 1, -1), 1022), Err((1022, HeaderError::NoHeader(1022))));
        assert_eq!(parse(&header(20_240_520, 1, -1), 1024), Err((8, HeaderError::Count(-1))));
        let (wide, width) = (header(20_240_801, 7, 5), Width::Four);
        assert_eq!(parse(&wide, 1044), Ok((5, width)));
        assert_eq!(parse(&wide, 1034), Err((1034, HeaderError::Short { count: 5, width, size: 1034 })));
        assert_eq!(
            parse(&header(20_240_801, 1, 5), 1044),
            Err((4, HeaderError::Version { width, found: 1 }))
        );
    }

    proptest! {
        #[test]
        fn never_panics_and_accepts_only_exact_sizes(
            bytes in proptest::collection::vec(any::<u8>(), 0..1100),
            size in any::<u64>(), magic in any::<bool>(), wide in any::<bool>(), count in any::<i32>(),
        ) {
            let width = if wide { Width::Four } else { Width::Two };
            let bytes = if magic { header(width.magic(), width.version(), count) } else { bytes };
            if let Ok((tokens, width)) = parse(&bytes, size) {
                prop_assert_eq!(size, (1024 + width.bytes() * tokens) as u64);
                prop_assert!(tokens > 0);
            }
        }

        #[test]
        fn a_good_header_gives_its_count(count in 1..i32::MAX, wide in any::<bool>()) {
            let width = if wide { Width::Four } else { Width::Two };
            let good = header(width.magic(), width.version(), count);
            prop_assert_eq!(parse(&good, file_bytes(count, width)), Ok((usize::try_from(count).unwrap(), width)));
            prop_assert_eq!(encode(count, width), good);
        }
    }
}
