//! Looking for token ids in a run of tokens, 64 at a time so that the compiler vectorises it.

const BLOCK: usize = 64;

/// Return the position of the first `token` in `tokens`.
#[must_use]
pub fn find(tokens: &[u16], token: u16) -> Option<usize> {
    first(tokens, |t| t == token)
}

/// Return the position of the first id that is not below `vocab_size`.
#[must_use]
pub fn find_outside(tokens: &[u16], vocab_size: u32) -> Option<usize> {
    let bound = u16::try_from(vocab_size).ok()?;
    first(tokens, |t| t >= bound)
}

/// Return every position of `token` in `tokens`, in order.
pub fn positions(tokens: &[u16], token: u16) -> impl Iterator<Item = usize> + '_ {
    let mut from = 0;
    std::iter::from_fn(move || {
        let at = from + find(tokens.get(from..)?, token)?;
        from = at + 1;
        Some(at)
    })
}

fn first(tokens: &[u16], wanted: impl Fn(u16) -> bool) -> Option<usize> {
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
        fn agrees_with_the_naive_search(tokens in proptest::collection::vec(0..50u16, 0..400), token in 0..60u16) {
            prop_assert_eq!(find(&tokens, token), tokens.iter().position(|&t| t == token));
            let all: Vec<usize> =
                tokens.iter().enumerate().filter(|(_, t)| **t == token).map(|(at, _)| at).collect();
            prop_assert_eq!(positions(&tokens, token).collect::<Vec<_>>(), all);
            let outside = tokens.iter().position(|&t| t >= token);
            prop_assert_eq!(find_outside(&tokens, u32::from(token)), outside);
            prop_assert_eq!(find_outside(&tokens, 65_536), None);
        }
    }
}
