//! Memory of batches: 64-byte aligned, and reused only after the last reference to it is gone.
//!
//! JAX on a CPU does not copy an aligned host array but shares it, so a buffer that was handed out
//! must never be refilled while anyone can still see it. A buffer returns to its pool in `Drop`,
//! and only there.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::allocation::try_zeroed_slice_box;
use bytemuck::{Pod, Zeroable};

use crate::error::Error;
use crate::shard::Width;
use crate::state::Cursor;
use crate::tokens::Tokens;

/// One cache line of zeros: 64-byte unit of batch memory, for alignment.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; LINE]);

pub(crate) const LINE: usize = 64;

/// So much memory.
///
/// # Errors
/// The machine does not have it.
pub(crate) fn zeroed_lines(count: usize) -> Result<Vec<Line>, Error> {
    try_zeroed_slice_box(count).map(Vec::from).map_err(|()| {
        Error::argument(format!(
            "a batch needs {} MB in one piece, which this machine does not have; use fewer lanes, \
             a shorter lane_len or more processes",
            count / 1_000_000 * LINE
        ))
    })
}

/// The first `len` integers in `lines`.
pub(crate) fn view<T: Pod>(lines: &[Line], len: usize) -> &[T] {
    &bytemuck::cast_slice(lines)[..len]
}

pub(crate) fn view_mut<T: Pod>(lines: &mut [Line], len: usize) -> &mut [T] {
    &mut bytemuck::cast_slice_mut(lines)[..len]
}

/// The memory of `items`.
pub fn bytes_of<T: bytemuck::NoUninit>(items: &[T]) -> &[u8] {
    bytemuck::cast_slice(items)
}

/// Buffers that nobody refers to, ready to be filled again.
pub struct Pool {
    free: Mutex<Vec<Vec<Line>>>,
    keep: usize,
}

impl Pool {
    /// A pool that keeps at most `keep` unused buffers.
    pub fn new(keep: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), keep })
    }

    #[cfg(test)]
    fn unused(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn take(&self, lines: usize) -> Result<Vec<Line>, Error> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.retain(|buffer| buffer.len() == lines);
        let found = free.pop();
        drop(free);
        found.map_or_else(|| zeroed_lines(lines), Ok)
    }

    /// Where the lock is taken the memory goes: in a fork it may be taken for ever.
    fn give(&self, buffer: Vec<Line>) {
        if let Ok(mut free) = self.free.try_lock() {
            if free.len() < self.keep {
                free.push(buffer);
            }
        }
    }
}

/// Shape of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Lanes of this process.
    pub rows: usize,
    /// Tokens of a lane; its row has one more.
    pub lane_len: usize,
    /// How tokens are stored.
    pub width: Width,
    /// Size of the table of document offsets, if there is one.
    pub max_docs: Option<usize>,
}

impl Shape {
    /// Lines of memory for tokens, document offsets and document counts.
    fn lines(&self) -> [usize; 3] {
        let [table, count] = match self.max_docs {
            Some(docs) => [docs + 1, 1].map(|numbers| numbers * size_of::<i32>()),
            None => [0, 0],
        };
        [(self.lane_len + 1) * self.width.bytes(), table, count]
            .map(|bytes| self.rows.saturating_mul(bytes).div_ceil(LINE))
    }
}

/// One batch of this process: its tokens, its document offsets and where the stream stands after
/// it.
pub struct Batch {
    memory: Vec<Line>,
    pool: Arc<Pool>,
    shape: Shape,
    /// Index of this batch, from 0.
    pub step: u64,
    /// Pass over the data, from 0.
    pub epoch: u64,
    /// Tokens passed over since the batch before that no lane of any process holds.
    pub dropped: u64,
    /// Bytes of shards that this process read for this batch.
    pub bytes_read: u64,
    /// How often it took another shard than the one before.
    pub switches: u64,
    /// Where the stream stands once this batch is delivered.
    pub(crate) after: Cursor,
}

impl Batch {
    /// A batch with memory from `pool`; its contents are not defined yet.
    ///
    /// # Errors
    /// The machine has not the memory.
    pub fn new(pool: &Arc<Pool>, shape: Shape) -> Result<Self, Error> {
        Ok(Self {
            memory: pool.take(shape.lines().iter().sum())?,
            pool: Arc::clone(pool),
            shape,
            step: 0,
            epoch: 0,
            dropped: 0,
            bytes_read: 0,
            switches: 0,
            after: Cursor::default(),
        })
    }

    /// Bytes of its memory.
    pub(crate) fn bytes(&self) -> usize {
        LINE * self.memory.len()
    }

