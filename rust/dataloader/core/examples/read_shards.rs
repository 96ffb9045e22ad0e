//! Read token shards, train nothing: `cargo run --example read_shards -- SHARD...`

use std::process::ExitCode;
use std::time::Instant;

use jspeed_dataloader_core::{Catalog, Config, Error, Loader, Order, Stage};

fn main() -> ExitCode {
    match read(std::env::args_os().skip(1).map(Into::into).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// One epoch of 8 lanes of 1,024 tokens, and how fast that was.
fn read(paths: Vec<std::path::PathBuf>) -> Result<(), Error> {
    let shards = Catalog::open(paths)?;
    println!("{shards}");
    let stage = Stage::new(None, 1024, None, None)?;
    let loader = Loader::new(shards, Config::new(8, Order::Contiguous, vec![stage]))?;
    let (began, mut tokens, mut largest) = (Instant::now(), 0, 0);
    for batch in loader {
        let row = batch?;
        let row = row.tokens();
        tokens += row.len();
        largest = (0..row.len()).map(|at| row.at(at)).max().max(Some(largest)).unwrap_or(largest);
    }
    println!("{tokens} tokens up to id {largest} in {:.2} s", began.elapsed().as_secs_f64());
    Ok(())
}
