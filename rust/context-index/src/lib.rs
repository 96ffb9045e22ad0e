//! What followed this context earlier: an index of the documents that a run has trained on.
//!
//! Every position is stored once: its token and, for each length of context, the position where the
//! same context stood before it the last time. A [`Table`] of each length knows where every context
//! occurred last, so the earlier occurrences of a context are one chain, latest first, of that
//! context alone: before a position is put into a chain, its tokens are compared with the stored
//! ones. A hash decides where to look, never what is found.
//!
//! Contexts are shared among threads by their hashes, so a chain is in the order of positions for
//! any number of them.
#![deny(missing_docs)]

use std::cmp::Reverse;
use std::hint::black_box;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use bytemuck::Zeroable;
use bytemuck::allocation::{try_zeroed_slice_box, try_zeroed_vec};

mod contexts;
mod table;

use contexts::Contexts;
use table::{Table, part};

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
/// Bytes of a page of memory, or less.
const PAGE: usize = 4096;

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
    /// For each position its token, then for each table the last earlier position with the same
    /// context, or 0.
    rows: Box<[AtomicU32]>,
    capacity: usize,
    recent: usize,
    top: usize,
    bos: u32,
    threads: usize,
    tokens: usize,
    steps: u64,
}

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
struct Answers<'a> {
    lengths: &'a mut [u8],
    occurrences: &'a mut [u8],
    tokens: &'a mut [u32],
    counts: &'a mut [u8],
}

