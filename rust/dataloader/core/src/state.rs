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
    let mut fields = vec![
        ("version", Value::Int(VERSION)),
        ("step", Value::Int(int(cursor.step))),
        ("epoch", Value::Int(int(cursor.epoch))),
        ("shard", Value::Int(int(cursor.shard))),
        ("offset", Value::Int(int(cursor.offset))),
    ];
    fields.extend(identity(config, catalog));
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
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
    for (name, here) in
        [("version", Value::Int(VERSION))].into_iter().chain(identity(config, catalog))
    {
        if get(name) != Some(&here) {
            return Err(differs(name, here.to_string()));
        }
    }
    let upto = |name: &str, high: i64| match get(name) {
        Some(Value::Int(value)) if (0..=high).contains(value) => Ok(value.unsigned_abs()),
        _ if high == i64::MAX => Err(differs(name, "an integer from 0".to_owned())),
        _ => Err(differs(name, format!("an integer from 0 to {high}"))),
    };
    let within = |name, high: usize| {
        upto(name, int(high)).map(|value| usize::try_from(value).unwrap_or(high))
    };
    let (shards, mixed) = (catalog.shards(), config.order.mixes_shards());
    let step = upto("step", i64::MAX)?;
    let epoch = upto("epoch", i64::MAX)?;
    let shard = within("shard", if mixed { 0 } else { shards.len() - 1 })?;
    let end = if mixed { catalog.num_tokens() } else { shards[shard].tokens };
    Ok(Cursor { step, epoch, shard, offset: within("offset", end)? })
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
        ("lanes", Value::Int(int(config.lanes))),
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
    let steps = match stage.steps {
        Some(steps) => format!("{steps} steps"),
        None => "any number of steps".to_owned(),
    };
    let cut = match stage.max_doc_len {
        Some(len) => format!(" with documents cut at {len}"),
        None => String::new(),
    };
    format!("{steps} of {} tokens{cut}", stage.lane_len)
}

fn int<T: TryInto<i64>>(value: T) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}
