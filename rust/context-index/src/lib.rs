//! What followed this context earlier: an index of the documents that a run has trained on.
//!
//! Every token is stored once. A [`Table`] of each length of context knows where every context
//! occurred last, and links each position to the one where its context was before. So the earlier
//! occurrences of a context are one chain, latest first, of that context alone: before a position
//! is put into a chain, its tokens are compared with the stored ones. A hash decides where to look,
//! never what is found.
//!
//! Contexts are shared among threads by their hashes, so a chain is in the order of positions for
//! any number of them.
#![deny(missing_docs)]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

mod contexts;
mod matches;
mod memory;
mod pool;
mod push;
mod query;
mod table;

pub use matches::Matches;

use contexts::Stored;
use memory::Memory;
use pool::Pool;
use push::Push;
use query::{Query, Scratch};
use table::Table;

/// A wrong argument, or memory that the machine does not have, in a complete message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(String);

impl std::error::Error for Error {}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Convert an argument that the caller called `name`.
fn in_range<T: TryFrom<i64>>(name: &str, value: i64, low: i64, high: i64) -> Result<T, Error> {
    T::try_from(value).ok().filter(|_| (low..=high).contains(&value)).ok_or_else(|| {
        Error(format!("{name} should be from {low} to {high} but is {value}; choose another value"))
    })
}

/// Positions that a thread handles at a time: their cache misses overlap, and what is known of them
/// fits the cache.
const CHUNK: usize = 128;

/// The arguments of an index as the caller gave them.
#[derive(Debug, Clone)]
pub struct IndexArguments {
    /// Tokens that it has room for.
    pub capacity: i64,
    /// Tokens of a context, each from 1 to 255.
    pub lengths: Vec<i64>,
    /// How many occurrences of a context count, the latest, from 1 to 255.
    pub recent: i64,
    /// How many different next tokens are told, from 1 to `recent`.
    pub top: i64,
    /// The token that starts a document.
    pub bos_id: i64,
    /// Threads that push and query.
    pub threads: i64,
}

/// The index.
pub struct ContextIndex {
    /// By length, the shortest first.
    tables: Vec<Table>,
    /// The token of each position.
    stored: Memory,
    capacity: usize,
    recent: usize,
    top: usize,
    bos: u32,
    pool: Pool,
    tokens: usize,
    steps: u64,
}

impl ContextIndex {
    /// An empty index, with all the memory that it will ever take.
    ///
    /// # Errors
    /// An argument is out of its range, or the memory is more than there is.
    pub fn new(given: &IndexArguments) -> Result<Self, Error> {
        let capacity = in_range("capacity", given.capacity, 1, u32::MAX.into())?;
        let mut lengths = given
            .lengths
            .iter()
            .map(|&len| in_range("a length of context", len, 1, u8::MAX.into()))
            .collect::<Result<Vec<u8>, _>>()?;
        lengths.sort_unstable();
        lengths.dedup();
        if lengths.is_empty() {
            return Err(Error(
                "lengths is empty; name at least one length of context, as [6, 10, 20]".to_owned(),
            ));
        }
        let threads = in_range("threads", given.threads, 1, 1024)?;
        let recent = in_range("recent", given.recent, 1, u8::MAX.into())?;
        let top = in_range("top", given.top, 1, given.recent)?;
        let bos = in_range("bos_id", given.bos_id, 0, u32::MAX.into())?;
        let pool = Pool::new(threads);
        let tables = lengths.iter().map(|&len| Table::new(len, capacity, &pool));
        let tables = tables.collect::<Result<_, _>>()?;
        let stored = Memory::new::<u32>(capacity, &pool)?;
        Ok(Self { tables, stored, capacity, recent, top, bos, pool, tokens: 0, steps: 0 })
    }

    /// Tokens that were pushed.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens that it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Steps that were pushed.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Different next tokens that an answer tells.
    pub fn top(&self) -> usize {
        self.top
    }

    /// Bytes of memory, empty or full: 4, and 20 for each length, a token of capacity.
    pub fn bytes(&self) -> usize {
        let slots = Table::slots(self.capacity) * size_of::<u64>();
        let words = self.capacity * size_of::<u32>();
        words + self.tables.len() * (2 * words + slots)
    }

    /// Add the documents of step `step`, rows of `row_len` tokens, which all queries of later steps
    /// see.
    ///
    /// A document begins with the document marker or a row, and ends where the next one begins:
    /// neither a context nor what follows it is in two documents.
    ///
    /// # Errors
    /// Steps do not follow each other or the index is full; nothing has changed then.
    pub fn push(&mut self, step: u64, tokens: &[u32], row_len: usize) -> Result<(), Error> {
        self.check(step, tokens, row_len)?;
        if tokens.len() > self.capacity - self.tokens {
            return Err(Error(format!(
                "step {step} has {} tokens, but the index holds {} and has room for {} in all; \
                 make it with a capacity of all tokens of the run",
                tokens.len(),
                self.tokens,
                self.capacity
            )));
        }
        let first = self.tokens;
        let stored = self.stored.view_mut::<u32>();
        stored[first..first + tokens.len()].copy_from_slice(tokens);
        let tables: Vec<_> = self.tables.iter_mut().map(Table::writer).collect();
        let push = Push { tables, stored: Stored(stored), first, tokens, row_len, bos: self.bos };
        push.run(&self.pool);
        self.tokens += tokens.len();
        self.steps += 1;
        Ok(())
    }

    /// Answer what followed the context up to each token of rows of `row_len` tokens, in the steps
    /// before `step`.
    ///
    /// # Errors
    /// Other steps than exactly those before `step` were pushed.
    pub fn query(&self, step: u64, tokens: &[u32], row_len: usize) -> Result<Matches, Error> {
        self.check(step, tokens, row_len)?;
        let mut matches = Matches::new(tokens.len(), self.top)?;
        let query = Query {
            tables: self.tables.iter().map(Table::reader).collect(),
            stored: Stored(self.stored.view()),
            recent: self.recent,
            tokens,
            row_len,
            bos: self.bos,
        };
        let work = Mutex::new(chunks(tokens.len()).zip(matches.chunks(self.top)));
        self.pool.each(|_| {
            let mut scratch = Scratch::new();
            loop {
                let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((chunk, mut answers)) = next else { break };
                query.answer(&chunk, &mut answers, &mut scratch);
            }
        });
        drop(work);
        Ok(matches)
    }

    fn check(&self, step: u64, tokens: &[u32], row_len: usize) -> Result<(), Error> {
        if row_len == 0 || tokens.len() % row_len != 0 {
            return Err(Error(format!("{} tokens are no rows of {row_len}", tokens.len())));
        }
        if step != self.steps {
            return Err(Error(format!(
                "step {step} should see the steps before it and no other, but the index holds {} \
                 steps; query a step before it is pushed, and push each once, in order",
                self.steps
            )));
        }
        Ok(())
    }
}

/// Positions `0..len` in chunks.
fn chunks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(CHUNK).map(move |start| start..len.min(start + CHUNK))
}

#[cfg(test)]
mod tests;
