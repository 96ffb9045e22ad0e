//! The configuration of a stream: what the caller asks for, and whether it fits together and its
//! shards.

use crate::error::{Error, in_range};
use crate::shard::Catalog;

/// The largest number of lanes, tokens of a block and other counts that the caller may ask for.
pub const MOST: i64 = i32::MAX as i64;
const MOST_DOCS: i64 = 1 << 20;

/// Consecutive batches of one shape.
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

impl Stage {
    /// A stage of the caller's numbers.
    ///
    /// # Errors
    /// A number is out of its range.
    pub fn new(
        steps: Option<i64>,
        lane_len: i64,
        max_doc_len: Option<i64>,
        max_docs: Option<i64>,
    ) -> Result<Self, Error> {
        Ok(Self {
            steps: steps.map(|steps| in_range("steps", steps, 1, i64::MAX)).transpose()?,
            lane_len: in_range("lane_len", lane_len, 1, MOST - 1)?,
            max_doc_len: max_doc_len
                .map(|len| in_range("max_doc_len", len, 1, MOST - 1))
                .transpose()?,
            max_docs: max_docs.map(|docs| in_range("max_docs", docs, 1, MOST_DOCS)).transpose()?,
        })
    }
}

/// The order in which tokens fill lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// Lanes are packed with documents, each from its first token.
    Documents,
    /// Lanes are consecutive windows of a shard.
    Contiguous,
    /// Lanes are windows of blocks in a pseudo-random order.
    Blocks {
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
    pub fn mixes_shards(self) -> bool {
        matches!(self, Self::Blocks { .. } | Self::Windows { .. })
    }
}

/// How shards are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Mapped, with `pread` where the kernel lacks what that needs.
    Map,
    /// Always `pread`.
    Pread,
}

/// What a stream is made of, besides its shards.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Lanes of the global batch.
    pub lanes: usize,
    /// The order in which tokens fill lanes.
    pub order: Order,
    /// The token that starts a document; by default GPT-2's <|endoftext|>.
    pub bos_id: u32,
    /// At least one stage.
    pub stages: Vec<Stage>,
    /// Which process this is, from 0.
    pub process_index: usize,
    /// How many processes share the batch.
    pub process_count: usize,
    /// Passes over the data; `None` for no end.
    pub epochs: Option<u64>,
    /// Ids at or above this are an error.
    pub vocab_size: Option<u32>,
    /// Batches made ahead; of small ones eight times as many for a consumer that only takes them.
    pub prefetch: usize,
    /// How shards are read.
    pub backend: Backend,
}

impl Config {
    /// One epoch of `lanes` lanes in this order, in one process that prefetches two batches from
    /// mapped shards; the fields are there to be changed.
    pub fn new(lanes: usize, order: Order, stages: Vec<Stage>) -> Self {
        Self {
            lanes,
            order,
            bos_id: 50_256,
            stages,
            process_index: 0,
            process_count: 1,
            epochs: Some(1),
            vocab_size: None,
            prefetch: 2,
            backend: Backend::Map,
        }
    }

    /// Check the fields against each other and against the shards.
    ///
    /// # Errors
    /// What contradicts what, or a batch that no shard has enough tokens for.
    pub fn check(&self, catalog: &Catalog) -> Result<(), Error> {
        let Self { lanes, process_count, bos_id, .. } = *self;
        if lanes == 0 || process_count == 0 || lanes % process_count != 0 {
            return Err(Error::argument(format!(
                "lanes={lanes} cannot be shared equally by process_count={process_count} \
                 processes; choose lanes as a multiple of process_count"
            )));
        }
        if self.stages.is_empty() {
            return Err(Error::argument(
                "schedule has no stage, at least one was expected; leave it out or add one",
            ));
        }
        let cut = self.stages.iter().find_map(|stage| stage.max_doc_len);
        if let (Some(max), false) = (cut, self.order == Order::Documents) {
            return Err(Error::argument(format!(
                "max_doc_len={max} needs align=\"bos\" but align is None, which never cuts \
                 documents; drop one of the two"
            )));
        }
        let outside = self.vocab_size.filter(|&size| bos_id >= size);
        if let (Some(size), Order::Documents) = (outside, self.order) {
            return Err(Error::argument(format!(
                "align=\"bos\" looks for bos_id={bos_id} but vocab_size={size} has ids below \
                 {size} only; give the bos_id of this vocabulary or align=None"
            )));
        }
        match self.order {
            Order::Windows { .. } if self.epochs.is_some() => {
                return Err(Error::argument(
                    "random windows are drawn without end, so there are no epochs to count; give \
                     epochs=None",
                ));
            }
            Order::Blocks { block_tokens: block, .. } => {
                let mut lane_lens = self.stages.iter().map(|stage| stage.lane_len);
                if let Some(lane_len) = lane_lens.find(|lane_len| block % lane_len != 0) {
                    return Err(Error::argument(format!(
                        "block_tokens={block} is not a multiple of lane_len={lane_len}; choose \
                         block_tokens as a multiple of the lane_len of every stage"
                    )));
                }
            }
            _ => {}
        }
        self.stages.iter().try_for_each(|stage| self.check_fit(catalog, stage.lane_len))
    }