impl Matches {
    /// Room for the answers to `positions` questions.
    fn new(positions: usize, top: usize) -> Result<Self, Error> {
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

    fn chunks(&mut self, top: usize) -> impl Iterator<Item = Answers<'_>> {
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

/// Pushed tokens that one thread links, and the hashes of the contexts before them.
type Share = Vec<(usize, u64)>;

/// A chain that is followed: whose answer it is, in which table, and where its next occurrence is.
struct Walk {
    answer: usize,
    table: usize,
    position: u32,
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
        let tables = lengths.iter().map(|&len| Table::new(len, capacity, threads));
        let tables = tables.collect::<Result<Vec<_>, _>>()?;
        let rows = zeroed(capacity * (1 + tables.len()), threads, |word| {
            AtomicU32::store(word, 0, Relaxed);
        })?;
        Ok(Self { tables, rows, capacity, recent, top, bos, threads, tokens: 0, steps: 0 })
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

    /// Bytes of memory, empty or full: 4, and 16 for each length, a token of capacity.
    pub fn bytes(&self) -> usize {
        let slots = self.tables.len() * Table::slots(self.capacity);
        self.rows.len() * size_of::<AtomicU32>() + slots * size_of::<u64>()
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
        let index = &*self;
        let block = tokens.len().div_ceil(index.threads);
        let shares = in_threads(index.threads, |thread| {
            let bound = |thread: usize| tokens.len().min(thread * block);
            index.store(bound(thread)..bound(thread + 1), tokens, row_len)
        });
        in_threads(index.threads, |thread| {
            for number in 0..index.tables.len() {
                for shares in &shares {
                    index.link(number, &shares[number * index.threads + thread], tokens);
                }
            }
        });
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
        let work = Mutex::new(chunks(tokens.len()).zip(matches.chunks(self.top)));
        in_threads(self.threads, |_| {
            loop {
                let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((chunk, mut answers)) = next else { break };
                self.answer(&chunk, tokens, row_len, &mut answers);
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

    /// Words of a position.
    fn stride(&self) -> usize {
        1 + self.tables.len()
    }

    /// Words of a position: its token, and its links.
    fn row(&self, position: u32) -> &[AtomicU32] {
        &self.rows[position as usize * self.stride()..][..self.stride()]
    }

    /// The position that a token gets which is pushed next; below the capacity, which fits.
    fn position(&self, at: usize) -> u32 {
        u32::try_from(self.tokens + at).unwrap_or(u32::MAX)
    }

    fn contexts(&self, chunk: &Range<usize>, row_len: usize, tokens: &[u32]) -> Contexts {
        let longest = self.tables.last().map_or(0, |table| table.len.into());
        Contexts::new(chunk, row_len, longest, self.bos, |at| tokens[at])
    }

    /// Whether the tokens before `end` are those before the stored `position`.
    fn same(&self, position: u32, len: u8, end: usize, tokens: &[u32]) -> bool {
        let len = usize::from(len);
        let stored =
            self.rows[(position as usize - len) * self.stride()..].iter().step_by(self.stride());
        stored.zip(end - len..end).all(|(stored, at)| stored.load(Relaxed) == tokens[at])
    }

    /// Store pushed tokens, and return those to link: for each table, what is for each thread.
    fn store(&self, block: Range<usize>, tokens: &[u32], row_len: usize) -> Vec<Share> {
        let contexts = self.contexts(&block, row_len, tokens);
        let mut shares = vec![Share::new(); self.tables.len() * self.threads];
        for at in block {
            self.row(self.position(at))[0].store(tokens[at], Relaxed);
            for (number, table) in self.tables.iter().enumerate() {
                if contexts.depth(at) > table.len.into() {
                    let hash = table.hash(&contexts, at);
                    shares[number * self.threads + part(hash, self.threads)].push((at, hash));
                }
            }
        }
        shares
    }

    /// Put pushed tokens into the chains of a table.
    fn link(&self, number: usize, share: &[(usize, u64)], tokens: &[u32]) {
        let table = &self.tables[number];
        for chunk in share.chunks(CHUNK) {
            table.fetch(chunk.iter().map(|&(_, hash)| hash));
            for &(at, hash) in chunk {
                let position = self.position(at);
                let last =
                    table.insert(hash, position, |last| self.same(last, table.len, at, tokens));
                self.row(position)[1 + number].store(last, Relaxed);
            }
        }
    }

    /// Answer the questions of one chunk.
    fn answer(
        &self,
        chunk: &Range<usize>,
        tokens: &[u32],
        row_len: usize,
        answers: &mut Answers<'_>,
    ) {
        let contexts = self.contexts(chunk, row_len, tokens);
        let mut walks = self.longest(chunk, &contexts, tokens, answers);
        let mut next: Vec<Vec<(u32, u8)>> = vec![Vec::new(); chunk.len()];
        for _ in 0..self.recent {
            // All chains go a step further at a time, so that their cache misses overlap.
            black_box(
                walks.iter().fold(0, |sum, walk| sum ^ self.row(walk.position)[0].load(Relaxed)),
            );
            walks.retain_mut(|walk| {
                let row = self.row(walk.position);
                count(&mut next[walk.answer], row[0].load(Relaxed));
                answers.occurrences[walk.answer] += 1;
                walk.position = row[1 + walk.table].load(Relaxed);
                walk.position != 0
            });
        }
        let told = answers.tokens.chunks_mut(self.top).zip(answers.counts.chunks_mut(self.top));
        for (mut next, (tokens, counts)) in next.into_iter().zip(told) {
            next.sort_by_key(|&(_, count)| Reverse(count));
            for (slot, (token, count)) in next.into_iter().take(self.top).enumerate() {
                (tokens[slot], counts[slot]) = (token, count);
            }
        }
    }

    /// The chains of the longest contexts of a chunk that occurred. A context occurred only where
    /// its shorter ones did.
    fn longest(
        &self,
        chunk: &Range<usize>,
        contexts: &Contexts,
        tokens: &[u32],
        answers: &mut Answers<'_>,
    ) -> Vec<Walk> {
        let mut last: Vec<Option<Walk>> = chunk.clone().map(|_| None).collect();
        let mut open: Vec<usize> = chunk.clone().collect();
        for (number, table) in self.tables.iter().enumerate() {
            open.retain(|&at| contexts.depth(at) >= table.len.into());
            let hash = |at| table.hash(contexts, at + 1);
            table.fetch(open.iter().map(|&at| hash(at)));
            open.retain(|&at| {
                let (_, position) =
                    table.find(hash(at), |last| self.same(last, table.len, at + 1, tokens));
                if position != 0 {
                    let answer = at - chunk.start;
                    last[answer] = Some(Walk { answer, table: number, position });
                    answers.lengths[answer] = table.len;
                }
                position != 0
            });
        }
        last.into_iter().flatten().collect()
    }
}

/// Count one more `token` among those seen, which are in the order of their first.
fn count(seen: &mut Vec<(u32, u8)>, token: u32) {
    match seen.iter_mut().find(|(other, _)| *other == token) {
        Some((_, count)) => *count += 1,
        None => seen.push((token, 1)),
    }
}

/// Positions `0..len` in chunks.
fn chunks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(CHUNK).map(move |start| start..len.min(start + CHUNK))
}

/// What `work` returns for each of `0..threads`, in a thread each; in this one where none can be
/// had.
fn in_threads<T: Send>(threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let others: Vec<_> = (1..threads)
            .map(|thread| Builder::new().spawn_scoped(scope, move || work(thread)))
            .collect();
        let mut results = vec![work(0)];
        results.extend(others.into_iter().zip(1..).map(|(other, thread)| match other {
            Ok(other) => other.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => work(thread),
        }));
        results
    })
}

/// So many zeros, in memory that the system has given by then: `touch` writes one, and is called
/// for one of every page.
fn zeroed<T: Zeroable + Sync>(
    count: usize,
    threads: usize,
    touch: fn(&T),
) -> Result<Box<[T]>, Error> {
    let zeros: Box<[T]> = try_zeroed_slice_box(count).map_err(|()| {
        Error(format!(
            "the index needs {} MB in one piece, which this machine does not have; lower its \
             capacity",
            count / 1_000_000 * size_of::<T>()
        ))
    })?;
    let share = count.div_ceil(threads);
    in_threads(threads, |thread| {
        zeros
            .iter()
            .skip(thread * share)
            .take(share)
            .step_by(PAGE / size_of::<T>())
            .for_each(touch);
    });
    Ok(zeros)
}

#[cfg(test)]
mod tests;
