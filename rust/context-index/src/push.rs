//! A step goes into the chains of all tables.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use crate::CHUNK;
use crate::contexts::{Asked, Contexts, Stored};
use crate::pool::Pool;
use crate::table::{Writer, part};

/// Tokens that a thread hashes at a time: what is known of them fits its cache.
const BLOCK: usize = 4096;

/// What one thread links, for one table.
type Share = Vec<Asked>;

/// A step that is pushed.
pub struct Push<'a> {
    pub tables: Vec<Writer<'a>>,
    /// All tokens, those of this step from `first` on.
    pub stored: Stored<'a>,
    pub first: usize,
    pub tokens: &'a [u32],
    pub row_len: usize,
    pub bos: u32,
}

impl Push<'_> {
    /// Put all tokens into the chains. In turn threads hash a block each, and link the contexts
    /// that are theirs by the hash.
    pub fn run(&self, pool: &Pool) {
        let parts = pool.threads();
        let empty = || RwLock::new(vec![vec![Share::new(); parts]; self.tables.len()]);
        let shares: Vec<_> = (0..parts).map(|_| empty()).collect();
        for round in (0..self.tokens.len()).step_by(parts * BLOCK) {
            let bound = |thread: usize| self.tokens.len().min(round + thread * BLOCK);
            pool.each(|thread| {
                let mut mine = shares[thread].write().unwrap_or_else(PoisonError::into_inner);
                self.hash(bound(thread)..bound(thread + 1), &mut mine);
            });
            pool.each(|thread| {
                for shares in &shares {
                    let shares = shares.read().unwrap_or_else(PoisonError::into_inner);
                    for (table, shares) in self.tables.iter().zip(&*shares) {
                        self.link(table, &shares[thread]);
                    }
                }
            });
        }
    }

    /// Share out those of a block of tokens that have a context.
    fn hash(&self, block: Range<usize>, shares: &mut [Vec<Share>]) {
        let longest = self.tables.last().map_or(0, |table| table.len.into());
        let contexts = Contexts::new(&block, self.row_len, longest, self.bos, self.tokens);
        for (table, shares) in self.tables.iter().zip(shares) {
            shares.iter_mut().for_each(Share::clear);
            for asked in table.contexts(&contexts, block.start) {
                let part = part(asked.1, shares.len());
                shares[part].push(asked);
            }
        }
    }

    /// Put tokens into the chains of a table.
    fn link(&self, table: &Writer<'_>, share: &[Asked]) {
        let len = table.len.into();
        for chunk in share.chunks(CHUNK) {
            self.stored.fetch(len, chunk, |hash| table.first(hash));
            for &(at, hash) in chunk {
                let context = &self.tokens[at - len..at];
                // Below the capacity, which fits.
                let position = u32::try_from(self.first + at).unwrap_or(u32::MAX);
                table.insert(hash, position, self.tokens[at], |last| {
                    self.stored.is_before(last, context)
                });
            }
        }
    }
}
