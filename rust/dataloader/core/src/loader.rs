//! Prefetching: one producer thread, a bounded queue, and the state of the batches delivered so
//! far.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::batch::{Batch, Pool};
use crate::config::Config;
use crate::error::{Error, Kind};
use crate::plan::Plan;
use crate::shard::Catalog;
use crate::state::{self, Cursor, Value};
use crate::stream::Stream;

/// Interval at which a consumer that waits is asked whether to go on.
const POLL: Duration = Duration::from_millis(100);

/// A consumer that is back within this time does nothing between batches. To be woken costs the
/// processor more than a small batch does, so it is woken once for a few of them.
const HASTE: Duration = Duration::from_micros(100);

/// How many small batches those are, for each that is made ahead.
const FEW: usize = 8;

/// Bytes of the largest batch that is small.
const SMALL: usize = 256 << 10;

/// How long a few are waited for when one is ready.
const PATIENCE: Duration = Duration::from_millis(1);

/// Counters over delivered batches.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// Bytes of shards read for them.
    pub bytes_read: u64,
    /// Tokens passed over that no lane holds.
    pub dropped_tokens: u64,
    /// How often a consumer found no batch ready.
    pub queue_empty: u64,
    /// How often another shard was opened.
    pub shard_switches: u64,
    /// Batches.
    pub batches: u64,
    /// Seconds that consumers waited for them.
    pub waited: f64,
    /// Of these, for the one that took longest.
    pub longest_wait: f64,
    /// Seconds that a consumer waited for each of the last [`Stats::WAITS`] batches.
    waits: VecDeque<f64>,
}

impl Stats {
    /// How many batches percentiles are of, the last ones.
    pub const WAITS: usize = 4096;

    fn record(&mut self, batch: &Batch, wait: Duration) {
        self.bytes_read += batch.bytes_read;
        self.dropped_tokens += batch.dropped;
        self.shard_switches += batch.switches;
        let wait = wait.as_secs_f64();
        self.waited += wait;
        self.longest_wait = self.longest_wait.max(wait);
        if self.waits.len() == Self::WAITS {
            self.waits.pop_front();
        }
        self.waits.push_back(wait);
        self.batches += 1;
    }

    /// The wait that `percent` of the last waits do not exceed; zero before the first.
    pub fn wait_percentile(&self, percent: usize) -> Duration {
        let mut sorted = Vec::from(self.waits.clone());
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * percent).div_ceil(100);
        Duration::from_secs_f64(sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default())
    }
}

/// A stream of batches with a thread that makes them ahead. All methods may be called from any
/// thread.
///
/// As an iterator it repeats the error that ended its stream.
pub struct Loader {
    shared: Arc<Shared>,
    made_in: u32,
}

struct Shared {
    catalog: Arc<Catalog>,
    config: Config,
    pool: Arc<Pool>,
    inner: Mutex<Inner>,
    /// Consumers wait for a batch.
    made: Condvar,
    /// The producer waits until one is wanted.
    wanted: Condvar,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Batch>,
    /// Why no batch will follow the queue: it was the last, or an error.
    end: Option<Result<(), Error>>,
    delivered: Cursor,
    /// Consumers that wait at this moment.
    waiting: usize,
    /// With how many batches in the queue they are woken.
    enough: usize,
    /// When the last batch was delivered, if it was small.
    small: Option<Instant>,
    /// Whether the producer waits and nobody has woken it.
    asleep: bool,
    producer: Option<Producer>,
    stats: Stats,
    closed: bool,
}

struct Producer {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Loader {
    /// A loader at the start of its stream; nothing is read until [`Loader::start`] or the first
    /// batch.
    ///
    /// # Errors
    /// As [`Config::check`].
    pub fn new(catalog: impl Into<Arc<Catalog>>, config: Config) -> Result<Self, Error> {
        let catalog = catalog.into();
        config.check(&catalog)?;
        let pool = Pool::new(FEW * config.prefetch + 2);
        let (inner, made, wanted) = Default::default();
        let shared = Arc::new(Shared { catalog, config, pool, inner, made, wanted });
        Ok(Self { shared, made_in: process::id() })
    }

    /// Begin to make batches; does nothing when that has begun.
    ///
    /// # Errors
    /// The loader is closed, or the system has no more threads.
    pub fn start(&self) -> Result<(), Error> {
        self.started().map(drop)
    }

