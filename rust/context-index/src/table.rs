//! A hash table from the contexts of one length to where each occurred last.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::contexts::{Contexts, power};
use super::zeroed;
use crate::Error;

pub struct Table {
    /// Tokens of a context.
    pub len: u8,
    power: u64,
    /// Open addressing: the position of the last occurrence and 32 bits of the hash; a position of
    /// 0 is an empty slot.
    slots: Box<[AtomicU64]>,
}

impl Table {
    /// Slots for so many contexts: at most two in three are taken.
    pub fn slots(contexts: usize) -> usize {
        contexts + contexts / 2 + 1
    }

    pub fn new(len: u8, contexts: usize, threads: usize) -> Result<Self, Error> {
        let slots =
            zeroed(Self::slots(contexts), threads, |slot| AtomicU64::store(slot, 0, Relaxed))?;
        Ok(Self { len, power: power(len.into()), slots })
    }

    /// The hash of the context before `end`.
    pub fn hash(&self, contexts: &Contexts, end: usize) -> u64 {
        contexts.hash(end, self.len.into(), self.power)
    }

    /// Have the slots of many hashes in the cache: their misses overlap here, and would follow each
    /// other in `find`.
    pub fn fetch(&self, hashes: impl Iterator<Item = u64>) {
        black_box(hashes.fold(0, |sum, hash| sum ^ self.slots[self.home(hash)].load(Relaxed)));
    }

    /// Where the context of this hash is, for which `same` position holds, and its last occurrence;
    /// or the empty slot that it would get, and 0.
    pub fn find(&self, hash: u64, same: impl Fn(u32) -> bool) -> (usize, u32) {
        let mut slot = self.home(hash);
        loop {
            let [last, tag] = bytemuck::cast::<u64, [u32; 2]>(self.slots[slot].load(Relaxed));
            if last == 0 || (tag == Self::tag(hash) && same(last)) {
                return (slot, last);
            }
            slot = if slot + 1 == self.slots.len() { 0 } else { slot + 1 };
        }
    }

    /// Let the last occurrence of a context be at `position`, and return the one before that, or 0.
    ///
    /// Threads may do this at the same time for different contexts.
    pub fn insert(&self, hash: u64, position: u32, same: impl Fn(u32) -> bool) -> u32 {
        let word = bytemuck::cast([position, Self::tag(hash)]);
        loop {
            let (slot, last) = self.find(hash, &same);
            if last != 0 {
                self.slots[slot].store(word, Relaxed);
                return last;
            }
            if self.slots[slot].compare_exchange(0, word, Relaxed, Relaxed).is_ok() {
                return 0;
            }
        }
    }

    fn home(&self, hash: u64) -> usize {
        part(hash, self.slots.len())
    }

    fn tag(hash: u64) -> u32 {
        let [tag, _] = bytemuck::cast::<u64, [u32; 2]>(hash);
        tag
    }
}

/// Which of so many equal parts of all hashes this one is in.
pub fn part(hash: u64, parts: usize) -> usize {
    // The high half of the product is below `parts`.
    usize::try_from((u128::from(hash) * parts as u128) >> 64).unwrap_or_default()
}
