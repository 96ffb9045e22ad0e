//! Read the tokens of one shard; a file that changes meanwhile gives an error, never a signal.
//!
//! A shard is mapped, or read by `pread` where that is asked for or a fault in the mapping could
//! not be answered. Tokens of a file that was changed may be any: [`Reader::unchanged`] tells, by
//! the mapping's flag, size and modification time, and comes after every copy, before it is used.
//!
//! While the second half of a shard is consumed, [`ReadAhead`] asks for the next one.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::batch::{LINE, Line, view_mut, zeroed_lines};
use crate::config::Backend;
use crate::error::{Error, Kind};
use crate::mapping::{self, Mapping};
use crate::shard::{Catalog, HEADER_BYTES, Shard, open_regular};
use crate::tokens::Tokens;

/// Tokens between looks at whether to go on, and that `pread` reads at a time (64 KiB of uint16).
const CHUNK: usize = 1 << 15;

enum Source {
    Map(Mapping),
    Pread(Window),
}

/// Tokens that were read.
#[derive(Default)]
struct Window {
    tokens: Range<usize>,
    memory: Vec<Line>,
}

/// An open shard.
pub struct Reader {
    shard: Shard,
    file: File,
    stamp: Stamp,
    source: Source,
    /// Whether tokens were read since the file was last found unchanged.
    used: bool,
    /// Tokens of this batch that are in `bytes_read`, each once.
    counted: Range<usize>,
    bytes_read: u64,
}

#[derive(PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { size: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }
}

impl Reader {
    /// Open a shard that a [`Catalog`] has validated. Errors: it cannot be opened, or its size is
    /// no longer what the catalogue saw.
    fn open(shard: &Shard, backend: Backend) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::io(&shard.path, 0, error);
        let file = open_regular(&shard.path).map_err(failed)?;
        let stamp = Stamp::of(&file.metadata().map_err(failed)?);
        let was = shard.width.offset(shard.tokens);
        if stamp.size != was {
            return Err(changed(shard, &resized(was, stamp.size)));
        }
        let map = if backend == Backend::Map { Mapping::new(&file) } else { None };
        let source = map.map_or_else(|| Source::Pread(Window::default()), Source::Map);
        let shard = shard.clone();
        Ok(Self { shard, file, stamp, source, used: false, counted: 0..0, bytes_read: 0 })
    }

    /// Borrow the tokens of `range`. Errors: the file was truncated or cannot be read.
    pub fn tokens(&mut self, range: Range<usize>) -> Result<Tokens<'_>, Error> {
        self.used = true;
        self.count(&range);
        if let Source::Pread(window) = &self.source {
            if range.start < window.tokens.start || range.end > window.tokens.end {
                self.read(range.start..range.end.max(self.chunk_from(range.start)))?;
            }
        }
        let width = self.shard.width;
        Ok(match &self.source {
            // It starts at a page, and the catalogue checked its size.
            Source::Map(map) => Tokens::new(&map.bytes()[HEADER_BYTES..], width).slice(range),
            Source::Pread(Window { tokens, memory }) => {
                let memory = &bytemuck::cast_slice(memory)[..width.bytes() * tokens.len()];
                let start = tokens.start;
                Tokens::new(memory, width).slice(range.start - start..range.end - start)
            }
        })
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
    pub fn unchanged(&mut self) -> Result<(), Error> {
        if !std::mem::take(&mut self.used) {
            return Ok(());
        }
        let metadata =
            self.file.metadata().map_err(|error| Error::io(&self.shard.path, 0, error))?;
        let now = Stamp::of(&metadata);
        let torn = matches!(&self.source, Source::Map(map) if map.is_torn());
        if now == self.stamp && !torn {
            return Ok(());
        }
        let resized = resized(self.stamp.size, now.size);
        Err(changed(&self.shard, if now.size == self.stamp.size { WRITTEN } else { &resized }))
    }

    fn chunk_from(&self, token: usize) -> usize {
        (token + CHUNK).min(self.shard.tokens)
    }

    fn count(&mut self, range: &Range<usize>) {
        if !(self.counted.start..=self.counted.end).contains(&range.start) {
            self.counted = range.start..range.start;
        }
        let more = range.end.saturating_sub(self.counted.end);
        self.counted.end += more;
        self.bytes_read += (self.shard.width.bytes() * more) as u64;
    }

    fn read(&mut self, range: Range<usize>) -> Result<(), Error> {
        let offset = self.shard.width.offset(range.start);
        let len = self.shard.width.bytes() * range.len();
        let mut window = Window { tokens: range, memory: Vec::new() };
        if let Source::Pread(before) = &mut self.source {
            before.tokens = 0..0;
            window.memory = std::mem::take(&mut before.memory);
        }
        if window.memory.len() < len.div_ceil(LINE) {
            window.memory = zeroed_lines(len.div_ceil(LINE))?;
        }
        if let Err(error) = self.file.read_exact_at(view_mut(&mut window.memory, len), offset) {
            self.unchanged()?;
            return Err(Error::io(&self.shard.path, offset, error));
        }
        self.source = Source::Pread(window);
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
pub struct Readers {
    backend: Backend,
    open: Vec<(usize, Reader)>,
    switches: u64,
    bytes_closed: u64,
}

impl Readers {
    const MOST: usize = 2;

    /// No shard is open yet.
    pub fn new(backend: Backend) -> Self {
        Self { backend, open: Vec::new(), switches: 0, bytes_closed: 0 }
    }

    /// Before every batch: where faults are no longer answered, shards are read from here on.
    pub fn begin(&mut self) {
        let answered = self.backend == Backend::Pread || mapping::armed();
        for (_, reader) in &mut self.open {
            reader.counted.start = reader.counted.end;
            if !answered && matches!(reader.source, Source::Map(_)) {
                reader.source = Source::Pread(Window::default());
            }
        }
    }

    /// The reader of a shard, opened if need be; the one that was used least recently makes room
    /// for it.
    pub fn get(&mut self, catalog: &Catalog, shard: usize) -> Result<&mut Reader, Error> {
        let found = self.open.iter().position(|(index, _)| *index == shard);
        if let Some(at) = found {
            self.open[at..].rotate_left(1);
        } else {
            if self.open.len() == Self::MOST {
                let (_, mut oldest) = self.open.remove(0);
                oldest.unchanged()?;
                self.bytes_closed += oldest.bytes_read;
            }
            self.switches += u64::from(!self.open.is_empty());
            self.open.push((shard, Reader::open(&catalog.shards()[shard], self.backend)?));
        }
        let last = self.open.len() - 1;
        Ok(&mut self.open[last].1)
    }

    /// After every batch, before it is used, and before an error that tokens gave rise to is told:
    /// [`Reader::unchanged`] of each.
    pub fn unchanged(&mut self) -> Result<(), Error> {
        self.open.iter_mut().try_for_each(|(_, reader)| reader.unchanged())
    }

    /// How many times a shard was opened after the first.
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Bytes read from all shards so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_closed + self.open.iter().map(|(_, reader)| reader.bytes_read).sum::<u64>()
    }
}

