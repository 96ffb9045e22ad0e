//! Statistics of a loader: batches, bytes, and how long its consumer waited.

use std::time::Duration;

use crate::buffer::Batch;

/// Counters over delivered batches.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Bytes of shards read for them.
    pub bytes_read: u64,
    /// Tokens passed over that no lane holds.
    pub dropped_tokens: u64,
    /// How often a consumer found no batch ready.
    pub queue_empty: u64,
    /// How often another shard was opened.
    pub shard_switches: u64,
    /// Seconds that a consumer waited for each batch.
    pub waits: Vec<f32>,
}

impl Stats {
    pub(crate) fn record(&mut self, batch: &Batch, wait: Duration) {
        self.bytes_read += batch.bytes_read;
        self.dropped_tokens += batch.dropped;
        self.shard_switches += batch.switches;
        self.waits.push(wait.as_secs_f32());
    }

    /// The wait that `percent` of all waits do not exceed; zero before the first.
    #[must_use]
    pub fn wait_percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.waits.clone();
        sorted.sort_by(f32::total_cmp);
        let rank = (sorted.len() * percent).div_ceil(100);
        Duration::from_secs_f32(sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_wait_that_so_many_do_not_exceed() {
        let of = |waits: &[f32]| {
            let stats = Stats { waits: waits.to_vec(), ..Stats::default() };
            [50, 99, 100].map(|percent| stats.wait_percentile(percent).as_secs())
        };
        assert_eq!(of(&[]), [0; 3]);
        assert_eq!(of(&[3.0, 1.0, 2.0]), [2, 3, 3]);
        assert_eq!(of(&[4.0, 1.0]), [1, 4, 4]);
    }
}
