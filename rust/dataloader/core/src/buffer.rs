//! Memory of batches: 64-byte aligned, and reused only after the last reference to it is gone.
//!
//! JAX on a CPU does not copy an aligned host array but shares it, so a buffer that was handed out must never
//! be refilled while anyone can still see it. A buffer returns to its pool in `Drop`, and only there.

use std::sync::{Arc, Mutex, PoisonError};

use crate::state::Cursor;

/// One cache line of zeros: what buffers are made of, for its alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

const LINE: usize = 64;

/// Plain integers for which every bit pattern is a value and whose size divides a line.
trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for i32 {}

fn view<T: Plain>(lines: &[Line], len: usize) -> &[T] {
    assert!(len * size_of::<T>() <= lines.len() * LINE);
    // SAFETY: the lines are initialised, aligned to 64 bytes and at least as long, and any bits are a valid T.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), len) }
}

fn view_mut<T: Plain>(lines: &mut [Line], len: usize) -> &mut [T] {
    assert!(len * size_of::<T>() <= lines.len() * LINE);
    // SAFETY: as in `view`, and the lines are borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

/// Buffers that nobody refers to, ready to be filled again.
#[derive(Default)]
pub struct Pool {
    free: Mutex<Vec<Vec<Line>>>,
    keep: usize,
}

impl Pool {
    /// A pool that keeps at most `keep` unused buffers.
    #[must_use]
    pub fn new(keep: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), keep })
    }

    /// How many unused buffers it holds.
    #[must_use]
    pub fn unused(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn take(&self, lines: usize) -> Vec<Line> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.retain(|buffer| buffer.len() == lines);
        free.pop().unwrap_or_else(|| vec![Line([0; LINE]); lines])
    }

    fn give(&self, buffer: Vec<Line>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.keep {
            free.push(buffer);
        }
    }
}

/// One batch of this process: its tokens, its document offsets and where the stream stands after it.
pub struct Batch {
    memory: Vec<Line>,
    pool: Arc<Pool>,
    rows: usize,
    lane_len: usize,
    max_docs: Option<usize>,
    /// Index of this batch, from 0.
    pub step: u64,
    /// Pass over the data, from 0.
    pub epoch: u64,
    /// Tokens passed over since the batch before that no lane of any process holds.
    pub dropped: u64,
    /// Bytes of shards that this process read for this batch.
    pub bytes_read: u64,
    /// Shards that were opened for this batch.
    pub opened: u64,
    /// Where the stream stands once this batch is delivered.
    pub after: Cursor,
}

impl Batch {
    /// A batch of `rows` lanes with memory from `pool`; its contents are not defined yet.
    #[must_use]
    pub fn new(pool: &Arc<Pool>, rows: usize, lane_len: usize, max_docs: Option<usize>) -> Self {
        let mut batch = Self {
            memory: Vec::new(),
            pool: Arc::clone(pool),
            rows,
            lane_len,
            max_docs,
            step: 0,
            epoch: 0,
            dropped: 0,
            bytes_read: 0,
            opened: 0,
            after: Cursor::default(),
        };
        let [tokens, offsets, counts] = batch.lines();
        batch.memory = pool.take(tokens + offsets + counts);
        batch
    }

    /// Lanes of this process.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens of a lane; a row of [`Batch::tokens`] has one more.
    #[must_use]
    pub fn lane_len(&self) -> usize {
        self.lane_len
    }

    /// Size of the table of document offsets, if there is one.
    #[must_use]
    pub fn max_docs(&self) -> Option<usize> {
        self.max_docs
    }

    /// `(rows, lane_len + 1)` tokens, row after row.
    #[must_use]
    pub fn tokens(&self) -> &[u16] {
        view(&self.memory, self.rows * (self.lane_len + 1))
    }

    /// `(rows, max_docs + 1)` offsets; a row is padded with `lane_len`. Empty without a table.
    #[must_use]
    pub fn doc_offsets(&self) -> &[i32] {
        let [tokens, ..] = self.lines();
        view(&self.memory[tokens..], self.max_docs.map_or(0, |docs| self.rows * (docs + 1)))
    }

    /// `(rows,)` numbers of documents. Empty without a table.
    #[must_use]
    pub fn num_docs(&self) -> &[i32] {
        let [tokens, offsets, _] = self.lines();
        view(&self.memory[tokens + offsets..], self.max_docs.map_or(0, |_| self.rows))
    }

    /// The tokens of one row, to be filled.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [u16] {
        let width = self.lane_len + 1;
        &mut view_mut(&mut self.memory, self.rows * width)[row * width..(row + 1) * width]
    }

    /// Set the offsets of one row from the ends of its documents.
    pub(crate) fn set_documents(&mut self, row: usize, ends: &[usize]) {
        let Some(max_docs) = self.max_docs else { return };
        let [tokens, offsets, _] = self.lines();
        let (rows, lane_len) = (self.rows, narrow(self.lane_len));
        let table = view_mut::<i32>(&mut self.memory[tokens..], rows * (max_docs + 1));
        let line = &mut table[row * (max_docs + 1)..(row + 1) * (max_docs + 1)];
        line.fill(lane_len);
        line[0] = 0;
        for (slot, end) in line[1..].iter_mut().zip(ends) {
            *slot = narrow(*end);
        }
        view_mut::<i32>(&mut self.memory[tokens + offsets..], rows)[row] = narrow(ends.len());
    }

    fn lines(&self) -> [usize; 3] {
        let docs = self.max_docs.map_or(0, |docs| docs + 1);
        let table = self.rows * docs * size_of::<i32>();
        let counts = if docs > 0 { self.rows * size_of::<i32>() } else { 0 };
        [self.rows * (self.lane_len + 1) * size_of::<u16>(), table, counts].map(|bytes| bytes.div_ceil(LINE))
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

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        let pool = Pool::new(2);
        let mut batch = Batch::new(&pool, 3, 7, Some(4));
        for row in 0..3u16 {
            batch.row_mut(row.into()).fill(row + 1);
            batch.set_documents(row.into(), &[2, 7]);
        }
        assert_eq!(batch.tokens(), [[1; 8], [2; 8], [3; 8]].concat());
        assert_eq!(batch.doc_offsets(), [0, 2, 7, 7, 7].repeat(3));
        assert_eq!(batch.num_docs(), [2, 2, 2]);
        assert_eq!(batch.tokens().as_ptr().align_offset(LINE), 0);
        assert_eq!(batch.doc_offsets().as_ptr().align_offset(LINE), 0);
        assert_eq!(batch.num_docs().as_ptr().align_offset(LINE), 0);
    }

    #[test]
    fn memory_is_reused_only_after_drop() {
        let pool = Pool::new(1);
        let first = Batch::new(&pool, 1, 100, None);
        let second = Batch::new(&pool, 1, 100, None);
        let (one, two) = (first.tokens().as_ptr(), second.tokens().as_ptr());
        assert_ne!(one, two);
        drop(first);
        drop(second);
        assert_eq!(pool.unused(), 1);
        assert_eq!(Batch::new(&pool, 1, 100, None).tokens().as_ptr(), one);
        let other = Batch::new(&pool, 1, 50, None);
        assert_eq!((other.tokens().len(), pool.unused()), (51, 0));
    }
}
