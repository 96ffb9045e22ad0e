//! Shards on disk: their headers and sizes checked once, nothing mapped.
//!
//! A shard is 256 little-endian int32 words, of which the first three are used, and then tokens.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Kind};

/// Size of the header in bytes.
pub const HEADER_BYTES: usize = 1024;

/// The integers that tokens are stored as; the first word of the header says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// uint16, as `FineWeb`'s shards of GPT-2 tokens.
    Two = 2,
    /// uint32, as llm.c's shards of Llama 3 tokens.
    Four = 4,
}

impl Width {
    /// Bytes of a token.
    pub fn bytes(self) -> usize {
        self as usize
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
        if self == Self::Two { u16::MAX.into() } else { u32::MAX }
    }

    /// The byte of a shard at which a token starts; also the size of a shard of so many tokens.
    pub fn offset(self, token: usize) -> u64 {
        (HEADER_BYTES + self.bytes() * token) as u64
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Two { "uint16" } else { "uint32" })
    }
}

/// The header of a shard with `count` tokens of `width`.
pub fn encode_header(count: i32, width: Width) -> Vec<u8> {
    let [magic, version] = width.words();
    let mut bytes: Vec<u8> =
        [magic, version, count].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(HEADER_BYTES, 0);
    bytes
}

/// Check the first bytes of a file of `size` bytes and return how many tokens it holds, and of
/// which width.
///
/// # Errors
/// What is wrong and what to do, to follow the name of the file in a message.
pub fn parse_header(bytes: &[u8], size: u64) -> Result<(usize, Width), String> {
    let fault = |what: String| Err(format!("{what}; copy it again or make it again"));
    let (Some(magic), Some(version), Some(count), true) =
        (word(bytes, 0), word(bytes, 1), word(bytes, 2), size >= HEADER_BYTES as u64)
    else {
        return fault(format!(
            "has {size} bytes, fewer than the {HEADER_BYTES} bytes of a shard header"
        ));
    };
    let widths = [Width::Two, Width::Four];
    let Some(width) = widths.into_iter().find(|width| width.words()[0] == magic) else {
        let [two, four] = widths.map(|width| format!("{} ({width})", width.words()[0]));
        return fault(format!(
            "is not a token shard: its first header word should be the magic number {two} or \
             {four} but is {magic}"
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
            "{what}: its header counts {count} {width} tokens, which take {need} bytes, but the \
             file has {size}"
        ));
    }
    Ok((tokens, width))
}

fn word(bytes: &[u8], index: usize) -> Option<i32> {
    let word = bytes.get(4 * index..4 * index + 4)?;
    Some(i32::from_le_bytes(word.try_into().ok()?))
}

/// One validated shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// How many tokens it holds.
    pub tokens: usize,
    /// How they are stored.
    pub width: Width,
}

/// Validated shards, sorted by file name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalog {
    shards: Vec<Shard>,
    fingerprint: String,
}

impl Catalog {
    /// Check the header and size of every file and sort them by name.
    ///
    /// # Errors
    /// No path, a file that cannot be read, one that is not a valid shard, or shards of two widths.
    pub fn open(mut paths: Vec<PathBuf>) -> Result<Self, Error> {
        if paths.is_empty() {
            return Err(Error::argument(
                "no shard was given, at least one was expected; name some",
            ));
        }
        paths.sort_by(|a, b| a.file_name().cmp(&b.file_name()).then_with(|| a.cmp(b)));
        let mut hash = Fingerprint::default();
        let mut shards: Vec<Shard> = Vec::with_capacity(paths.len());
        for path in paths {
            let (bytes, size) = read_header(&path).map_err(|error| Error::io(&path, 0, error))?;
            let (tokens, width) = parse_header(&bytes, size).map_err(|fault| {
                Error::new(Kind::Format, format!("shard {} {fault}", path.display()))
            })?;
            hash.field(path.file_name().unwrap_or_default().as_bytes());
            hash.field(&size.to_le_bytes());
            hash.field(&bytes);
            if let Some(first) = shards.first().filter(|first| first.width != width) {
                return Err(Error::argument(format!(
                    "shard {} holds {width} tokens but {}, which comes first, holds {}; open \
                     shards of one width",
                    path.display(),
                    first.path.display(),
                    first.width
                )));
            }
            shards.push(Shard { path, tokens, width });
        }
        Ok(Self { shards, fingerprint: hash.hex() })
    }

