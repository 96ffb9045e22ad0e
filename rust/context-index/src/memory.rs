//! Zeros in large pages where the system has them: nearly every read of an index is in another
//! page, which the processor would have to look for first.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use memmap2::MmapMut;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::Error;
use crate::pool::Pool;

/// Bytes of a page of memory, or less.
const PAGE: usize = 4096;

/// So many zeros at first, in memory that nothing else refers to.
pub struct Memory {
    map: MmapMut,
}

impl Memory {
    /// Room for `count` values of `T`, which the system has given by then.
    pub fn new<T>(count: usize, pool: &Pool) -> Result<Self, Error> {
        let bytes = count.checked_mul(size_of::<T>());
        let map = bytes.and_then(|bytes| MmapMut::map_anon(bytes).ok()).ok_or_else(|| {
            Error(format!(
                "the index needs {} MB in one piece, which this machine does not have; lower its \
                 capacity",
                count / 1_000_000 * size_of::<T>()
            ))
        })?;
        // A system without large pages has small ones.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        let mut memory = Self { map };
        let all: &[AtomicU8] = memory.view_mut();
        let share = all.len().div_ceil(pool.threads()).next_multiple_of(PAGE);
        pool.each(|thread| {
            let mine = all.iter().skip(thread * share).take(share);
            mine.step_by(PAGE).for_each(|byte| byte.store(0, Relaxed));
        });
        Ok(memory)
    }

    /// The values.
    pub fn view<T: FromBytes + Immutable>(&self) -> &[T] {
        // A mapping begins with a page and holds whole values.
        <[T]>::ref_from_bytes(&self.map).unwrap_or_default()
    }

    /// The values, to be changed.
    pub fn view_mut<T: FromBytes + IntoBytes>(&mut self) -> &mut [T] {
        <[T]>::mut_from_bytes(&mut self.map).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri gives what the system would refuse")]
    fn too_much_memory_is_refused() {
        for count in [isize::MAX.unsigned_abs() / 8, usize::MAX] {
            let refused = Memory::new::<u64>(count, &Pool::new(1)).err().unwrap().to_string();
            assert!(refused.contains("lower its capacity"), "{refused}");
        }
    }
}
