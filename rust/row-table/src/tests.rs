//! The table against a model that keeps every row in a map and decays it at every update.
//! `tests/rows/test_row_table.py` compares it with `jspeed.optim.rows`, and has what it refuses.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const ROWS: i64 = 40;
/// A decay of 100 takes 4 % of a weight, five times what bf16 rounds away.
const RATES: Rates = Rates { learning_rate: 0.02, beta2: 0.9, eps: 1e-6, weight_decay: 100.0 };

#[derive(Clone, Default)]
struct Row {
    weights: Vec<f32>,
    /// By how much fp32 may end elsewhere: one unit in the last place of bf16 at every update, since
    /// the least difference can turn a rounding. Later updates keep it, also where weights cancel.
    slack: Vec<f32>,
    square: f64,
}

/// The rule in the words of its paper: fp64, but for weights, which are rounded to bf16.
#[derive(Default)]
struct Model {
    rows: HashMap<i64, Row>,
    updates: i32,
}

impl Model {
    fn update(&mut self, parts: &[(&[i64], &[f32])], width: usize) {
        let mut sums: HashMap<i64, Vec<f64>> = HashMap::new();
        for (rows, gradients) in parts {
            let mut of_part: HashMap<i64, Vec<f32>> = HashMap::new();
            for (row, gradient) in rows.iter().zip(gradients.chunks(width)) {
                let sum = of_part.entry(*row).or_insert_with(|| vec![0.0; width]);
                // exact: few bits before the point and after it
                sum.iter_mut().zip(gradient).for_each(|(sum, &value)| *sum += value);
            }
            for (row, of_part) in of_part {
                let sum = sums.entry(row).or_insert_with(|| vec![0.0; width]);
                sum.iter_mut()
                    .zip(of_part)
                    .for_each(|(sum, value)| *sum += f64::from(arithmetic::narrow(value).widen()));
            }
        }
        self.updates += 1;
        let [beta, rate, eps, decay] = [0.9, 0.02, 1e-6, 100.0];
        self.rows.values_mut().for_each(|row| row.square *= beta);
        for (number, sum) in sums {
            let row = self.rows.entry(number).or_default();
            row.weights.resize(width, 0.0);
            row.slack.resize(width, 0.0);
            let squares: f64 = sum.iter().map(|value| value * value).sum();
            row.square += (1.0 - beta) * squares / f64::from(u32::try_from(width).unwrap());
            let corrected = row.square / (1.0 - beta.powi(self.updates));
            // The bias is corrected in the rate, as in row_adam, so that eps is not scaled by it.
            let root = (1.0 - beta.powi(self.updates)).sqrt();
            assert!((corrected.sqrt() * root - row.square.sqrt()).abs() < 1e-9);
            let weights = row.weights.iter_mut().zip(&mut row.slack);
            for ((weight, slack), value) in weights.zip(&sum) {
                let old = f64::from(*weight);
                let mut step = rate * root * value / (row.square.sqrt() + eps);
                if step * old > 0.0 {
                    step += decay * rate * rate * old;
                }
                #[expect(clippy::cast_possible_truncation, reason = "rounded to bf16")]
                let new = (old - step) as f32;
                *weight = arithmetic::narrow(new).widen();
                *slack += weight.abs() / 128.0 + 1e-6;
            }
        }
    }
}

/// Lists of rows, some equal, and numbers that bf16 holds for their gradients.
fn updates(width: usize) -> impl Strategy<Value = Vec<(Vec<i64>, Vec<f32>)>> {
    let lengths = prop_oneof![Just(0usize), Just(1), 2usize..9, 63usize..66, Just(128)];
    let rows = prop_oneof![4 => 0..ROWS, 1 => Just(7)];
    let update = lengths.prop_flat_map(move |length| {
        let numbers = prop::collection::vec(-128i16..128, length * width);
        (prop::collection::vec(rows.clone(), length), numbers)
    });
    let numbers =
        |numbers: Vec<i16>| numbers.into_iter().map(|x| f32::from(x) / 64.0).collect::<Vec<_>>();
    let update = update.prop_map(move |(rows, given)| (rows, numbers(given)));
    prop::collection::vec(update, 1..5)
}

fn narrowed(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| arithmetic::narrow(value)).collect()
}

