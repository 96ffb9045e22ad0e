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
use crate::read::{Readers, will_need};
use crate::state::Cursor;
use crate::tokens::Tokens;

/// Batches, one after the other.
pub struct Stream<'a> {
    plan: Plan<'a>,
    pool: &'a Arc<Pool>,
    stop: &'a AtomicBool,
    cursor: Cursor,
    readers: Readers<'a>,
}

/// A batch in the making.
struct Draft {
    batch: Batch,
    stage: Stage,
    /// The lanes of this process, one a row.
    local: Range<usize>,
    vocab_size: Option<u32>,
    /// Where the documents of the lane end that is being filled.
    ends: Vec<usize>,
    faults: Faults,
}

/// What a batch must not hold: an error unless the shard ends before the batch does.
#[derive(Default)]
struct Faults {
    /// Shard, place and id of the first token outside the vocabulary.
    foreign: Option<(usize, usize, u32)>,
    /// The first lane with more documents than the table: its number, shard, place and how many.
    crowded: Option<(usize, usize, usize, usize)>,
    /// The most documents of any such lane.
    most: usize,
}

impl Draft {
    /// Copy tokens, which start at `place` of a shard, into a lane from its token `to` on, and look
    /// for ids that it must not hold.
    fn copy(&mut self, lane: usize, to: usize, tokens: Tokens<'_>, (shard, place): (usize, usize)) {
        self.batch.copy(lane - self.local.start, to, tokens);
        if let (Some(size), None) = (self.vocab_size, self.faults.foreign) {
            let found = tokens.find_outside(size);
            self.faults.foreign = found.map(|at| (shard, place + at, tokens.at(at)));
        }
    }

    /// Write down where the documents of a lane end, which starts at `place` of a shard.
    fn end_lane(&mut self, lane: usize, (shard, place): (usize, usize)) {
        let found = self.ends.len();
        if self.stage.max_docs.is_some_and(|max_docs| found > max_docs) {
            self.faults.crowded.get_or_insert((lane, shard, place, found));
            self.faults.most = self.faults.most.max(found);
        } else if self.local.contains(&lane) {
            self.batch.set_documents(lane - self.local.start, &self.ends);
        }
        self.ends.clear();
    }
}

impl<'a> Stream<'a> {
    /// A stream that continues at `cursor` and gives up with an error once `stop` is set.
    pub fn new(plan: Plan<'a>, pool: &'a Arc<Pool>, cursor: Cursor, stop: &'a AtomicBool) -> Self {
        let readers = Readers::new(plan.catalog, plan.config.backend);
        Self { plan, pool, stop, cursor, readers }
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
        let mut at = self.cursor;
        let stage = match self.plan.config.stage_at(at.step) {
            Some(&stage) if !self.plan.is_over(at) => stage,
            _ => return Ok(None),
        };
        let Config { lanes, order, vocab_size, .. } = *self.plan.config;
        let Stage { lane_len, max_docs, .. } = stage;
        let (local, width) = (self.plan.config.local_lanes(), self.plan.catalog.width());
        let rows = local.len();
        let batch = Batch::new(self.pool, Shape { rows, lane_len, width, max_docs })?;
        let (ends, faults) = Default::default();
        let mut draft = Draft { batch, stage, local, vocab_size, ends, faults };
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
            (draft.ends, draft.faults) = Default::default();
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
        self.check(&draft)?;
        let used = match order {
            Order::Documents => lane_len + 1,
            Order::Windows { .. } => 0,
            Order::Contiguous | Order::Blocks { .. } => lane_len,
        };
        dropped += at.offset - start.offset - lanes * used;
        // Documents are searched for in all that is passed over.
        let read = match order {
            Order::Documents => dropped + lanes * used,
            _ => rows * (lane_len + 1),
        };
        self.cursor = Cursor { step: start.step + 1, ..at };
        self.read_ahead(start.offset);
        let mut batch = draft.batch;
        (batch.step, batch.epoch, batch.dropped) = (start.step, start.epoch, dropped as u64);
        batch.bytes_read = (read * width.bytes()) as u64;
        batch.switches = std::mem::take(&mut self.readers.switches);
        batch.after = self.cursor;
        Ok(Some(batch))
    }

