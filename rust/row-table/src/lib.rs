//! A table of bf16 rows that no device holds: [`RowTable::gather`] copies rows out,
//! [`RowTable::update`] changes them by their gradients.
//!
//! A row gets a *slot* in the first update that names it, the next one in the order of the list. So
//! memory follows the rows in use, frequent rows lie together, and what a checkpoint needs is the
//! front of three arrays. A row that was never updated is zeros and has no slot.
//!
//! The rule is Adam without momentum, with one mean square a row (`jspeed.optim.rows`). A row's
//! mean square decays at every update, also at those that do not name the row: it keeps the number
//! of its last update, and decays by all betas since when it is named again.
//!
//! Gradients come in parts, such as those of a step and a device. A row's are summed in fp32, in
//! the order of the list, and each part's sum is rounded to the part's numbers, as a device rounds
//! what it sends. A row is changed by one thread. All arithmetic is IEEE's, without fused
//! operations. So the bits do not depend on the number of threads.
#![deny(missing_docs)]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

mod arithmetic;
mod cache;
mod decay;
mod memory;
#[cfg(test)]
mod tests;

pub use arithmetic::Gradient;
use arithmetic::{Change, Piece, change_rows};
use decay::Decay;
pub use memory::available as available_memory;

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

/// Rows that a thread gathers at a time.
const CHUNK: usize = 512;
/// Pieces of an update for each thread: the last one to end is late by one piece.
const PIECES: usize = 8;
/// In a list: no row.
pub const LEFT_OUT: i64 = -1;
/// The most columns of a row.
const WIDEST: i64 = 1 << 16;

/// The mean square of a row after its last update, and the number of that update.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Moment {
    /// The running mean of squares.
    pub square: f32,
    /// How many updates there were up to the last one that named the row.
    pub updates: u32,
}

/// What an update is told besides gradients; see `jspeed.optim.rows.row_adam`.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Rate of this update.
    pub learning_rate: f32,
    /// Of the mean square, in this update: above 0 and below 1.
    pub beta2: f32,
    /// Added to the root of the mean square.
    pub eps: f32,
    /// Cautious decay, in units of the squared rate.
    pub weight_decay: f32,
}

/// Slots in use, for a checkpoint: their rows, weights and moments.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The row of each slot.
    pub rows: &'a [u32],
    /// Its weights, bf16.
    pub weights: &'a [u16],
    /// Its moment.
    pub moments: &'a [Moment],
}

/// The table.
pub struct RowTable {
    rows: usize,
    width: usize,
    capacity: usize,
    used: usize,
    /// By row: its slot and 1 more, or 0.
    slots: MmapMut,
    /// By slot: bf16 weights.
    weights: MmapMut,
    /// By slot.
    moments: MmapMut,
    /// By slot.
    row_of: MmapMut,
    decay: Decay,
    threads: usize,
    pool: ThreadPool,
}

