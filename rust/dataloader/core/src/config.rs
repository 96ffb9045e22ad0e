//! What a stream is made of: raw arguments in, a checked configuration out.

use crate::catalog::Catalog;
use crate::error::Error;

/// One stage as the caller gave it.
#[derive(Debug, Clone, Copy, Default)]
pub struct StageArguments {
    /// Batches of this stage; `None` without a schedule.
    pub steps: Option<i64>,
    /// Tokens of a lane; `None` for [`LANE_LEN`].
    pub lane_len: Option<i64>,
    /// Documents are cut after this many tokens.
    pub max_doc_len: Option<i64>,
    /// Size of the table of document offsets.
    pub max_docs: Option<i64>,
}

/// All arguments as the caller gave them.
#[derive(Debug, Clone)]
pub struct Arguments {
    /// Lanes of the global batch.
    pub lanes: i64,
    /// `"bos"` or `None`.
    pub align: Option<String>,
    /// The token that starts a document.
    pub bos_id: i64,
    /// The only stage, when there is no schedule.
    pub whole: StageArguments,
    /// The stages, in order.
    pub schedule: Option<Vec<StageArguments>>,
    /// Which process this is.
    pub process_index: i64,
    /// How many processes share the batch.
    pub process_count: i64,
    /// Seed and block size of a shuffled stream.
    pub shuffle: Option<(i64, Option<i64>)>,
    /// Passes over the data; `None` for no end.
    pub epochs: Option<i64>,
    /// Ids at or above this are an error.
    pub vocab_size: Option<i64>,
    /// Batches made ahead.
    pub prefetch: i64,
}

/// A checked stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Batches of this stage; `None` without a schedule.
    pub steps: Option<u64>,
    /// Tokens of a lane.
    pub lane_len: usize,
    /// Documents are cut after this many tokens.
    pub max_doc_len: Option<usize>,
    /// Size of the table of document offsets.
    pub max_docs: Option<usize>,
}

/// The order in which tokens fill lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Lanes are packed with documents, each from its first token.
    Documents,
    /// Lanes are consecutive windows of a shard.
    Contiguous,
    /// Lanes are windows of blocks in a pseudo-random order.
    Shuffled {
        /// Names the order.
        seed: u64,
        /// Tokens of a block.
        block_tokens: usize,
    },
}

/// A configuration that fits its shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Lanes of the global batch.
    pub lanes: usize,
    /// The order in which tokens fill lanes.
    pub order: Order,
    /// The token that starts a document.
    pub bos_id: u16,
    /// At least one stage.
    pub stages: Vec<Stage>,
    /// Which process this is.
    pub process_index: usize,
    /// How many processes share the batch.
    pub process_count: usize,
    /// Passes over the data; `None` for no end.
    pub epochs: Option<u64>,
    /// Ids at or above this are an error.
    pub vocab_size: Option<u32>,
    /// Batches made ahead.
    pub prefetch: usize,
}

/// Tokens of a lane when nothing else is said: the first stage of the record.
pub const LANE_LEN: i64 = 16_384;

const MOST_DOCS: i64 = 1 << 20;

impl Config {
    /// Check `arguments` against each other and against the shards.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the argument, what was expected, what was given and what to do.
    pub fn new(arguments: &Arguments, catalog: &Catalog) -> Result<Self, Error> {
        let a = arguments;
        let lanes = within("lanes", a.lanes, 1, i64::from(i32::MAX))?;
        let process_count = within("process_count", a.process_count, 1, i64::from(i32::MAX))?;
        let process_index = within("process_index", a.process_index, 0, a.process_count - 1)?;
        if lanes % process_count != 0 {
            return Err(Error::argument(format!(
                "lanes={lanes} cannot be shared equally by process_count={process_count} processes; choose lanes as a \
                 multiple of process_count"
            )));
        }
        let bos_id: u16 = within("bos_id", a.bos_id, 0, i64::from(u16::MAX))?;
        let vocab_size = match a.vocab_size {
            Some(size) => Some(within("vocab_size", size, 1, i64::from(u32::MAX))?),
            None => None,
        };
        let epochs = match a.epochs {
            Some(epochs) => Some(within("epochs", epochs, 1, i64::MAX)?),
            None => None,
        };
        let stages = stages(a)?;
        let config = Self {
            lanes,
            order: order(a, &stages)?,
            bos_id,
            stages,
            process_index,
            process_count,
            epochs,
            vocab_size,
            prefetch: within("prefetch", a.prefetch, 0, i64::from(i32::MAX))?,
        };
        config.check_documents()?;
        config.check_size(catalog)?;
        Ok(config)
    }

