//! Shards on disk for the tests, and loaders over them.
#![allow(dead_code, reason = "every test binary uses its own part of this")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use jspeed_dataloader_core::{
    Backend, Batch, Catalog, Config, Error, Loader, Order, Stage, Width, encode_header,
};

/// A folder that goes away with its value.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("jspeed-core-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, shards: &[Vec<u16>]) -> Vec<PathBuf> {
        self.write_as("tiny", shards, shard)
    }

    pub fn write_as(
        &self,
        name: &str,
        shards: &[Vec<u16>],
        bytes: fn(&[u16]) -> Vec<u8>,
    ) -> Vec<PathBuf> {
        let write = |(index, tokens): (usize, &Vec<u16>)| {
            let path = self.0.join(format!("{name}_train_{index:06}.bin"));
            std::fs::write(&path, bytes(tokens)).unwrap();
            path
        };
        shards.iter().enumerate().map(write).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A shard of uint32 tokens.
pub fn wide_shard(tokens: &[u16]) -> Vec<u8> {
    let mut bytes = encode_header(i32::try_from(tokens.len()).unwrap(), Width::Four);
    bytes.extend(tokens.iter().flat_map(|token| u32::from(*token).to_le_bytes()));
    bytes
}

pub fn shard(tokens: &[u16]) -> Vec<u8> {
    let mut bytes = encode_header(i32::try_from(tokens.len()).unwrap(), Width::Two);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes
}

/// Steps, tokens of a lane and the longest document, of each stage.
pub type Stages = Vec<(u64, usize, Option<usize>)>;

pub fn config(lanes: usize, stages: &[(u64, usize, Option<usize>)]) -> Config {
    let stage = |&(steps, lane_len, max_doc_len): &(u64, usize, Option<usize>)| Stage {
        steps: Some(steps),
        lane_len,
        max_doc_len,
        max_docs: Some(16),
    };
    let mut made = Config::new(lanes, Order::Documents, stages.iter().map(stage).collect());
    (made.bos_id, made.epochs, made.prefetch) = (0, Some(2), 0);
    made
}

/// Lanes of consecutive windows, which cut no document.
pub fn contiguous(config: &mut Config) {
    config.order = Order::Contiguous;
    for stage in &mut config.stages {
        stage.max_doc_len = None;
    }
}

pub fn loader(paths: &[PathBuf], config: &Config, backend: Backend) -> Result<Loader, Error> {
    let mut config = config.clone();
    config.backend = backend;
    Loader::new(Catalog::open(paths.to_vec())?, config)
}

pub fn next(loader: &Loader) -> Result<Option<Batch>, Error> {
    loader.next_batch(|| true)
}

/// What a batch says, comparable: epoch, dropped, and for each lane its tokens and document ends.
pub type Told = (u64, u64, Vec<(Vec<u16>, Vec<i32>)>);

pub fn told(batch: &Batch) -> Told {
    let shape = batch.shape();
    let docs = shape.max_docs.unwrap() + 1;
    let lanes = (0..shape.rows).map(|row| {
        let tokens = batch.row(row);
        let tokens = (0..tokens.len()).map(|at| u16::try_from(tokens.at(at)).unwrap()).collect();
        let offsets = &batch.doc_offsets()[row * docs..(row + 1) * docs];
        let count = usize::try_from(batch.num_docs()[row]).unwrap();
        assert_eq!(offsets[0], 0);
        assert!(offsets[count..].iter().all(|&end| usize::try_from(end) == Ok(shape.lane_len)));
        (tokens, offsets[1..=count].to_vec())
    });
    (batch.epoch, batch.dropped, lanes.collect())
}

/// All batches of a stream; an epoch without one ends it.
pub fn drain(loader: &Loader) -> Vec<Told> {
    let mut all = Vec::new();
    loop {
        match next(loader) {
            Ok(Some(batch)) => all.push(told(&batch)),
            Ok(None) => return all,
            Err(error) if error.to_string().contains("fits into any of") => return all,
            Err(error) => panic!("{error}"),
        }
    }
}
