//! Tokens as they are stored, and search among them: 64 at a time, so that the compiler vectorises
//! it.

use std::ops::Range;

use crate::shard::Width;

const BLOCK: usize = 64;

/// Borrowed tokens, as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens<'a> {
    /// Two bytes each.
    U16(&'a [u16]),
    /// Four bytes each.
    U32(&'a [u32]),
}

impl<'a> Tokens<'a> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::U16(tokens) => tokens.len(),
            Self::U32(tokens) => tokens.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their memory.
    pub fn as_bytes(&self) -> &'a [u8] {
        match self {
            Self::U16(tokens) => bytemuck::cast_slice(tokens),
            Self::U32(tokens) => bytemuck::cast_slice(tokens),
        }
    }

    /// How they are stored.
    pub fn width(&self) -> Width {
        match self {
            Self::U16(_) => Width::Two,
            Self::U32(_) => Width::Four,
        }
    }

    /// Some of them.
    ///
    /// # Panics
    /// When there are not that many.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::U16(tokens) => Self::U16(&tokens[range]),
            Self::U32(tokens) => Self::U32(&tokens[range]),
        }
    }

    /// The token at `index`.
    ///
    /// # Panics
    /// When there are not that many.
    pub fn at(&self, index: usize) -> u32 {
        match self {
            Self::U16(tokens) => tokens[index].into(),
            Self::U32(tokens) => tokens[index],
        }
    }

    /// Return the position of the first `token`.
    pub fn find(&self, token: u32) -> Option<usize> {
        match self {
            Self::U16(tokens) => find(tokens, u16::try_from(token).ok()?),
            Self::U32(tokens) => find(tokens, token),
        }
    }

    /// Return the position of the first id that is not below `vocab_size`.
    pub fn find_outside(&self, vocab_size: u32) -> Option<usize> {
        match self {
            Self::U16(tokens) => {
                let bound = u16::try_from(vocab_size).ok()?;
                first(tokens, |t| t >= bound)
            }
            Self::U32(tokens) => first(tokens, |t| t >= vocab_size),
        }
    }

    /// Every position of `token`, in order.
    pub fn positions(self, token: u32) -> impl Iterator<Item = usize> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let at = from + self.slice(from..self.len()).find(token)?;
            from = at + 1;
            Some(at)
        })
    }
}

fn find<T: Copy + Eq>(tokens: &[T], token: T) -> Option<usize> {
    first(tokens, |t| t == token)
}

fn first<T: Copy>(tokens: &[T], wanted: impl Fn(T) -> bool) -> Option<usize> {
    let blocks = tokens.chunks_exact(BLOCK);
    let rest = tokens.len() - blocks.remainder().len();
    for (index, block) in blocks.enumerate() {
        // No early exit inside a block: the reduction is what vectorises.
        if block.iter().fold(false, |hit, &t| hit | wanted(t)) {
            return block.iter().position(|&t| wanted(t)).map(|at| index * BLOCK + at);
        }
    }
    tokens[rest..].iter().position(|&t| wanted(t)).map(|at| rest + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_the_naive_search(
            tokens in proptest::collection::vec(0..50u16, 0..400), token in 0..60u32,
        ) {
            let wide: Vec<u32> = tokens.iter().map(|&t| t.into()).collect();
            for tokens in [Tokens::U16(&tokens), Tokens::U32(&wide)] {
                let places = 0..tokens.len();
                let all: Vec<_> = places.clone().filter(|&at| tokens.at(at) == token).collect();
                let outside = places.clone().find(|&at| tokens.at(at) >= token);
                prop_assert_eq!(tokens.find(token), all.first().copied());
                prop_assert_eq!(tokens.positions(token).collect::<Vec<_>>(), all);
                prop_assert_eq!(tokens.find_outside(token), outside);
                prop_assert_eq!(tokens.find_outside(65_536), None);
                prop_assert_eq!(tokens.find(65_536 + token), None);
            }
        }
    }
}
