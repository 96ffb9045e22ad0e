//! The canonical mask against encoding itself: all pairs of a small vocabulary, and what GPT-2's
//! pretokenizer writes.

use std::collections::{HashMap, HashSet};

use jspeed_tokenizer_mask::canonical_mask;
use proptest::prelude::*;

type Ranks = HashMap<Vec<u8>, usize>;

/// Merge the pair whose text has the lowest rank, of equal ones the first, until there is none.
fn encode(text: &[u8], ranks: &Ranks) -> Vec<Vec<u8>> {
    let mut pieces: Vec<_> = text.iter().map(|&byte| vec![byte]).collect();
    loop {
        let rank = |at: usize| ranks.get(&[&pieces[at][..], &pieces[at + 1]].concat());
        let Some((_, at)) =
            (1..pieces.len()).filter_map(|end| Some((rank(end - 1)?, end - 1))).min()
        else {
            return pieces;
        };
        let second = pieces.remove(at + 1);
        pieces[at].extend(second);
    }
}

/// Cut a text like GPT-2's pretokenizer: contractions, letters, numbers and others with a space
/// before, spaces.
fn words(text: &str) -> Vec<&str> {
    let kind = |c: char| match c {
        c if c.is_whitespace() => 0,
        c if c.is_alphabetic() => 1,
        c if c.is_numeric() => 2,
        _ => 3,
    };
    let mut found = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let len = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"]
            .iter()
            .find(|end| rest.starts_with(**end))
            .map_or_else(
                || {
                    let run = |from: usize| {
                        let first = kind(rest[from..].chars().next().unwrap());
                        from + rest[from..].find(|c| kind(c) != first).unwrap_or(rest.len() - from)
                    };
                    let spaces = if kind(rest.chars().next().unwrap()) == 0 { run(0) } else { 0 };
                    match spaces {
                        0 => run(0),
                        1 if rest.starts_with(' ') && rest.len() > 1 => run(1),
                        all if all == rest.len() => all,
                        all => {
                            let last = rest[..all].chars().last().unwrap().len_utf8();
                            if last == all { all } else { all - last }
                        }
                    }
                },
                |end| end.len(),
            );
        let (word, after) = rest.split_at(len);
        found.push(word);
        rest = after;
    }
    found
}

/// The bytes of `text`, and then merges: of each pair of numbers two neighbours in one of its words
/// are joined.
fn learn(text: &str, choices: &[(usize, usize)]) -> Vec<Vec<u8>> {
    let mut tokens: Vec<_> = (0..=255).map(|byte| vec![byte]).collect();
    let mut ranks = Ranks::new();
    let words = words(text);
    for (word, place) in choices {
        let pieces = encode(words[word % words.len()].as_bytes(), &ranks);
        if pieces.len() > 1 {
            let at = place % (pieces.len() - 1);
            let token = pieces[at..at + 2].concat();
            // A merge whose text is made in another way first is none of a tokenizer's.
            if !ranks.contains_key(&token) && encode(&token, &ranks) == pieces[at..at + 2] {
                ranks.insert(token.clone(), tokens.len());
                tokens.push(token);
            }
        }
    }
    tokens
}

fn ends_with_a_character(token: &[u8]) -> bool {
    (1..=token.len().min(4)).any(|len| std::str::from_utf8(&token[token.len() - len..]).is_ok())
}

fn is_set(mask: &[u8], size: usize, first: usize, second: usize) -> bool {
    mask[first * size / 8 + second / 8] >> (second % 8) & 1 == 1
}

fn ids(tokens: &[Vec<u8>]) -> Ranks {
    tokens.iter().enumerate().map(|(id, token)| (token.clone(), id)).collect()
}

fn choices() -> impl Strategy<Value = Vec<(usize, usize)>> {
    proptest::collection::vec((0..1000usize, 0..1000usize), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, ..ProptestConfig::with_cases(48)
    })]

    /// In words of letters the pretokenizer has no part: a bit is set where encoding both texts
    /// gives other tokens.
    #[test]
    fn all_pairs_of_letters(text in "[ab]{1,40}|[a-c]{1,60}", choices in choices()) {
        let tokens = learn(&text, &choices);
        let size = tokens.len().next_multiple_of(8) + 8;
        let mask = canonical_mask(&tokens, size).unwrap();
        let ranks = ids(&tokens);
        let letters = (97..100).chain(256..tokens.len());
        for first in letters.clone() {
            for second in letters.clone() {
                let both = [&tokens[first][..], &tokens[second]].concat();
                let stays = encode(&both, &ranks) == [&tokens[first][..], &tokens[second]];
                prop_assert_eq!(is_set(&mask, size, first, second), !stays, "{} {}", first, second);
            }
        }
        prop_assert!(mask[tokens.len() * size / 8..].iter().all(|&byte| byte == 0));
    }

    /// Whatever a text is of, no two tokens that it is written in are ruled out: in a word none, and
    /// after a word none but where its last token ends inside a character.
    #[test]
    fn no_neighbours_of_a_text(
        text in "([st'é’ \n\u{3000}1,!x]|re|'ll){1,80}",
        more in "[st're’é \n1!]{0,80}",
        choices in choices(),
    ) {
        let tokens = learn(&text, &choices);
        let size = tokens.len().next_multiple_of(8);
        let mask = canonical_mask(&tokens, size).unwrap();
        let ranks = ids(&tokens);
        for text in [text.clone(), more.clone(), text + &more] {
            let mut before: Option<Vec<u8>> = None;
            for word in words(&text) {
                for token in encode(word.as_bytes(), &ranks) {
                    if let Some(last) = before {
                        let set = is_set(&mask, size, ranks[&last], ranks[&token]);
                        prop_assert!(!set, "{:?}, {:?} in {:?}", last, token, text);
                    }
                    before = Some(token);
                }
                before = before.filter(|last| ends_with_a_character(last));
            }
        }
    }
}

/// ASCII bytes are their own tokens; 128 = ab, 129 = 's, 130 = ab ab, 131 a special token.
#[test]
fn by_hand() {
    let mut tokens: Vec<_> = (0..128).map(|byte| vec![byte]).collect();
    tokens.extend([b"ab".to_vec(), b"'s".to_vec(), b"abab".to_vec(), vec![]]);
    let mask = canonical_mask(&tokens, 136).unwrap();
    let set: HashSet<_> = (0..136)
        .flat_map(|p| (0..136).map(move |x| (p, x)))
        .filter(|&(p, x)| is_set(&mask, 136, p, x))
        .collect();
    // An apostrophe before an s may be one that ends a run of others.
    assert_eq!(set, HashSet::from([(97, 98), (128, 128), (128, 130)]));
}

#[test]
fn refused() {
    let ascii: Vec<_> = (0..128u8).map(|byte| vec![byte]).collect();
    let why = |tokens: &[Vec<u8>], size| canonical_mask(tokens, size).unwrap_err().to_string();
    assert!(why(&ascii, 120).contains("128 tokens in 120 columns"));
    assert!(why(&ascii, 130).contains("a multiple of 8"));
    assert!(canonical_mask(&ascii, 128).unwrap().iter().all(|&byte| byte == 0));
    for bad in ["abc", "é"] {
        let tokens = [&ascii[..], &[bad.as_bytes().to_vec()]].concat();
        assert!(
            why(&tokens, 136)
                .contains(&format!("token 128, \"{bad}\", is not made of two earlier tokens"))
        );
    }
    assert!(canonical_mask(&ascii[..0], 0).unwrap().is_empty());
}
