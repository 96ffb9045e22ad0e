//! Which token GPT-2's tokenizer can never write directly after which other one.
//!
//! Byte-pair encoding applies its merges in the order of their ranks, so that a token is a tree of
//! merges, and the rank of a merge is the id of the token that it makes. Two tokens are never
//! neighbours when encoding their text would merge across the border between them: when, at the
//! time of some rule (a, b), the last piece of the first token is a and the first piece of the
//! second is b. The last pieces that a token ever has are those down the right edge of its
//! tree, each until the merge above it; the first pieces are those down the left edge. A border at
//! which the pretokenizer may cut says nothing, but for one after a token that ends inside a
//! character: like record 91, this takes such a border for one without a cut. A text of rare spaces
//! or signs may be written in a pair that is ruled out.
//!
//! In an order of tokens in which each is followed by the trees that begin with it, latest merge
//! first, the tokens whose first piece is b at the time of a rule are neighbours: a rule is one
//! range of that order.
#![deny(missing_docs)]

use std::collections::HashMap;
use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;
use regex_syntax::hir::{Class, ClassUnicode, Hir, HirKind};

/// A wrong argument, or memory that the machine does not have, in a complete message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(String);

impl std::error::Error for Error {}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The pretokenizer makes words of these, whatever follows.
const CONTRACTIONS: [&[u8]; 7] = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"];

/// What GPT-2's pretokenizer takes a character for; inside, where a token does not begin or end
/// with a whole one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Space,
    Letter,
    Number,
    Other,
    Inside,
}

/// The mask of a vocabulary: bit x of row p is set where token x is never written directly after
/// token p, whatever surrounds them. Rows of `size` bits, the least significant one first, one
/// after the other.
///
/// `tokens` are the byte pairs of a tokenizer with GPT-2's pretokenizer, by id: single bytes, and
/// merges in the order of their ranks. An empty one stands for a special token, of which nothing is
/// said, nor of ids from `tokens.len()` on.
///
/// # Errors
/// `size` is not a multiple of 8 or has no room for all tokens; a token is not made of two earlier
/// ones.
pub fn canonical_mask(tokens: &[impl AsRef<[u8]>], size: usize) -> Result<Vec<u8>, Error> {
    if size < tokens.len() || size % 8 != 0 {
        return Err(Error(format!(
            "a mask of {} tokens in {size} columns; expected as many columns as tokens or more, a \
             multiple of 8",
            tokens.len()
        )));
    }
    let (vocabulary, row_len) = (Vocabulary::new(tokens)?, size / 8);
    let mut mask = try_zeroed_vec(size.saturating_mul(row_len)).map_err(|()| {
        Error(format!(
            "a mask of {size} columns needs {} MB in one piece, which this machine does not have; \
             lower its size",
            size as u128 * row_len as u128 / 1_000_000
        ))
    })?;
    for (token, row) in mask.chunks_mut(row_len.max(1)).take(tokens.len()).enumerate() {
        vocabulary.rule_out(token, row);
    }
    Ok(mask)
}

/// A token by its id.
type Id = usize;

/// The two tokens that a token was merged from; None for a byte, and for a special token.
type Parts = Option<(Id, Id)>;

struct Vocabulary {
    /// What each token was merged from.
    parts: Vec<Parts>,
    /// The rules whose first part is a token, by rank.
    rules: Vec<Vec<Id>>,
    /// Where in `order` the tokens lie whose first piece is the second part of a rule at its time.
    ranges: Vec<Range<usize>>,
    /// All tokens that begin with a whole character, with its kind.
    order: Vec<(Id, Kind)>,
    /// The kind of each token's last character; None where a contraction ends, after which
    /// anything can follow.
    ends: Vec<Option<Kind>>,
}

impl Vocabulary {
    fn new(tokens: &[impl AsRef<[u8]>]) -> Result<Self, Error> {
        let kinds = Kinds::new();
        let (merges, parts) = Merges::learn(tokens)?;
        let mut rules = vec![Vec::new(); tokens.len()];
        for (id, pair) in parts.iter().enumerate() {
            if let Some((left, _)) = *pair {
                rules[left].push(id);
            }
        }
        let starts: Vec<_> = tokens.iter().map(|token| kinds.first(token.as_ref())).collect();
        let mut sizes: Vec<_> =
            starts.iter().map(|kind| usize::from(*kind != Kind::Inside)).collect();
        for (id, pair) in parts.iter().enumerate().rev() {
            if let Some((left, _)) = *pair {
                sizes[left] += sizes[id];
            }
        }
        let (mut order, mut places) = (Vec::with_capacity(tokens.len()), vec![0; tokens.len()]);
        let mut stack: Vec<Id> = (0..tokens.len()).filter(|&id| parts[id].is_none()).collect();
        while let Some(id) = stack.pop() {
            places[id] = order.len();
            if starts[id] != Kind::Inside {
                order.push((id, starts[id]));
            }
            stack.extend(&rules[id]);
        }
        let range = |rule: Id, piece: Id| {
            let later = &rules[piece][rules[piece].partition_point(|&id| id < rule)..];
            let own = places[piece] + usize::from(starts[piece] != Kind::Inside);
            places[piece]..later.first().map_or(own, |&last| places[last] + sizes[last])
        };
        let ranges = parts
            .iter()
            .enumerate()
            .map(|(id, pair)| pair.map_or(0..0, |(_, right)| range(id, right)));
        let ranges = ranges.collect();
        let mut ends: Vec<_> =
            tokens.iter().map(|token| Some(kinds.last(token.as_ref()))).collect();
        for word in CONTRACTIONS {
            if let Some(&last) = merges.encode(word).as_deref().and_then(<[Id]>::last) {
                ends[last] = None;
            }
        }
        Ok(Self { parts, rules, ranges, order, ends })
    }

