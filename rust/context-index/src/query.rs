//! What followed the contexts of a chunk of positions.

use std::ops::Range;

use crate::contexts::{Asked, Contexts, Stored};
use crate::matches::{Answers, Counter};
use crate::table::Reader;

/// Rows that ask, and the index that they ask.
pub struct Query<'a> {
    pub tables: Vec<Reader<'a>>,
    pub stored: Stored<'a>,
    pub recent: usize,
    pub tokens: &'a [u32],
    pub row_len: usize,
    pub bos: u32,
}

/// A chain that is followed: whose answer it is, in which table, and where its next occurrence is.
#[derive(Clone, Copy)]
struct Walk {
    answer: usize,
    table: usize,
    position: u32,
}

/// Memory of a thread for one chunk after the other.
pub struct Scratch {
    /// For each answer what followed, the latest first, up to `recent`.
    followed: Vec<u32>,
    counter: Counter,
}

impl Scratch {
    pub fn new() -> Self {
        Self { followed: Vec::new(), counter: Counter::new() }
    }
}

impl Query<'_> {
    /// Answer the questions of one chunk.
    pub fn answer(&self, chunk: &Range<usize>, answers: &mut Answers<'_>, scratch: &mut Scratch) {
        let recent = self.recent;
        scratch.followed.resize(chunk.len() * recent, 0);
        let mut walks = self.longest(chunk, answers);
        for occurrence in 0..recent {
            // All chains go a step further at a time, so that their cache misses overlap.
            for walk in &mut walks {
                let [token, position] = self.tables[walk.table].entry(walk.position);
                scratch.followed[walk.answer * recent + occurrence] = token;
                walk.position = position;
            }
            walks.retain(|walk| {
                answers.occurrences[walk.answer] += 1;
                walk.position != 0
            });
        }
        let top = answers.tokens.len() / chunk.len();
        let told = answers.tokens.chunks_mut(top).zip(answers.counts.chunks_mut(top));
        let followed = scratch.followed.chunks(recent).zip(&*answers.occurrences);
        for ((followed, &count), (tokens, counts)) in followed.zip(told) {
            scratch.counter.tell(&followed[..count.into()], tokens, counts);
        }
    }

    /// The chains of the longest contexts of a chunk that occurred. A context occurred only where
    /// its shorter ones did.
    fn longest(&self, chunk: &Range<usize>, answers: &mut Answers<'_>) -> Vec<Walk> {
        let longest = self.tables.last().map_or(0, |table| table.len.into());
        let contexts = Contexts::new(chunk, self.row_len, longest, self.bos, self.tokens);
        let mut last: Vec<Option<Walk>> = vec![None; chunk.len()];
        let mut open: Vec<Asked> = chunk.clone().map(|at| (at, 0)).collect();
        for (number, table) in self.tables.iter().enumerate() {
            let len = table.len.into();
            open.retain(|&(at, _)| contexts.depth(at) >= len);
            for (at, hash) in &mut open {
                *hash = table.hash(&contexts, *at + 1);
            }
            self.stored.fetch(len, &open, |hash| table.first(hash));
            open.retain(|&(at, hash)| {
                let context = &self.tokens[at + 1 - len..=at];
                let position = table.find(hash, |last| self.stored.is_before(last, context));
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
