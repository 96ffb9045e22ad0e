//! Read the tokens of one shard; a truncated file gives an error, not SIGBUS.
//!
//! Touching a mapped page beyond the end of its file raises SIGBUS, so every range is populated by
//! `madvise(MADV_POPULATE_READ)` before it is touched; where the kernel has no such advice the shard is read by
//! `pread` instead. A file that was cut inside its last page, or written in place, gives no signal at all:
//! [`Reader::unchanged`] finds those by size and modification time and belongs after every copy.

use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::Pod;
use memmap2::Mmap;
use rustix::io::Errno;

use crate::buffer::{LINE, Line, view, view_mut};
use crate::catalog::{Catalog, Shard, open_regular};
use crate::config::Backend;
use crate::error::{Error, Kind};
use crate::header::{self, Width};
use crate::scan::Tokens;

/// Tokens populated at a time while scanning (64 KiB of uint16): small, so that few unneeded pages are read.
const CHUNK: usize = 1 << 15;

enum Source {
    Map(Mmap),
    Pread(Vec<Line>),
}

/// An open shard.
pub struct Reader {
    shard: Shard,
    file: File,
    stamp: Stamp,
    source: Source,
    ready: Range<usize>,
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
    /// Open a shard that a [`Catalog`] has validated. Errors: it cannot be opened, or its size is no longer what the
    /// catalogue saw.
    pub fn open(shard: &Shard, backend: Backend) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::io(&shard.path, 0, &error);
        let file = open_regular(&shard.path).map_err(failed)?;
        let stamp = Stamp::of(&file.metadata().map_err(failed)?);
        let was = shard.width.offset(shard.tokens);
        if stamp.size != was {
            return Err(changed(shard, 0, &resized(was, stamp.size)));
        }
        // SAFETY: the mapping is read-only and private to this reader. Another process may still change the file:
        // ranges are populated before they are touched and `unchanged` is called before a copy is used.
        #[expect(
            unsafe_code,
            reason = "mapping a file that others may change has no safe interface"
        )]
        let map = if backend == Backend::Map { unsafe { Mmap::map(&file) }.ok() } else { None };
        let source = map.map_or_else(|| Source::Pread(Vec::new()), Source::Map);
        Ok(Self { shard: shard.clone(), file, stamp, source, ready: 0..0, bytes_read: 0 })
    }

    /// Forget which tokens were found readable; call it at the start of every batch.
    pub fn rewind(&mut self) {
        self.ready = 0..0;
    }

    /// Borrow the tokens of `range`. Errors: the file was truncated or cannot be read.
    pub fn tokens(&mut self, range: Range<usize>) -> Result<Tokens<'_>, Error> {
        let ahead = match self.source {
            Source::Map(_) => range.end,
            // The next piece is mostly near.
            Source::Pread(_) => range.end.max(self.chunk_from(range.start)),
        };
        self.make_ready(&range, ahead)?;
        let width = self.shard.width;
        Ok(match &self.source {
            Source::Map(map) => match width {
                Width::Two => Tokens::U16(&body(map)[range]),
                Width::Four => Tokens::U32(&body(map)[range]),
            },
            Source::Pread(window) => {
                let Range { start, end } = self.ready;
                let (held, range) = (end - start, range.start - start..range.end - start);
                match width {
                    Width::Two => Tokens::U16(&view(window, held)[range]),
                    Width::Four => Tokens::U32(&view(window, held)[range]),
                }
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
            // Scan the populated range first: a document costs no system call of its own.
            if !self.ready.contains(&from) {
                self.make_ready(&(from..from + 1), self.chunk_from(from))?;
            }
            let to = range.end.min(self.ready.end);
            if let Some(at) = self.tokens(from..to)?.find(token) {
                return Ok(Some(from + at));
            }
            from = to;
        }
        Ok(None)
    }

    /// Check that the file still is the one that was opened: same size, not written to; else [`Kind::Changed`].
    pub fn unchanged(&self) -> Result<(), Error> {
        let offset = self.shard.width.offset(self.ready.start);
        let metadata =
            self.file.metadata().map_err(|error| Error::io(&self.shard.path, offset, &error))?;
        let now = Stamp::of(&metadata);
        if now == self.stamp {
            return Ok(());
        }
        let what =
            if now.size == self.stamp.size { WRITTEN } else { &resized(self.stamp.size, now.size) };
        Err(changed(&self.shard, offset, what))
    }

    fn chunk_from(&self, token: usize) -> usize {
        (token + CHUNK).min(self.shard.tokens)
    }

    /// Make `range` readable, and if that takes a system call, everything up to `ahead`.
    fn make_ready(&mut self, range: &Range<usize>, ahead: usize) -> Result<(), Error> {
        if range.start >= self.ready.start && range.end <= self.ready.end {
            return Ok(());
        }
        if let Source::Map(map) = &self.source {
            if !(self.ready.start..=self.ready.end).contains(&range.start) {
                self.ready = range.start..range.start;
            }
            let (from, to) =
                (self.shard.width.offset(self.ready.end), self.shard.width.offset(ahead));
            match populate(map, index(from), index(to - from)) {
                Ok(()) => {
                    self.ready.end = ahead;
                    self.bytes_read += to - from;
                    return Ok(());
                }
                Err(error) if error.raw_os_error() == Some(Errno::FAULT.raw_os_error()) => {
                    self.unchanged()?;
                    return Err(changed(&self.shard, from, WRITTEN));
                }
                Err(_) => self.source = Source::Pread(Vec::new()),
            }
        }
        self.read(range.start..ahead)
    }

    fn read(&mut self, range: Range<usize>) -> Result<(), Error> {
        let offset = self.shard.width.offset(range.start);
        let len = self.shard.width.bytes() * range.len();
        let mut lines = match &mut self.source {
            Source::Pread(window) => std::mem::take(window),
            Source::Map(_) => Vec::new(),
        };
        self.ready = 0..0;
        lines.resize(len.div_ceil(LINE), Line::ZERO);
        if let Err(error) = self.file.read_exact_at(view_mut(&mut lines, len), offset) {
            self.unchanged()?;
            return Err(Error::io(&self.shard.path, offset, &error));
        }
        self.bytes_read += len as u64;
        self.source = Source::Pread(lines);
        self.ready = range;
        Ok(())
    }
}

