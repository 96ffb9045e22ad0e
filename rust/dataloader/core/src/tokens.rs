//! Tokens as they are stored, and search among them, by blocks, so that the compiler vectorises it.

use std::ops::Range;

use bytemuck::Pod;

use crate::shard::Width;

/// Borrowed tokens, as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokens<'a> {
    bytes: &'a [u8],
    width: Width,
}

impl<'a> Tokens<'a> {
    /// The tokens in some memory, which must be whole and aligned.
    pub fn new(bytes: &'a [u8], width: Width) -> Self {
        Self { bytes, width }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.width.bytes()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Their memory.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// All of them, as `u16` or `u32`.
    ///
    /// # Panics
    /// When they are stored as another type, not whole or not aligned.
    pub fn as_slice<T: Pod>(&self) -> &'a [T] {
        assert!(size_of::<T>() == self.width.bytes());
        bytemuck::cast_slice(self.bytes)
    }

    /// Some of them.
    ///
    /// # Panics
    /// When there are not that many.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        let bytes = self.width.bytes();
        Self { bytes: &self.bytes[bytes * range.start..bytes * range.end], ..self }
    }

    /// The token at `index`.
    ///
    /// # Panics
    /// When there are not that many.
    pub fn at(&self, index: usize) -> u32 {
        match self.width {
            Width::Two => self.as_slice::<u16>()[index].into(),
            Width::Four => self.as_slice()[index],
        }
    }

    /// Return the position of the first `token`.
    pub fn find(&self, token: u32) -> Option<usize> {
        match self.width {
            Width::Two => find(self.as_slice(), u16::try_from(token).ok()?),
            Width::Four => find(self.as_slice(), token),
        }
    }

    /// Return the position of the first id that is not below `vocab_size`.
    pub fn find_outside(&self, vocab_size: u32) -> Option<usize> {
        match self.width {
            Width::Two => {
                let bound = u16::try_from(vocab_size).ok()?;
                first(self.as_slice::<u16>(), |t| t >= bound)
            }
            Width::Four => first(self.as_slice::<u32>(), |t| t >= vocab_size),
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
    let mut from = without::<T, 64>(tokens, &wanted);
    from += without::<T, 8>(&tokens[from..], &wanted);
    tokens[from..].iter().position(|&t| wanted(t)).map(|at| from + at)
}

/// How many tokens are before the first block that holds a wanted one, or are in whole blocks.
fn without<T: Copy, const BLOCK: usize>(tokens: &[T], wanted: impl Fn(T) -> bool) -> usize {
    // No early exit inside a block: the reduction is what vectorises.
    let hit = |block: &[T]| block.iter().fold(false, |hit, &t| hit | wanted(t));
    BLOCK * tokens.chunks_exact(BLOCK).take_while(|block| !hit(block)).count()
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
            let narrow = Tokens::new(bytemuck::cast_slice(&tokens), Width::Two);
            let wide = Tokens::new(bytemuck::cast_slice(&wide), Width::Four);
            for tokens in [narrow, wide] {
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