    /// The shards in stream order.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Tokens in all shards.
    pub fn num_tokens(&self) -> usize {
        self.shards.iter().map(|shard| shard.tokens).sum()
    }

    /// How the tokens of all shards are stored.
    pub fn width(&self) -> Width {
        self.shards[0].width
    }

    /// Hexadecimal hash of every shard's name, size and header.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
}

impl fmt::Display for Catalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |shard: &Shard| {
            shard.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
        };
        let (first, last) = (name(&self.shards[0]), name(&self.shards[self.shards.len() - 1]));
        let names = if self.shards.len() == 1 { first } else { format!("{first} .. {last}") };
        write!(
            f,
            "Shards({} files, {} {} tokens, {names}, fingerprint {})",
            self.shards.len(),
            self.num_tokens(),
            self.width(),
            &self.fingerprint[..12]
        )
    }
}

/// Open a file to read; a pipe, which would be waited for, is an error as any other that is no
/// regular file.
pub(crate) fn open_regular(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    Ok(file)
}

fn read_header(path: &Path) -> std::io::Result<(Vec<u8>, u64)> {
    let file = open_regular(path)?;
    let size = file.metadata()?.len();
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    file.take(HEADER_BYTES as u64).read_to_end(&mut bytes)?;
    Ok((bytes, size))
}

/// 128-bit FNV-1a over length-prefixed fields: names data and settings, and is no protection
/// against forgery.
pub(crate) struct Fingerprint(u128);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fingerprint {
    pub(crate) fn field(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
        }
    }

    pub(crate) fn hex(&self) -> String {
        format!("{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header([magic, version]: [i32; 2], count: i32) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            [magic, version, count].iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.resize(HEADER_BYTES, 0);
        bytes
    }

    #[test]
    fn each_fault_is_told_apart() {
        let (narrow, wide) = ([20_240_520, 1], [20_240_801, 7]);
        assert_eq!(parse_header(&header(narrow, 5), 1034), Ok((5, Width::Two)));
        assert_eq!(parse_header(&header(wide, 5), 1044), Ok((5, Width::Four)));
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
            let fault = parse_header(&header(words, count), size).unwrap_err();
            assert!(fault.contains(told), "{fault}");
        }
        assert!(parse_header(&[], 0).unwrap_err().contains("has 0 bytes"));
    }

    proptest! {
        #[test]
        fn never_panics_and_accepts_only_exact_sizes(
            bytes in proptest::collection::vec(any::<u8>(), 0..1100),
            size: u64, magic: bool, wide: bool, count: i32,
        ) {
            let width = if wide { Width::Four } else { Width::Two };
            let bytes = if magic { header(width.words(), count) } else { bytes };
            if let Ok((tokens, width)) = parse_header(&bytes, size) {
                prop_assert_eq!(size, (1024 + width.bytes() * tokens) as u64);
                prop_assert!(tokens > 0);
            }
        }

        #[test]
        fn a_good_header_gives_its_count(count in 1..i32::MAX, wide in any::<bool>()) {
            let width = if wide { Width::Four } else { Width::Two };
            let (good, tokens) = (header(width.words(), count), usize::try_from(count).unwrap());
            prop_assert_eq!(parse_header(&good, width.offset(tokens)), Ok((tokens, width)));
            prop_assert_eq!(encode_header(count, width), good);
        }
    }
}
