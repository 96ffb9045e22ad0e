//! The stream of batches: which tokens fill which lane. A lane is one row of a batch.
//!
//! Every process finds the borders of all lanes, so that all stand at the same place after every
//! batch, and copies its own lanes only, straight from the shard into the batch.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::batch::{Batch, Pool, Shape};
use crate::config::{Config, Order, Stage, whole_blocks};
use crate::error::{Error, Kind};
use crate::read::{ReadAhead, Readers};
use crate::shard::Catalog;
use crate::shuffle::{Permutation, draw};
use crate::state::Cursor;

/// Batches, one after the other.
pub struct Stream {
    catalog: Arc<Catalog>,
    config: Arc<Config>,
    pool: Arc<Pool>,
    stop: Arc<AtomicBool>,
    cursor: Cursor,
    readers: Readers,
    ahead: ReadAhead,
    /// Blocks before each shard, then their total; empty unless blocks are shuffled.
    blocks: Vec<usize>,
    /// Where the documents of a lane end.
    ends: Vec<usize>,
}

/// A batch in the making.
struct Draft {
    batch: Batch,
    stage: Stage,
    /// The lanes of this process.
    local: Range<usize>,
    /// The first token outside the vocabulary: an error unless a shard ends before the batch does.
    foreign: Option<Error>,
}

impl Draft {
    /// The row of a lane of this process.
    fn row(&self, lane: usize) -> Option<usize> {
        self.local.contains(&lane).then(|| lane - self.local.start)
    }
}

impl Stream {
    /// A stream that continues at `cursor` and gives up with an error once `stop` is set.
    pub fn new(
        catalog: Arc<Catalog>,
        config: Arc<Config>,
        pool: Arc<Pool>,
        cursor: Cursor,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let mut blocks = Vec::new();
        if let Order::Blocks { block_tokens, .. } = config.order {
            blocks.push(0);
            blocks.extend(catalog.shards().iter().scan(0, |total, shard| {
                *total += whole_blocks(shard.tokens, block_tokens);
                Some(*total)
            }));
        }
        let (readers, ahead) = (Readers::new(config.backend), ReadAhead::default());
        Self { catalog, config, pool, stop, cursor, readers, ahead, blocks, ends: Vec::new() }
    }