/// The one shard that is being read ahead.
#[derive(Default)]
pub(crate) struct ReadAhead {
    shard: Option<(usize, Option<File>)>,
    advised: u64,
}

impl ReadAhead {
    /// Ask for as much of the next shard as the current one is consumed past its half; a failure
    /// costs only time.
    ///
    /// In pieces, because one request for a whole cold shard would keep the thread from making
    /// batches.
    pub(crate) fn advise(&mut self, index: usize, next: &Shard, consumed: usize, of: usize) {
        let past = (2 * consumed).saturating_sub(of);
        if past == 0 {
            return;
        }
        if self.shard.as_ref().is_none_or(|(open, _)| *open != index) {
            (self.shard, self.advised) = (Some((index, open_regular(&next.path).ok())), 0);
        }
        let wanted = u128::from(next.width.offset(next.tokens)) * past as u128 / of as u128;
        let wanted = u64::try_from(wanted).unwrap_or_default();
        if let Some((_, Some(file))) = &self.shard {
            if wanted > self.advised {
                will_need(file, self.advised, wanted - self.advised);
                self.advised = wanted;
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn will_need(file: &File, from: u64, len: u64) {
    use rustix::fs::{Advice, fadvise};
    let _ = fadvise(file, from, std::num::NonZeroU64::new(len), Advice::WillNeed);
}

#[cfg(not(target_os = "linux"))]
fn will_need(_: &File, _: u64, _: u64) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Width;

    #[test]
    fn advises_the_next_shard_in_proportion_to_the_second_half() {
        let path = std::env::temp_dir().join(format!("jspeed-ahead-{}", std::process::id()));
        std::fs::write(&path, [0; 3024]).unwrap();
        let next = Shard { path: path.clone(), tokens: 1000, width: Width::Two };
        let mut ahead = ReadAhead::default();
        ahead.advise(1, &next, 500, 1000);
        assert!(ahead.shard.is_none());
        let asked = |ahead: &mut ReadAhead, index, consumed| {
            ahead.advise(index, &next, consumed, 1000);
            (ahead.shard.as_ref().map(|(open, _)| *open), ahead.advised)
        };
        assert_eq!(asked(&mut ahead, 1, 750), (Some(1), 1512));
        assert_eq!(asked(&mut ahead, 1, 1000), (Some(1), 3024));
        assert_eq!(asked(&mut ahead, 2, 600), (Some(2), 604));
        std::fs::remove_file(path).unwrap();
        assert_eq!(asked(&mut ahead, 3, 600), (Some(3), 0));
    }
}