    /// When the middle of a shard is passed, ask for the start of the next one.
    fn read_ahead(&self, from: usize) {
        let (here, next) = (self.cursor, self.plan.next_segment(self.cursor));
        let alone = next.shard == here.shard || self.plan.config.order.mixes_shards();
        let middle = self.plan.segment_len(here) / 2;
        if (from..here.offset).contains(&middle) && !alone && !self.plan.is_over(next) {
            will_need(&self.plan.catalog.shards()[next.shard]);
        }
    }

    /// Fill all lanes from `at` on, in one segment, and move `at` behind them; false where the
    /// segment ends before.
    fn fill(&mut self, draft: &mut Draft, at: &mut Cursor) -> Result<bool, Error> {
        let Config { bos_id, lanes, order, .. } = *self.plan.config;
        if order == Order::Documents {
            return self.pack(draft, at);
        }
        let Stage { lane_len, max_docs, .. } = draft.stage;
        for lane in 0..lanes {
            let Some((shard, start)) = self.plan.window(at, lane, lane_len) else {
                return Ok(false);
            };
            if !draft.local.contains(&lane) {
                continue;
            }
            let reader = self.readers.get(shard)?;
            let tokens = reader.tokens(start..start + lane_len + 1)?;
            draft.copy(lane, 0, tokens, (shard, start));
            if max_docs.is_some() {
                let starts = tokens.positions(bos_id).filter(|at| (1..lane_len).contains(at));
                draft.ends.extend(starts.chain([lane_len]));
                draft.end_lane(lane, (shard, start));
            }
        }
        Ok(true)
    }

    /// The rules of modded-nanogpt: a lane is filled with documents, each from its first token and
    /// cut at `max_doc_len` or at the end of the lane; the cut-off rest is skipped. The last
    /// document of a shard ends with the shard. If the shard has too few tokens left for a
    /// whole batch, they are dropped.
    fn pack(&mut self, draft: &mut Draft, at: &mut Cursor) -> Result<bool, Error> {
        let Config { bos_id, lanes, .. } = *self.plan.config;
        let Stage { lane_len, max_doc_len, .. } = draft.stage;
        let (shard, tokens, width) = (at.shard, self.plan.segment_len(*at), lane_len + 1);
        if tokens - at.offset < lanes.saturating_mul(width) {
            return Ok(false);
        }
        let reader = self.readers.get(shard)?;
        // Where the next document starts, unless the one before was cut.
        let mut next = None;
        for lane in 0..lanes {
            let (mut filled, mut first) = (0, at.offset);
            while filled < width {
                if next.is_none() {
                    next = reader.find(bos_id, at.offset..tokens, self.stop)?;
                }
                let Some(start) = next else { return Ok(false) };
                let longest = max_doc_len.unwrap_or(width).min(width - filled).min(tokens - start);
                next = reader.find(bos_id, start + 1..start + longest, self.stop)?;
                at.offset = next.unwrap_or(start + longest);
                if draft.local.contains(&lane) {
                    draft.copy(lane, filled, reader.tokens(start..at.offset)?, (shard, start));
                }
                if filled == 0 {
                    first = start;
                }
                // A document of which only the last target fits has no input in this lane.
                if filled < lane_len {
                    draft.ends.push(lane_len.min(filled + at.offset - start));
                }
                filled += at.offset - start;
            }
            draft.end_lane(lane, (shard, first));
        }
        Ok(true)
    }

    fn check(&self, draft: &Draft) -> Result<(), Error> {
        let Faults { foreign, crowded, most } = draft.faults;
        let path = |shard: usize| self.plan.catalog.shards()[shard].path.display();
        if let (Some((lane, shard, place, found)), Some(max_docs)) = (crowded, draft.stage.max_docs)
        {
            return Err(Error::new(
                Kind::DocOverflow,
                format!(
                    "step {}, lane {lane} (shard {}, token {place}) holds {found} documents but \
                     max_docs={max_docs}; set max_docs to at least {most}, or more where other \
                     lanes hold more",
                    self.cursor.step,
                    path(shard)
                ),
            ));
        }
        if let (Some((shard, place, id)), Some(size)) = (foreign, draft.vocab_size) {
            return Err(Error::new(
                Kind::TokenRange,
                format!(
                    "shard {} holds token id {id} at token position {place}, but \
                     vocab_size={size} allows ids below {size} only; use the vocabulary the shard \
                     was made with or make the shard again",
                    path(shard)
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
}
