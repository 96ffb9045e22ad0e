//! The shards of a data set: every header and size checked once, nothing mapped.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Kind};
use crate::header::{self, Width};

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
                "no shard was given, at least one was expected; make some with `jspeed prepare text FILES \
                 --out DIR`",
            ));
        }
        paths.sort_by(|a, b| a.file_name().cmp(&b.file_name()).then_with(|| a.cmp(b)));
        let mut hash = Fingerprint::default();
        let mut shards: Vec<Shard> = Vec::with_capacity(paths.len());
        for path in paths {
            let (bytes, size) = read_header(&path).map_err(|error| Error::io(&path, 0, &error))?;
            let (tokens, width) = header::parse(&bytes, size).map_err(|fault| {
                Error::new(Kind::Format, format!("shard {} {fault}", path.display()))
            })?;
            hash.field(path.file_name().unwrap_or_default().as_bytes());
            hash.field(&size.to_le_bytes());
            hash.field(&bytes);
            if let Some(first) = shards.first().filter(|first| first.width != width) {
                return Err(Error::argument(format!(
                    "shard {} holds {width} tokens but {}, which comes first, holds {}; open shards of one width",
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

impl std::fmt::Display for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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

/// Open a file to read; a pipe, which would be waited for, is an error as any other that is no regular file.
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
    let mut bytes = Vec::with_capacity(header::BYTES);
    file.take(header::BYTES as u64).read_to_end(&mut bytes)?;
    Ok((bytes, size))
}

/// 128-bit FNV-1a over length-prefixed fields: names data and settings, and is no protection against forgery.
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
