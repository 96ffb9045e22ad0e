//! The shard header: 256 little-endian int32, of which the first three are used.

use std::fmt;

/// Size of the header in bytes.
pub const BYTES: usize = 1024;

/// The integers that tokens are stored as; the first word of the header says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// uint16, as `FineWeb`'s shards of GPT-2 tokens.
    Two,
    /// uint32, as llm.c's shards of Llama 3 tokens.
    Four,
}

impl Width {
    /// Bytes of a token.
    pub fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// The first two header words: magic number and version.
    pub fn words(self) -> [i32; 2] {
        match self {
            Self::Two => [20_240_520, 1],
            Self::Four => [20_240_801, 7],
        }
    }

    /// The largest id that fits.
    pub fn largest(self) -> u32 {
        match self {
            Self::Two => u16::MAX.into(),
            Self::Four => u32::MAX,
        }
    }

    /// The byte of a shard at which a token starts; also the size of a shard of so many tokens.
    pub fn offset(self, token: usize) -> u64 {
        (BYTES + self.bytes() * token) as u64
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Two { "uint16" } else { "uint32" })
    }
}

/// The header of a shard with `count` tokens of `width`.
pub fn encode(count: i32, width: Width) -> Vec<u8> {
    let [magic, version] = width.words();
    let mut bytes: Vec<u8> =
        [magic, version, count].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(BYTES, 0);
    bytes
}

/// Check the first bytes of a file of `size` bytes and return how many tokens it holds, and of which width.
///
/// # Errors
/// What is wrong and what to do, to follow the name of the file in a message.
pub fn parse(bytes: &[u8], size: u64) -> Result<(usize, Width), String> {
    let fault =
        |what: String| Err(format!("{what}; copy it again or make it with `jspeed prepare`"));
    let (Some(magic), Some(version), Some(count), true) =
        (word(bytes, 0), word(bytes, 1), word(bytes, 2), size >= BYTES as u64)
    else {
        return fault(format!("has {size} bytes, fewer than the {BYTES} bytes of a shard header"));
    };
    let widths = [Width::Two, Width::Four];
    let Some(width) = widths.into_iter().find(|width| width.words()[0] == magic) else {
        let [two, four] = widths.map(|width| format!("{} ({width})", width.words()[0]));
        return fault(format!(
            "is not a token shard: its first header word should be the magic number {two} or {four} but is {magic}"
        ));
    };
    let expected = width.words()[1];
    if version != expected {
        return fault(format!(
            "should be version {expected} ({width} tokens) but its header says version {version}"
        ));
    }
    let Some(tokens) = usize::try_from(count).ok().filter(|&tokens| tokens > 0) else {
        return fault(format!("should hold at least one token but its header counts {count}"));
    };
    let need = width.offset(tokens);
    if size != need {
        let what = if size < need { "is too short" } else { "has trailing bytes" };
        return fault(format!(
            "{what}: its header counts {count} {width} tokens, which take {need} bytes, but the file has {size}"
        ));
    }
    Ok((tokens, width))
}

fn word(bytes: &[u8], index: usize) -> Option<i32> {
    let word = bytes.get(4 * index..4 * index + 4)?;
    Some(i32::from_le_bytes(word.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header([magic, version]: [i32; 2], count: i32) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            [magic, version, count].iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.resize(BYTES, 0);
        bytes
    }

    #[test]
    fn each_fault_is_told_apart() {
        let (narrow, wide) = ([20_240_520, 1], [20_240_801, 7]);
        assert_eq!(parse(&header(narrow, 5), 1034), Ok((5, Width::Two)));
        assert_eq!(parse(&header(wide, 5), 1044), Ok((5, Width::Four)));
        for (words, count, size, told) in [
            (
                narrow,
                5,
                1033,
                "too short: its header counts 5 uint16 tokens, which take 1034 bytes",
            ),
            (narrow, 5, 1035, "trailing bytes"),
            (wide, 5, 1034, "too short: its header counts 5 uint32 tokens, which take 1044 bytes"),
            ([7, 1], 5, 1034, "magic number 20240520 (uint16) or 20240801 (uint32) but is 7"),
            ([20_240_520, 7], 5, 1034, "version 1 (uint16 tokens) but its header says version 7"),
            ([20_240_801, 1], 5, 1044, "version 7 (uint32 tokens) but its header says version 1"),
            (narrow, 0, 1024, "its header counts 0"),
            (narrow, -1, 1024, "its header counts -1"),
            (narrow, -1, 1022, "has 1022 bytes, fewer than"),
        ] {
            let fault = parse(&header(words, count), size).unwrap_err();
            assert!(fault.contains(told), "{fault}");
        }
        assert!(parse(&[], 0).unwrap_err().contains("has 0 bytes"));
    }

    proptest! {
        #[test]
        fn never_panics_and_accepts_only_exact_sizes(
            bytes in proptest::collection::vec(any::<u8>(), 0..1100),
            size in any::<u64>(), magic in any::<bool>(), wide in any::<bool>(), count in any::<i32>(),
        ) {
            let width = if wide { Width::Four } else { Width::Two };
            let bytes = if magic { header(width.words(), count) } else { bytes };
            if let Ok((tokens, width)) = parse(&bytes, size) {
                prop_assert_eq!(size, (1024 + width.bytes() * tokens) as u64);
                prop_assert!(tokens > 0);
            }
        }

        #[test]
        fn a_good_header_gives_its_count(count in 1..i32::MAX, wide in any::<bool>()) {
            let width = if wide { Width::Four } else { Width::Two };
            let (good, tokens) = (header(width.words(), count), usize::try_from(count).unwrap());
            prop_assert_eq!(parse(&good, width.offset(tokens)), Ok((tokens, width)));
            prop_assert_eq!(encode(count, width), good);
        }
    }
}