fn everything(table: &RowTable) -> (Vec<u32>, Vec<u16>, Vec<(u32, u32)>) {
    let part = table.part(0, usize::MAX);
    let moments = part.moments.iter().map(|moment| (moment.square.to_bits(), moment.updates));
    (part.rows.to_vec(), part.weights.to_vec(), moments.collect())
}

fn gathered(table: &RowTable, rows: &[i64]) -> Vec<u16> {
    let mut out = vec![1; rows.len() * table.width()];
    table.gather(rows, &mut out).unwrap();
    out
}

proptest! {
    #[test]
    fn rows_are_those_of_the_model(
        (width, updates) in prop_oneof![Just(1usize), Just(5), Just(32), Just(72)]
            .prop_flat_map(|width| (Just(width), updates(width)))
    ) {
        let mut table =
            RowTable::new(ROWS, i64::try_from(width).unwrap(), ROWS, 2).unwrap();
        let mut model = Model::default();
        for (step, (rows, gradients)) in updates.iter().enumerate() {
            let half = rows.len() / 2;
            let parts = [
                (&rows[..half], &gradients[..half * width]),
                (&rows[half..], &gradients[half * width..]),
            ];
            let narrow = parts.map(|(_, gradients)| narrowed(gradients));
            let [first, last] = &narrow;
            table.update(step as u64, rows, &[first, &[], last], &RATES).unwrap();
            model.update(&parts, width);
            let all: Vec<i64> = (0..ROWS).rev().collect();
            for (row, found) in all.iter().zip(gathered(&table, &all).chunks(width)) {
                let unused = Row { weights: vec![0.0; width], slack: vec![0.0; width], square: 0.0 };
                let expected = model.rows.get(row).unwrap_or(&unused);
                for (found, (weight, slack)) in
                    found.iter().zip(expected.weights.iter().zip(&expected.slack))
                {
                    prop_assert!((found.widen() - weight).abs() <= *slack);
                }
            }
        }
        prop_assert_eq!(table.used(), model.rows.len());
        let part = table.part(0, usize::MAX);
        for (row, moment) in part.rows.iter().zip(part.moments) {
            let now = f64::from(moment.square) * f64::from(table.decay.since(moment.updates));
            let expected = model.rows[&i64::from(*row)].square;
            prop_assert!((now - expected).abs() <= 1e-5 * expected);
        }
    }

    #[test]
    fn threads_change_no_bit(updates in updates(48)) {
        let tables: Vec<_> = [1, 2, 16].into_iter().map(|threads| {
            let mut table = RowTable::new(ROWS, 48, ROWS, threads).unwrap();
            for (step, (rows, gradients)) in updates.iter().enumerate() {
                table.update(step as u64, rows, &[&narrowed(gradients)], &RATES).unwrap();
            }
            everything(&table)
        }).collect();
        prop_assert!(tables.iter().all(|table| *table == tables[0]));
    }

    #[test]
    fn sums_of_parts_of_fp32_are_not_rounded(updates in updates(48)) {
        let [mut whole, mut parts] = [1, 3].map(|threads| RowTable::new(ROWS, 48, ROWS, threads).unwrap());
        for (step, (rows, gradients)) in updates.iter().enumerate() {
            whole.update(step as u64, rows, &[gradients], &RATES).unwrap();
            let (first, last) = gradients.split_at(rows.len() / 3 * 48);
            parts.update(step as u64, rows, &[first, &[], last], &RATES).unwrap();
        }
        prop_assert!(everything(&whole) == everything(&parts));
    }

    #[test]
    fn two_calls_are_one_update(updates in updates(8), first in any::<u64>()) {
        let [mut whole, mut halves] =
            [1, 3].map(|threads| RowTable::new(ROWS, 8, ROWS, threads).unwrap());
        for (step, (rows, gradients)) in updates.iter().enumerate() {
            let step = step as u64;
            whole.update(step, rows, &[gradients], &RATES).unwrap();
            for now in [true, false] {
                let named = |&row: &i64| if (first >> row & 1 == 1) == now { row } else { LEFT_OUT };
                let rows: Vec<i64> = rows.iter().map(named).collect();
                halves.update(step, &rows, &[gradients], &RATES).unwrap();
                if let Some(&row) = rows.iter().find(|&&row| row != LEFT_OUT) {
                    let before = everything(&halves);
                    let again = halves.update(step, &[row], &[&[1.0f32; 8]], &RATES);
                    prop_assert!(again.unwrap_err().to_string().contains("had update"));
                    prop_assert!(everything(&halves) == before);
                }
            }
            let all: Vec<i64> = (0..ROWS).collect();
            prop_assert!(gathered(&whole, &all) == gathered(&halves, &all));
            prop_assert_eq!(whole.used(), halves.used());
        }
        let other = halves.update(
            updates.len() as u64 - 1, &[], &[] as &[&[f32]], &Rates { beta2: 0.5, ..RATES }
        );
        prop_assert!(other.unwrap_err().to_string().contains("goes on with 0.5"));
    }

    #[test]
    fn registers_of_any_width_change_no_bit(
        numbers in prop::collection::vec(any::<u16>(), 4 * 72), old in prop::collection::vec(any::<u16>(), 3 * 72)
    ) {
        // Any bits but those of infinities and NaN.
        let finite = |numbers: Vec<u16>| numbers.into_iter().map(|x| x & !0x4000).collect::<Vec<_>>();
        let (gradients, old) = (finite(numbers), finite(old));
        let keys = [1 << 32, (1 << 32) | 1, (2 << 32) | 2, (3 << 32) | 3];
        let change = Change::new(&RATES, 4).unwrap();
        let mut decay = Decay::default();
        for beta in [0.5, 0.9, 0.9] {
            decay.push(beta);
        }
        let results = [change_rows, arithmetic::change_each].map(|change_all| {
            let (mut weights, mut moments) = (old.clone(), [Moment { square: 0.3, updates: 1 }; 3]);
            let (weights_of, moments_of) = (&mut weights[..], &mut moments[..]);
            let (keys, gradients) = (&keys[..], &[&gradients[..]][..]);
            let piece =
                Piece { keys, gradients, first: 0, weights: weights_of, moments: moments_of };
            let skipped = change_all(&change, &decay, piece);
            (skipped, weights, moments.map(|moment| moment.square.to_bits()))
        });
        prop_assert_eq!(&results[0], &results[1]);
        prop_assert!(results[0].0.is_none() && results[0].1 != old);
    }

    #[test]
    fn any_numbers_are_rows_of_the_table_or_refused(
        rows in prop::collection::vec(
            prop_oneof![6 => 0..ROWS, 1 => ROWS - 1..ROWS + 2, 1 => any::<i64>()], 0..12
        )
    ) {
        let mut table = RowTable::new(ROWS, 3, ROWS, 2).unwrap();
        table.update(0, &[2, 39], &[&[1.0f32; 6]], &RATES).unwrap();
        let before = everything(&table);
        let fits = rows.iter().all(|row| (LEFT_OUT..ROWS).contains(row));
        let mut out = vec![7; rows.len() * 3];
        prop_assert_eq!(table.gather(&rows, &mut out).is_ok(), fits);
        for (row, out) in rows.iter().zip(out.chunks(3)) {
            prop_assert_eq!(*out == [7; 3], !fits || *row == LEFT_OUT);
        }
        let updated = table.update(1, &rows, &[&vec![1.0f32; rows.len() * 3]], &RATES);
        prop_assert_eq!(updated.is_ok(), fits);
        prop_assert!(fits || everything(&table) == before);
    }

    #[test]
    fn a_table_goes_on_from_its_parts(updates in updates(8), piece in 1usize..20) {
        let mut whole = RowTable::new(ROWS, 8, ROWS, 1).unwrap();
        let (before, after) = updates.split_at(updates.len() / 2);
        for (step, (rows, gradients)) in before.iter().enumerate() {
            whole.update(step as u64, rows, &[gradients], &RATES).unwrap();
        }
        let mut copy = RowTable::new(ROWS, 8, ROWS, 2).unwrap();
        copy.resume(whole.betas()).unwrap();
        for first in (0..whole.used()).step_by(piece) {
            copy.append(whole.part(first, piece)).unwrap();
        }
        for (step, (rows, gradients)) in (before.len()..).zip(after) {
            whole.update(step as u64, rows, &[gradients], &RATES).unwrap();
            copy.update(step as u64, rows, &[gradients], &RATES).unwrap();
        }
        prop_assert!(everything(&whole) == everything(&copy));
    }
}

