//! Statistics of a loader: batches, bytes, and how long its consumer waited.

use std::time::Duration;

use crate::buffer::Batch;

/// Octaves are split into this many buckets, so a quantile is at most an eighth too high.
const PARTS: usize = 8;

/// Counters over delivered batches.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Batches delivered.
    pub batches: u64,
    /// Bytes of shards read for them.
    pub bytes_read: u64,
    /// Tokens passed over that no lane holds.
    pub dropped_tokens: u64,
    /// How often a consumer found no batch ready.
    pub queue_empty: u64,
    /// Total time consumers waited.
    pub waited: Duration,
    /// The longest wait.
    pub longest: Duration,
    /// How often another shard was opened.
    pub shard_switches: u64,
    buckets: Vec<u64>,
}

impl Stats {
    pub(crate) fn record(&mut self, batch: &Batch, wait: Duration) {
        self.batches += 1;
        self.bytes_read += batch.bytes_read;
        self.dropped_tokens += batch.dropped;
        self.shard_switches += batch.switches;
        self.waited += wait;
        self.longest = self.longest.max(wait);
        let bucket = bucket(wait);
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
    }

    /// The wait that `percent` of all waits do not exceed, to about 12 %, rounded up; zero before the first.
    #[must_use]
    pub fn wait_percentile(&self, percent: u64) -> Duration {
        let rank = (self.batches * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return upper_end(index).min(self.longest);
            }
        }
        Duration::ZERO
    }
}

fn bucket(wait: Duration) -> usize {
    let nanos = usize::try_from(wait.as_nanos()).unwrap_or(usize::MAX).max(PARTS);
    let octave = (nanos.ilog2() - PARTS.ilog2()) as usize;
    octave * PARTS + (nanos >> octave) - PARTS
}

fn upper_end(bucket: usize) -> Duration {
    let nanos = ((bucket % PARTS + PARTS + 1) as u128) << (bucket / PARTS);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bucket_ends_just_above_its_members(nanos in 8..u64::MAX / 16) {
            let wait = Duration::from_nanos(nanos);
            let end = upper_end(bucket(wait));
            prop_assert!(wait < end && end.as_nanos() * 8 <= wait.as_nanos() * 9 + 8, "{:?} {:?}", wait, end);
        }
    }
}
