//! The saved state of a stream: position and configuration identity, as integers and strings.

use std::sync::Arc;

use crate::catalog::{Catalog, Fingerprint};
use crate::config::{Config, Order, Stage};
use crate::error::{Error, Kind};
use crate::sources::Sources;

/// The version of the state and of the order of every stream.
pub const VERSION: i64 = 1;

/// The position of a stream: everything that the next batch depends on besides data and configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cursor {
    /// Batches so far.
    pub step: u64,
    /// Where each source stands.
    pub places: Vec<Place>,
}

/// The position in one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Pass over the data, from 0.
    pub epoch: u64,
    /// The shard, as its position in the order of the epoch; 0 where the order mixes shards.
    pub shard: usize,
    /// Token in the shard, or in the epoch of shuffled blocks; 0 for random windows.
    pub offset: usize,
}

impl Cursor {
    /// The start of a stream of so many sources.
    pub fn start(sources: usize) -> Self {
        Self { step: 0, places: vec![Place::default(); sources] }
    }
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

/// The fields of a state, in a fixed order; the second source of a mixture has `epoch_1`, and so on.
pub fn save(cursor: &Cursor, config: &Config, sources: &Sources) -> Vec<(String, Value)> {
    let mut fields = vec![
        ("version".to_owned(), Value::Int(VERSION)),
        ("step".to_owned(), Value::Int(int(cursor.step))),
    ];
    for (source, place) in cursor.places.iter().enumerate() {
        let [epoch, shard, offset] = names(source);
        fields.push((epoch, Value::Int(int(place.epoch))));
        fields.push((shard, Value::Int(int(place.shard))));
        fields.push((offset, Value::Int(int(place.offset))));
    }
    fields.extend(
        identity(config, sources).into_iter().map(|(name, value)| (name.to_owned(), value)),
    );
    fields
}

/// Read a state back; [`Kind::State`] names the first field that is missing, out of range or different here.
pub fn load(
    fields: &[(String, Value)],
    config: &Config,
    sources: &Sources,
) -> Result<Cursor, Error> {
    let get = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    let differs = |name: &str, expected: String| {
        let found = get(name).map_or_else(|| "no such field".to_owned(), ToString::to_string);
        Error::new(
            Kind::State,
            format!(
                "the saved state differs in {name}: this loader has {expected}, the state has {found}; resume with the \
                 data and settings that the state was saved with"
            ),
        )
    };
    let same = |name: &'static str, here: &Value| {
        if get(name) == Some(here) { Ok(()) } else { Err(differs(name, here.to_string())) }
    };
    same("version", &Value::Int(VERSION))?;
    for (name, here) in identity(config, sources) {
        same(name, &here)?;
    }
    let upto = |name: &str, high: i64| match get(name) {
        Some(Value::Int(value)) if (0..=high).contains(value) => Ok(value.unsigned_abs()),
        _ if high == i64::MAX => Err(differs(name, "an integer from 0".to_owned())),
        _ => Err(differs(name, format!("an integer from 0 to {high}"))),
    };
    let within = |name: &str, high: usize| {
        upto(name, int(high)).map(|value| usize::try_from(value).unwrap_or_default())
    };
    let mixed = config.order.mixes_shards();
    let place = |(source, catalog): (usize, &Arc<Catalog>)| {
        let names = names(source);
        let epoch = upto(&names[0], i64::MAX)?;
        let shard = within(&names[1], if mixed { 0 } else { catalog.shards().len() - 1 })?;
        let end = if mixed {
            catalog.num_tokens()
        } else {
            catalog.shards()[config.shard_at(catalog, epoch, shard)].tokens
        };
        Ok(Place { epoch, shard, offset: within(&names[2], end)? })
    };
    Ok(Cursor {
        step: upto("step", i64::MAX)?,
        places: sources.catalogs().enumerate().map(place).collect::<Result<_, Error>>()?,
    })
}

fn names(source: usize) -> [String; 3] {
    let end = if source == 0 { String::new() } else { format!("_{source}") };
    ["epoch", "shard", "offset"].map(|name| format!("{name}{end}"))
}

/// The data fingerprint and settings that a position is valid for.
fn identity(config: &Config, sources: &Sources) -> Vec<(&'static str, Value)> {
    let align = if config.order == Order::Documents { "bos" } else { "none" };
    let shuffle = match (config.order, config.shard_seed) {
        (Order::Shuffled { seed, block_tokens }, _) => {
            format!("seed {seed}, blocks of {block_tokens} tokens")
        }
        (Order::Windows { seed }, _) => format!("seed {seed}, random windows"),
        (_, Some(seed)) => format!("seed {seed}, whole shards"),
        (_, None) => "none".to_owned(),
    };
    let weights =
        sources.weights().map(|weight| weight.to_string()).collect::<Vec<_>>().join(" : ");
    let schedule = config.stages.iter().map(describe).collect::<Vec<_>>().join(", ");
    let mut fields = vec![
        ("fingerprint", Value::Text(sources.fingerprint().to_owned())),
        ("weights", Value::Text(weights)),
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
    let steps = stage
        .steps
        .map_or_else(|| "any number of steps".to_owned(), |steps| format!("{steps} steps"));
    let cut =
        stage.max_doc_len.map_or_else(String::new, |len| format!(" with documents cut at {len}"));
    format!("{steps} of {} tokens{cut}", stage.lane_len)
}

fn int<T: TryInto<i64>>(value: T) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}
