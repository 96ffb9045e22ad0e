//! Choose which tokens of one shard set go into which lanes (rows) of a batch.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::catalog::{Catalog, Shard};
use crate::config::{Config, Order, Stage, whole_blocks};
use crate::error::{Error, Kind};
use crate::readahead::ReadAhead;
use crate::reader::Readers;
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

/// The pieces of this process's lanes in a batch.
pub(crate) struct Plan {
    pub(crate) pieces: Vec<Piece>,
    /// Where the source stands after all lanes.
    pub(crate) after: Place,
    /// Tokens passed over.
    pub(crate) dropped: usize,
}

/// The pieces in one segment (a shard, or an epoch of blocks or windows), and the token after the last.
struct Segment {
    pieces: Vec<Piece>,
    end: usize,
}

/// The lanes of a batch that one source fills.
#[derive(Clone, Copy)]
pub(crate) struct LaneRequest<'a> {
    pub(crate) step: u64,
    pub(crate) stage: &'a Stage,
    /// Their numbers, counted over all processes; at least one.
    pub(crate) lanes: &'a [usize],
}

/// Plans the lanes that one source fills, batch after batch.
pub(crate) struct LanePlanner {
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) readers: Readers,
    config: Arc<Config>,
    stop: Arc<AtomicBool>,
    ahead: ReadAhead,
    /// Blocks before each shard, then their total; empty unless blocks are shuffled.
    blocks: Vec<usize>,
}

impl LanePlanner {
    pub(crate) fn new(catalog: Arc<Catalog>, config: Arc<Config>, stop: Arc<AtomicBool>) -> Self {
        let mut blocks = Vec::new();
        if let Order::Shuffled { block_tokens, .. } = config.order {
            blocks.push(0);
            blocks.extend(catalog.shards().iter().scan(0, |total, shard| {
                *total += whole_blocks(shard.tokens, block_tokens);
                Some(*total)
            }));
        }
        let readers = Readers::new(config.backend);
        Self { catalog, readers, config, stop, ahead: ReadAhead::default(), blocks }
    }

