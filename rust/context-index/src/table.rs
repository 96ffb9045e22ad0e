//! The contexts of one length: where each occurred last, and for each position where its context
//! was before.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Error;
use crate::contexts::{Asked, Contexts, power};
use crate::memory::Memory;
use crate::pool::Pool;

/// Slots in a line of the cache.
const LINE: usize = 8;

/// A table of contexts of `len` tokens.
pub struct Table {
    /// Tokens of a context.
    pub len: u8,
    power: u64,
    /// Open addressing: the position of the last occurrence and 32 bits of the hash; a position of
    /// 0 is an empty slot.
    slots: Memory,
    /// For each position its token, and the last earlier position with the same context or 0.
    entries: Memory,
}

/// A table to be reader.
pub struct Reader<'a> {
    pub len: u8,
    power: u64,
    slots: &'a [u64],
    entries: &'a [u64],
}

/// A table to be changed, by any number of threads.
pub struct Writer<'a> {
    pub len: u8,
    power: u64,
    slots: &'a [AtomicU64],
    entries: &'a [AtomicU64],
}

impl Table {
    /// Slots for so many contexts: at most two in three are taken.
    pub fn slots(contexts: usize) -> usize {
        (contexts + contexts / 2 + 1).next_multiple_of(LINE)
    }

    pub fn new(len: u8, contexts: usize, pool: &Pool) -> Result<Self, Error> {
        let slots = Memory::new::<u64>(Self::slots(contexts), pool)?;
        let entries = Memory::new::<u64>(contexts, pool)?;
        Ok(Self { len, power: power(len.into()), slots, entries })
    }

    pub fn reader(&self) -> Reader<'_> {
        let Self { len, power, .. } = *self;
        Reader { len, power, slots: self.slots.view(), entries: self.entries.view() }
    }

    pub fn writer(&mut self) -> Writer<'_> {
        let Self { len, power, .. } = *self;
        Writer { len, power, slots: self.slots.view_mut(), entries: self.entries.view_mut() }
    }
}

impl Reader<'_> {
    /// The hash of the context before `end`.
    pub fn hash(&self, contexts: &Contexts, end: usize) -> u64 {
        contexts.hash(end, self.len.into(), self.power)
    }

    /// The word of the first slot that a context of this hash may have.
    pub fn first(&self, hash: u64) -> u64 {
        self.slots[part(hash, self.slots.len())]
    }

    /// The token of a position, and the last earlier position with the same context or 0.
    pub fn entry(&self, position: u32) -> [u32; 2] {
        halves(self.entries[position as usize])
    }

    /// The last occurrence of the context of this hash, for which `same` position holds, or 0.
    pub fn find(&self, hash: u64, same: impl Fn(u32) -> bool) -> u32 {
        find(hash, self.slots.len(), |slot| self.slots[slot], same).1
    }
}

impl Writer<'_> {
    /// The positions from `start` on that have a context before them, and its hash.
    pub fn contexts(&self, contexts: &Contexts, start: usize) -> impl Iterator<Item = Asked> {
        contexts.before(start, self.len.into(), self.power)
    }

    /// As [`Reader::first`].
    pub fn first(&self, hash: u64) -> u64 {
        self.slots[part(hash, self.slots.len())].load(Relaxed)
    }

    /// Let the last occurrence of a context be at `position`, and link it to the one before that.
    ///
    /// Threads may do this at the same time for different contexts.
    pub fn insert(&self, hash: u64, position: u32, token: u32, same: impl Fn(u32) -> bool) {
        let word = word(hash, position);
        loop {
            let slot = |slot: usize| self.slots[slot].load(Relaxed);
            let (slot, last) = find(hash, self.slots.len(), slot, &same);
            if last != 0 {
                self.slots[slot].store(word, Relaxed);
            } else if self.slots[slot].compare_exchange(0, word, Relaxed, Relaxed).is_err() {
                continue;
            }
            let entry = zerocopy::transmute!([token, last]);
            return self.entries[position as usize].store(entry, Relaxed);
        }
    }
}

/// The slot of the context of this hash, for which `same` position holds, and its last occurrence;
/// or the empty slot that it would get, and 0. The slots of a line of the cache come before those
/// of the next.
fn find(
    hash: u64,
    slots: usize,
    word: impl Fn(usize) -> u64,
    same: impl Fn(u32) -> bool,
) -> (usize, u32) {
    let home = part(hash, slots);
    let mut line = home - home % LINE;
    loop {
        for place in home..home + LINE {
            let slot = line + place % LINE;
            let [last, tag] = halves(word(slot));
            if last == 0 || (tag == halves(hash)[0] && same(last)) {
                return (slot, last);
            }
        }
        line = if line + LINE == slots { 0 } else { line + LINE };
    }
}

/// The position in a slot if it may be that of a context of this hash, or 0.
pub fn guess(hash: u64, word: u64) -> u32 {
    let [last, tag] = halves(word);
    if tag == halves(hash)[0] { last } else { 0 }
}

/// What a slot holds.
fn word(hash: u64, position: u32) -> u64 {
    zerocopy::transmute!([position, halves(hash)[0]])
}

fn halves(word: u64) -> [u32; 2] {
    zerocopy::transmute!(word)
}

/// Which of so many equal parts of all hashes this one is in.
pub fn part(hash: u64, parts: usize) -> usize {
    // The high half of the product is below `parts`.
    usize::try_from((u128::from(hash) * parts as u128) >> 64).unwrap_or_default()
}
