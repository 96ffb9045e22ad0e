//! Token shards to training batches: the stream of jspeed, in plain Rust.
//!
//! [`Catalog`] validates the shard files, [`Config`] the request, [`lanes::Stream`] produces batches one after
//! the other, and [`Loader`] runs a stream ahead of its consumer. What a stream yields depends on the shards
//! and the configuration only: never on the process count, the prefetch depth or timing.
#![deny(missing_docs)]

#[cfg(not(all(unix, target_endian = "little", target_pointer_width = "64")))]
compile_error!("the shard reader needs a 64-bit little-endian Unix");

pub mod buffer;
pub mod catalog;
pub mod config;
pub mod error;
pub mod header;
pub mod lanes;
pub mod prefetch;
pub mod reader;
pub mod scan;
pub mod shuffle;
pub mod state;
pub mod stats;

pub use buffer::Batch;
pub use catalog::Catalog;
pub use config::{Arguments, Config, StageArguments};
pub use error::{Error, Kind};
pub use prefetch::{Loader, Next, Wait};
pub use state::Value;
