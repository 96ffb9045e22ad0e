//! The answers to a query, and how occurrences are counted.

use bytemuck::allocation::try_zeroed_vec;

use crate::{CHUNK, Error};

/// The answers to a query, one after the other for each of its tokens.
#[derive(Default)]
pub struct Matches {
    /// Tokens of the longest context that occurred, 0 for none.
    pub lengths: Vec<u8>,
    /// Its occurrences, the latest `recent`.
    pub occurrences: Vec<u8>,
    /// What followed it, `top` of them: the most frequent first, and of equally many the latest
    /// first; then 0.
    pub tokens: Vec<u32>,
    /// How often each did; 0 where there is none.
    pub counts: Vec<u8>,
}

/// The [`Matches`] of [`CHUNK`] positions or fewer.
pub struct Answers<'a> {
    pub lengths: &'a mut [u8],
    pub occurrences: &'a mut [u8],
    pub tokens: &'a mut [u32],
    pub counts: &'a mut [u8],
}

impl Matches {
    /// Room for the answers to `positions` questions.
    pub(crate) fn new(positions: usize, top: usize) -> Result<Self, Error> {
        let bytes = || try_zeroed_vec(positions).ok();
        let all = positions * top;
        let room =
            || Some((bytes()?, bytes()?, try_zeroed_vec(all).ok()?, try_zeroed_vec(all).ok()?));
        let (lengths, occurrences, tokens, counts) = room().ok_or_else(|| {
            Error(format!(
                "the answers to {positions} positions, {top} tokens each, need more memory than \
                 this machine has; ask for fewer at a time, or lower top"
            ))
        })?;
        Ok(Self { lengths, occurrences, tokens, counts })
    }

    pub(crate) fn chunks(&mut self, top: usize) -> impl Iterator<Item = Answers<'_>> {
        let tokens = self.tokens.chunks_mut(CHUNK * top).zip(self.counts.chunks_mut(CHUNK * top));
        let lengths = self.lengths.chunks_mut(CHUNK).zip(self.occurrences.chunks_mut(CHUNK));
        lengths.zip(tokens).map(|((lengths, occurrences), (tokens, counts))| Answers {
            lengths,
            occurrences,
            tokens,
            counts,
        })
    }
}

/// Counts what followed a context.
pub struct Counter {
    /// Different tokens in the order of their first, and how often each came.
    seen: Vec<(u32, u8)>,
    /// Open addressing: where in `seen` a token is, from 1 to 255; 0 is an empty slot.
    slots: [u8; 512],
}

impl Counter {
    pub fn new() -> Self {
        Self { seen: Vec::with_capacity(u8::MAX.into()), slots: [0; 512] }
    }

    /// Tell the most frequent of up to 255 tokens and how often each came: of equally many the
    /// first first.
    pub fn tell(&mut self, followed: &[u32], tokens: &mut [u32], counts: &mut [u8]) {
        for &token in followed {
            self.count(token);
        }
        let mut told = 0;
        for &(token, count) in &self.seen {
            if told == tokens.len() && count <= counts[told - 1] {
                continue;
            }
            let place = counts[..told].partition_point(|&more| more >= count);
            told = tokens.len().min(told + 1);
            tokens.copy_within(place..told - 1, place + 1);
            counts.copy_within(place..told - 1, place + 1);
            (tokens[place], counts[place]) = (token, count);
        }
        self.seen.clear();
        self.slots.fill(0);
    }

    fn count(&mut self, token: u32) {
        let mut slot = usize::from(token.wrapping_mul(0x9e37_79b1).to_be_bytes()[0]) * 2;
        loop {
            match self.slots[slot] {
                0 => {
                    self.seen.push((token, 1));
                    // At most 255 were counted.
                    self.slots[slot] = u8::try_from(self.seen.len()).unwrap_or(u8::MAX);
                    return;
                }
                place if self.seen[usize::from(place) - 1].0 == token => {
                    self.seen[usize::from(place) - 1].1 += 1;
                    return;
                }
                _ => slot = (slot + 1) % self.slots.len(),
            }
        }
    }
}
