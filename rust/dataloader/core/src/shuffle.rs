//! A pseudo-random permutation of `0..size`, keyed by seed and epoch, with constant memory and
//! seek.
//!
//! A balanced Feistel network permutes the smallest power of four that holds `size`; results
//! outside the range are put through it again (cycle walking), so at most four passes are expected.

const ROUNDS: usize = 8;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The order of one epoch.
#[derive(Debug, Clone)]
pub struct Permutation {
    size: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..size` that belongs to `seed` and `epoch`.
    pub fn new(size: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        let base = mix(mix(seed.wrapping_add(GOLDEN)) ^ epoch);
        let mut keys = [0; ROUNDS];
        let mut counter = base;
        for key in &mut keys {
            counter = counter.wrapping_add(GOLDEN);
            *key = mix(counter);
        }
        Self { size, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// Where `index` goes; both are below the size.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.size, "index {index} in a permutation of {}", self.size);
        let mut value = index;
        loop {
            value = self.network(value);
            if value < self.size {
                return value;
            }
        }
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// A number below `size` that belongs to `seed`, `step` and `lane`; all are about equally likely.
pub fn draw(size: u64, seed: u64, step: u64, lane: u64) -> u64 {
    let key = mix(mix(seed.wrapping_add(GOLDEN)) ^ step);
    let drawn = mix(key.wrapping_add(GOLDEN.wrapping_mul(lane.wrapping_add(1))));
    // The high half of the product: the bias is below size / 2^64.
    ((u128::from(drawn) * u128::from(size)) >> 64) as u64
}

/// The finaliser of `SplitMix64` (Steele, Lea and Flood 2014).
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order(size: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = Permutation::new(size, seed, epoch);
        (0..size).map(|i| permutation.at(i)).collect()
    }

    proptest! {
        #[test]
        fn is_a_permutation(size in 1..2000u64, seed in any::<u64>(), epoch in any::<u64>()) {
            let mut seen = order(size, seed, epoch);
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..size).collect::<Vec<_>>());
        }
    }

    #[test]
    fn seeds_and_epochs_give_different_orders() {
        let orders = [order(1000, 0, 0), order(1000, 1, 0), order(1000, 0, 1), order(1000, 1, 1)];
        for (i, a) in orders.iter().enumerate() {
            for b in &orders[i + 1..] {
                assert!(a.iter().zip(b).filter(|(x, y)| x == y).count() < 20);
            }
        }
    }

    #[test]
    fn small_orders_are_about_equally_likely() {
        let mut counts = std::collections::HashMap::new();
        for seed in 0..6000 {
            *counts.entry(order(3, seed, 0)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    }

    #[test]
    fn draws_are_about_equally_likely() {
        let mut counts = [0; 6];
        for (step, lane) in (0..1000).flat_map(|step| (0..6).map(move |lane| (step, lane))) {
            counts[usize::try_from(draw(6, 7, step, lane)).unwrap()] += 1;
        }
        assert!(counts.iter().all(|&count| (880..1120).contains(&count)), "{counts:?}");
    }

    #[test]
    fn the_order_is_frozen() {
        // Recorded from this implementation: a change breaks every saved state, so state::VERSION
        // must change too.
        assert_eq!(order(8, 0, 0), [0, 3, 6, 2, 1, 7, 5, 4]);
        assert_eq!([0, 1, 2, 3].map(|lane| draw(1000, 0, 0, lane)), [338, 269, 271, 480]);
    }
}
