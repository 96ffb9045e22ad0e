//! The index against a model that keeps every context in a map; see `contexts::KEPT` for what their
//! hashes are here. `tests/retrieval/test_context_index.py` has what it refuses.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const BOS: u16 = 0;

/// An answer: length, occurrences, and next tokens with their counts.
type Told = (u8, usize, Vec<(u32, u8)>);

#[derive(Default)]
struct Model(HashMap<Vec<u16>, Vec<u16>>);

impl Model {
    fn push(&mut self, rows: &[Vec<u16>], lengths: &[i64]) {
        for document in rows.iter().flat_map(|row| documents(row)) {
            for (at, len) in
                (0..document.len()).flat_map(|at| lengths.iter().map(move |&len| (at, count(len))))
            {
                if at >= len {
                    self.0.entry(document[at - len..at].to_vec()).or_default().push(document[at]);
                }
            }
        }
    }

    fn query(&self, rows: &[Vec<u16>], given: &IndexArguments) -> Vec<Told> {
        let documents = rows.iter().flat_map(|row| documents(row));
        documents
            .flat_map(|document| {
                (1..=document.len()).map(move |end| self.told(&document[..end], given))
            })
            .collect()
    }

    fn told(&self, context: &[u16], given: &IndexArguments) -> Told {
        let fits = given.lengths.iter().map(|&len| count(len)).filter(|&len| len <= context.len());
        let known =
            fits.filter_map(|len| Some((len, self.0.get(&context[context.len() - len..])?)));
        let Some((len, next)) = known.max_by_key(|&(len, _)| len) else {
            return (0, 0, Vec::new());
        };
        let latest: Vec<u32> =
            next.iter().rev().take(count(given.recent)).map(|&token| token.into()).collect();
        let mut told: Vec<(u32, u8)> = Vec::new();
        for &token in &latest {
            if told.iter().all(|&(other, _)| other != token) {
                let times = latest.iter().filter(|&&other| other == token).count();
                told.push((token, u8::try_from(times).unwrap()));
            }
        }
        told.sort_by_key(|&(_, times)| std::cmp::Reverse(times));
        told.truncate(count(given.top));
        (u8::try_from(len).unwrap(), latest.len(), told)
    }
}

fn count(number: i64) -> usize {
    usize::try_from(number).unwrap()
}

fn documents(row: &[u16]) -> Vec<Vec<u16>> {
    let mut all: Vec<Vec<u16>> = Vec::new();
    for &token in row {
        if token == BOS || all.is_empty() {
            all.push(Vec::new());
        }
        all.last_mut().unwrap().push(token);
    }
    all
}

fn given(capacity: usize, lengths: &[i64]) -> IndexArguments {
    let capacity = i64::try_from(capacity).unwrap();
    IndexArguments {
        capacity,
        lengths: lengths.to_vec(),
        recent: 96,
        top: 8,
        bos_id: BOS.into(),
        threads: 1,
    }
}

fn push(index: &mut ContextIndex, rows: &[Vec<u16>]) -> Result<(), Error> {
    index.push(index.steps(), &tokens(rows), rows[0].len())
}

fn tokens(rows: &[Vec<u16>]) -> Vec<u32> {
    rows.concat().into_iter().map(u32::from).collect()
}

fn query(index: &ContextIndex, rows: &[Vec<u16>]) -> Vec<Told> {
    let tokens = tokens(rows);
    let (count, top) = (tokens.len(), index.top());
    let found = index.query(index.steps(), &tokens, rows[0].len()).unwrap();
    let told = |at: usize| {
        let pairs = found.tokens[at * top..].iter().zip(&found.counts[at * top..]).take(top);
        let filled = pairs.clone().take_while(|&(_, &count)| count > 0).count();
        assert!(pairs.clone().skip(filled).all(|(&token, &count)| token == 0 && count == 0));
        (
            found.lengths[at],
            found.occurrences[at].into(),
            pairs.take(filled).map(|(&token, &count)| (token, count)).collect(),
        )
    };
    (0..count).map(told).collect()
}