    /// What it has memory for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// `(rows, lane_len + 1)` tokens, row after row.
    pub fn tokens(&self) -> Tokens<'_> {
        let Shape { rows, lane_len, width, .. } = self.shape;
        Tokens::new(view(&self.memory, rows * (lane_len + 1) * width.bytes()), width)
    }

    /// The tokens of one row.
    pub fn row(&self, row: usize) -> Tokens<'_> {
        let width = self.shape.lane_len + 1;
        self.tokens().slice(row * width..(row + 1) * width)
    }

    /// `(rows, max_docs + 1)` offsets; a row is padded with `lane_len`. Empty without a table.
    pub fn doc_offsets(&self) -> &[i32] {
        let docs = self.shape.max_docs.map_or(0, |docs| docs + 1);
        view(&self.memory[self.start(1)..], self.shape.rows * docs)
    }

    /// `(rows,)` numbers of documents. Empty without a table.
    pub fn num_docs(&self) -> &[i32] {
        view(&self.memory[self.start(2)..], self.shape.max_docs.map_or(0, |_| self.shape.rows))
    }

    /// Copy `tokens`, of the width of the batch, into a row from its token `at` on.
    ///
    /// # Panics
    /// When they do not fit.
    pub(crate) fn copy(&mut self, row: usize, at: usize, tokens: Tokens<'_>) {
        let Shape { lane_len, width, .. } = self.shape;
        let (row_bytes, bytes) = (width.bytes() * (lane_len + 1), tokens.as_bytes());
        let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut self.memory);
        let line = &mut memory[row * row_bytes..(row + 1) * row_bytes];
        let start = width.bytes() * at;
        line[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Set the offsets of one row from the ends of its documents.
    pub(crate) fn set_documents(&mut self, row: usize, ends: &[usize]) {
        let Shape { rows, lane_len, max_docs: Some(max_docs), .. } = self.shape else { return };
        let (offsets, counts) = (self.start(1), self.start(2));
        let table = view_mut::<i32>(&mut self.memory[offsets..], rows * (max_docs + 1));
        let line = &mut table[row * (max_docs + 1)..(row + 1) * (max_docs + 1)];
        line.fill(narrow(lane_len));
        line[0] = 0;
        for (slot, end) in line[1..].iter_mut().zip(ends) {
            *slot = narrow(*end);
        }
        view_mut::<i32>(&mut self.memory[counts..], rows)[row] = narrow(ends.len());
    }

    /// The line at which a part begins.
    fn start(&self, part: usize) -> usize {
        self.shape.lines()[..part].iter().sum()
    }
}

/// Lane lengths and document counts are below `i32::MAX` once a [`crate::Config`] exists.
fn narrow(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.memory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(rows: usize, lane_len: usize, max_docs: Option<usize>) -> Shape {
        Shape { rows, lane_len, width: Width::Two, max_docs }
    }

    fn start(batch: &Batch) -> *const u16 {
        batch.tokens().as_slice().as_ptr()
    }

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        for width in [Width::Two, Width::Four] {
            let mut batch =
                Batch::new(&Pool::new(2), Shape { width, ..shape(3, 7, Some(4)) }).unwrap();
            for row in 0..3u16 {
                let (narrow, wide) = ([row + 1; 8], [u32::from(row) + 1; 8]);
                let bytes = if width == Width::Two { bytes_of(&narrow) } else { bytes_of(&wide) };
                batch.copy(row.into(), 0, Tokens::new(bytes, width));
                batch.set_documents(row.into(), &[2, 7]);
            }
            let tokens: Vec<u32> = (0..24).map(|at| batch.tokens().at(at)).collect();
            assert_eq!(tokens, [[1; 8], [2; 8], [3; 8]].concat());
            assert_eq!(batch.row(1).find(2), Some(0));
            assert_eq!(batch.doc_offsets(), [0, 2, 7, 7, 7].repeat(3));
            assert_eq!(batch.num_docs(), [2, 2, 2]);
            assert_eq!(batch.doc_offsets().as_ptr().align_offset(LINE), 0);
            assert_eq!(batch.num_docs().as_ptr().align_offset(LINE), 0);
        }
    }

    #[test]
    fn memory_is_reused_only_after_drop() {
        let pool = Pool::new(1);
        let first = Batch::new(&pool, shape(1, 100, None)).unwrap();
        let second = Batch::new(&pool, shape(1, 100, None)).unwrap();
        let (one, two) = (start(&first), start(&second));
        assert_ne!(one, two);
        assert_eq!(one.align_offset(LINE), 0);
        drop(first);
        drop(second);
        assert_eq!(pool.unused(), 1);
        assert_eq!(start(&Batch::new(&pool, shape(1, 100, None)).unwrap()), one);
        let other = Batch::new(&pool, shape(1, 50, None)).unwrap();
        assert_eq!((other.tokens().len(), pool.unused()), (51, 0));
    }
}