impl RowTable {
    /// A table of `rows` x `width` zeros, of which `capacity` may ever be updated.
    ///
    /// # Errors
    /// An argument is out of its range, or a full table needs more memory than there is now.
    pub fn new(rows: i64, width: i64, capacity: i64, threads: i64) -> Result<Self, Error> {
        let rows: usize = in_range("num_rows", rows, 1, i64::from(u32::MAX) - 1)?;
        let width: usize = in_range("width", width, 1, WIDEST)?;
        let most = i64::try_from(rows).unwrap_or(i64::MAX);
        let capacity: usize = in_range("capacity", capacity, 1, most)?;
        let threads = in_range("threads", threads, 1, 1024)?;
        memory::check(rows, width, capacity, memory::available())?;
        let map = |bytes, huge| memory::map(bytes, huge, rows, capacity);
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|number| format!("rows-{number}"))
            .build()
            .map_err(|error| {
                Error(format!("cannot start {threads} threads ({error}); lower threads"))
            })?;
        Ok(Self {
            rows,
            width,
            capacity,
            used: 0,
            slots: map(rows * size_of::<u32>(), false)?,
            weights: map(capacity * width * size_of::<u16>(), true)?,
            moments: map(capacity * size_of::<Moment>(), true)?,
            row_of: map(capacity * size_of::<u32>(), false)?,
            decay: Decay::default(),
            threads,
            pool,
        })
    }

    /// Rows of the table.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows that may be updated.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Rows that were updated.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes of the rows in use and of the numbers of all slots: the memory that is touched.
    pub fn bytes(&self) -> usize {
        memory::bytes(self.rows, self.width, self.used)
    }

    /// The betas of all updates so far.
    pub fn betas(&self) -> &[f32] {
        self.decay.betas()
    }

    /// Copy `rows` into `out`, one after the other; what is at the place of a row that is
    /// [`LEFT_OUT`] stays.
    ///
    /// # Errors
    /// A row is not in the table, or `out` has another size; `out` is unchanged then.
    pub fn gather(&self, rows: &[i64], out: &mut [u16]) -> Result<(), Error> {
        self.check_size(rows.len(), out.len(), "out")?;
        self.check_rows(rows, LEFT_OUT)?;
        let slots: &[u32] = bytemuck::cast_slice(&self.slots);
        let weights: &[u16] = bytemuck::cast_slice(&self.weights);
        self.pool.install(|| {
            let pieces = rows.par_chunks(CHUNK).zip(out.par_chunks_mut(CHUNK * self.width));
            pieces.for_each(|(rows, out)| {
                cache::gather(rows, slots, weights, out, self.width);
            });
        });
        Ok(())
    }

    /// Change `rows`, some of which may be equal, by `gradients`, one row after the other, in parts
    /// of whole rows. Gradients of rows that are [`LEFT_OUT`] are not read.
    ///
    /// `step` is the number of updates so far; or one less, for rows that the last update has left
    /// out: two calls with all gradients of each row in one of them are one update.
    ///
    /// # Errors
    /// A row is not in the table or had this update before, sizes differ, a rate is out of its
    /// range, `step` is another one, more rows than the capacity would be in use, or memory for the
    /// order of the list is missing: nothing has changed then. A gradient is not finite: all rows
    /// but such have changed.
    pub fn update<G: Gradient>(
        &mut self,
        step: u64,
        rows: &[i64],
        gradients: &[&[G]],
        rates: &Rates,
    ) -> Result<(), Error> {
        let goes_on = self.decay.updates().checked_sub(1) == Some(step);
        if step != self.decay.updates() && !goes_on {
            return Err(Error(format!(
                "update {step} should follow exactly as many, but the table has had {}; make each \
                 update once, in order",
                self.decay.updates()
            )));
        }
        if let Some(beta) =
            self.betas().last().filter(|beta| goes_on && beta.to_bits() != rates.beta2.to_bits())
        {
            return Err(Error(format!(
                "update {step} began with beta2 {beta} and goes on with {}; give the same",
                rates.beta2
            )));
        }
        self.check_size(rows.len(), gradients.iter().map(|part| part.len()).sum(), "gradients")?;
        for part in gradients {
            self.check_size(part.len() / self.width, part.len(), "a part of the gradients")?;
        }
        self.check_rows(rows, LEFT_OUT)?;
        let change = Change::new(rates, step)?;
        let mut keys = Vec::new();
        keys.try_reserve_exact(rows.len()).map_err(|_| {
            Error(format!(
                "the order of {} rows needs more memory than there is; update fewer at a time",
                rows.len()
            ))
        })?;
        let before = self.used;
        self.find_slots(rows, &mut keys)?;
        if goes_on {
            if let Some(row) = self.already_updated(&keys) {
                self.free(before);
                return Err(Error(format!(
                    "row {row} has had update {step} already; leave it out (-1) of the second list"
                )));
            }
        } else {
            self.decay.push(rates.beta2);
        }
        let piece = keys.len().div_ceil(PIECES * self.threads).max(CHUNK / PIECES);
        let (width, decay) = (self.width, &self.decay);
        let mut weights: &mut [u16] = bytemuck::cast_slice_mut(&mut self.weights);
        let mut moments: &mut [Moment] = bytemuck::cast_slice_mut(&mut self.moments);
        let wrong = AtomicUsize::new(usize::MAX);
        self.pool.install(|| {
            keys.par_sort_unstable();
            // Pieces end where a slot does, and each takes the slots up to its last one: no two
            // threads have one row.
            let (mut pieces, mut rest, mut first) = (Vec::new(), &keys[..], 0);
            while !rest.is_empty() {
                let mut end = piece.min(rest.len());
                while end < rest.len() && slot(rest[end]) == slot(rest[end - 1]) {
                    end += 1;
                }
                let (keys, later) = rest.split_at(end);
                let after = slot(keys[end - 1]) + 1;
                let (own, others) = weights.split_at_mut((after - first) * width);
                let (own_moments, other_moments) = moments.split_at_mut(after - first);
                pieces.push(Piece { keys, gradients, first, weights: own, moments: own_moments });
                (rest, first) = (later, after);
                (weights, moments) = (others, other_moments);
            }
            pieces.into_par_iter().for_each(|piece| {
                let skipped = change_rows(&change, decay, piece);
                wrong.fetch_min(skipped.unwrap_or(usize::MAX), Relaxed);
            });
        });
        match wrong.into_inner() {
            usize::MAX => Ok(()),
            place => Err(Error(format!(
                "the gradient at place {place} of the list, of row {}, is not finite, or its \
                 square is not; such rows were left as they are and all others updated, so go \
                 back to a checkpoint, and lower the learning rate",
                rows[place]
            ))),
        }
    }

    /// The slots from `first` on, `count` or as many as are in use.
    pub fn part(&self, first: usize, count: usize) -> Part<'_> {
        let first = first.min(self.used);
        let last = first.saturating_add(count).min(self.used);
        let weights: &[u16] = bytemuck::cast_slice(&self.weights);
        Part {
            rows: &bytemuck::cast_slice(&self.row_of)[first..last],
            weights: &weights[first * self.width..last * self.width],
            moments: &bytemuck::cast_slice(&self.moments)[first..last],
        }
    }

    /// Let the updates so far have had these `betas`; of a table that has had none.
    ///
    /// # Errors
    /// The table has had updates, or one is not above 0 and below 1.
    pub fn resume(&mut self, betas: &[f32]) -> Result<(), Error> {
        if self.decay.updates() > 0 || self.used > 0 {
            return Err(Error(
                "only a new table can continue after other updates; make one".to_owned(),
            ));
        }
        betas.iter().try_for_each(|&beta| arithmetic::check_beta(beta))?;
        for &beta in betas {
            self.decay.push(beta);
        }
        Ok(())
    }

    /// Put rows of another table into the next slots, as [`RowTable::part`] has them.
    ///
    /// # Errors
    /// A row is not in the table or is in use already, sizes differ, or the capacity is too small.
    /// Nothing has changed then.
    pub fn append(&mut self, part: Part<'_>) -> Result<(), Error> {
        self.check_size(part.rows.len(), part.weights.len(), "weights")?;
        if part.rows.len() != part.moments.len() {
            return Err(Error(format!(
                "{} rows came with {} moments; give one for each row",
                part.rows.len(),
                part.moments.len()
            )));
        }
        let updates = self.decay.updates();
        if let Some(late) = part.moments.iter().find(|moment| u64::from(moment.updates) > updates) {
            return Err(Error(format!(
                "a row was last changed by update {}, but the table has had {updates}; resume it \
                 with the betas of all updates first",
                late.updates
            )));
        }
        let rows: Vec<i64> = part.rows.iter().map(|&row| row.into()).collect();
        self.check_rows(&rows, 0)?;
        let before = self.used;
        let mut keys = Vec::new();
        self.find_slots(&rows, &mut keys)?;
        let fresh = (before..).zip(&keys).all(|(next, &key)| slot(key) == next);
        if !fresh {
            self.free(before);
            return Err(Error(
                "a row is there twice; give each row of a table once, to a new table".to_owned(),
            ));
        }
        let weights: &mut [u16] = bytemuck::cast_slice_mut(&mut self.weights);
        weights[before * self.width..][..part.weights.len()].copy_from_slice(part.weights);
        let moments: &mut [Moment] = bytemuck::cast_slice_mut(&mut self.moments);
        moments[before..][..part.moments.len()].copy_from_slice(part.moments);
        Ok(())
    }

    fn check_size(&self, rows: usize, values: usize, name: &str) -> Result<(), Error> {
        if rows.checked_mul(self.width) == Some(values) {
            return Ok(());
        }
        Err(Error(format!(
            "{name} should be {rows} rows of {} numbers but has {values} numbers; give one row \
             for each row of the list",
            self.width
        )))
    }

    fn check_rows(&self, rows: &[i64], least: i64) -> Result<(), Error> {
        let outside = |&row: &i64| {
            row < least || usize::try_from(row.max(0)).map_or(true, |row| row >= self.rows)
        };
        let Some(at) = rows.iter().position(outside) else { return Ok(()) };
        Err(Error(format!(
            "row {} at place {at} of the list is not in the table, which has {} rows; rows count \
             from 0",
            rows[at], self.rows
        )))
    }

    /// A row of these `keys` that the last update has changed.
    fn already_updated(&self, keys: &[u64]) -> Option<u32> {
        let moments: &[Moment] = bytemuck::cast_slice(&self.moments);
        let row_of: &[u32] = bytemuck::cast_slice(&self.row_of);
        let last = u32::try_from(self.decay.updates()).unwrap_or(u32::MAX);
        let found = |&&key: &&u64| moments[slot(key)].updates == last;
        let found = self.pool.install(|| keys.par_iter().with_min_len(CHUNK).find_first(found));
        found.map(|&key| row_of[slot(key)])
    }

    /// Make `keys` of the rows of the list that are not left out, of slot and place; new rows get
    /// the next slots, in the order of the list.
    fn find_slots(&mut self, rows: &[i64], keys: &mut Vec<u64>) -> Result<(), Error> {
        let before = self.used;
        let known: &[u32] = bytemuck::cast_slice(&self.slots);
        let key_of = |(place, &row): (usize, &i64)| {
            let next = usize::try_from(row).map_or(0, |row| known[row]);
            (u64::from(next) << 32) | place as u64
        };
        let found = rows.par_iter().enumerate().with_min_len(CHUNK).map(key_of);
        self.pool.install(|| found.collect_into_vec(keys));
        let slots: &mut [u32] = bytemuck::cast_slice_mut(&mut self.slots);
        let row_of: &mut [u32] = bytemuck::cast_slice_mut(&mut self.row_of);
        for key in keys.iter_mut().filter(|key| **key >> 32 == 0) {
            // What does not fit is left out: rows were checked.
            let Ok(row) = u32::try_from(rows[place(*key)]) else { continue };
            let slot = &mut slots[row as usize];
            if *slot == 0 {
                if self.used == self.capacity {
                    self.free(before);
                    return Err(Error(format!(
                        "the list has more new rows than the table has room for: {before} of {} \
                         are in use; make the table with a larger capacity",
                        self.capacity
                    )));
                }
                row_of[self.used] = row;
                self.used += 1;
                *slot = u32::try_from(self.used).unwrap_or_default();
            }
            *key |= u64::from(*slot) << 32;
        }
        keys.retain(|key| key >> 32 > 0);
        Ok(())
    }

    /// Take the slots from `first` on from their rows again.
    fn free(&mut self, first: usize) {
        let slots: &mut [u32] = bytemuck::cast_slice_mut(&mut self.slots);
        let row_of: &[u32] = bytemuck::cast_slice(&self.row_of);
        for &row in &row_of[first..self.used] {
            slots[row as usize] = 0;
        }
        self.used = first;
    }
}

/// The slot of a key, which has 1 more.
fn slot(key: u64) -> usize {
    (key >> 32) as usize - 1
}

/// The place in the list of a key.
#[expect(clippy::cast_possible_truncation, reason = "the low half")]
fn place(key: u64) -> usize {
    key as u32 as usize
}
