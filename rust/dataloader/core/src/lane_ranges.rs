//! Where one source's lanes lie: the walk over its shards that fills some lanes of a batch.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::catalog::{Catalog, Shard};
use crate::config::{Config, Order, Stage, whole_blocks};
use crate::error::Error;
use crate::readahead::Ahead;
use crate::reader::{Backend, Readers};
use crate::shuffle::{Permutation, draw};
use crate::state::Place;

/// A run of tokens of one shard that goes into one lane.
pub(crate) struct Piece {
    pub(crate) lane: usize,
    pub(crate) shard: usize,
    pub(crate) range: Range<usize>,
    /// Whether its document goes on after it, so that the target of its last token is not the token that followed.
    pub(crate) cut: bool,
}

/// Where a walk led.
pub(crate) enum Walked {
    /// To these pieces of this process's lanes.
    To { pieces: Vec<Piece>, after: Place, dropped: usize },
    /// To the end of the last epoch.
    End { dropped: usize },
}

/// The pieces in one shard, or in one epoch of blocks, and the token after the last.
struct Plan {
    pieces: Vec<Piece>,
    end: usize,
}

/// The lanes of a batch that one source fills.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) step: u64,
    pub(crate) stage: &'a Stage,
    /// Their numbers, counted over all processes; at least one.
    pub(crate) lanes: &'a [usize],
}

/// The walk over one source.
pub(crate) struct Walk {
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) readers: Readers,
    config: Arc<Config>,
    stop: Arc<AtomicBool>,
    ahead: Ahead,
    /// Blocks before each shard, then their total; empty unless blocks are shuffled.
    blocks: Vec<usize>,
}

impl Walk {
    pub(crate) fn new(
        catalog: Arc<Catalog>,
        config: Arc<Config>,
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
        Self { catalog, readers: Readers::new(backend), config, stop, ahead: Ahead::default(), blocks }
    }

