//! The stream: which tokens fill which lane of which batch.
//!
//! Every process walks the boundaries of all lanes, so that all stand at the same place after every batch,
//! and copies only its own lanes. [`Order`] names the three walks.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::buffer::{Batch, Pool};
use crate::catalog::Catalog;
use crate::config::{Config, Order, Stage, whole_blocks};
use crate::error::Error;
use crate::reader::{Backend, Readers};
use crate::scan;
use crate::shuffle::Permutation;
use crate::state::Cursor;

/// A run of tokens of one shard that goes into one lane.
struct Piece {
    lane: usize,
    shard: usize,
    range: Range<usize>,
}

/// The pieces of this process's lanes, and where the walk ended.
struct Plan {
    pieces: Vec<Piece>,
    end: usize,
}

/// What a stream yields.
pub enum Item {
    /// The next batch.
    Batch(Batch),
    /// There is none; the tokens passed over since the last one.
    End {
        /// Tokens that no lane holds.
        dropped: u64,
    },
}

/// Batches, one after the other.
pub struct Stream {
    catalog: Arc<Catalog>,
    config: Arc<Config>,
    pool: Arc<Pool>,
    stop: Arc<AtomicBool>,
    readers: Readers,
    cursor: Cursor,
    /// Blocks before each shard, then their total; empty unless shuffled.
    blocks: Vec<usize>,
    permutation: Option<(u64, Permutation)>,
}

impl Stream {
    /// A stream that continues at `cursor` and gives up with [`Error::Stopped`] once `stop` is set.
    #[must_use]
    pub fn new(
        catalog: Arc<Catalog>,
        config: Arc<Config>,
        pool: Arc<Pool>,
        cursor: Cursor,
        stop: Arc<AtomicBool>,
        backend: Backend,
    ) -> Self {
        let mut blocks = Vec::new();
        if let Order::Shuffled { block_tokens, .. } = config.order {
            blocks.push(0);
            blocks.extend(catalog.shards().iter().scan(0, |total, shard| {
                *total += whole_blocks(shard.tokens, block_tokens);
                Some(*total)
            }));
        }
        Self {
            catalog,
            config,
            pool,
            stop,
            readers: Readers::new(backend),
            cursor,
            blocks,
            permutation: None,
        }
    }

