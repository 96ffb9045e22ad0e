//! Threads that stay from step to step: to start them takes longer than their work.

use std::mem;
use std::process;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

/// The threads; none where the caller's does the work.
pub struct Pool {
    threads: Option<ThreadPool>,
    made_in: u32,
}

impl Pool {
    /// So many threads, or as many as the system has.
    pub fn new(threads: usize) -> Self {
        // Miri refuses what rayon's queues do with pointers.
        let threads = if cfg!(miri) { 1 } else { threads };
        let halves = std::iter::successors(Some(threads), |threads| Some(threads / 2));
        let started = halves.take_while(|&threads| threads > 1).find_map(|threads| {
            let name = |thread| format!("jspeed-index-{thread}");
            ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build().ok()
        });
        Self { threads: started, made_in: process::id() }
    }

    /// How many.
    pub fn threads(&self) -> usize {
        self.threads.as_ref().map_or(1, ThreadPool::current_num_threads)
    }

    /// What `work` returns for each of `0..threads`, in a thread each.
    pub fn each<T: Send>(&self, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        match &self.threads {
            Some(threads) => threads.broadcast(|thread| work(thread.index())),
            None => vec![work(0)],
        }
    }
}

impl Drop for Pool {
    /// A fork has none of the threads, and may have a lock that one of them held.
    fn drop(&mut self) {
        if self.made_in != process::id() {
            mem::forget(self.threads.take());
        }
    }
}