#[test]
fn rows_past_the_capacity_change_nothing() {
    let mut table = RowTable::new(ROWS, 2, 3, 1).unwrap();
    table.update(0, &[5, 9], &[&[1.0f32; 4]], &RATES).unwrap();
    let before = everything(&table);
    let refused = table.update(1, &[1, 1, 2, 5], &[&[1.0f32; 8]], &RATES).unwrap_err();
    assert!(refused.to_string().contains("2 of 3 are in use"), "{refused}");
    assert!(everything(&table) == before && table.betas().len() == 1);
    table.update(1, &[2, 2, 5], &[&[1.0f32; 2], &[1.0f32; 4]], &RATES).unwrap();
    assert_eq!(table.part(0, 9).rows, [5, 9, 2]);
}

#[test]
fn a_gradient_that_is_not_finite_changes_its_row_alone() {
    let mut table = RowTable::new(ROWS, 2, ROWS, 1).unwrap();
    let refused = table
        .update(
            0,
            &[5, 9, 5, 1],
            &[&[1.0, 1.0, 1.0, f32::INFINITY, 1.0, 1.0, f32::NAN, 1.0]],
            &RATES,
        )
        .unwrap_err();
    assert!(refused.to_string().contains("place 1 of the list, of row 9"), "{refused}");
    let rows = gathered(&table, &[5, 9, 1]);
    assert!(rows[..2].iter().all(|&weight| weight.widen() < 0.0));
    assert_eq!(rows[2..], [0; 4]);
}

