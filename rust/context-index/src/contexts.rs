//! The contexts of a chunk of positions: how many tokens of its document each has, and hashes of
//! them.

use std::hint::black_box;
use std::ops::Range;

use crate::CHUNK;
use crate::table::guess;

/// Odd, with bits all over: the factor of a polynomial hash modulo 2^64.
const BASE: u64 = 0x9e37_79b9_7f4a_7c15;
/// Unit tests keep so few bits that most contexts collide: their answers must be exact all the
/// same.
const KEPT: u64 = if cfg!(test) { 0xfe00_0000_0000_007f } else { u64::MAX };

/// Where a token is among those of its step, and the hash of the context before or up to it.
pub type Asked = (usize, u64);

/// All tokens of the index.
#[derive(Clone, Copy)]
pub struct Stored<'a>(pub &'a [u32]);

impl Stored<'_> {
    /// Whether `context` is before `position`.
    pub fn is_before(&self, position: u32, context: &[u32]) -> bool {
        let position = position as usize;
        self.0[position - context.len()..position] == *context
    }

    /// Have what a table's search reads in the cache, for up to [`CHUNK`] contexts of `len` tokens:
    /// their misses overlap here, and would follow each other there. First the slots, then the
    /// tokens before the positions in them, so that no branch waits for a slot.
    pub fn fetch(&self, len: usize, asked: &[Asked], slot: impl Fn(u64) -> u64) {
        let mut words = [0; CHUNK];
        for (word, (_, hash)) in words.iter_mut().zip(asked) {
            *word = slot(*hash);
        }
        black_box(words.iter().zip(asked).fold(0, |sum, (&word, &(_, hash))| {
            let position = guess(hash, word) as usize;
            sum ^ self.0[position.saturating_sub(len)] ^ self.0[position.saturating_sub(1)]
        }));
    }
}

/// What is known of the contexts of a chunk.
pub struct Contexts {
    /// The position of the first value.
    first: usize,
    /// Tokens of the document up to and including each position, as far as was looked.
    depths: Vec<usize>,
    /// The hash of all tokens before each position.
    prefixes: Vec<u64>,
}

impl Contexts {
    /// Those of `chunk` in rows of `row_len` tokens, none longer than `longest`. A document begins
    /// with `bos` or a row.
    pub fn new(
        chunk: &Range<usize>,
        row_len: usize,
        longest: usize,
        bos: u32,
        tokens: &[u32],
    ) -> Self {
        let first = chunk.start.saturating_sub(longest);
        let count = chunk.end - first;
        let (mut depths, mut prefixes) = (Vec::with_capacity(count), Vec::with_capacity(count + 1));
        let (mut depth, mut prefix, mut column) = (0, 0u64, first % row_len);
        for &token in &tokens[first..chunk.end] {
            prefixes.push(prefix);
            prefix = prefix.wrapping_mul(BASE).wrapping_add(token.into());
            depth = if column == 0 || token == bos { 1 } else { depth + 1 };
            depths.push(depth);
            column = if column + 1 == row_len { 0 } else { column + 1 };
        }
        prefixes.push(prefix);
        Self { first, depths, prefixes }
    }

    /// Tokens of the document up to and including `at`: exact, or more than `longest`.
    pub fn depth(&self, at: usize) -> usize {
        self.depths[at - self.first]
    }

    /// Hash of the tokens before `end`, as many as `power` belongs to.
    pub fn hash(&self, end: usize, len: usize, power: u64) -> u64 {
        let end = end - self.first;
        difference(self.prefixes[end - len], self.prefixes[end], power)
    }

    /// The positions from `start` on with `len` tokens of their document before them, and the
    /// hashes of these.
    pub fn before(&self, start: usize, len: usize, power: u64) -> impl Iterator<Item = Asked> {
        let skipped = (start - self.first).max(len).min(self.depths.len());
        let prefixes =
            self.prefixes[skipped - len.min(skipped)..].iter().zip(&self.prefixes[skipped..]);
        let depths = self.depths[skipped..].iter().zip(self.first + skipped..);
        depths
            .zip(prefixes)
            .filter(move |((depth, _), _)| **depth > len)
            .map(move |((_, at), (&before, &end))| (at, difference(before, end, power)))
    }
}

/// The hash of what came between two prefixes.
fn difference(before: u64, end: u64, power: u64) -> u64 {
    mix(end.wrapping_sub(before.wrapping_mul(power))) & KEPT
}

/// The factor by which a hash grows over `len` tokens.
pub fn power(len: usize) -> u64 {
    (0..len).fold(1, |power, _| BASE.wrapping_mul(power))
}

/// The finaliser of `SplitMix64` (Steele, Lea and Flood 2014).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
