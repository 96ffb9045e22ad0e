//! The saved state of a stream: position and identity of the configuration, as integers and
//! strings.

use crate::config::{Config, Order, Stage};
use crate::error::{Error, Kind};
use crate::shard::{Catalog, Fingerprint};

/// The version of the state and of the order of every stream.
pub const VERSION: i64 = 1;

/// The position of a stream: everything that the next batch depends on besides data and
/// configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor {
    /// Batches so far.
    pub step: u64,
    /// Pass over the data, from 0.
    pub epoch: u64,
    /// The shard; 0 where the order mixes shards.
    pub shard: usize,
    /// Token in the shard, or in the epoch of shuffled blocks; 0 for random windows.
    pub offset: usize,
}

/// A field of a saved state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// An integer.
    Int(i64),
    /// A string.
    Text(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "\"{value}\""),
        }
    }
}

/// The fields of a state, in a fixed order.
pub fn save(cursor: &Cursor, config: &Config, catalog: &Catalog) -> Vec<(String, Value)> {
    let position = [
        ("version", Value::Int(VERSION)),
        ("step", int(cursor.step)),
        ("epoch", int(cursor.epoch)),
        ("shard", int(cursor.shard)),
        ("offset", int(cursor.offset)),
    ];
    let fields = position.into_iter().chain(identity(config, catalog));
    fields.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Read a state back; [`Kind::State`] names the first field that is missing, out of range or
/// different here.
pub fn load(
    fields: &[(String, Value)],
    config: &Config,
    catalog: &Catalog,
) -> Result<Cursor, Error> {
    let get = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    let differs = |name: &str, expected: String| {
        let found = get(name).map_or_else(|| "no such field".to_owned(), ToString::to_string);
        Error::new(
            Kind::State,
            format!(
                "the saved state differs in {name}: this loader has {expected}, the state has \
                 {found}; resume with the data and settings that the state was saved with"
            ),
        )
    };
    let version = ("version", Value::Int(VERSION));
    for (name, here) in [version].into_iter().chain(identity(config, catalog)) {
        if get(name) != Some(&here) {
            return Err(differs(name, here.to_string()));
        }
    }
    let number = |name, high: usize| {
        let found = get(name).and_then(|value| match value {
            Value::Int(number) => usize::try_from(*number).ok(),
            Value::Text(_) => None,
        });
        let expected = || differs(name, format!("an integer from 0 to {high}"));
        found.filter(|number| *number <= high).ok_or_else(expected)
    };
    let count = |name| number(name, isize::MAX.unsigned_abs()).map(|number| number as u64);
    let (step, epoch) = (count("step")?, count("epoch")?);
    let (shards, mixed) = (catalog.shards(), config.order.mixes_shards());
    let shard = number("shard", if mixed { 0 } else { shards.len() - 1 })?;
    let end = if mixed { catalog.num_tokens() } else { shards[shard].tokens };
    Ok(Cursor { step, epoch, shard, offset: number("offset", end)? })
}

/// The data fingerprint and settings that a position is valid for.
fn identity(config: &Config, catalog: &Catalog) -> Vec<(&'static str, Value)> {
    let align = if config.order == Order::Documents { "bos" } else { "none" };
    let shuffle = match config.order {
        Order::Blocks { seed, block_tokens } => {
            format!("seed {seed}, blocks of {block_tokens} tokens")
        }
        Order::Windows { seed } => format!("seed {seed}, random windows"),
        Order::Documents | Order::Contiguous => "none".to_owned(),
    };
    let schedule = config.stages.iter().map(describe).collect::<Vec<_>>().join(", ");
    let mut fields = vec![
        ("fingerprint", Value::Text(catalog.fingerprint().to_owned())),
        // Of the one set of shards; states of version 1 have it.
        ("weights", Value::Text("1".to_owned())),
        ("lanes", int(config.lanes)),
        ("align", Value::Text(align.to_owned())),
        ("bos_id", Value::Int(config.bos_id.into())),
        ("shuffle", Value::Text(shuffle)),
        ("schedule", Value::Text(schedule)),
    ];
    let mut hash = Fingerprint::default();
    for (name, value) in &fields[1..] {
        hash.field(name.as_bytes());
        hash.field(value.to_string().as_bytes());
    }
    fields.push(("config_hash", Value::Text(hash.hex())));
    fields
}

fn describe(stage: &Stage) -> String {
    let steps = stage.steps.map_or("any number of".to_owned(), |steps| steps.to_string());
    let cut = stage.max_doc_len.map(|len| format!(" with documents cut at {len}"));
    format!("{steps} steps of {} tokens{}", stage.lane_len, cut.unwrap_or_default())
}

fn int<T: TryInto<i64>>(value: T) -> Value {
    Value::Int(value.try_into().unwrap_or(i64::MAX))
}
