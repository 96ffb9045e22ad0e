//! What a stream reads: one set of shards, or several in fixed proportions.

use std::sync::Arc;

use crate::catalog::{Catalog, Fingerprint};
use crate::config::MOST;
use crate::error::Error;
use crate::header::Width;

/// The fractional part of the golden ratio in units of 2^-64: its multiples fill [0, 1) as evenly as any can.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sets of shards and how many lanes of all each one fills.
#[derive(Debug, Clone)]
pub struct Sources {
    sets: Vec<(Arc<Catalog>, u64)>,
    /// See [`bounds`].
    bounds: Vec<u64>,
    fingerprint: String,
}

impl Sources {
    /// Mix sets of shards: of all lanes, a set fills its weight over the sum of all weights.
    ///
    /// # Errors
    /// No set, a weight outside 1 to 2^31 - 1, or tokens of two widths.
    pub fn new(given: Vec<(Arc<Catalog>, i64)>) -> Result<Self, Error> {
        let Some(first) = given.first().map(|(catalog, _)| Arc::clone(catalog)) else {
            return Err(Error::argument(
                "the mixture has no shards, at least one pair (shards, weight) was expected; add one",
            ));
        };
        let mut sets = Vec::with_capacity(given.len());
        for (catalog, weight) in given {
            if !(1..=MOST).contains(&weight) {
                return Err(Error::argument(format!(
                    "the weight of {catalog} should be from 1 to {MOST} but is {weight}; choose whole numbers in the \
                     proportions you want, such as 7 and 3"
                )));
            }
            if first.width() != catalog.width() {
                return Err(Error::argument(format!(
                    "a mixture should have tokens of one width but {first} holds {} and {catalog} holds {}; make one \
                     of them again",
                    first.width(),
                    catalog.width()
                )));
            }
            sets.push((catalog, weight.unsigned_abs()));
        }
        let mut hash = Fingerprint::default();
        for (catalog, _) in &sets {
            hash.field(catalog.fingerprint().as_bytes());
        }
        let fingerprint = if sets.len() == 1 { first.fingerprint().to_owned() } else { hash.hex() };
        let weights: Vec<u64> = sets.iter().map(|(_, weight)| *weight).collect();
        Ok(Self { sets, bounds: bounds(&weights), fingerprint })
    }

    /// The sets, in the order given.
    pub fn catalogs(&self) -> impl Iterator<Item = &Arc<Catalog>> {
        self.sets.iter().map(|(catalog, _)| catalog)
    }

    /// Their weights.
    pub fn weights(&self) -> impl Iterator<Item = u64> {
        self.sets.iter().map(|(_, weight)| *weight)
    }

    /// How tokens are stored.
    pub fn width(&self) -> Width {
        self.sets[0].0.width()
    }

    /// Tokens in all sets.
    pub fn num_tokens(&self) -> usize {
        self.catalogs().map(|catalog| catalog.num_tokens()).sum()
    }

    /// Identifies the data of all sets; for one set its own fingerprint.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The set that fills a lane, for the number of the lane counted over the whole stream.
    ///
    /// A function of that number alone, stateless, and close to the weights over any consecutive lanes.
    pub fn of_lane(&self, lane: u64) -> usize {
        let place = lane.wrapping_mul(GOLDEN);
        self.bounds.partition_point(|bound| *bound <= place)
    }
}

/// Where each source but the last ends in [0, 1), in units of 2^-64.
fn bounds(weights: &[u64]) -> Vec<u64> {
    let (total, mut sum) = (weights.iter().sum::<u64>(), 0);
    let ends = weights[..weights.len() - 1].iter().map(|weight| {
        sum += weight;
        // Below 2^64, because the last weight is not in the sum.
        u64::try_from((u128::from(sum) << 64) / u128::from(total)).unwrap_or(u64::MAX)
    });
    ends.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_run_of_lanes_has_close_to_its_share(
            weights in proptest::collection::vec(1..100u64, 1..5), from in 0..1_000_000u64, len in 1..3000u64,
        ) {
            let sources = Sources { sets: Vec::new(), bounds: bounds(&weights), fingerprint: String::new() };
            let total: u64 = weights.iter().sum();
            let mut counts = vec![0u64; weights.len()];
            for lane in from..from + len {
                counts[sources.of_lane(lane)] += 1;
            }
            for (count, weight) in counts.iter().zip(&weights) {
                prop_assert!((count * total).abs_diff(len * weight) <= 5 * total, "{counts:?} {weights:?}");
            }
        }
    }
}
