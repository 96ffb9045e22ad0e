//! What an update does to a row: the same operations in the same order on every machine, so that
//! only their width in registers differs.

use bytemuck::Pod;

use crate::cache::{AHEAD, fetch, fetch_all};
use crate::decay::Decay;
use crate::{Error, Moment, Rates, place, slot};

/// Columns whose squares are summed apart, and then by halves.
const LANES: usize = 32;
/// Of these, so many that one register of AVX2 holds.
const REGISTER: usize = 8;

/// A number of a gradient: bf16 as its bits, or fp32.
pub trait Gradient: Pod + Send + Sync {
    /// As fp32, exactly.
    fn widen(self) -> f32;
    /// The nearest number of its kind, as fp32.
    fn round(sum: f32) -> f32;
}

impl Gradient for u16 {
    #[inline]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    #[inline]
    fn round(sum: f32) -> f32 {
        narrow(sum).widen()
    }
}

impl Gradient for f32 {
    #[inline]
    fn widen(self) -> f32 {
        self
    }
    #[inline]
    fn round(sum: f32) -> f32 {
        sum
    }
}

/// The nearest bf16, the even one of two.
#[inline]
pub fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Refuse a beta that leaves nothing of a mean square, or all.
pub fn check_beta(beta: f32) -> Result<(), Error> {
    if beta > 0.0 && beta < 1.0 {
        return Ok(());
    }
    Err(Error(format!("beta2 should be above 0 and below 1 but is {beta}; choose another value")))
}

/// The factors of an update.
pub struct Change {
    /// Share of this update's mean square.
    fresh: f32,
    rate: f32,
    eps: f32,
    /// How much a weight decays whose change has its sign.
    fraction: f32,
}

impl Change {
    /// Those of update `step`, the number of earlier ones.
    pub fn new(rates: &Rates, step: u64) -> Result<Self, Error> {
        let Rates { learning_rate, beta2, eps, weight_decay } = *rates;
        let named =
            [("learning_rate", learning_rate), ("eps", eps), ("weight_decay", weight_decay)];
        let fits = |name, x: f32| x.is_finite() && (x > 0.0 || (x == 0.0 && name != "eps"));
        if let Some((name, value)) = named.into_iter().find(|&(name, x)| !fits(name, x)) {
            let low = if name == "eps" { "above" } else { "at least" };
            return Err(Error(format!(
                "{name} should be a finite number {low} 0 but is {value}; choose another value"
            )));
        }
        check_beta(beta2)?;
        let left = 1.0 - power(f64::from(beta2), step + 1);
        #[expect(clippy::cast_possible_truncation, reason = "rounded to fp32")]
        let rate = (f64::from(learning_rate) * left.sqrt()) as f32;
        let fraction = weight_decay * (learning_rate * learning_rate);
        Ok(Self { fresh: 1.0 - beta2, rate, eps, fraction })
    }
}

/// `base` to the power of `exponent`, by multiplications.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

/// A part of an update that one thread makes.
pub struct Piece<'a, G> {
    /// Sorted, of whole slots.
    pub keys: &'a [u64],
    /// Those of the whole list, in parts of whole rows.
    pub gradients: &'a [&'a [G]],
    /// The slot with which weights and moments begin.
    pub first: usize,
    pub weights: &'a mut [u16],
    pub moments: &'a mut [Moment],
}

/// Change the rows of a piece. Return the first place of a row that was not changed, as its mean
/// square is not finite.
pub fn change_rows<G: Gradient>(
    change: &Change,
    decay: &Decay,
    piece: Piece<'_, G>,
) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        #[expect(unsafe_code, reason = "code for a feature of the processor")]
        unsafe {
            return change_rows_avx2(change, decay, piece);
        }
    }
    change_each(change, decay, piece)
}

/// [`change_each`], compiled for registers of 32 bytes; without fused operations, the same bits.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[expect(unsafe_code, reason = "code for a feature of the processor")]
unsafe fn change_rows_avx2<G: Gradient>(
    change: &Change,
    decay: &Decay,
    piece: Piece<'_, G>,
) -> Option<usize> {
    change_each(change, decay, piece)
}

