//! Token shards to training batches: the stream of jspeed, in plain Rust; and [`ContextIndex`], which remembers them.
//!
//! [`Catalog`] validates the shard files, [`Sources`] mixes sets of them, [`Config`] is the request and is checked
//! against them, [`lanes::Stream`] produces batches one after the other, and [`Loader`] runs a stream ahead of its
//! consumer. What a stream yields depends on the shards and the configuration only: never on the process count, the
//! prefetch depth or timing.
//!
//! Beside it, [`canonical`] tells which tokens a tokenizer never writes one after the other.
#![deny(missing_docs)]

#[cfg(not(all(unix, target_endian = "little", target_pointer_width = "64")))]
compile_error!("the shard reader needs a 64-bit little-endian Unix");

pub mod buffer;
pub mod canonical;
pub mod catalog;
pub mod config;
pub mod error;
pub mod header;
pub mod index;
mod lane_ranges;
pub mod lanes;
pub mod prefetch;
mod readahead;
pub mod reader;
pub mod scan;
pub mod shuffle;
pub mod sources;
pub mod state;
pub mod stats;

pub use buffer::Batch;
pub use catalog::Catalog;
pub use config::{Backend, Config, Order, Stage};
pub use error::{Error, Kind};
pub use index::{ContextIndex, Found, IndexArguments};
pub use prefetch::{Loader, Next, Wait};
pub use sources::Sources;
pub use state::Value;