    /// Wait for the next batch; `None` after the last. A longer wait asks `go_on` again and again,
    /// without the lock.
    ///
    /// # Errors
    /// The loader is closed, `go_on` says no, or the stream failed; then the same error again on
    /// every later call.
    pub fn next_batch(&self, mut go_on: impl FnMut() -> bool) -> Result<Option<Batch>, Error> {
        let (began, mut found_empty) = (Instant::now(), false);
        loop {
            let mut inner = self.started()?;
            if let Some(batch) = inner.queue.pop_front() {
                inner.delivered = batch.after;
                inner.stats.record(&batch, began.elapsed());
                inner.small = (batch.bytes() <= SMALL).then(Instant::now);
                let room = inner.queue.len() < self.shared.config.prefetch;
                let wake = room && std::mem::take(&mut inner.asleep);
                drop(inner);
                if wake {
                    self.shared.wanted.notify_one();
                }
                return Ok(Some(batch));
            }
            if let Some(end) = &inner.end {
                return end.clone().map(|()| None);
            }
            let (mut enough, mut patience) = (1, POLL);
            if !std::mem::replace(&mut found_empty, true) {
                inner.stats.queue_empty += 1;
                if inner.small.is_some_and(|before| began.duration_since(before) < HASTE) {
                    (enough, patience) = ((FEW * self.shared.config.prefetch).max(1), PATIENCE);
                }
            }
            inner.waiting += 1;
            inner.enough = enough;
            if std::mem::take(&mut inner.asleep) {
                self.shared.wanted.notify_one();
            }
            let few = |inner: &mut Inner| {
                inner.queue.len() < enough && inner.end.is_none() && !inner.closed
            };
            let waited = self.shared.made.wait_timeout_while(inner, patience, few);
            let (mut inner, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            inner.waiting -= 1;
            inner.enough = inner.waiting.min(1);
            drop(inner);
            if timeout.timed_out() && patience == POLL && !go_on() {
                return Err(Error::stopped());
            }
        }
    }

    /// The state of the batches delivered so far.
    ///
    /// # Errors
    /// This process is a fork, in which the lock may be held for ever.
    pub fn state(&self) -> Result<Vec<(String, Value)>, Error> {
        let delivered = self.lock()?.delivered;
        Ok(state::save(&delivered, &self.shared.config, &self.shared.catalog))
    }

    /// Continue after the batches of a saved state.
    ///
    /// # Errors
    /// [`Kind::State`] when it belongs to other data or settings, or the loader is closed.
    pub fn load_state(&self, fields: &[(String, Value)]) -> Result<(), Error> {
        let cursor = state::load(fields, &self.shared.config, &self.shared.catalog)?;
        let mut inner = self.open()?;
        inner.delivered = cursor;
        self.halt(inner);
        Ok(())
    }

    /// Counters over the batches delivered so far.
    ///
    /// # Errors
    /// As [`Loader::state`].
    pub fn stats(&self) -> Result<Stats, Error> {
        Ok(self.lock()?.stats.clone())
    }

    /// Stop the thread and wait for it to end; batches already handed out stay valid. May be called
    /// twice.
    pub fn close(&self) {
        if let Ok(mut inner) = self.lock() {
            inner.closed = true;
            self.halt(inner);
        }
    }

    /// Threads and locks do not survive `fork`.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, Error> {
        let (here, made_in) = (process::id(), self.made_in);
        if made_in == here {
            return Ok(self.shared.lock());
        }
        Err(Error::new(
            Kind::Forked,
            format!(
                "this loader was made in process {made_in} and cannot be used in its fork {here}, \
                 which has none of its threads; make the loader in the child or start the child \
                 with spawn"
            ),
        ))
    }

    fn open(&self) -> Result<MutexGuard<'_, Inner>, Error> {
        let inner = self.lock()?;
        if inner.closed {
            return Err(Error::argument(
                "the loader is closed; make a new one and give it the state of this one",
            ));
        }
        Ok(inner)
    }

