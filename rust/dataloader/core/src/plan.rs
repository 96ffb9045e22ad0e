//! Where the lanes of a batch start, and which shard comes after which.

use crate::config::{Config, Order, whole_blocks};
use crate::shard::Catalog;
use crate::shuffle::{Permutation, draw};
use crate::state::Cursor;

/// The order of a stream over its shards.
pub struct Plan<'a> {
    pub catalog: &'a Catalog,
    pub config: &'a Config,
    /// Blocks before each shard, then their total; empty unless blocks are shuffled.
    blocks: Vec<usize>,
}

impl<'a> Plan<'a> {
    pub fn new(catalog: &'a Catalog, config: &'a Config) -> Self {
        let mut blocks = Vec::new();
        if let Order::Blocks { block_tokens, .. } = config.order {
            blocks.push(0);
            blocks.extend(catalog.shards().iter().scan(0, |total, shard| {
                *total += whole_blocks(shard.tokens, block_tokens);
                Some(*total)
            }));
        }
        Self { catalog, config, blocks }
    }

    /// Whether it is behind the last epoch.
    pub fn is_over(&self, at: Cursor) -> bool {
        self.config.epochs.is_some_and(|epochs| at.epoch >= epochs)
    }

    /// Tokens of the segment in which `at` lies: a shard, or all where the order mixes them.
    pub fn segment_len(&self, at: Cursor) -> usize {
        let shards = self.catalog.shards();
        let mixed = self.config.order.mixes_shards();
        if mixed { self.catalog.num_tokens() } else { shards[at.shard].tokens }
    }

    /// The start of the segment after that of `at`.
    pub fn next_segment(&self, at: Cursor) -> Cursor {
        let last = self.config.order.mixes_shards() || at.shard + 1 == self.catalog.shards().len();
        let (epoch, shard) = if last { (at.epoch + 1, 0) } else { (at.epoch, at.shard + 1) };
        Cursor { epoch, shard, offset: 0, ..at }
    }

    /// The shard of a lane's window and where it starts, in order; then `at` is behind it. `None`
    /// where the segment ends before.
    pub fn window(&self, at: &mut Cursor, lane: usize, lane_len: usize) -> Option<(usize, usize)> {
        match self.config.order {
            Order::Documents => None,
            Order::Contiguous => {
                // All lanes and their last target fit, or none is read.
                let (start, lanes_left) = (at.offset, self.config.lanes - lane);
                let end = lanes_left.checked_mul(lane_len)?.checked_add(start)?;
                at.offset += lane_len;
                (end < self.segment_len(*at)).then_some((at.shard, start))
            }
            // As contiguous, over the blocks of all shards in the order of this epoch; a window
            // that would cross the end of its block (possible after a change of stage) starts with
            // the next block.
            Order::Blocks { seed, block_tokens } => {
                let count = *self.blocks.last()?;
                if at.offset % block_tokens + lane_len > block_tokens {
                    at.offset = at.offset.next_multiple_of(block_tokens);
                }
                let (turn, within) = (at.offset / block_tokens, at.offset % block_tokens);
                if turn >= count {
                    return None;
                }
                at.offset += lane_len;
                let order = Permutation::new(count as u64, seed, at.epoch);
                let block = usize::try_from(order.at(turn as u64)).ok()?;
                let shard = self.blocks.partition_point(|before| *before <= block) - 1;
                Some((shard, (block - self.blocks[shard]) * block_tokens + within))
            }
            // As nanoGPT: a lane starts at any token that has `lane_len` more after it in its
            // shard. The draws depend on the step number only, so the saved position stays 0.
            Order::Windows { seed } => {
                let shards = self.catalog.shards().iter();
                let starts = shards.map(|shard| shard.tokens.saturating_sub(lane_len));
                let total: usize = starts.clone().sum();
                let drawn = draw(total as u64, seed, at.step, lane as u64);
                let mut start = usize::try_from(drawn).ok()?;
                for (shard, here) in starts.enumerate() {
                    if start < here {
                        return Some((shard, start));
                    }
                    start -= here;
                }
                None
            }
        }
    }
}