    /// The lanes of this process.
    #[must_use]
    pub fn local_lanes(&self) -> std::ops::Range<usize> {
        let each = self.lanes / self.process_count;
        self.process_index * each..(self.process_index + 1) * each
    }

    /// The stage of a step, or `None` after the last.
    #[must_use]
    pub fn stage_at(&self, step: u64) -> Option<&Stage> {
        let mut end = 0u64;
        self.stages.iter().find(|stage| {
            end = stage.steps.map_or(u64::MAX, |steps| end.saturating_add(steps));
            step < end
        })
    }

    fn check_documents(&self) -> Result<(), Error> {
        if self.order != Order::Documents {
            if let Some(max) = self.stages.iter().find_map(|stage| stage.max_doc_len) {
                return Err(Error::argument(format!(
                    "max_doc_len={max} needs align=\"bos\" but align is None, which never cuts documents; drop one of \
                     the two"
                )));
            }
        } else if let Some(size) = self.vocab_size {
            if u32::from(self.bos_id) >= size {
                return Err(Error::argument(format!(
                    "align=\"bos\" looks for bos_id={} but vocab_size={size} has ids below {size} only; give the \
                     bos_id of this vocabulary or align=None",
                    self.bos_id
                )));
            }
        }
        Ok(())
    }

    fn check_size(&self, catalog: &Catalog) -> Result<(), Error> {
        let largest = catalog.shards().iter().map(|shard| shard.tokens).max().unwrap_or_default();
        for stage in &self.stages {
            let (have, need, unit) = match self.order {
                Order::Documents => {
                    (largest, self.lanes.saturating_mul(stage.lane_len + 1), "tokens in one shard")
                }
                Order::Contiguous => (
                    largest,
                    self.lanes.saturating_mul(stage.lane_len).saturating_add(1),
                    "tokens in one shard",
                ),
                Order::Shuffled { block_tokens, .. } => {
                    let blocks: usize =
                        catalog.shards().iter().map(|s| whole_blocks(s.tokens, block_tokens)).sum();
                    let windows = blocks.saturating_mul(block_tokens / stage.lane_len);
                    (windows, self.lanes, "lane windows in whole blocks")
                }
            };
            if have < need {
                return Err(Error::argument(format!(
                    "a batch of lanes={} x lane_len={} needs {need} {unit} but there are {have} at most (shards from \
                     {}); use fewer lanes, a shorter lane_len or larger shards",
                    self.lanes,
                    stage.lane_len,
                    catalog.shards()[0].path.display()
                )));
            }
        }
        Ok(())
    }
}

/// Blocks of a shard that also have their look-ahead token.
pub(crate) fn whole_blocks(tokens: usize, block_tokens: usize) -> usize {
    tokens.saturating_sub(1) / block_tokens
}

fn stages(a: &Arguments) -> Result<Vec<Stage>, Error> {
    let Some(schedule) = &a.schedule else { return Ok(vec![stage(&a.whole)?]) };
    let StageArguments { lane_len, max_doc_len, max_docs, .. } = a.whole;
    if lane_len.or(max_doc_len).or(max_docs).is_some() {
        return Err(Error::argument(
            "lane_len, max_doc_len and max_docs belong to the stages when there is a schedule, but were given beside \
             it; give them in one place",
        ));
    }
    if schedule.is_empty() {
        return Err(Error::argument(
            "schedule has no stage, at least one was expected; leave it out or add one",
        ));
    }
    schedule.iter().map(stage).collect()
}

