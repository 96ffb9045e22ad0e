//! Check the caller's arguments and build the configuration; all argument errors are here.

use crate::catalog::Catalog;
use crate::config::{Config, Order, Stage, whole_blocks};
use crate::error::Error;
use crate::reader::Backend;
use crate::sources::Sources;

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

/// The order of a shuffled stream as the caller gave it.
#[derive(Debug, Clone)]
pub struct ShuffleArguments {
    /// Seed of the permutation.
    pub seed: i64,
    /// `"block"`, `"shard"` or `"window"`.
    pub unit: String,
    /// Tokens of a block; `None` for the fewest that fit every stage.
    pub block_tokens: Option<i64>,
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
    pub single_stage: StageArguments,
    /// The stages, in order.
    pub schedule: Option<Vec<StageArguments>>,
    /// Which process this is.
    pub process_index: i64,
    /// How many processes share the batch.
    pub process_count: i64,
    /// The order of a shuffled stream.
    pub shuffle: Option<ShuffleArguments>,
    /// Passes over the data; `None` for no end.
    pub epochs: Option<i64>,
    /// Ids at or above this are an error.
    pub vocab_size: Option<i64>,
    /// Whether batches have a mask of targets that do not follow their input.
    pub loss_mask: bool,
    /// Batches made ahead.
    pub prefetch: i64,
    /// `"mmap"` or `"pread"`.
    pub backend: String,
}

/// Tokens of a lane when nothing else is said: the first stage of the record.
pub const LANE_LEN: i64 = 16_384;

const MAX_DOCS_LIMIT: i64 = 1 << 20;

impl Config {
    /// Check `arguments` against each other and against the shards.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the argument, what was expected, what was given and what to do.
    pub fn new(arguments: &Arguments, sources: &Sources) -> Result<Self, Error> {
        let a = arguments;
        let lanes = in_range("lanes", a.lanes, 1, i64::from(i32::MAX))?;
        let process_count = in_range("process_count", a.process_count, 1, i64::from(i32::MAX))?;
        let process_index = in_range("process_index", a.process_index, 0, a.process_count - 1)?;
        if lanes % process_count != 0 {
            return Err(Error::argument(format!(
                "lanes={lanes} cannot be shared equally by process_count={process_count} processes; choose lanes as a \
                 multiple of process_count"
            )));
        }
        let bos_id = in_range("bos_id", a.bos_id, 0, sources.width().largest().into())?;
        let vocab_size =
            a.vocab_size.map(|size| in_range("vocab_size", size, 1, i64::from(u32::MAX))).transpose()?;
        let epochs = a.epochs.map(|epochs| in_range("epochs", epochs, 1, i64::MAX)).transpose()?;
        let stages = stages(a)?;
        let (order, shard_seed) = order(a, &stages)?;
        let config = Self {
            lanes,
            order,
            shard_seed,
            bos_id,
            stages,
            process_index,
            process_count,
            epochs,
            vocab_size,
            loss_mask: a.loss_mask,
            prefetch: in_range("prefetch", a.prefetch, 0, i64::from(i32::MAX))?,
        };
        config.check_documents()?;
        config.check_size(sources)?;
        Ok(config)
    }

    fn check_documents(&self) -> Result<(), Error> {
        if self.order != Order::Documents {
            if self.loss_mask {
                return Err(Error::argument(
                    "loss_mask needs align=\"bos\" but align is None, which never cuts documents; drop one of the two",
                ));
            }
            if let Some(max) = self.stages.iter().find_map(|stage| stage.max_doc_len) {
                return Err(Error::argument(format!(
                    "max_doc_len={max} needs align=\"bos\" but align is None, which never cuts documents; drop one of \
                     the two"
                )));
            }
        } else if let Some(size) = self.vocab_size {
            if self.bos_id >= size {
                return Err(Error::argument(format!(
                    "align=\"bos\" looks for bos_id={} but vocab_size={size} has ids below {size} only; give the \
                     bos_id of this vocabulary or align=None",
                    self.bos_id
                )));
            }
        }
        Ok(())
    }

    fn check_size(&self, sources: &Sources) -> Result<(), Error> {
        let total: u64 = sources.weights().sum();
        for (catalog, weight) in sources.catalogs().zip(sources.weights()) {
            // The most that a batch takes of this source is at least its share.
            let share = (self.lanes as u128 * u128::from(weight)).div_ceil(u128::from(total));
            let lanes = usize::try_from(share).unwrap_or(usize::MAX);
            for stage in &self.stages {
                self.check_fit(catalog, lanes, stage)?;
            }
        }
        Ok(())
    }