    /// Set the bits of the tokens that never follow `token`.
    fn rule_out(&self, token: Id, row: &mut [u8]) {
        let Some(end) = self.ends[token] else { return };
        let (mut piece, mut until) = (token, usize::MAX);
        loop {
            for &rule in self.rules[piece].iter().take_while(|&&rule| rule < until) {
                for &(next, start) in &self.order[self.ranges[rule].clone()] {
                    if !may_part(end, start) {
                        row[next / 8] |= 1 << (next % 8);
                    }
                }
            }
            let Some((_, right)) = self.parts[piece] else { break };
            (piece, until) = (right, piece);
        }
    }
}

/// Whether the pretokenizer cuts between two such characters of some text: within spaces, and in
/// contractions.
fn may_part(end: Kind, start: Kind) -> bool {
    matches!((end, start), (Kind::Space, Kind::Space) | (Kind::Other, Kind::Letter))
}

/// The single bytes and the rules of a vocabulary.
struct Merges {
    bytes: [Option<Id>; 256],
    ranks: HashMap<(Id, Id), Id>,
}

impl Merges {
    /// Also return what each token is merged from, found by encoding its bytes with the rules
    /// before it.
    fn learn(tokens: &[impl AsRef<[u8]>]) -> Result<(Self, Vec<Parts>), Error> {
        let mut merges = Self { bytes: [None; 256], ranks: HashMap::with_capacity(tokens.len()) };
        for (id, token) in tokens.iter().enumerate() {
            if let &[byte] = token.as_ref() {
                merges.bytes[usize::from(byte)] = Some(id);
            }
        }
        let mut parts = Vec::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            let token = token.as_ref();
            if token.len() < 2 {
                parts.push(None);
                continue;
            }
            let pieces =
                merges.encode(token).filter(|pieces| pieces.iter().all(|&piece| piece < id));
            let Some(&[left, right]) = pieces.as_deref() else {
                let what = format!(
                    "token {id}, {:?}, is not made of two earlier tokens",
                    String::from_utf8_lossy(token)
                );
                let wanted = "expected byte pairs in the order of their merges";
                return Err(Error(format!("{what}; {wanted}")));
            };
            merges.ranks.insert((left, right), id);
            parts.push(Some((left, right)));
        }
        Ok((merges, parts))
    }

    /// A word after all merges, that of the lowest rank first, of equal ones the first; None where
    /// a byte is no token.
    fn encode(&self, word: &[u8]) -> Option<Vec<Id>> {
        let mut pieces: Vec<Id> =
            word.iter().map(|&byte| self.bytes[usize::from(byte)]).collect::<Option<_>>()?;
        let rank = |pair: &[Id]| self.ranks.get(&(pair[0], pair[1])).copied().unwrap_or(usize::MAX);
        let mut of_pairs: Vec<_> = pieces.windows(2).map(rank).collect();
        while let Some((at, &best)) = of_pairs.iter().enumerate().min_by_key(|&(_, rank)| rank) {
            if best == usize::MAX {
                break;
            }
            pieces[at] = best;
            pieces.remove(at + 1);
            of_pairs.remove(at);
            if at < of_pairs.len() {
                of_pairs[at] = rank(&pieces[at..at + 2]);
            }
            if at > 0 {
                of_pairs[at - 1] = rank(&pieces[at - 1..=at]);
            }
        }
        Some(pieces)
    }
}

/// Letters and numbers as `\p{L}` and `\p{N}` know them.
struct Kinds {
    letters: ClassUnicode,
    numbers: ClassUnicode,
}

impl Kinds {
    fn new() -> Self {
        let class = |pattern| match regex_syntax::parse(pattern).map(Hir::into_kind) {
            Ok(HirKind::Class(Class::Unicode(class))) => class,
            _ => unreachable!("a class of characters"),
        };
        Self { letters: class(r"\p{L}"), numbers: class(r"\p{N}") }
    }

    /// Of the first character.
    fn first(&self, token: &[u8]) -> Kind {
        self.of((1..=token.len().min(4)).map(|len| &token[..len]))
    }

    /// Of the last character.
    fn last(&self, token: &[u8]) -> Kind {
        self.of((1..=token.len().min(4)).map(|len| &token[token.len() - len..]))
    }

    /// Of the first of `texts` that is one.
    fn of<'a>(&self, mut texts: impl Iterator<Item = &'a [u8]>) -> Kind {
        let found = texts.find_map(|text| std::str::from_utf8(text).ok()?.chars().next());
        let Some(character) = found else { return Kind::Inside };
        let is_in = |class: &ClassUnicode| {
            let after = class.ranges().partition_point(|range| range.end() < character);
            class.ranges().get(after).is_some_and(|range| range.start() <= character)
        };
        match character {
            c if c.is_whitespace() => Kind::Space,
            _ if is_in(&self.letters) => Kind::Letter,
            _ if is_in(&self.numbers) => Kind::Number,
            _ => Kind::Other,
        }
    }
}