fn stage(given: &StageArguments) -> Result<Stage, Error> {
    let tokens = i64::from(i32::MAX) - 1;
    Ok(Stage {
        steps: match given.steps {
            Some(steps) => Some(within("steps", steps, 1, i64::MAX)?),
            None => None,
        },
        lane_len: within("lane_len", given.lane_len.unwrap_or(LANE_LEN), 1, tokens)?,
        max_doc_len: match given.max_doc_len {
            Some(len) => Some(within("max_doc_len", len, 1, tokens)?),
            None => None,
        },
        max_docs: match given.max_docs {
            Some(docs) => Some(within("max_docs", docs, 1, MOST_DOCS)?),
            None => None,
        },
    })
}

fn order(a: &Arguments, stages: &[Stage]) -> Result<Order, Error> {
    match (a.align.as_deref(), a.shuffle) {
        (Some("bos"), None) => Ok(Order::Documents),
        (None, None) => Ok(Order::Contiguous),
        (None, Some((seed, block))) => {
            let seed = within("the seed of Shuffle", seed, 0, i64::MAX)?;
            let block_tokens = match block {
                Some(block) => within("block_tokens", block, 1, i64::from(i32::MAX))?,
                None => stages.iter().map(|stage| stage.lane_len).fold(1, least_common_multiple),
            };
            match stages.iter().find(|stage| block_tokens % stage.lane_len != 0) {
                Some(stage) => Err(Error::argument(format!(
                    "block_tokens={block_tokens} is not a multiple of lane_len={}; choose block_tokens as a multiple \
                     of the lane_len of every stage",
                    stage.lane_len
                ))),
                None => Ok(Order::Shuffled { seed, block_tokens }),
            }
        }
        (Some("bos"), Some(_)) => Err(Error::argument(
            "shuffle needs align=None but align is \"bos\", which keeps the order of documents; drop one of the two",
        )),
        (Some(other), _) => Err(Error::argument(format!(
            "align should be \"bos\" or None but is \"{other}\"; choose one of the two"
        ))),
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

fn within<T: TryFrom<i64>>(name: &str, value: i64, low: i64, high: i64) -> Result<T, Error> {
    let bound = if high == i64::MAX { format!("at least {low}") } else { format!("from {low} to {high}") };
    T::try_from(value).ok().filter(|_| (low..=high).contains(&value)).ok_or_else(|| {
        Error::argument(format!("{name} should be {bound} but is {value}; choose another value"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(steps: &[Option<u64>]) -> Config {
        let stage = |(index, steps): (usize, &Option<u64>)| Stage {
            steps: *steps,
            lane_len: index,
            max_doc_len: None,
            max_docs: None,
        };
        Config {
            lanes: 8,
            order: Order::Contiguous,
            bos_id: 0,
            stages: steps.iter().enumerate().map(stage).collect(),
            process_index: 3,
            process_count: 4,
            epochs: None,
            vocab_size: None,
            prefetch: 0,
        }
    }

    #[test]
    fn stages_follow_each_other() {
        let config = stages(&[Some(2), Some(1), Some(3)]);
        let found: Vec<_> = (0..8).map(|step| config.stage_at(step).map(|stage| stage.lane_len)).collect();
        assert_eq!(found, [Some(0), Some(0), Some(1), Some(2), Some(2), Some(2), None, None]);
        assert_eq!(stages(&[None]).stage_at(u64::MAX - 1).map(|stage| stage.lane_len), Some(0));
        assert_eq!(config.local_lanes(), 6..8);
    }

    #[test]
    fn the_smallest_block_fits_every_stage() {
        assert_eq!([16_384, 32_768, 49_152].into_iter().fold(1, least_common_multiple), 98_304);
    }
}