    fn check_fit(&self, catalog: &Catalog, lanes: usize, stage: &Stage) -> Result<(), Error> {
        let largest = catalog.shards().iter().map(|shard| shard.tokens).max().unwrap_or_default();
        let (have, need, unit) = match self.order {
            Order::Documents => (largest, lanes.saturating_mul(stage.lane_len + 1), "tokens in one shard"),
            Order::Contiguous => {
                (largest, lanes.saturating_mul(stage.lane_len).saturating_add(1), "tokens in one shard")
            }
            Order::Windows { .. } => (largest, stage.lane_len + 1, "tokens in one shard"),
            Order::Shuffled { block_tokens, .. } => {
                let blocks: usize =
                    catalog.shards().iter().map(|s| whole_blocks(s.tokens, block_tokens)).sum();
                let windows = blocks.saturating_mul(block_tokens / stage.lane_len);
                (windows, lanes, "lane windows in whole blocks")
            }
        };
        if have < need {
            return Err(Error::argument(format!(
                "a batch of lanes={lanes} x lane_len={} needs {need} {unit} but there are {have} at most (shards from \
                 {}); use fewer lanes, a shorter lane_len or larger shards",
                stage.lane_len,
                catalog.shards()[0].path.display()
            )));
        }
        Ok(())
    }
}

fn stages(a: &Arguments) -> Result<Vec<Stage>, Error> {
    let Some(schedule) = &a.schedule else { return Ok(vec![stage(&a.single_stage)?]) };
    let StageArguments { lane_len, max_doc_len, max_docs, .. } = a.single_stage;
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
        steps: given.steps.map(|steps| in_range("steps", steps, 1, i64::MAX)).transpose()?,
        lane_len: in_range("lane_len", given.lane_len.unwrap_or(LANE_LEN), 1, tokens)?,
        max_doc_len: given.max_doc_len.map(|len| in_range("max_doc_len", len, 1, tokens)).transpose()?,
        max_docs: given.max_docs.map(|docs| in_range("max_docs", docs, 1, MAX_DOCS_LIMIT)).transpose()?,
    })
}

/// The order of tokens and the seed of the order of shards.
fn order(a: &Arguments, stages: &[Stage]) -> Result<(Order, Option<u64>), Error> {
    let plain = match a.align.as_deref() {
        Some("bos") => Order::Documents,
        None => Order::Contiguous,
        Some(other) => {
            return Err(Error::argument(format!(
                "align should be \"bos\" or None but is \"{other}\"; choose one of the two"
            )));
        }
    };
    let Some(ShuffleArguments { seed, unit, block_tokens }) = &a.shuffle else { return Ok((plain, None)) };
    let seed = in_range("the seed of Shuffle", *seed, 0, i64::MAX)?;
    match (unit.as_str(), block_tokens) {
        ("shard", None) => Ok((plain, Some(seed))),
        ("shard", Some(block)) => Err(Error::argument(format!(
            "Shuffle has block_tokens={block} beside unit=\"shard\", which keeps shards whole; drop one of the two"
        ))),
        ("block", _) if plain == Order::Documents => Err(Error::argument(
            "shuffle by block needs align=None but align is \"bos\", which keeps the order of documents; use \
             unit=\"shard\" or drop one of the two",
        )),
        ("block", block) => {
            let block_tokens = match block {
                Some(block) => in_range("block_tokens", *block, 1, i64::from(i32::MAX))?,
                None => stages.iter().map(|stage| stage.lane_len).fold(1, least_common_multiple),
            };
            match stages.iter().find(|stage| block_tokens % stage.lane_len != 0) {
                Some(stage) => Err(Error::argument(format!(
                    "block_tokens={block_tokens} is not a multiple of lane_len={}; choose block_tokens as a multiple \
                     of the lane_len of every stage",
                    stage.lane_len
                ))),
                None => Ok((Order::Shuffled { seed, block_tokens }, None)),
            }
        }
        ("window", Some(_)) => Err(Error::argument(
            "Shuffle has block_tokens beside unit=\"window\", which starts at any token; drop one of the two",
        )),
        ("window", None) if plain == Order::Documents => Err(Error::argument(
            "random windows need align=None but align is \"bos\", which starts lanes at documents; drop one of the two",
        )),
        ("window", None) if a.epochs.is_some() => Err(Error::argument(
            "random windows are drawn without end, so there are no epochs to count; give epochs=None",
        )),
        ("window", None) => Ok((Order::Windows { seed }, None)),
        (other, _) => Err(Error::argument(format!(
            "the unit of Shuffle should be \"block\", \"shard\" or \"window\" but is \"{other}\"; choose one of them"
        ))),
    }
}

impl Arguments {
    /// How shards are to be read.
    ///
    /// # Errors
    /// [`Error::Argument`] when the name is unknown.
    pub fn backend(&self) -> Result<Backend, Error> {
        match self.backend.as_str() {
            "mmap" => Ok(Backend::Map),
            "pread" => Ok(Backend::Pread),
            other => Err(Error::argument(format!(
                "backend should be \"mmap\" or \"pread\" but is \"{other}\"; choose one of the two"
            ))),
        }
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

pub(crate) fn in_range<T: TryFrom<i64>>(name: &str, value: i64, low: i64, high: i64) -> Result<T, Error> {
    let bound = if high == i64::MAX { format!("at least {low}") } else { format!("from {low} to {high}") };
    T::try_from(value).ok().filter(|_| (low..=high).contains(&value)).ok_or_else(|| {
        Error::argument(format!("{name} should be {bound} but is {value}; choose another value"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_block_fits_every_stage() {
        assert_eq!([16_384, 32_768, 49_152].into_iter().fold(1, least_common_multiple), 98_304);
    }
}