#[cfg(target_os = "linux")]
fn populate(map: &Mmap, from: usize, len: usize) -> std::io::Result<()> {
    map.advise_range(memmap2::Advice::PopulateRead, from, len)
}

#[cfg(not(target_os = "linux"))]
fn populate(_: &Mmap, _: usize, _: usize) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// The tokens of a mapped shard.
///
/// # Panics
/// When they are not whole or not aligned; a mapping starts at a page, and the catalogue checked its size.
fn body<T: Pod>(map: &Mmap) -> &[T] {
    bytemuck::cast_slice(&map[header::BYTES..])
}

fn index(byte: u64) -> usize {
    usize::try_from(byte).unwrap_or(usize::MAX)
}

const WRITTEN: &str = "was written to, or its disk failed, while it was read";

fn resized(was: u64, now: u64) -> String {
    format!("had {was} bytes when it was opened and has {now} now, noticed while reading")
}

fn changed(shard: &Shard, offset: u64, what: &str) -> Error {
    Error::new(
        Kind::Changed,
        format!(
            "shard {} {what} at byte {offset}; restore it, and replace shards by renaming a finished file over them",
            shard.path.display()
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

    /// The reader of a shard, opened if need be; the one that was used least recently makes room for it.
    pub fn get(&mut self, catalog: &Catalog, shard: usize) -> Result<&mut Reader, Error> {
        if let Some(at) = self.open.iter().position(|(index, _)| *index == shard) {
            let recent = self.open.remove(at);
            self.open.push(recent);
        } else {
            if self.open.len() == Self::MOST {
                self.bytes_closed += self.open.remove(0).1.bytes_read;
            }
            self.switches += u64::from(!self.open.is_empty());
            self.open.push((shard, Reader::open(&catalog.shards()[shard], self.backend)?));
        }
        let last = self.open.len() - 1;
        Ok(&mut self.open[last].1)
    }

    /// Call [`Reader::rewind`] on every open shard.
    pub fn rewind(&mut self) {
        self.open.iter_mut().for_each(|(_, reader)| reader.rewind());
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