    /// The tokens of all `wanted` lanes from `from` on, in one segment; `None` after the last epoch.
    pub(crate) fn plan(
        &mut self,
        from: Place,
        wanted: LaneRequest<'_>,
    ) -> Result<Option<Plan>, Error> {
        let (mut at, mut dropped) = (from, 0);
        let mut from_the_start = (at.shard, at.offset) == (0, 0);
        let segment = loop {
            if self.config.epochs.is_some_and(|epochs| at.epoch >= epochs) {
                return Ok(None);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::stopped());
            }
            if let Some(segment) = self.in_segment(&at, wanted)? {
                break segment;
            }
            dropped += self.segment_len(&at) - at.offset;
            at = Place { shard: at.shard + 1, offset: 0, ..at };
            if at.shard == self.segments_per_epoch() {
                if from_the_start {
                    return Err(self.no_batch(wanted));
                }
                from_the_start = true;
                at = Place { epoch: at.epoch + 1, shard: 0, offset: 0 };
            }
        };
        let used = match self.config.order {
            Order::Documents => wanted.stage.lane_len + 1,
            Order::Windows { .. } => 0,
            Order::Contiguous | Order::Shuffled { .. } => wanted.stage.lane_len,
        };
        dropped += segment.end - at.offset - wanted.lanes.len() * used;
        let after = Place { offset: segment.end, ..at };
        self.read_ahead(&after);
        Ok(Some(Plan { pieces: segment.pieces, after, dropped }))
    }

    /// Shards visited one after another, or 1 when the order mixes shards.
    fn segments_per_epoch(&self) -> usize {
        if self.config.order.mixes_shards() { 1 } else { self.catalog.shards().len() }
    }

    /// Tokens of the segment in which `at` lies.
    fn segment_len(&self, at: &Place) -> usize {
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
        if next.shard == self.segments_per_epoch() {
            next = Place { epoch: at.epoch + 1, shard: 0, ..*at };
        }
        let (shard, here) = (self.shard_of(&next), self.shard_of(at));
        if shard != here && self.config.epochs.is_none_or(|epochs| next.epoch < epochs) {
            let shards = self.catalog.shards();
            self.ahead.advise(shard, &shards[shard], at.offset, shards[here].tokens);
        }
    }

    fn in_segment(
        &mut self,
        at: &Place,
        wanted: LaneRequest<'_>,
    ) -> Result<Option<Segment>, Error> {
        match self.config.order {
            Order::Documents => self.plan_documents(at, wanted),
            Order::Contiguous => Ok(self.plan_contiguous(at, wanted)),
            Order::Shuffled { seed, block_tokens } => {
                Ok(self.plan_blocks(at, wanted, seed, block_tokens))
            }
            Order::Windows { seed } => Ok(self.plan_windows(at, wanted, seed)),
        }
    }

    /// The rules of modded-nanogpt: a lane is filled with documents, each from its first token and cut at
    /// `max_doc_len` or at the end of the lane; the cut-off rest is skipped. The last document of a shard
    /// ends with the shard. If the shard has too few tokens left for a whole batch, they are dropped.
    fn plan_documents(
        &mut self,
        at: &Place,
        wanted: LaneRequest<'_>,
    ) -> Result<Option<Segment>, Error> {
        let Config { bos_id, loss_mask, .. } = *self.config;
        let LaneRequest { step, stage, lanes } = wanted;
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
                    return Ok(None);
                };
                let longest =
                    stage.max_doc_len.unwrap_or(width).min(width - filled).min(tokens - start);
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
                let (found, offset) = documents[index];
                let least = documents.iter().map(|(count, _)| *count).max().unwrap_or(found);
                let path = &self.catalog.shards()[shard].path;
                return Err(too_many_documents(
                    path,
                    offset,
                    step,
                    lanes[index],
                    found,
                    max_docs,
                    least,
                ));
            }
        }
        Ok(Some(Segment { pieces, end }))
    }

    /// Lane after lane, window after window; a shard is left when its lanes and their last target do not fit.
    fn plan_contiguous(
        &self,
        at: &Place,
        LaneRequest { stage, lanes, .. }: LaneRequest<'_>,
    ) -> Option<Segment> {
        let (local, shard) = (self.config.local_lanes(), self.shard_of(at));
        let end = lanes.len().checked_mul(stage.lane_len)?.checked_add(at.offset)?;
        if end >= self.catalog.shards()[shard].tokens {
            return None;
        }
        let starts = (at.offset..end).step_by(stage.lane_len);
        let pieces = lanes.iter().zip(starts).filter(|(lane, _)| local.contains(lane));
        let piece = |(&lane, start)| Piece {
            lane,
            shard,
            range: start..start + stage.lane_len + 1,
            cut: false,
        };
        Some(Segment { pieces: pieces.map(piece).collect(), end })
    }

    /// As contiguous, over the blocks of all shards in the order of this epoch; a window that would cross the
    /// end of its block (possible after a change of stage) starts with the next block instead.
    fn plan_blocks(
        &self,
        at: &Place,
        LaneRequest { stage, lanes, .. }: LaneRequest<'_>,
        seed: u64,
        block_tokens: usize,
    ) -> Option<Segment> {
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
                pieces.push(Piece {
                    lane,
                    shard,
                    range: start..start + stage.lane_len + 1,
                    cut: false,
                });
            }
            end += stage.lane_len;
        }
        Some(Segment { pieces, end })
    }

    /// As nanoGPT: every lane starts at any token that has `lane_len` more after it in its shard. The
    /// draws depend on the step number only, so the saved position stays 0.
    fn plan_windows(&self, at: &Place, wanted: LaneRequest<'_>, seed: u64) -> Option<Segment> {
        let LaneRequest { step, stage, lanes } = wanted;
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
        let pieces =
            lanes.iter().filter(|lane| local.contains(lane)).map(piece).collect::<Option<_>>()?;
        Some(Segment { pieces, end: at.offset })
    }

    fn no_batch(&self, LaneRequest { stage, lanes, .. }: LaneRequest<'_>) -> Error {
        let shards = self.catalog.shards();
        let start = match self.config.order {
            Order::Documents => format!(" that start at a document (token {})", self.config.bos_id),
            _ => String::new(),
        };
        Error::argument(format!(
            "no batch of {} lanes x {} tokens{start} fits into any of {} shard(s) from {}; use fewer lanes, a shorter \
             lane_len or larger shards",
            lanes.len(),
            stage.lane_len,
            shards.len(),
            shards[0].path.display()
        ))
    }
}

/// The error for a lane that holds `found` documents and starts at token `offset`; a table of `least` is needed.
pub(crate) fn too_many_documents(
    path: &Path,
    offset: usize,
    step: u64,
    lane: usize,
    found: usize,
    max_docs: usize,
    least: usize,
) -> Error {
    Error::new(
        Kind::DocOverflow,
        format!(
            "step {step}, lane {lane} (shard {}, token {offset}) holds {found} documents but max_docs={max_docs}; set \
             max_docs to at least {least}, or more where other lanes hold more",
            path.display()
        ),
    )
}