/// Text of few words that repeats itself: tokens from 1 on, documents of about `len` tokens.
fn text(tokens: usize, seed: u64, len: u64) -> Vec<u16> {
    let mut all: Vec<u16> = Vec::new();
    while all.len() < tokens {
        let (at, size) = (all.len() as u64, all.len());
        let draw = |of: u64, lane: u64| {
            let drawn = contexts::mix(contexts::mix(seed ^ (lane << 32)) ^ at) % of;
            usize::try_from(drawn).unwrap()
        };
        if draw(len, 0) == 0 {
            all.push(BOS);
        } else if size > 100 && draw(20, 1) == 0 {
            let from = draw(at - 50, 2);
            all.extend_from_within(from..from + 1 + draw(40, 3));
        } else {
            all.push(u16::try_from(1 + draw(1 + draw(300, 4) as u64, 5)).unwrap());
        }
    }
    all.truncate(tokens);
    all
}

fn steps() -> impl Strategy<Value = Vec<Vec<Vec<u16>>>> {
    (1..4usize, 1..40usize).prop_flat_map(|(rows, len)| {
        let token = prop_oneof![1 => Just(BOS), 6 => 1..4u16];
        let row = proptest::collection::vec(token, len);
        proptest::collection::vec(proptest::collection::vec(row, rows), 1..6)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Every step asks about what only the steps before it may answer, among it its own text and
    /// that of the next.
    #[test]
    fn answers_are_those_of_the_model(
        steps in steps(),
        lengths in proptest::collection::vec(1..9i64, 1..4),
        recent in 1..12i64,
        top in 1..5i64,
        threads in 1..5i64,
    ) {
        let tokens = steps.concat().concat().len();
        let given = given(tokens, &lengths);
        let given = IndexArguments { recent, top: top.min(recent), threads, ..given };
        let mut lengths = lengths;
        lengths.sort_unstable();
        lengths.dedup();
        let (mut index, mut model) = (ContextIndex::new(&given).unwrap(), Model::default());
        for (step, rows) in steps.iter().enumerate() {
            for asked in &steps[step..steps.len().min(step + 2)] {
                prop_assert_eq!(query(&index, asked), model.query(asked, &given));
            }
            push(&mut index, rows).unwrap();
            model.push(rows, &lengths);
        }
        prop_assert_eq!(index.tokens(), tokens);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri would take hours")]
fn a_hundred_thousand_tokens_and_any_number_of_threads() {
    let (lengths, all) = ([1, 3, 6], text(110_000, 1, 200));
    let rows = |from: usize| {
        all[from..from + 10_000].chunks(2_500).map(<[u16]>::to_vec).collect::<Vec<_>>()
    };
    let mut model = Model::default();
    let mut indices: Vec<_> = [1, 2, 3, 8]
        .map(|threads| {
            ContextIndex::new(&IndexArguments { threads, ..given(100_000, &lengths) }).unwrap()
        })
        .into();
    for step in 0..10 {
        model.push(&rows(step * 10_000), &lengths);
        for index in &mut indices {
            push(index, &rows(step * 10_000)).unwrap();
        }
    }
    let expected = model.query(&rows(100_000), &given(1, &lengths));
    assert!(expected.iter().filter(|told| told.0 == 6).count() > 1000);
    assert!(expected.iter().filter(|told| told.1 == 96).count() > 100);
    for index in indices {
        assert!(query(&index, &rows(100_000)) == expected, "{} threads", index.pool.threads());
    }
}

#[test]
fn documents_and_rows_are_borders() {
    let mut index = ContextIndex::new(&given(100, &[2])).unwrap();
    push(&mut index, &[vec![1, 2, 3, BOS, 4, 5], vec![6, 7, BOS, BOS, 8, 9]]).unwrap();
    let told = |row: &[u16]| query(&index, &[row.to_vec()]).last().unwrap().clone();
    assert_eq!(told(&[1, 2]), (2, 1, vec![(3, 1)]));
    assert_eq!(told(&[BOS, 4]), (2, 1, vec![(5, 1)]));
    // Followed by a document or a row; across either; after a document of one token.
    for row in [[2, 3], [4, 5], [6, 7], [3, BOS], [5, 6], [7, BOS], [BOS, BOS]] {
        assert_eq!(told(&row), (0, 0, vec![]), "{row:?}");
    }
    // Of the asker's document alone.
    assert_eq!(told(&[1, BOS, 2]), (0, 0, vec![]));
    assert_eq!(query(&index, &[vec![1], vec![2]]), [(0, 0, vec![]), (0, 0, vec![])]);
}