    /// Make the next batch.
    ///
    /// # Errors
    /// A shard that changed or cannot be read, a token outside the vocabulary, too many documents in a lane, or
    /// an epoch without a single batch.
    pub fn next_item(&mut self) -> Result<Item, Error> {
        let config = Arc::clone(&self.config);
        let Some(stage) = config.stage_at(self.cursor.step) else {
            return Ok(Item::End { dropped: 0 });
        };
        let (bytes_before, opened_before) = (self.readers.bytes_read(), self.readers.opened());
        let mut at = self.cursor;
        let mut dropped = 0;
        let mut from_the_start = (at.shard, at.offset) == (0, 0);
        let plan = loop {
            if config.epochs.is_some_and(|epochs| at.epoch >= epochs) {
                return Ok(Item::End { dropped: dropped as u64 });
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            self.readers.rewind();
            if let Some(plan) = self.plan(&at, stage)? {
                break plan;
            }
            dropped += self.rest(&at);
            at = Cursor { shard: at.shard + 1, offset: 0, ..at };
            if at.shard == self.walks() {
                if from_the_start {
                    return Err(self.no_batch(stage));
                }
                from_the_start = true;
                at = Cursor { epoch: at.epoch + 1, shard: 0, ..at };
            }
        };
        let held = stage.lane_len + usize::from(config.order == Order::Documents);
        dropped += plan.end - at.offset - config.lanes * held;
        let mut batch = Batch::new(&self.pool, config.local_lanes().len(), stage.lane_len, stage.max_docs);
        self.fill(&mut batch, &plan.pieces)?;
        self.cursor = Cursor { step: at.step + 1, offset: plan.end, ..at };
        batch.step = at.step;
        batch.epoch = at.epoch;
        batch.dropped = dropped as u64;
        batch.bytes_read = self.readers.bytes_read() - bytes_before;
        batch.opened = self.readers.opened() - opened_before;
        batch.after = self.cursor;
        Ok(Item::Batch(batch))
    }

    /// How many walks an epoch has: one for each shard, or one over all blocks.
    fn walks(&self) -> usize {
        if self.blocks.is_empty() { self.catalog.shards().len() } else { 1 }
    }

    /// Tokens from `at` to the end of its walk.
    fn rest(&self, at: &Cursor) -> usize {
        let end = if self.blocks.is_empty() {
            self.catalog.shards()[at.shard].tokens
        } else {
            self.catalog.num_tokens()
        };
        end - at.offset
    }

    fn plan(&mut self, at: &Cursor, stage: &Stage) -> Result<Option<Plan>, Error> {
        match self.config.order {
            Order::Documents => self.plan_documents(at, stage),
            Order::Contiguous => Ok(self.plan_contiguous(at, stage)),
            Order::Shuffled { seed, block_tokens } => Ok(self.plan_shuffled(at, stage, seed, block_tokens)),
        }
    }

    /// The rules of modded-nanogpt: a lane is filled with documents, each from its first token and cut at
    /// `max_doc_len` or at the end of the lane; what is cut off is passed over. The last document of a shard
    /// ends with the shard. A batch that the shard cannot complete is given up, and with it the shard.
    fn plan_documents(&mut self, at: &Cursor, stage: &Stage) -> Result<Option<Plan>, Error> {
        let Config { lanes, bos_id, .. } = *self.config;
        let local = self.config.local_lanes();
        let tokens = self.catalog.shards()[at.shard].tokens;
        let width = stage.lane_len + 1;
        if tokens - at.offset < lanes.saturating_mul(width) {
            return Ok(None);
        }
        let reader = self.readers.get(&self.catalog, at.shard)?;
        let (mut pieces, mut documents) = (Vec::new(), Vec::with_capacity(lanes));
        let mut end = at.offset;
        for lane in 0..lanes {
            let (mut filled, mut count, mut first) = (0, 0, end);
            while filled < width {
                let Some(start) = reader.find(bos_id, end..tokens, &self.stop)? else {
                    reader.unchanged()?;
                    return Ok(None);
                };
                let longest = stage.max_doc_len.unwrap_or(width).min(width - filled).min(tokens - start);
                let next = reader.find(bos_id, start + 1..start + longest, &self.stop)?;
                end = next.unwrap_or(start + longest);
                if filled == 0 {
                    first = start;
                }
                // A document of which only the last target fits has no input in this lane.
                count += usize::from(filled < stage.lane_len);
                filled += end - start;
                if local.contains(&lane) {
                    pieces.push(Piece { lane, shard: at.shard, range: start..end });
                }
            }
            documents.push((count, first));
        }
        if let Some(max_docs) = stage.max_docs {
            if let Some(lane) = documents.iter().position(|(count, _)| *count > max_docs) {
                reader.unchanged()?;
                let (found, offset) = documents[lane];
                let fits = documents.iter().map(|(count, _)| *count).max().unwrap_or(found);
                return Err(self.overflow(at.shard, offset, (at.step, lane), [found, max_docs, fits]));
            }
        }
        Ok(Some(Plan { pieces, end }))
    }

    /// Lane after lane, window after window; a shard is left when a whole batch and its last target do not fit.
    fn plan_contiguous(&self, at: &Cursor, stage: &Stage) -> Option<Plan> {
        let end = self.config.lanes.checked_mul(stage.lane_len)?.checked_add(at.offset)?;
        if end >= self.catalog.shards()[at.shard].tokens {
            return None;
        }
        let piece = |lane| {
            let start = at.offset + lane * stage.lane_len;
            Piece { lane, shard: at.shard, range: start..start + stage.lane_len + 1 }
        };
        Some(Plan { pieces: self.config.local_lanes().map(piece).collect(), end })
    }

    /// As contiguous, over the blocks of all shards in the order of this epoch; a window that would cross the
    /// end of its block (possible after a change of stage) starts with the next block instead.
    fn plan_shuffled(&mut self, at: &Cursor, stage: &Stage, seed: u64, block_tokens: usize) -> Option<Plan> {
        let count = *self.blocks.last()?;
        if self.permutation.as_ref().is_none_or(|(epoch, _)| *epoch != at.epoch) {
            self.permutation = Some((at.epoch, Permutation::new(count as u64, seed, at.epoch)));
        }
        let (_, permutation) = self.permutation.as_ref()?;
        let local = self.config.local_lanes();
        let mut pieces = Vec::with_capacity(local.len());
        let mut end = at.offset;
        for lane in 0..self.config.lanes {
            if end % block_tokens + stage.lane_len > block_tokens {
                end = end.next_multiple_of(block_tokens);
            }
            if end >= count * block_tokens {
                return None;
            }
            if local.contains(&lane) {
                let block = usize::try_from(permutation.at((end / block_tokens) as u64)).ok()?;
                let shard = self.blocks.partition_point(|before| *before <= block) - 1;
                let start = (block - self.blocks[shard]) * block_tokens + end % block_tokens;
                pieces.push(Piece { lane, shard, range: start..start + stage.lane_len + 1 });
            }
            end += stage.lane_len;
        }
        Some(Plan { pieces, end })
    }

    /// Copy the pieces into the rows of a batch and fill its table of documents.
    fn fill(&mut self, batch: &mut Batch, pieces: &[Piece]) -> Result<(), Error> {
        let (lane_len, step) = (batch.lane_len(), self.cursor.step);
        let aligned = self.config.order == Order::Documents;
        for (row, pieces) in pieces.chunk_by(|a, b| a.lane == b.lane).enumerate() {
            let mut ends = Vec::with_capacity(pieces.len());
            let tokens = batch.row_mut(row);
            let mut filled = 0;
            for Piece { shard, range, .. } in pieces {
                let reader = self.readers.get(&self.catalog, *shard)?;
                let end = filled + range.len();
                tokens[filled..end].copy_from_slice(reader.tokens(range.clone())?);
                if filled < lane_len {
                    ends.push(end.min(lane_len));
                }
                filled = end;
            }
            let first = &pieces[0];
            self.readers.get(&self.catalog, first.shard)?.unchanged()?;
            self.check_range(tokens, pieces)?;
            if let (Some(max_docs), false) = (batch.max_docs(), aligned) {
                ends.clear();
                let inputs = &batch.row_mut(row)[..lane_len];
                ends.extend(scan::positions(inputs, self.config.bos_id).filter(|at| *at > 0));
                ends.push(lane_len);
                if ends.len() > max_docs {
                    let found = [ends.len(), max_docs, ends.len()];
                    return Err(self.overflow(first.shard, first.range.start, (step, first.lane), found));
                }
            }
            batch.set_documents(row, &ends);
        }
        Ok(())
    }

    fn check_range(&self, tokens: &[u16], pieces: &[Piece]) -> Result<(), Error> {
        let Some(vocab_size) = self.config.vocab_size else { return Ok(()) };
        let Some(at) = scan::find_outside(tokens, vocab_size) else { return Ok(()) };
        let mut before = 0;
        for Piece { shard, range, .. } in pieces {
            if at < before + range.len() {
                let path = self.catalog.shards()[*shard].path.clone();
                let offset = range.start + at - before;
                return Err(Error::TokenRange { path, offset, token: tokens[at], vocab_size });
            }
            before += range.len();
        }
        Ok(())
    }

    fn overflow(&self, shard: usize, offset: usize, place: (u64, usize), numbers: [usize; 3]) -> Error {
        let path = self.catalog.shards()[shard].path.clone();
        let ((step, lane), [found, max_docs, fits]) = (place, numbers);
        Error::DocOverflow { path, offset, step, lane, found, max_docs, fits }
    }

    fn no_batch(&self, stage: &Stage) -> Error {
        let shards = self.catalog.shards();
        Error::NoBatch {
            path: shards[0].path.clone(),
            offset: 0,
            shards: shards.len(),
            lanes: self.config.lanes,
            lane_len: stage.lane_len,
            bos_id: (self.config.order == Order::Documents).then_some(self.config.bos_id),
        }
    }
}
