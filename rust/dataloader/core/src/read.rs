//! Read the tokens of one shard; a file that changes meanwhile gives an error, never a signal.
//!
//! A shard is mapped, or read by `pread` where that is asked for or a fault in the mapping could
//! not be answered. Tokens of a file that was changed may be any: [`Readers::unchanged`] tells, by
//! the mapping's flag, size and modification time, and comes after every copy, before it is used.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use jspeed_mapped_file::{Mapping, armed};

use crate::batch::{LINE, Line, view_mut, zeroed_lines};
use crate::config::Backend;
use crate::error::{Error, Kind};
use crate::shard::{Catalog, HEADER_BYTES, Shard, open_regular};
use crate::tokens::Tokens;

/// Tokens between looks at whether to go on, and that `pread` reads at a time (64 KiB of uint16).
const CHUNK: usize = 1 << 15;

/// An open shard.
pub struct Reader {
    shard: Shard,
    file: File,
    stamp: Stamp,
    /// Without one, `memory` has the tokens of `window`, which `pread` read last.
    map: Option<Mapping>,
    window: Range<usize>,
    memory: Vec<Line>,
    /// Whether tokens were read since the file was last found unchanged.
    used: bool,
}

#[derive(PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { size: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) })
    }
}

impl Reader {
    /// Open a shard that a [`Catalog`] has validated. Errors: it cannot be opened, or its size is
    /// no longer what the catalogue saw.
    fn open(shard: &Shard, backend: Backend) -> Result<Self, Error> {
        let opened = open_regular(&shard.path).and_then(|file| Ok((Stamp::of(&file)?, file)));
        let (stamp, file) = opened.map_err(|error| Error::io(&shard.path, 0, error))?;
        let was = shard.width.offset(shard.tokens);
        if stamp.size != was {
            return Err(changed(shard, &resized(was, stamp.size)));
        }
        let map = if backend == Backend::Map { Mapping::new(&file) } else { None };
        let (window, memory) = Default::default();
        Ok(Self { shard: shard.clone(), file, stamp, map, window, memory, used: false })
    }

    /// Borrow the tokens of `range`. Errors: the file was truncated or cannot be read.
    pub fn tokens(&mut self, range: Range<usize>) -> Result<Tokens<'_>, Error> {
        self.used = true;
        let here = range.start >= self.window.start && range.end <= self.window.end;
        if self.map.is_none() && !here {
            self.read(range.start..range.end.max(self.chunk_from(range.start)))?;
        }
        let (bytes, first) = match &self.map {
            // They start at a page, and the catalogue checked their number.
            Some(map) => (&map.bytes()[HEADER_BYTES..], 0),
            None => (bytemuck::cast_slice(&self.memory), self.window.start),
        };
        let range = range.start - first..range.end - first;
        Ok(Tokens::new(bytes, self.shard.width).slice(range))
    }

    /// Find the first `token` in `range`. Errors: as [`Reader::tokens`], and once `stop` is set.
    pub fn find(
        &mut self,
        token: u32,
        range: Range<usize>,
        stop: &AtomicBool,
    ) -> Result<Option<usize>, Error> {
        let mut from = range.start;
        while from < range.end {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::stopped());
            }
            let to = range.end.min(self.chunk_from(from));
            if let Some(at) = self.tokens(from..to)?.find(token) {
                return Ok(Some(from + at));
            }
            from = to;
        }
        Ok(None)
    }

    /// Check that tokens read since the last check were those of the file that was opened: it has
    /// the same size and was not written to; else [`Kind::Changed`].
    fn unchanged(&mut self) -> Result<(), Error> {
        if !std::mem::take(&mut self.used) {
            return Ok(());
        }
        let now = Stamp::of(&self.file).map_err(|error| Error::io(&self.shard.path, 0, error))?;
        if now == self.stamp && !self.map.as_ref().is_some_and(Mapping::is_torn) {
            return Ok(());
        }
        let resized = resized(self.stamp.size, now.size);
        Err(changed(&self.shard, if now.size == self.stamp.size { WRITTEN } else { &resized }))
    }

    fn chunk_from(&self, token: usize) -> usize {
        (token + CHUNK).min(self.shard.tokens)
    }

    fn read(&mut self, range: Range<usize>) -> Result<(), Error> {
        let offset = self.shard.width.offset(range.start);
        let len = self.shard.width.bytes() * range.len();
        self.window = 0..0;
        if self.memory.len() < len.div_ceil(LINE) {
            self.memory = zeroed_lines(len.div_ceil(LINE))?;
        }
        if let Err(error) = self.file.read_exact_at(view_mut(&mut self.memory, len), offset) {
            self.unchanged()?;
            return Err(Error::io(&self.shard.path, offset, error));
        }
        self.window = range;
        Ok(())
    }
}

const WRITTEN: &str = "was written to, or its disk failed, while it was read";

fn resized(was: u64, now: u64) -> String {
    format!("had {was} bytes when it was opened and has {now} now, noticed while reading")
}

fn changed(shard: &Shard, what: &str) -> Error {
    let path = shard.path.display();
    Error::new(
        Kind::Changed,
        format!(
            "shard {path} {what}; restore it, and replace shards by renaming a finished file over \
             them"
        ),
    )
}

/// The shards that are open: the last two that were used.
pub struct Readers<'a> {
    catalog: &'a Catalog,
    backend: Backend,
    open: Vec<(usize, Reader)>,
    /// How many times a shard was opened after the first.
    pub switches: u64,
}

impl<'a> Readers<'a> {
    const MOST: usize = 2;

    /// No shard is open yet.
    pub fn new(catalog: &'a Catalog, backend: Backend) -> Self {
        Self { catalog, backend, open: Vec::new(), switches: 0 }
    }

    /// Before every batch: where faults are no longer answered, shards are read from here on.
    pub fn begin(&mut self) {
        if self.backend == Backend::Map && !armed() {
            self.backend = Backend::Pread;
            self.open.iter_mut().for_each(|(_, reader)| reader.map = None);
        }
    }

    /// The reader of a shard, opened if need be; the one that was used least recently makes room
    /// for it.
    pub fn get(&mut self, shard: usize) -> Result<&mut Reader, Error> {
        let found = self.open.iter().position(|(index, _)| *index == shard);
        if let Some(at) = found {
            self.open[at..].rotate_left(1);
        } else {
            if self.open.len() == Self::MOST {
                self.open.remove(0).1.unchanged()?;
            }
            self.switches += u64::from(!self.open.is_empty());
            self.open.push((shard, Reader::open(&self.catalog.shards()[shard], self.backend)?));
        }
        let last = self.open.len() - 1;
        Ok(&mut self.open[last].1)
    }

    /// After every batch, before it is used, and before an error that tokens gave rise to is told:
    /// [`Kind::Changed`] where a shard is not what it was when it was opened.
    pub fn unchanged(&mut self) -> Result<(), Error> {
        self.open.iter_mut().try_for_each(|(_, reader)| reader.unchanged())
    }
}

/// Have the system read the first 4 MiB of a shard that will be needed soon; while they are used it
/// reads on, and into larger pages than those that are asked for. A failure costs only time.
#[cfg(target_os = "linux")]
pub fn will_need(shard: &Shard) {
    use rustix::fs::{Advice, fadvise};
    if let Ok(file) = open_regular(&shard.path) {
        let _ = fadvise(&file, 0, std::num::NonZeroU64::new(4 << 20), Advice::WillNeed);
    }
}

/// Other systems are not asked.
#[cfg(not(target_os = "linux"))]
pub fn will_need(_: &Shard) {}