    /// Make the next batch; `None` after the last. Errors: a shard that changed or cannot be read,
    /// a token outside the vocabulary, too many documents in a lane, an epoch without a single
    /// batch.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, Error> {
        self.readers.begin();
        let made = self.make();
        // Tokens of a file that has changed prove nothing, be it a batch, its end or an error.
        self.readers.unchanged()?;
        made
    }

    fn make(&mut self) -> Result<Option<Batch>, Error> {
        let Some(&stage) = self.config.stage_at(self.cursor.step) else { return Ok(None) };
        let mut at = self.cursor;
        if self.is_over(at) {
            return Ok(None);
        }
        let local = self.config.local_lanes();
        let Stage { lane_len, max_docs, .. } = stage;
        let shape = Shape { rows: local.len(), lane_len, width: self.catalog.width(), max_docs };
        let batch = Batch::new(&self.pool, shape)?;
        let mut draft = Draft { batch, stage, local, foreign: None };
        let (bytes, switches) = (self.readers.bytes_read(), self.readers.switches());
        let mut dropped = 0;
        let mut from_the_start = (at.shard, at.offset) == (0, 0);
        let end = loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::stopped());
            }
            if let Some(end) = self.fill(&mut draft, at)? {
                break end;
            }
            draft.foreign = None;
            dropped += self.segment_len(at) - at.offset;
            at = self.next_segment(at);
            if at.shard == 0 {
                if from_the_start {
                    return Err(self.no_batch(stage));
                }
                from_the_start = true;
            }
            if self.is_over(at) {
                return Ok(None);
            }
        };
        if let Some(error) = draft.foreign {
            return Err(error);
        }
        let used = match self.config.order {
            Order::Documents => lane_len + 1,
            Order::Windows { .. } => 0,
            Order::Contiguous | Order::Blocks { .. } => lane_len,
        };
        dropped += end - at.offset - self.config.lanes * used;
        self.cursor = Cursor { step: self.cursor.step + 1, offset: end, ..at };
        self.read_ahead();
        let mut batch = draft.batch;
        batch.step = self.cursor.step - 1;
        batch.epoch = at.epoch;
        batch.dropped = dropped as u64;
        batch.bytes_read = self.readers.bytes_read() - bytes;
        batch.switches = self.readers.switches() - switches;
        batch.after = self.cursor;
        Ok(Some(batch))
    }

    fn is_over(&self, at: Cursor) -> bool {
        self.config.epochs.is_some_and(|epochs| at.epoch >= epochs)
    }

    /// Tokens of the segment in which `at` lies: a shard, or all where the order mixes them.
    fn segment_len(&self, at: Cursor) -> usize {
        let shards = self.catalog.shards();
        let mixed = self.config.order.mixes_shards();
        if mixed { self.catalog.num_tokens() } else { shards[at.shard].tokens }
    }

    fn next_segment(&self, at: Cursor) -> Cursor {
        let last = self.config.order.mixes_shards() || at.shard + 1 == self.catalog.shards().len();
        let (epoch, shard) = if last { (at.epoch + 1, 0) } else { (at.epoch, at.shard + 1) };
        Cursor { epoch, shard, offset: 0, ..at }
    }

    fn read_ahead(&mut self) {
        let (here, next) = (self.cursor, self.next_segment(self.cursor));
        if !self.config.order.mixes_shards() && next.shard != here.shard && !self.is_over(next) {
            let shard = &self.catalog.shards()[next.shard];
            self.ahead.advise(next.shard, shard, here.offset, self.segment_len(here));
        }
    }

    /// Fill all lanes from `at` on, in one segment, and return the token after the last; `None`
    /// where the segment ends before.
    fn fill(&mut self, draft: &mut Draft, at: Cursor) -> Result<Option<usize>, Error> {
        if self.config.order == Order::Documents {
            return self.pack(draft, at);
        }
        let Stage { lane_len, max_docs, .. } = draft.stage;
        let mut end = at.offset;
        for lane in 0..self.config.lanes {
            let Some((shard, start, after)) = self.window(at, lane, end, lane_len) else {
                return Ok(None);
            };
            end = after;
            let Some(row) = draft.row(lane) else { continue };
            self.copy(draft, row, 0, shard, start..start + lane_len + 1)?;
            let Some(max_docs) = max_docs else { continue };
            self.ends.clear();
            let starts = draft.batch.row(row).positions(self.config.bos_id);
            self.ends.extend(starts.filter(|at| (1..lane_len).contains(at)));
            self.ends.push(lane_len);
            let found = self.ends.len();
            if found > max_docs {
                return Err(self.too_many_documents((shard, start), lane, found, max_docs, found));
            }
            draft.batch.set_documents(row, &self.ends);
        }
        Ok(Some(end))
    }

    /// The rules of modded-nanogpt: a lane is filled with documents, each from its first token and
    /// cut at `max_doc_len` or at the end of the lane; the cut-off rest is skipped. The last
    /// document of a shard ends with the shard. If the shard has too few tokens left for a
    /// whole batch, they are dropped.
    fn pack(&mut self, draft: &mut Draft, at: Cursor) -> Result<Option<usize>, Error> {
        let Config { bos_id, lanes, .. } = *self.config;
        let Stage { lane_len, max_doc_len, max_docs, .. } = draft.stage;
        let (shard, tokens) = (at.shard, self.catalog.shards()[at.shard].tokens);
        let width = lane_len + 1;
        if tokens - at.offset < lanes.saturating_mul(width) {
            return Ok(None);
        }
        let (mut end, mut most, mut over) = (at.offset, 0, None);
        for lane in 0..lanes {
            let (row, from) = (draft.row(lane), end);
            let (mut filled, mut first) = (0, from);
            self.ends.clear();
            while filled < width {
                let Some(start) = self.find(shard, bos_id, end..tokens)? else { return Ok(None) };
                let longest = max_doc_len.unwrap_or(width).min(width - filled).min(tokens - start);
                let next = self.find(shard, bos_id, start + 1..start + longest)?;
                end = next.unwrap_or(start + longest);
                if let Some(row) = row {
                    self.copy(draft, row, filled, shard, start..end)?;
                }
                if filled == 0 {
                    first = start;
                }
                // A document of which only the last target fits has no input in this lane.
                if filled < lane_len {
                    self.ends.push(lane_len.min(filled + end - start));
                }
                filled += end - start;
            }
            let found = self.ends.len();
            most = most.max(found);
            if max_docs.is_some_and(|max_docs| found > max_docs) {
                over.get_or_insert((lane, first, found));
            } else if let Some(row) = row {
                draft.batch.set_documents(row, &self.ends);
            }
        }
        if let (Some((lane, first, found)), Some(max_docs)) = (over, max_docs) {
            return Err(self.too_many_documents((shard, first), lane, found, max_docs, most));
        }
        Ok(Some(end))
    }

    fn find(
        &mut self,
        shard: usize,
        token: u32,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        self.readers.get(&self.catalog, shard)?.find(token, range, &self.stop)
    }

    /// Copy tokens of a shard into a row, from its token `to` on, and look for ids that it must not
    /// hold.
    fn copy(
        &mut self,
        draft: &mut Draft,
        row: usize,
        to: usize,
        shard: usize,
        range: Range<usize>,
    ) -> Result<(), Error> {
        let start = range.start;
        let tokens = self.readers.get(&self.catalog, shard)?.tokens(range)?;
        draft.batch.copy(row, to, tokens);
        let Some(vocab_size) = self.config.vocab_size else { return Ok(()) };
        if let Some(at) = tokens.find_outside(vocab_size).filter(|_| draft.foreign.is_none()) {
            draft.foreign = Some(Error::new(
                Kind::TokenRange,
                format!(
                    "shard {} holds token id {} at token position {}, but vocab_size={vocab_size} \
                     allows ids below {vocab_size} only; use the vocabulary the shard was made \
                     with or make the shard again",
                    self.catalog.shards()[shard].path.display(),
                    tokens.at(at),
                    start + at
                ),
            ));
        }
        Ok(())
    }

    /// Where the window of a lane starts, its shard and token, and where the lane after it would.
    fn window(
        &self,
        at: Cursor,
        lane: usize,
        end: usize,
        lane_len: usize,
    ) -> Option<(usize, usize, usize)> {
        match self.config.order {
            Order::Contiguous => self.next_in_shard(at, end, lane_len),
            Order::Blocks { seed, block_tokens } => {
                self.next_in_blocks(at.epoch, seed, block_tokens, end, lane_len)
            }
            Order::Windows { seed } => self.anywhere(seed, lane, end, lane_len),
            Order::Documents => None,
        }
    }

    /// Window after window; a shard is left when its lanes and their last target do not fit.
    fn next_in_shard(
        &self,
        at: Cursor,
        end: usize,
        lane_len: usize,
    ) -> Option<(usize, usize, usize)> {
        let all = self.config.lanes.checked_mul(lane_len)?.checked_add(at.offset)?;
        (all < self.catalog.shards()[at.shard].tokens).then_some((at.shard, end, end + lane_len))
    }

    /// As contiguous, over the blocks of all shards in the order of this epoch; a window that would
    /// cross the end of its block (possible after a change of stage) starts with the next block.
    fn next_in_blocks(
        &self,
        epoch: u64,
        seed: u64,
        block_tokens: usize,
        end: usize,
        lane_len: usize,
    ) -> Option<(usize, usize, usize)> {
        let count = *self.blocks.last()?;
        let crosses = end % block_tokens + lane_len > block_tokens;
        let end = if crosses { end.next_multiple_of(block_tokens) } else { end };
        if end >= count * block_tokens {
            return None;
        }
        let order = Permutation::new(count as u64, seed, epoch);
        let block = usize::try_from(order.at((end / block_tokens) as u64)).ok()?;
        let shard = self.blocks.partition_point(|before| *before <= block) - 1;
        let start = (block - self.blocks[shard]) * block_tokens + end % block_tokens;
        Some((shard, start, end + lane_len))
    }

    /// As nanoGPT: a lane starts at any token that has `lane_len` more after it in its shard. The
    /// draws depend on the step number only, so the saved position stays 0.
    fn anywhere(
        &self,
        seed: u64,
        lane: usize,
        end: usize,
        lane_len: usize,
    ) -> Option<(usize, usize, usize)> {
        let starts =
            self.catalog.shards().iter().map(|shard| shard.tokens.saturating_sub(lane_len));
        let total: usize = starts.clone().sum();
        let drawn = draw(total as u64, seed, self.cursor.step, lane as u64);
        let mut start = usize::try_from(drawn).ok()?;
        for (shard, here) in starts.enumerate() {
            if start < here {
                return Some((shard, start, end));
            }
            start -= here;
        }
        None
    }

    fn no_batch(&self, stage: Stage) -> Error {
        let Config { lanes, order, bos_id, .. } = *self.config;
        let shards = self.catalog.shards();
        let start = match order {
            Order::Documents => format!(" that start at a document (token {bos_id})"),
            _ => String::new(),
        };
        Error::argument(format!(
            "no batch of {lanes} lanes x {} tokens{start} fits into any of {} shard(s) from {}; \
             use fewer lanes, a shorter lane_len or larger shards",
            stage.lane_len,
            shards.len(),
            shards[0].path.display()
        ))
    }

    /// The error for a lane that holds `found` documents and starts at a token of a shard; a table
    /// of `least` is needed.
    fn too_many_documents(
        &self,
        (shard, token): (usize, usize),
        lane: usize,
        found: usize,
        max_docs: usize,
        least: usize,
    ) -> Error {
        let (step, path) = (self.cursor.step, self.catalog.shards()[shard].path.display());
        Error::new(
            Kind::DocOverflow,
            format!(
                "step {step}, lane {lane} (shard {path}, token {token}) holds {found} documents \
                 but max_docs={max_docs}; set max_docs to at least {least}, or more where other \
                 lanes hold more"
            ),
        )
    }
}