    /// Find the tokens of all `wanted` lanes from `from` on, in one shard.
    pub(crate) fn find(&mut self, from: Place, wanted: Wanted<'_>) -> Result<Walked, Error> {
        let (mut at, mut dropped) = (from, 0);
        let mut from_the_start = (at.shard, at.offset) == (0, 0);
        let plan = loop {
            if self.config.epochs.is_some_and(|epochs| at.epoch >= epochs) {
                return Ok(Walked::End { dropped });
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            self.readers.rewind();
            if let Some(plan) = self.plan(&at, wanted)? {
                break plan;
            }
            dropped += self.end(&at) - at.offset;
            at = Place { shard: at.shard + 1, offset: 0, ..at };
            if at.shard == self.rounds() {
                if from_the_start {
                    return Err(self.no_batch(wanted));
                }
                from_the_start = true;
                at = Place { epoch: at.epoch + 1, shard: 0, offset: 0 };
            }
        };
        let held = match self.config.order {
            Order::Documents => wanted.stage.lane_len + 1,
            Order::Windows { .. } => 0,
            Order::Contiguous | Order::Shuffled { .. } => wanted.stage.lane_len,
        };
        dropped += plan.end - at.offset - wanted.lanes.len() * held;
        let after = Place { offset: plan.end, ..at };
        self.read_ahead(&after);
        Ok(Walked::To { pieces: plan.pieces, after, dropped })
    }

    /// The error of a lane with more documents than its table.
    pub(crate) fn overflow(&self, first: (usize, usize), place: (u64, usize), numbers: [usize; 3]) -> Error {
        let ((shard, offset), (step, lane), [found, max_docs, fits]) = (first, place, numbers);
        let path = self.catalog.shards()[shard].path.clone();
        Error::DocOverflow { path, offset, step, lane, found, max_docs, fits }
    }

    /// How many rounds an epoch has: one for each shard, or one over all of them.
    fn rounds(&self) -> usize {
        if self.config.order.mixes_shards() { 1 } else { self.catalog.shards().len() }
    }

    /// Tokens of the round in which `at` lies.
    fn end(&self, at: &Place) -> usize {
        if self.config.order.mixes_shards() {
            self.catalog.num_tokens()
        } else {
            self.catalog.shards()[self.shard_of(at)].tokens
        }
    }

    fn shard_of(&self, at: &Place) -> usize {
        self.config.shard_at(&self.catalog, at.epoch, at.shard)
    }

    fn read_ahead(&mut self, at: &Place) {
        if self.config.order.mixes_shards() {
            return;
        }
        let mut next = Place { shard: at.shard + 1, ..*at };
        if next.shard == self.rounds() {
            next = Place { epoch: at.epoch + 1, shard: 0, ..*at };
        }
        let (shard, here) = (self.shard_of(&next), self.shard_of(at));
        if shard != here && self.config.epochs.is_none_or(|epochs| next.epoch < epochs) {
            let shards = self.catalog.shards();
            self.ahead.advise(shard, &shards[shard], at.offset, shards[here].tokens);
        }
    }

    fn plan(&mut self, at: &Place, wanted: Wanted<'_>) -> Result<Option<Plan>, Error> {
        match self.config.order {
            Order::Documents => self.plan_documents(at, wanted),
            Order::Contiguous => Ok(self.plan_contiguous(at, wanted)),
            Order::Shuffled { seed, block_tokens } => Ok(self.plan_blocks(at, wanted, seed, block_tokens)),
            Order::Windows { seed } => Ok(self.plan_windows(at, wanted, seed)),
        }
    }

    /// The rules of modded-nanogpt: a lane is filled with documents, each from its first token and cut at
    /// `max_doc_len` or at the end of the lane; what is cut off is passed over. The last document of a shard
    /// ends with the shard. A batch that the shard cannot complete is given up, and with it the shard.
    fn plan_documents(&mut self, at: &Place, wanted: Wanted<'_>) -> Result<Option<Plan>, Error> {
        let Config { bos_id, loss_mask, .. } = *self.config;
        let Wanted { step, stage, lanes } = wanted;
        let (local, shard) = (self.config.local_lanes(), self.shard_of(at));
        let tokens = self.catalog.shards()[shard].tokens;
        let width = stage.lane_len + 1;
        if tokens - at.offset < lanes.len().saturating_mul(width) {
            return Ok(None);
        }
        let reader = self.readers.get(&self.catalog, shard)?;
        let (mut pieces, mut documents) = (Vec::new(), Vec::with_capacity(lanes.len()));
        let mut end = at.offset;
        for &lane in lanes {
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
                    let whole = !loss_mask || next.is_some() || end == tokens;
                    let cut = !whole && reader.tokens(end..end + 1)?.at(0) != bos_id;
                    pieces.push(Piece { lane, shard, range: start..end, cut });
                }
            }
            documents.push((count, first));
        }
        if let Some(max_docs) = stage.max_docs {
            if let Some(index) = documents.iter().position(|(count, _)| *count > max_docs) {
                reader.unchanged()?;
                let (found, offset) = documents[index];
                let fits = documents.iter().map(|(count, _)| *count).max().unwrap_or(found);
                return Err(self.overflow((shard, offset), (step, lanes[index]), [found, max_docs, fits]));
            }
        }
        Ok(Some(Plan { pieces, end }))
    }

    /// Lane after lane, window after window; a shard is left when its lanes and their last target do not fit.
    fn plan_contiguous(&self, at: &Place, Wanted { stage, lanes, .. }: Wanted<'_>) -> Option<Plan> {
        let (local, shard) = (self.config.local_lanes(), self.shard_of(at));
        let end = lanes.len().checked_mul(stage.lane_len)?.checked_add(at.offset)?;
        if end >= self.catalog.shards()[shard].tokens {
            return None;
        }
        let starts = (at.offset..end).step_by(stage.lane_len);
        let pieces = lanes.iter().zip(starts).filter(|(lane, _)| local.contains(lane));
        let piece =
            |(&lane, start)| Piece { lane, shard, range: start..start + stage.lane_len + 1, cut: false };
        Some(Plan { pieces: pieces.map(piece).collect(), end })
    }

    /// As contiguous, over the blocks of all shards in the order of this epoch; a window that would cross the
    /// end of its block (possible after a change of stage) starts with the next block instead.
    fn plan_blocks(
        &self,
        at: &Place,
        Wanted { stage, lanes, .. }: Wanted<'_>,
        seed: u64,
        block_tokens: usize,
    ) -> Option<Plan> {
        let count = *self.blocks.last()?;
        let permutation = Permutation::new(count as u64, seed, at.epoch);
        let local = self.config.local_lanes();
        let mut pieces = Vec::with_capacity(local.len());
        let mut end = at.offset;
        for &lane in lanes {
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
                pieces.push(Piece { lane, shard, range: start..start + stage.lane_len + 1, cut: false });
            }
            end += stage.lane_len;
        }
        Some(Plan { pieces, end })
    }

    /// As nanoGPT: every lane starts at any token that has `lane_len` more after it in its shard. What a step
    /// draws depends on its number alone, so the place never moves.
    fn plan_windows(&self, at: &Place, wanted: Wanted<'_>, seed: u64) -> Option<Plan> {
        let Wanted { step, stage, lanes } = wanted;
        let starts = |shard: &Shard| shard.tokens.saturating_sub(stage.lane_len);
        let shards = self.catalog.shards();
        let total: usize = shards.iter().map(starts).sum();
        let local = self.config.local_lanes();
        let piece = |&lane: &usize| {
            let mut start = usize::try_from(draw(total as u64, seed, step, lane as u64)).ok()?;
            let shard = shards.iter().position(|shard| {
                let here = start < starts(shard);
                start -= if here { 0 } else { starts(shard) };
                here
            })?;
            Some(Piece { lane, shard, range: start..start + stage.lane_len + 1, cut: false })
        };
        let pieces = lanes.iter().filter(|lane| local.contains(lane)).map(piece).collect::<Option<_>>()?;
        Some(Plan { pieces, end: at.offset })
    }

    fn no_batch(&self, Wanted { stage, lanes, .. }: Wanted<'_>) -> Error {
        let shards = self.catalog.shards();
        Error::NoBatch {
            path: shards[0].path.clone(),
            offset: 0,
            shards: shards.len(),
            lanes: lanes.len(),
            lane_len: stage.lane_len,
            bos_id: (self.config.order == Order::Documents).then_some(self.config.bos_id),
        }
    }
}
