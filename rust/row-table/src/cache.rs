//! Copies of rows that are far apart: fetched ahead, and written past the caches.
//!
//! Nobody on the host reads a gathered row again, so it should not push others out of the caches.

/// Rows ahead whose weights are fetched; slots are looked up four times as far ahead.
pub const AHEAD: usize = 2;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Copy `rows` into `out`: by slot, or zeros where a row has none; nothing for one that is left out.
pub fn gather(rows: &[i64], slots: &[u32], weights: &[u16], out: &mut [u16], width: usize) {
    let slot_of = |at: usize| {
        let row = rows.get(at).and_then(|&row| usize::try_from(row).ok())?;
        Some(slots[row] as usize)
    };
    for at in 0..AHEAD.min(rows.len()) {
        fetch_row(weights, slot_of(at), width);
    }
    for (at, out) in out.chunks_exact_mut(width).enumerate() {
        if let Some(&row) = rows.get(at + 4 * AHEAD) {
            fetch(slots, usize::try_from(row).unwrap_or_default());
        }
        fetch_row(weights, slot_of(at + AHEAD), width);
        match slot_of(at) {
            None => {}
            Some(0) => out.fill(0),
            Some(slot) => stream(&weights[(slot - 1) * width..][..width], out),
        }
    }
    fence();
}

fn fetch_row(weights: &[u16], slot: Option<usize>, width: usize) {
    if let Some(slot @ 1..) = slot {
        fetch_all(&weights[(slot - 1) * width..][..width]);
    }
}

/// Fetch all lines of `values`.
pub fn fetch_all<T>(values: &[T]) {
    let step = (LINE / size_of::<T>()).max(1);
    for at in (0..values.len()).step_by(step) {
        fetch(values, at);
    }
}

/// Begin to load the line of `values[at]` into the caches; it need not exist.
pub fn fetch<T>(values: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address has no effect but on caches.
        #[expect(unsafe_code, reason = "prefetching has no safe interface")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(at).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, at);
}

/// Copy a row past the caches where the processor can by 32 bytes and both lie on borders of them.
fn stream(row: &[u16], out: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__m256i;
        #[expect(clippy::cast_ptr_alignment, reason = "looked at in the next line")]
        let (from, to) = (row.as_ptr().cast::<__m256i>(), out.as_mut_ptr().cast::<__m256i>());
        let whole = row.len() % 16 == 0 && row.len() == out.len();
        if whole && from.is_aligned() && to.is_aligned() && is_x86_feature_detected!("avx") {
            // SAFETY: both have as many numbers, on borders of 32 bytes; the processor has AVX.
            #[expect(unsafe_code, reason = "streaming stores have no safe interface")]
            unsafe {
                stream_avx(from, to, row.len() / 16);
            }
            return;
        }
    }
    out.copy_from_slice(row);
}

/// Copy `count` times 32 bytes past the caches. On an Intel Xeon stores of 16
/// bytes take half as long again (lab/2026-11-28-table-in-the-hosts-memory.md).
///
/// # Safety
/// The processor has AVX, and as many lie at both addresses, which are aligned.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
#[expect(unsafe_code, reason = "streaming stores have no safe interface")]
unsafe fn stream_avx(
    from: *const std::arch::x86_64::__m256i,
    to: *mut std::arch::x86_64::__m256i,
    count: usize,
) {
    for at in 0..count {
        // SAFETY: as above.
        unsafe {
            std::arch::x86_64::_mm256_stream_si256(
                to.add(at),
                std::arch::x86_64::_mm256_load_si256(from.add(at)),
            );
        }
    }
}

/// Let what was streamed be seen before what is written later.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: SSE is part of x86-64.
        #[expect(unsafe_code, reason = "fences of stores have no safe interface")]
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}
