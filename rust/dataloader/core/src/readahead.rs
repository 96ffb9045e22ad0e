//! Read-ahead: while the second half of a shard is consumed, the next shard is prefetched piecewise (fadvise).

use std::fs::File;

use crate::catalog::{Shard, open_regular};

/// The one shard that is being read ahead.
#[derive(Default)]
pub(crate) struct ReadAhead {
    shard: Option<(usize, Option<File>)>,
    advised: u64,
}

impl ReadAhead {
    /// Ask for as much of the next shard as the current one is consumed past its half; a failure costs only time.
    ///
    /// In pieces, because one request for a whole cold shard would keep the thread from making batches.
    pub(crate) fn advise(&mut self, index: usize, next: &Shard, consumed: usize, of: usize) {
        let past = (2 * consumed).saturating_sub(of);
        if past == 0 {
            return;
        }
        if self.shard.as_ref().is_none_or(|(open, _)| *open != index) {
            (self.shard, self.advised) = (Some((index, open_regular(&next.path).ok())), 0);
        }
        let wanted = u128::from(next.width.offset(next.tokens)) * past as u128 / of as u128;
        let wanted = u64::try_from(wanted).unwrap_or_default();
        if let Some((_, Some(file))) = &self.shard {
            if wanted > self.advised {
                will_need(file, self.advised, wanted - self.advised);
                self.advised = wanted;
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn will_need(file: &File, from: u64, len: u64) {
    use rustix::fs::{Advice, fadvise};
    let _ = fadvise(file, from, std::num::NonZeroU64::new(len), Advice::WillNeed);
}

#[cfg(not(target_os = "linux"))]
fn will_need(_: &File, _: u64, _: u64) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::Width;

    #[test]
    fn advises_the_next_shard_in_proportion_to_the_second_half() {
        let path = std::env::temp_dir().join(format!("jspeed-ahead-{}", std::process::id()));
        std::fs::write(&path, [0; 3024]).unwrap();
        let next = Shard { path: path.clone(), tokens: 1000, width: Width::Two };
        let mut ahead = ReadAhead::default();
        ahead.advise(1, &next, 500, 1000);
        assert!(ahead.shard.is_none());
        let asked = |ahead: &mut ReadAhead, index, consumed| {
            ahead.advise(index, &next, consumed, 1000);
            (ahead.shard.as_ref().map(|(open, _)| *open), ahead.advised)
        };
        assert_eq!(asked(&mut ahead, 1, 750), (Some(1), 1512));
        assert_eq!(asked(&mut ahead, 1, 1000), (Some(1), 3024));
        assert_eq!(asked(&mut ahead, 2, 600), (Some(2), 604));
        std::fs::remove_file(path).unwrap();
        assert_eq!(asked(&mut ahead, 3, 600), (Some(3), 0));
    }
}
