//! What a stream reads: one set of shards, or several in fixed proportions.

use std::sync::Arc;

use crate::catalog::{Catalog, Fingerprint};
use crate::error::Error;
use crate::header::Width;

/// The fractional part of the golden ratio in units of 2^-64: its multiples fill [0, 1) as evenly as any can.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sets of shards and how many lanes of all each one fills.
#[derive(Debug, Clone)]
pub struct Sources {
    sets: Vec<(Arc<Catalog>, u64)>,
    /// Where each source but the last ends in [0, 1), in units of 2^-64.
    bounds: Vec<u64>,
    fingerprint: String,
}

impl From<Arc<Catalog>> for Sources {
    fn from(catalog: Arc<Catalog>) -> Self {
        let fingerprint = catalog.fingerprint().to_owned();
        Self { sets: vec![(catalog, 1)], bounds: Vec::new(), fingerprint }
    }
}

impl Sources {
    /// Mix sets of shards: of all lanes, a set fills its weight over the sum of all weights.
    ///
    /// # Errors
    /// No set, a weight outside 1 to 2^31 - 1, or tokens of two widths.
    pub fn mixed(given: Vec<(Arc<Catalog>, i64)>) -> Result<Self, Error> {
        let mut sources: Vec<(Arc<Catalog>, u64)> = Vec::with_capacity(given.len());
        for (catalog, weight) in given {
            if !(1..=i64::from(i32::MAX)).contains(&weight) {
                return Err(Error::argument(format!(
                    "the weight of {catalog} should be from 1 to {} but is {weight}; choose whole numbers in the \
                     proportions you want, such as 7 and 3",
                    i32::MAX
                )));
            }
            if let Some((first, _)) = sources.first().filter(|(first, _)| first.width() != catalog.width()) {
                return Err(Error::argument(format!(
                    "a mixture should have tokens of one width but {first} holds {} and {catalog} holds {}; make one \
                     of them again",
                    first.width(),
                    catalog.width()
                )));
            }
            sources.push((catalog, weight.unsigned_abs()));
        }
        if sources.is_empty() {
            return Err(Error::argument(
                "the mixture has no shards, at least one pair (shards, weight) was expected; add one",
            ));
        }
        if sources.len() == 1 {
            return Ok(Self::from(Arc::clone(&sources[0].0)));
        }
        let mut hash = Fingerprint::default();
        for (catalog, _) in &sources {
            hash.field(catalog.fingerprint().as_bytes());
        }
        let total: u64 = sources.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0;
        let bounds = sources[1..].iter().zip(&sources).map(|(_, (_, weight))| {
            sum += weight;
            // Below 2^64, because the last weight is not in the sum.
            u64::try_from((u128::from(sum) << 64) / u128::from(total)).unwrap_or(u64::MAX)
        });
        let bounds = bounds.collect();
        Ok(Self { sets: sources, bounds, fingerprint: hash.hex() })
    }

    /// How many sets there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sets.len()
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
    #[must_use]
    pub fn width(&self) -> Width {
        self.sets[0].0.width()
    }

    /// Tokens in all sets.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.catalogs().map(|catalog| catalog.num_tokens()).sum()
    }

    /// Identifies the data of all sets; for one set its own fingerprint.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The set that fills a lane, for the number of the lane counted over the whole stream.
    ///
    /// A function of that number alone, stateless, and close to the weights over any consecutive lanes.
    #[must_use]
    pub fn of_lane(&self, lane: u64) -> usize {
        let place = lane.wrapping_mul(GOLDEN);
        self.bounds.partition_point(|bound| *bound <= place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sources(weights: &[u64]) -> Sources {
        let total: u64 = weights.iter().sum();
        let mut bounds = Vec::new();
        let mut sum = 0;
        for weight in &weights[..weights.len() - 1] {
            sum += weight;
            bounds.push(u64::try_from((u128::from(sum) << 64) / u128::from(total)).unwrap());
        }
        Sources { sets: Vec::new(), bounds, fingerprint: String::new() }
    }

    proptest! {
        #[test]
        fn every_run_of_lanes_has_close_to_its_share(
            weights in proptest::collection::vec(1..100u64, 1..5), from in 0..1_000_000u64, len in 1..3000u64,
        ) {
            let (sources, total) = (sources(&weights), weights.iter().sum::<u64>());
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
