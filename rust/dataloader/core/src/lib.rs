//! Token shards to training batches: the stream of jspeed, in plain Rust.
//!
//! [`Catalog`] validates the shard files, [`Config`] is the request and is checked against them,
//! and [`Loader`] makes batches ahead of its consumer. What it yields depends on the shards and the
//! configuration only: never on the process count, the prefetch depth or timing.
//!
//! ```no_run
//! use jspeed_dataloader_core::{Catalog, Config, Loader, Order, Stage};
//!
//! let shards = Catalog::open(vec!["fineweb_train_000001.bin".into()])?;
//! let stage = Stage::new(Some(100), 1024, None, None)?; // 100 batches, 1024 tokens a lane
//! let loader = Loader::new(shards, Config::new(8, Order::Contiguous, vec![stage]))?;
//! for batch in loader {
//!     let batch = batch?;
//!     println!("step {}: {} tokens", batch.step, batch.tokens().len());
//! }
//! # Ok::<(), jspeed_dataloader_core::Error>(())
//! ```
#![deny(missing_docs)]
#![forbid(unsafe_code)]

#[cfg(not(all(unix, target_endian = "little", target_pointer_width = "64")))]
compile_error!("the shard reader needs a 64-bit little-endian Unix");

mod batch;
mod config;
mod error;
mod loader;
mod plan;
mod read;
mod shard;
mod shuffle;
mod state;
mod stream;
mod tokens;

pub use batch::{Batch, Shape, bytes_of};
pub use config::{Backend, Config, MOST, Order, Stage, smallest_block};
pub use error::{Error, Kind, in_range};
pub use loader::{Loader, Stats};
pub use shard::{Catalog, HEADER_BYTES, Shard, Width, encode_header, parse_header};
pub use state::Value;
pub use tokens::Tokens;