/// [`change_rows`], compiled for the registers of whoever calls it.
#[inline(always)]
#[expect(clippy::inline_always, reason = "so that it is compiled for its caller's registers")]
pub fn change_each<G: Gradient>(
    change: &Change,
    decay: &Decay,
    piece: Piece<'_, G>,
) -> Option<usize> {
    let Piece { keys, gradients, first, weights, moments } = piece;
    let width = weights.len() / moments.len().max(1);
    // Where each part ends in the list.
    let ends: Vec<usize> = gradients
        .iter()
        .scan(0, |end, part| {
            *end += part.len() / width.max(1);
            Some(*end)
        })
        .collect();
    let part_of = |key: u64| ends.partition_point(|&end| end <= place(key));
    let gradient = |key: u64| {
        let part = part_of(key);
        let begin = if part == 0 { 0 } else { ends[part - 1] };
        &gradients[part][(place(key) - begin) * width..][..width]
    };
    let (mut sums, mut of_part) = (vec![0.0; width], vec![0.0; width]);
    let mut fetched = 0;
    let mut skipped = None;
    let mut at = 0;
    while at < keys.len() {
        let own = slot(keys[at]);
        let end = at + keys[at..].iter().take_while(|&&key| slot(key) == own).count();
        while fetched < keys.len().min(end + AHEAD) {
            let slot = slot(keys[fetched]) - first;
            fetch_all(gradient(keys[fetched]));
            if fetched == 0 || slot != self::slot(keys[fetched - 1]) - first {
                fetch(moments, slot);
                fetch_all(&weights[slot * width..][..width]);
            }
            fetched += 1;
        }
        let row = &mut weights[(own - first) * width..][..width];
        let moment = &mut moments[own - first];
        let changed = if end == at + 1 {
            change_row(change, decay, gradient(keys[at]), row, moment)
        } else {
            sums.fill(0.0);
            let mut rest = &keys[at..end];
            while let [key, ..] = rest {
                let last = ends[part_of(*key)];
                let (own, later) = rest.split_at(rest.partition_point(|&key| place(key) < last));
                if let [key] = own {
                    add(&mut sums, gradient(*key), Gradient::widen);
                } else {
                    of_part.fill(0.0);
                    for &key in own {
                        add(&mut of_part, gradient(key), Gradient::widen);
                    }
                    add(&mut sums, &of_part, G::round);
                }
                rest = later;
            }
            change_row(change, decay, &sums, row, moment)
        };
        if !changed {
            skipped = skipped.into_iter().chain([place(keys[at])]).min();
        }
        at = end;
    }
    skipped
}

/// Add to each sum what is made of its value.
#[inline(always)]
#[expect(clippy::inline_always, reason = "so that it is compiled for its caller's registers")]
fn add<T: Copy>(sums: &mut [f32], values: &[T], of: impl Fn(T) -> f32) {
    sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum += of(value));
}

/// Change a row, if its mean square is finite.
#[inline(always)]
#[expect(clippy::inline_always, reason = "so that it is compiled for its caller's registers")]
fn change_row<G: Gradient>(
    change: &Change,
    decay: &Decay,
    gradient: &[G],
    row: &mut [u16],
    moment: &mut Moment,
) -> bool {
    let mean = mean_square(gradient);
    if !mean.is_finite() {
        return false;
    }
    let kept = if moment.square == 0.0 { 0.0 } else { moment.square * decay.since(moment.updates) };
    moment.square = kept + change.fresh * mean;
    moment.updates = u32::try_from(decay.updates()).unwrap_or(u32::MAX);
    let scale = change.rate / (moment.square.sqrt() + change.eps);
    for (weight, value) in row.iter_mut().zip(gradient) {
        let old = weight.widen();
        let mut step = scale * value.widen();
        step += if step * old > 0.0 { change.fraction * old } else { 0.0 };
        *weight = narrow(old - step);
    }
    true
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "so that it is compiled for its caller's registers")]
#[expect(clippy::cast_precision_loss, reason = "a width is below 2^24")]
fn mean_square<G: Gradient>(values: &[G]) -> f32 {
    let mut sums = [[0.0; REGISTER]; LANES / REGISTER];
    let mut whole = values.chunks_exact(LANES);
    for values in &mut whole {
        for (sums, values) in sums.iter_mut().zip(values.chunks_exact(REGISTER)) {
            let values: [f32; REGISTER] = std::array::from_fn(|at| values[at].widen());
            *sums = std::array::from_fn(|at| sums[at] + values[at] * values[at]);
        }
    }
    let mut sums: [f32; LANES] = bytemuck::cast(sums);
    for (sum, value) in sums.iter_mut().zip(whole.remainder()) {
        *sum += value.widen() * value.widen();
    }
    let mut half = LANES;
    while half > 1 {
        half /= 2;
        let (low, high) = sums.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
    }
    sums[0] / values.len() as f32
}
