//! The stream of batches: assign tokens to lanes (a lane is one row of a batch: packed documents).
//!
//! Every process plans the boundaries of all lanes, so that all stand at the same place after every batch,
//! and copies only its own lanes. In a mixture each source fills the lanes that fall to it as if it were alone.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::buffer::{Batch, Pool, Shape};
use crate::config::{Config, Order};
use crate::error::{Error, Kind};
use crate::plan::{LanePlanner, LaneRequest, Piece, too_many_documents};
use crate::sources::Sources;
use crate::state::Cursor;

/// Batches, one after the other.
pub struct Stream {
    sources: Arc<Sources>,
    config: Arc<Config>,
    pool: Arc<Pool>,
    cursor: Cursor,
    planners: Vec<LanePlanner>,
}

impl Stream {
    /// A stream that continues at `cursor` and gives up with an error once `stop` is set.
    pub fn new(
        sources: Arc<Sources>,
        config: Arc<Config>,
        pool: Arc<Pool>,
        cursor: Cursor,
        stop: &Arc<AtomicBool>,
    ) -> Self {
        let planner = |catalog: &Arc<_>| {
            LanePlanner::new(Arc::clone(catalog), Arc::clone(&config), Arc::clone(stop))
        };
        let planners = sources.catalogs().map(planner).collect();
        Self { sources, config, pool, cursor, planners }
    }

    /// Make the next batch; `None` after the last. Errors: a shard that changed or cannot be read, a token outside the
    /// vocabulary, too many documents in a lane, an epoch without a single batch.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, Error> {
        self.planners.iter_mut().for_each(|planner| planner.readers.begin());
        let made = self.make_batch();
        // Tokens of a file that has changed prove nothing, be it a batch, its end or an error.
        self.planners.iter_mut().try_for_each(|planner| planner.readers.unchanged())?;
        made
    }

    fn make_batch(&mut self) -> Result<Option<Batch>, Error> {
        let config = Arc::clone(&self.config);
        let step = self.cursor.step;
        let Some(stage) = config.stage_at(step) else { return Ok(None) };
        let (bytes_before, switches_before) = self.counts();
        let mut after = Cursor { step: step + 1, places: self.cursor.places.clone() };
        let (mut planned, mut dropped) = (Vec::with_capacity(self.planners.len()), 0);
        for (source, lanes) in self.lanes_of_sources().iter().enumerate() {
            if lanes.is_empty() {
                continue;
            }
            let wanted = LaneRequest { step, stage, lanes };
            let Some(plan) = self.planners[source].plan(after.places[source], wanted)? else {
                return Ok(None);
            };
            after.places[source] = plan.after;
            dropped += plan.dropped;
            planned.push((source, plan.pieces));
        }
        let shape = Shape {
            rows: config.local_lanes().len(),
            lane_len: stage.lane_len,
            width: self.sources.width(),
            max_docs: stage.max_docs,
            loss_mask: config.loss_mask,
        };
        let mut batch = Batch::new(&self.pool, shape)?;
        for (source, pieces) in &planned {
            for pieces in pieces.chunk_by(|a, b| a.lane == b.lane) {
                self.fill(&mut batch, *source, pieces)?;
            }
        }
        self.cursor = after;
        let (bytes, switches) = self.counts();
        batch.step = step;
        batch.epoch = self.cursor.places.iter().map(|place| place.epoch).min().unwrap_or_default();
        batch.dropped = dropped as u64;
        batch.bytes_read = bytes - bytes_before;
        batch.switches = switches - switches_before;
        batch.after = self.cursor.clone();
        Ok(Some(batch))
    }

    /// The lanes of the next batch that each source fills.
    fn lanes_of_sources(&self) -> Vec<Vec<usize>> {
        let lanes = self.config.lanes;
        let first = self.cursor.step.wrapping_mul(lanes as u64);
        let mut all = vec![Vec::with_capacity(lanes); self.planners.len()];
        for lane in 0..lanes {
            all[self.sources.of_lane(first.wrapping_add(lane as u64))].push(lane);
        }
        all
    }

    /// Bytes read and shards switched so far.
    fn counts(&self) -> (u64, u64) {
        let readers = self.planners.iter().map(|planner| &planner.readers);
        readers.fold((0, 0), |(bytes, switches), readers| {
            (bytes + readers.bytes_read(), switches + readers.switches())
        })
    }

    /// Copy the pieces of one lane into its row of a batch and fill its table of documents and its mask.
    fn fill(&mut self, batch: &mut Batch, source: usize, pieces: &[Piece]) -> Result<(), Error> {
        let (Shape { lane_len, max_docs, .. }, step) = (batch.shape(), self.cursor.step);
        let planner = &mut self.planners[source];
        let first = &pieces[0];
        let row = first.lane - self.config.local_lanes().start;
        let (mut ends, mut cuts) = (Vec::with_capacity(pieces.len()), Vec::new());
        let mut filled = 0;
        for Piece { shard, range, cut, .. } in pieces {
            let reader = planner.readers.get(&planner.catalog, *shard)?;
            batch.copy(row, filled, reader.tokens(range.clone())?);
            if filled < lane_len {
                ends.push(lane_len.min(filled + range.len()));
            }
            filled += range.len();
            // The last token of a lane is a target only, and the true one of the token before it.
            if *cut && filled <= lane_len {
                cuts.push(filled - 1);
            }
        }
        self.check_range(batch, row, source, pieces)?;
        if let (Some(max_docs), false) = (max_docs, self.config.order == Order::Documents) {
            let starts = batch.row(row).positions(self.config.bos_id);
            ends = starts.into_iter().filter(|at| (1..lane_len).contains(at)).collect();
            ends.push(lane_len);
            if ends.len() > max_docs {
                let path = &self.planners[source].catalog.shards()[first.shard].path;
                let (offset, found) = (first.range.start, ends.len());
                return Err(too_many_documents(
                    path, offset, step, first.lane, found, max_docs, found,
                ));
            }
        }
        batch.set_documents(row, &ends);
        batch.set_mask(row, &cuts);
        Ok(())
    }

    fn check_range(
        &self,
        batch: &Batch,
        row: usize,
        source: usize,
        pieces: &[Piece],
    ) -> Result<(), Error> {
        let Some(vocab_size) = self.config.vocab_size else { return Ok(()) };
        let tokens = batch.row(row);
        let Some(at) = tokens.find_outside(vocab_size) else { return Ok(()) };
        let mut before = 0;
        for Piece { shard, range, .. } in pieces {
            if at < before + range.len() {
                return Err(Error::new(
                    Kind::TokenRange,
                    format!(
                        "shard {} holds token id {} at token position {}, but vocab_size={vocab_size} allows ids below \
                         {vocab_size} only; use the vocabulary the shard was made with or make the shard again",
                        self.planners[source].catalog.shards()[*shard].path.display(),
                        tokens.at(at),
                        range.start + at - before
                    ),
                ));
            }
            before += range.len();
        }
        Ok(())
    }
}
