//! Whole streams against a naive model that holds all tokens in memory. `tests/data` has more, of
//! what Python sees.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "the numbers of these tests are tiny"
)]

mod common;

use common::{Folder, Stages, Told, config, contiguous, drain, loader, next, told};
use jspeed_dataloader_core::{Backend, Kind, Order};
use proptest::prelude::*;

/// The model: shards as vectors, every rule spelt out token by token.
fn naive(
    shards: &[Vec<u16>],
    lanes: usize,
    stages: &Stages,
    aligned: bool,
    epochs: u64,
) -> Vec<Told> {
    let steps: Vec<_> =
        stages.iter().flat_map(|&(n, len, cut)| vec![(len, cut); n as usize]).collect();
    let (mut all, mut dropped) = (Vec::new(), 0);
    for epoch in 0..epochs {
        let before = all.len();
        for tokens in shards {
            let mut at = 0;
            while let Some(&(len, cut)) = steps.get(all.len()) {
                let found = if aligned {
                    pack(tokens, at, lanes, len, cut.unwrap_or(usize::MAX))
                } else {
                    slice(tokens, at, lanes, len)
                };
                let Some((batch, end)) = found else { break };
                let held = lanes * (len + usize::from(aligned));
                all.push((epoch, dropped + (end - at - held) as u64, batch));
                (at, dropped) = (end, 0);
            }
            dropped += (tokens.len() - at) as u64;
        }
        if all.len() == before {
            break;
        }
    }
    all
}

type Lanes = Vec<(Vec<u16>, Vec<i32>)>;

fn slice(tokens: &[u16], at: usize, lanes: usize, len: usize) -> Option<(Lanes, usize)> {
    let row = |lane: usize| {
        let row = tokens.get(at + lane * len..=at + (lane + 1) * len)?.to_vec();
        let mut ends: Vec<i32> = (1..len).filter(|&i| row[i] == 0).map(|i| i as i32).collect();
        ends.push(len as i32);
        Some((row, ends))
    };
    Some(((0..lanes).map(row).collect::<Option<_>>()?, at + lanes * len))
}

fn pack(
    tokens: &[u16],
    mut at: usize,
    lanes: usize,
    len: usize,
    cut: usize,
) -> Option<(Lanes, usize)> {
    let mut batch = Vec::new();
    for _ in 0..lanes {
        let (mut row, mut ends) = (Vec::new(), Vec::new());
        while row.len() < len + 1 {
            while *tokens.get(at)? != 0 {
                at += 1;
            }
            let mut taken = 0;
            while at < tokens.len()
                && taken < cut
                && row.len() < len + 1
                && (taken == 0 || tokens[at] != 0)
            {
                row.push(tokens[at]);
                (at, taken) = (at + 1, taken + 1);
            }
            ends.push(row.len().min(len) as i32);
        }
        ends.dedup();
        batch.push((row, ends));
    }
    Some((batch, at))
}

fn shards() -> impl Strategy<Value = Vec<Vec<u16>>> {
    let token = prop_oneof![1 => Just(0u16), 4 => 1..9u16];
    proptest::collection::vec(proptest::collection::vec(token, 1..160), 1..4)
}

fn stages() -> impl Strategy<Value = Stages> {
    proptest::collection::vec((1..6u64, 1..12usize, proptest::option::of(1..10usize)), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn streams_equal_the_naive_model(
        shards in shards(), stages in stages(), lanes in 1..5usize, aligned: bool,
    ) {
        let folder = Folder::new();
        let paths = folder.write(&shards);
        let mut given = config(lanes, &stages);
        if !aligned {
            contiguous(&mut given);
        }
        let Ok(made) = loader(&paths, &given, Backend::Map) else { return Ok(()) };
        let expected = naive(&shards, lanes, &stages, aligned, 2);
        prop_assert_eq!(drain(&made), expected.clone());
        given.prefetch = 3;
        prop_assert_eq!(drain(&loader(&paths, &given, Backend::Pread).unwrap()), expected);
    }

    #[test]
    fn lanes_and_resumes_do_not_depend_on_processes(
        shards in shards(), stages in stages(), kind in 0..4, at in 0..12usize, seed in 0..9u64,
    ) {
        let folder = Folder::new();
        let paths = folder.write(&shards);
        let mut given = config(4, &stages);
        if kind > 0 {
            contiguous(&mut given);
        }
        if kind == 3 {
            given.order = Order::Windows { seed };
        } else if kind == 2 {
            given.stages.iter_mut().for_each(|stage| stage.lane_len = 2 + stage.lane_len % 2);
            given.order = Order::Blocks { seed, block_tokens: 6 };
        }
        let Ok(whole) = loader(&paths, &given, Backend::Map) else { return Ok(()) };
        let expected = drain(&whole);
        let whole = loader(&paths, &given, Backend::Map).unwrap();
        for one in expected.iter().take(at) {
            prop_assert_eq!(&told(&next(&whole).unwrap().unwrap()), one);
        }
        let state = whole.state().unwrap();
        given.process_count = 2;
        let halves = [0, 1].map(|index| {
            given.process_index = index;
            given.prefetch = 2 * index;
            let half = loader(&paths, &given, Backend::Map).unwrap();
            half.load_state(&state).unwrap();
            drain(&half)
        });
        let [left, right] = halves;
        prop_assert_eq!(left.len(), right.len());
        let mut joined = left;
        joined.iter_mut().zip(right).for_each(|(a, b)| a.2.extend(b.2));
        prop_assert_eq!(&joined[..], expected.get(at..).unwrap_or_default());
    }
}

#[test]
fn without_any_document_there_is_one_clear_error() {
    let folder = Folder::new();
    let mut given = config(2, &[(5, 4, None)]);
    given.epochs = None;
    let made = loader(&folder.write(&[vec![7; 100], vec![7; 50]]), &given, Backend::Map).unwrap();
    for _ in 0..2 {
        let error = next(&made).err().unwrap().to_string();
        assert!(error.contains("(token 0) fits into any of 2 shard(s)"), "{error}");
    }
}

#[test]
fn too_many_documents_name_the_lane_and_what_would_fit() {
    let folder = Folder::new();
    let mut tokens = vec![0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0];
    tokens.extend([1; 9]);
    let mut given = config(3, &[(5, 4, None)]);
    given.stages[0].max_docs = Some(2);
    let made = loader(&folder.write(&[tokens]), &given, Backend::Map).unwrap();
    let error = next(&made).err().unwrap();
    let told = "token 5) holds 3 documents but max_docs=2; set max_docs to at least 4, ";
    assert!(
        error.kind == Kind::DocOverflow && error.to_string().starts_with("step 0, lane 1 "),
        "{error}"
    );
    assert!(error.to_string().contains(told), "{error}");
}
