//! The checked configuration of a stream.

use crate::catalog::Catalog;
use crate::shuffle::Permutation;

/// A checked stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Batches of this stage; `None` without a schedule.
    pub steps: Option<u64>,
    /// Tokens of a lane.
    pub lane_len: usize,
    /// Documents are cut after this many tokens.
    pub max_doc_len: Option<usize>,
    /// Size of the table of document offsets.
    pub max_docs: Option<usize>,
}

/// The order in which tokens fill lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Lanes are packed with documents, each from its first token.
    Documents,
    /// Lanes are consecutive windows of a shard.
    Contiguous,
    /// Lanes are windows of blocks in a pseudo-random order.
    Shuffled {
        /// Seed of the permutation.
        seed: u64,
        /// Tokens of a block.
        block_tokens: usize,
    },
    /// Every lane is a window that starts at a random token of any shard, drawn with replacement.
    Windows {
        /// Seed of the draws.
        seed: u64,
    },
}

impl Order {
    /// Whether it takes tokens of all shards at once, not of one after the other.
    #[must_use]
    pub fn mixes_shards(self) -> bool {
        matches!(self, Self::Shuffled { .. } | Self::Windows { .. })
    }
}

/// A configuration that fits its shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Lanes of the global batch.
    pub lanes: usize,
    /// The order in which tokens fill lanes.
    pub order: Order,
    /// Seed of the shard order; `None` keeps file-name order.
    pub shard_seed: Option<u64>,
    /// The token that starts a document.
    pub bos_id: u32,
    /// At least one stage.
    pub stages: Vec<Stage>,
    /// Which process this is.
    pub process_index: usize,
    /// How many processes share the batch.
    pub process_count: usize,
    /// Passes over the data; `None` for no end.
    pub epochs: Option<u64>,
    /// Ids at or above this are an error.
    pub vocab_size: Option<u32>,
    /// Whether batches have a mask of targets that do not follow their input.
    pub loss_mask: bool,
    /// Batches made ahead.
    pub prefetch: usize,
}

impl Config {
    /// The lanes of this process.
    #[must_use]
    pub fn local_lanes(&self) -> std::ops::Range<usize> {
        let each = self.lanes / self.process_count;
        self.process_index * each..(self.process_index + 1) * each
    }

    /// The stage of a step, or `None` after the last.
    #[must_use]
    pub fn stage_at(&self, step: u64) -> Option<&Stage> {
        let mut end = 0u64;
        self.stages.iter().find(|stage| {
            end = stage.steps.map_or(u64::MAX, |steps| end.saturating_add(steps));
            step < end
        })
    }

    /// The shard that is the `position`th of an epoch.
    ///
    /// # Panics
    /// When `position` is not below the number of shards.
    #[must_use]
    pub fn shard_at(&self, catalog: &Catalog, epoch: u64, position: usize) -> usize {
        let Some(seed) = self.shard_seed else { return position };
        let order = Permutation::new(catalog.shards().len() as u64, seed, epoch);
        usize::try_from(order.at(position as u64)).unwrap_or(usize::MAX)
    }
}

/// Blocks of a shard that also have their look-ahead token.
pub(crate) fn whole_blocks(tokens: usize, block_tokens: usize) -> usize {
    tokens.saturating_sub(1) / block_tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(steps: &[Option<u64>]) -> Config {
        let stage = |(index, steps): (usize, &Option<u64>)| Stage {
            steps: *steps,
            lane_len: index,
            max_doc_len: None,
            max_docs: None,
        };
        Config {
            lanes: 8,
            order: Order::Contiguous,
            shard_seed: None,
            bos_id: 0,
            stages: steps.iter().enumerate().map(stage).collect(),
            process_index: 3,
            process_count: 4,
            epochs: None,
            vocab_size: None,
            loss_mask: false,
            prefetch: 0,
        }
    }

    #[test]
    fn stages_follow_each_other() {
        let config = stages(&[Some(2), Some(1), Some(3)]);
        let found: Vec<_> = (0..8).map(|step| config.stage_at(step).map(|stage| stage.lane_len)).collect();
        assert_eq!(found, [Some(0), Some(0), Some(1), Some(2), Some(2), Some(2), None, None]);
        assert_eq!(stages(&[None]).stage_at(u64::MAX - 1).map(|stage| stage.lane_len), Some(0));
        assert_eq!(config.local_lanes(), 6..8);
    }
}
