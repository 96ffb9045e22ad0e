//! Token shards to training batches: the stream of jspeed, in plain Rust; and [`ContextIndex`], which remembers them.
//!
//! [`Catalog`] validates the shard files, [`Sources`] mixes sets of them, [`Config`] is the request and is checked
//! against them, and [`Loader`] makes batches ahead of its consumer. What it yields depends on the shards and the
//! configuration only: never on the process count, the prefetch depth or timing.
//!
//! Beside it, [`canonical`] tells which tokens a tokenizer never writes one after the other.
#![deny(missing_docs)]

#[cfg(not(all(unix, target_endian = "little", target_pointer_width = "64")))]
compile_error!("the shard reader needs a 64-bit little-endian Unix");

mod buffer;
pub mod canonical;
mod catalog;
mod config;
mod error;
pub mod header;
mod index;
mod lanes;
mod mapping;
mod plan;
mod prefetch;
mod readahead;
mod reader;
pub mod scan;
mod shuffle;
mod sources;
mod state;

pub use buffer::{Batch, Shape, bytes_of};
pub use catalog::{Catalog, Shard};
pub use config::{Backend, Config, MOST, Order, Stage};
pub use error::{Error, Kind, check_process, in_range};
pub use index::{ContextIndex, IndexArguments, Matches};
pub use prefetch::{Loader, Stats};
pub use sources::Sources;
pub use state::Value;
