//! The stream of batches: which tokens fill which lane. A lane is one row of a batch.
//!
//! Every process finds the borders of all lanes, so that all stand at the same place after every
//! batch, and copies its own lanes only, straight from the shard into the batch.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::batch::{Batch, Pool, Shape};
use crate::config::{Config, Order, Stage};
use crate::error::{Error, Kind};
use crate::plan::Plan;
use crate::read::{ReadAhead, Readers};
use crate::state::Cursor;

/// Batches, one after the other.
pub struct Stream {
    plan: Plan,
    pool: Arc<Pool>,
    stop: Arc<AtomicBool>,
    cursor: Cursor,
    readers: Readers,
    ahead: ReadAhead,
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
    pub fn new(plan: Plan, pool: Arc<Pool>, cursor: Cursor, stop: Arc<AtomicBool>) -> Self {
        let (readers, ahead) = (Readers::new(plan.config.backend), ReadAhead::default());
        Self { plan, pool, stop, cursor, readers, ahead, ends: Vec::new() }
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
        let Some(&stage) = self.plan.config.stage_at(self.cursor.step) else { return Ok(None) };
        let mut at = self.cursor;
        if self.plan.is_over(at) {
            return Ok(None);
        }
        let local = self.plan.config.local_lanes();
        let Stage { lane_len, max_docs, .. } = stage;
        let shape =
            Shape { rows: local.len(), lane_len, width: self.plan.catalog.width(), max_docs };
        let batch = Batch::new(&self.pool, shape)?;
        let mut draft = Draft { batch, stage, local, foreign: None };
        let (bytes, switches) = (self.readers.bytes_read(), self.readers.switches());
        let mut dropped = 0;
        let mut from_the_start = (at.shard, at.offset) == (0, 0);
        let start = loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::stopped());
            }
            let start = at;
            if self.fill(&mut draft, &mut at)? {
                break start;
            }
            draft.foreign = None;
            dropped += self.plan.segment_len(start) - start.offset;
            at = self.plan.next_segment(start);
            if at.shard == 0 {
                if from_the_start {
                    return Err(self.no_batch(stage));
                }
                from_the_start = true;
            }
            if self.plan.is_over(at) {
                return Ok(None);
            }
        };
        if let Some(error) = draft.foreign {
            return Err(error);
        }
        let used = match self.plan.config.order {
            Order::Documents => lane_len + 1,
            Order::Windows { .. } => 0,
            Order::Contiguous | Order::Blocks { .. } => lane_len,
        };
        dropped += at.offset - start.offset - self.plan.config.lanes * used;
        self.cursor = Cursor { step: self.cursor.step + 1, ..at };
        self.read_ahead();
        let mut batch = draft.batch;
        (batch.step, batch.epoch, batch.dropped) = (start.step, start.epoch, dropped as u64);
        batch.bytes_read = self.readers.bytes_read() - bytes;
        batch.switches = self.readers.switches() - switches;
        batch.after = self.cursor;
        Ok(Some(batch))
    }

    fn read_ahead(&mut self) {
        let (here, next) = (self.cursor, self.plan.next_segment(self.cursor));
        if !self.plan.config.order.mixes_shards()
            && next.shard != here.shard
            && !self.plan.is_over(next)
        {
            let shard = &self.plan.catalog.shards()[next.shard];
            self.ahead.advise(next.shard, shard, here.offset, self.plan.segment_len(here));
        }
    }

    /// Fill all lanes from `at` on, in one segment, and move `at` behind them; false where the
    /// segment ends before.
    fn fill(&mut self, draft: &mut Draft, at: &mut Cursor) -> Result<bool, Error> {
        if self.plan.config.order == Order::Documents {
            return self.pack(draft, at);
        }
        let Stage { lane_len, max_docs, .. } = draft.stage;
        for lane in 0..self.plan.config.lanes {
            let Some((shard, start)) = self.plan.window(at, lane, lane_len) else {
                return Ok(false);
            };
            let Some(row) = draft.row(lane) else { continue };
            self.copy(draft, row, 0, shard, start..start + lane_len + 1)?;
            let Some(max_docs) = max_docs else { continue };
            self.ends.clear();
            let starts = draft.batch.row(row).positions(self.plan.config.bos_id);
            self.ends.extend(starts.filter(|at| (1..lane_len).contains(at)));
            self.ends.push(lane_len);
            let found = self.ends.len();
            if found > max_docs {
                return Err(self.too_many_documents((shard, start), lane, found, max_docs, found));
            }
            draft.batch.set_documents(row, &self.ends);
        }
        Ok(true)
    }

    /// The rules of modded-nanogpt: a lane is filled with documents, each from its first token and
    /// cut at `max_doc_len` or at the end of the lane; the cut-off rest is skipped. The last
    /// document of a shard ends with the shard. If the shard has too few tokens left for a
    /// whole batch, they are dropped.
    fn pack(&mut self, draft: &mut Draft, at: &mut Cursor) -> Result<bool, Error> {
        let Config { bos_id, lanes, .. } = *self.plan.config;
        let Stage { lane_len, max_doc_len, max_docs, .. } = draft.stage;
        let (shard, tokens) = (at.shard, self.plan.catalog.shards()[at.shard].tokens);
        let width = lane_len + 1;
        if tokens - at.offset < lanes.saturating_mul(width) {
            return Ok(false);
        }
        let (mut most, mut over) = (0, None);
        for lane in 0..lanes {
            let row = draft.row(lane);
            let (mut filled, mut first) = (0, at.offset);
            self.ends.clear();
            while filled < width {
                let Some(start) = self.find(shard, bos_id, at.offset..tokens)? else {
                    return Ok(false);
                };
                let longest = max_doc_len.unwrap_or(width).min(width - filled).min(tokens - start);
                let next = self.find(shard, bos_id, start + 1..start + longest)?;
                let end = next.unwrap_or(start + longest);
                at.offset = end;
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
        Ok(true)
    }

    fn find(
        &mut self,
        shard: usize,
        token: u32,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        self.readers.get(&self.plan.catalog, shard)?.find(token, range, &self.stop)
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
        let tokens = self.readers.get(&self.plan.catalog, shard)?.tokens(range)?;
        draft.batch.copy(row, to, tokens);
        let Some(vocab_size) = self.plan.config.vocab_size else { return Ok(()) };
        if let Some(at) = tokens.find_outside(vocab_size).filter(|_| draft.foreign.is_none()) {
            draft.foreign = Some(Error::new(
                Kind::TokenRange,
                format!(
                    "shard {} holds token id {} at token position {}, but vocab_size={vocab_size} \
                     allows ids below {vocab_size} only; use the vocabulary the shard was made \
                     with or make the shard again",
                    self.plan.catalog.shards()[shard].path.display(),
                    tokens.at(at),
                    start + at
                ),
            ));
        }
        Ok(())
    }

    fn no_batch(&self, stage: Stage) -> Error {
        let Config { lanes, order, bos_id, .. } = *self.plan.config;
        let shards = self.plan.catalog.shards();
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
        let (step, path) = (self.cursor.step, self.plan.catalog.shards()[shard].path.display());
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
