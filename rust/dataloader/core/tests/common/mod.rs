//! Shards on disk for the tests, and loaders over them.
#![allow(dead_code, reason = "every test binary uses its own part of this")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jspeed_dataloader_core::reader::Backend;
use jspeed_dataloader_core::{Arguments, Batch, Catalog, Config, Error, Loader, Next, StageArguments, Wait};

/// A folder that goes away with its value.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("jspeed-core-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, shards: &[Vec<u16>]) -> Vec<PathBuf> {
        let write = |(index, tokens): (usize, &Vec<u16>)| {
            let path = self.0.join(format!("tiny_train_{index:06}.bin"));
            std::fs::write(&path, shard(tokens)).unwrap();
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

pub fn shard(tokens: &[u16]) -> Vec<u8> {
    let count = i32::try_from(tokens.len()).unwrap();
    let mut bytes: Vec<u8> =
        [20_240_520, 1, count].iter().flat_map(|word: &i32| word.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes
}

pub fn arguments(lanes: i64, stages: &[(i64, i64, Option<i64>)]) -> Arguments {
    let stage = |&(steps, lane_len, max_doc_len): &(i64, i64, Option<i64>)| StageArguments {
        steps: Some(steps),
        lane_len: Some(lane_len),
        max_doc_len,
        max_docs: Some(16),
    };
    Arguments {
        lanes,
        align: Some("bos".to_owned()),
        bos_id: 0,
        whole: StageArguments::default(),
        schedule: Some(stages.iter().map(stage).collect()),
        process_index: 0,
        process_count: 1,
        shuffle: None,
        epochs: Some(2),
        vocab_size: None,
        prefetch: 0,
    }
}

pub fn loader(paths: &[PathBuf], arguments: &Arguments, backend: Backend) -> Result<Loader, Error> {
    let catalog = Arc::new(Catalog::open(paths.to_vec())?);
    let config = Config::new(arguments, &catalog)?;
    Ok(Loader::new(catalog, config, backend))
}

pub fn next(loader: &Loader) -> Result<Option<Batch>, Error> {
    let mut wait = Wait::default();
    loop {
        match loader.next(&mut wait, Duration::from_millis(100))? {
            Next::Batch(batch) => return Ok(Some(batch)),
            Next::End => return Ok(None),
            Next::Pending => {}
        }
    }
}

/// What a batch says, comparable: epoch, dropped, and for each lane its tokens and document ends.
pub type Told = (u64, u64, Vec<(Vec<u16>, Vec<i32>)>);

pub fn told(batch: &Batch) -> Told {
    let (width, docs) = (batch.lane_len() + 1, batch.max_docs().unwrap() + 1);
    let rows = batch.tokens().chunks(width).zip(batch.doc_offsets().chunks(docs)).zip(batch.num_docs());
    let lanes = rows.map(|((tokens, offsets), &count)| {
        let count = usize::try_from(count).unwrap();
        assert_eq!(offsets[0], 0);
        assert!(offsets[count..].iter().all(|&end| usize::try_from(end) == Ok(batch.lane_len())));
        (tokens.to_vec(), offsets[1..=count].to_vec())
    });
    (batch.epoch, batch.dropped, lanes.collect())
}

/// All batches of a stream; an epoch without one ends it.
pub fn drain(loader: &Loader) -> Vec<Told> {
    let mut all = Vec::new();
    loop {
        match next(loader) {
            Ok(Some(batch)) => all.push(told(&batch)),
            Ok(None) | Err(Error::NoBatch { .. }) => return all,
            Err(error) => panic!("{error}"),
        }
    }
}