#[test]
fn a_row_that_is_named_again_after_long_has_forgotten() {
    let mut table = RowTable::new(ROWS, 1, ROWS, 1).unwrap();
    table.resume(&[0.5; 3000]).unwrap();
    for (updates, expected) in [(0, 0.0f32), (2990, 1.0 / 1024.0), (3000, 1.0)] {
        assert_eq!(table.decay.since(updates).to_bits(), expected.to_bits());
    }
}

#[test]
fn a_table_larger_than_memory_is_refused_before_it_is_made() {
    let fits = |capacity, there| memory::check(1000, 768, capacity, Some(there));
    let one = 1536 + 8 + 4;
    assert_eq!(fits(10, 4000 + 10 * one), Ok(()));
    let refused = fits(10, 4000 + 10 * one - 1).unwrap_err().to_string();
    assert!(refused.ends_with("lower capacity, to 9 or less"), "{refused}");
    assert!(fits(10, 3000).unwrap_err().to_string().ends_with("lower num_rows"));
    assert!(memory::check(1 << 32, 1 << 16, 1 << 32, memory::available()).is_err());
}

#[test]
fn the_tightest_control_group_limits_memory() {
    let root = std::env::temp_dir().join(format!("jspeed-memory-{}", std::process::id()));
    let write = |name: &str, text: &str| {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    assert_eq!(memory::available_under(&root), None);
    write("proc/meminfo", "MemTotal: 90 kB\nMemAvailable:      80 kB\n");
    assert_eq!(memory::available_under(&root), Some(80 * 1024));
    write("proc/self/cgroup", "0::/all/own\n");
    write("sys/fs/cgroup/all/own/memory.max", "max\n");
    write("sys/fs/cgroup/all/memory.max", "50000\n");
    write("sys/fs/cgroup/all/memory.current", "30000\n");
    assert_eq!(memory::available_under(&root), Some(20_000));
    // Pages of files are given back.
    write("sys/fs/cgroup/all/memory.stat", "anon 7\nactive_file 4000\ninactive_file 1000\n");
    assert_eq!(memory::available_under(&root), Some(25_000));
    write("sys/fs/cgroup/all/own/memory.max", "9000\n");
    write("sys/fs/cgroup/all/own/memory.current", "9001\n");
    assert_eq!(memory::available_under(&root), Some(0));
    std::fs::remove_dir_all(root).unwrap();
}

#[test]
fn bf16_is_rounded_to_nearest_even() {
    let half = 1.0 / 256.0; // of the distance of two bf16 numbers from 1 on
    for (value, expected) in [(1.0, 0x3f80), (1.0 + half, 0x3f80), (1.0 + 3.0 * half, 0x3f82)] {
        assert_eq!(arithmetic::narrow(value), expected);
    }
    assert_eq!(arithmetic::narrow(f32::MAX), 0x7f80);
}