    fn started(&self) -> Result<MutexGuard<'_, Inner>, Error> {
        let mut inner = self.open()?;
        if inner.producer.is_some() {
            return Ok(inner);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, flag, start) = (Arc::clone(&self.shared), Arc::clone(&stop), inner.delivered);
        let work = move || produce(&shared, &flag, start);
        let thread =
            Builder::new().name("jspeed-loader".to_owned()).spawn(work).map_err(|error| {
                Error::argument(format!(
                    "the loader's thread cannot be started ({error}); raise the limit on threads \
                     or close other loaders"
                ))
            })?;
        inner.producer = Some(Producer { thread, stop });
        Ok(inner)
    }

    /// Drop prefetched batches, stop the thread and wait for it to end, without the lock.
    fn halt(&self, mut inner: MutexGuard<'_, Inner>) {
        inner.queue.clear();
        inner.end = None;
        let producer = inner.producer.take();
        if let Some(Producer { stop, .. }) = &producer {
            stop.store(true, Ordering::Relaxed);
        }
        drop(inner);
        self.shared.made.notify_all();
        self.shared.wanted.notify_all();
        if let Some(Producer { thread, .. }) = producer {
            // A panic in the thread was caught and reported there.
            let _ = thread.join();
        }
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_batch(|| true).transpose()
    }
}

impl std::fmt::Display for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shared { catalog, config, .. } = &*self.shared;
        let Config { lanes, process_index, process_count, .. } = config;
        write!(
            f,
            "TokenLoader({} tokens, {lanes} lanes, process {process_index} of {process_count}",
            catalog.num_tokens()
        )?;
        match self.lock() {
            Ok(inner) => write!(f, ", at step {})", inner.delivered.step),
            Err(_) => f.write_str(", made before a fork)"),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.close();
    }
}

/// The thread: it makes a batch when the queue has room or a consumer waits, without the lock.
fn produce(shared: &Shared, stop: &AtomicBool, start: Cursor) {
    let Shared { catalog, config, pool, .. } = shared;
    let mut stream = Stream::new(Plan::new(catalog, config), pool, start, stop);
    loop {
        let idle = |inner: &mut Inner| {
            let wanted = inner.queue.len() < config.prefetch.max(inner.enough);
            inner.asleep = !wanted && !stop.load(Ordering::Relaxed);
            inner.asleep
        };
        let ready = shared.wanted.wait_while(shared.lock(), idle);
        drop(ready.unwrap_or_else(PoisonError::into_inner));
        let made = catch_unwind(AssertUnwindSafe(|| stream.next_batch())).unwrap_or_else(|_| {
            Err(Error::argument(
                "the loader's thread panicked, which is a bug; report it with the text above",
            ))
        });
        let mut inner = shared.lock();
        if stop.load(Ordering::Relaxed) {
            return;
        }
        match made {
            Ok(Some(batch)) => inner.queue.push_back(batch),
            Ok(None) => inner.end = Some(Ok(())),
            Err(error) => inner.end = Some(Err(error)),
        }
        let ended = inner.end.is_some();
        let wake = inner.waiting > 0 && (ended || inner.queue.len() >= inner.enough);
        drop(inner);
        if wake {
            shared.made.notify_all();
        }
        if ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Shape;
    use crate::shard::Width;

    #[test]
    fn waits_do_not_grow_for_ever() {
        let mut stats = Stats::default();
        let shape = Shape { rows: 1, lane_len: 1, width: Width::Two, max_docs: None };
        let batch = Batch::new(&Pool::new(1), shape).unwrap();
        for wait in 0..2 * Stats::WAITS as u64 + 10 {
            stats.record(&batch, Duration::from_secs(wait));
        }
        assert_eq!(stats.waits.len(), Stats::WAITS);
        assert_eq!(stats.batches, 2 * Stats::WAITS as u64 + 10);
        assert_eq!(stats.wait_percentile(100).as_secs(), stats.batches - 1);
        assert_eq!(stats.wait_percentile(1).as_secs(), stats.batches - 4096 + 40);
        assert!((stats.longest_wait - 8201.0).abs() < 0.1 && stats.waited > 33e6);
    }

    #[test]
    fn a_percentile_is_a_wait_that_so_many_do_not_exceed() {
        let of = |waits: &[f64]| {
            let stats = Stats { waits: waits.to_vec().into(), ..Stats::default() };
            [50, 99, 100].map(|percent| stats.wait_percentile(percent).as_secs())
        };
        assert_eq!(of(&[]), [0; 3]);
        assert_eq!(of(&[3.0, 1.0, 2.0]), [2, 3, 3]);
        assert_eq!(of(&[4.0, 1.0]), [1, 4, 4]);
    }
}