    fn check_fit(&self, catalog: &Catalog, lane_len: usize) -> Result<(), Error> {
        let (lanes, shards) = (self.lanes, catalog.shards());
        let largest = shards.iter().map(|shard| shard.tokens).max().unwrap_or_default();
        let in_one_shard = "tokens in one shard";
        let (have, need, unit) = match self.order {
            Order::Documents => (largest, lanes.saturating_mul(lane_len + 1), in_one_shard),
            Order::Contiguous => {
                (largest, lanes.saturating_mul(lane_len).saturating_add(1), in_one_shard)
            }
            Order::Windows { .. } => (largest, lane_len + 1, in_one_shard),
            Order::Blocks { block_tokens, .. } => {
                let blocks = shards.iter().map(|shard| whole_blocks(shard.tokens, block_tokens));
                let windows = blocks.sum::<usize>().saturating_mul(block_tokens / lane_len);
                (windows, lanes, "lane windows in whole blocks")
            }
        };
        if have < need {
            return Err(Error::argument(format!(
                "a batch of lanes={lanes} x lane_len={lane_len} needs {need} {unit} but there are \
                 {have} at most (shards from {}); use fewer lanes, a shorter lane_len or larger \
                 shards",
                shards[0].path.display()
            )));
        }
        Ok(())
    }

    /// The lanes of this process.
    pub fn local_lanes(&self) -> std::ops::Range<usize> {
        let each = self.lanes / self.process_count;
        self.process_index * each..(self.process_index + 1) * each
    }

    /// The stage of a step, or `None` after the last.
    pub fn stage_at(&self, step: u64) -> Option<&Stage> {
        let mut end = 0u64;
        self.stages.iter().find(|stage| {
            end = stage.steps.map_or(u64::MAX, |steps| end.saturating_add(steps));
            step < end
        })
    }
}

/// Blocks of a shard that also have their look-ahead token.
pub(crate) fn whole_blocks(tokens: usize, block_tokens: usize) -> usize {
    tokens.saturating_sub(1) / block_tokens
}

/// The smallest block that the lanes of every stage divide: their least common multiple.
pub fn smallest_block(stages: &[Stage]) -> usize {
    stages.iter().map(|stage| stage.lane_len).fold(1, |a, b| {
        let (mut x, mut y) = (a, b);
        while y != 0 {
            (x, y) = (y, x % y);
        }
        (a / x).saturating_mul(b)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(steps: &[Option<u64>], lane_lens: &[usize]) -> Config {
        let stage =
            |(&steps, &lane_len)| Stage { steps, lane_len, max_doc_len: None, max_docs: None };
        let stages = steps.iter().zip(lane_lens).map(stage).collect();
        let made = Config::new(8, Order::Contiguous, stages);
        Config { process_index: 3, process_count: 4, ..made }
    }

    #[test]
    fn stages_follow_each_other() {
        let made = config(&[Some(2), Some(1), Some(3)], &[7, 8, 9]);
        let found: Vec<_> =
            (0..8).map(|step| made.stage_at(step).map(|stage| stage.lane_len)).collect();
        assert_eq!(found, [Some(7), Some(7), Some(8), Some(9), Some(9), Some(9), None, None]);
        assert_eq!(
            config(&[None], &[7]).stage_at(u64::MAX - 1).map(|stage| stage.lane_len),
            Some(7)
        );
        assert_eq!(made.local_lanes(), 6..8);
    }

    #[test]
    fn the_smallest_block_fits_every_stage() {
        let made = config(&[Some(1); 3], &[16_384, 32_768, 49_152]);
        assert_eq!(smallest_block(&made.stages), 98_304);
    }
}
