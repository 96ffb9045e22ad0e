//! The loader, as Python sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::{MOST, in_range};
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::Batch;
use crate::shards::Shards;
use crate::{detached, raise};

/// Tokens of a lane when nothing else is said: the first stage of the record.
const LANE_LEN: i64 = 16_384;

/// An iterator of batches of token shards, made ahead by one thread.
///
/// The stream depends on the shards, lanes, align, `bos_id`, stages and shuffle alone: process p of P
/// gets lanes [p * lanes / P, (p + 1) * lanes / P) of the same global batches.
/// docs/reference/loader.md has an example, the type stub `_dataloader.pyi` all arguments and errors.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct TokenLoader {
    loader: core::Loader,
}

#[pymethods]
impl TokenLoader {
    #[new]
    #[pyo3(
        signature = (
            shards, *, lanes = 8, lane_len = None, align = None, max_doc_len = None,
            max_docs = None, bos_id = 50256, schedule = None, process_index = 0, process_count = 1,
            shuffle = None, epochs = 1, vocab_size = None, prefetch = 2, backend = "mmap"
        )
    )]
    #[allow(
        clippy::too_many_arguments,
        reason = "these are the keyword arguments of the Python class"
    )]
    fn new(
        py: Python<'_>,
        shards: &Bound<'_, PyAny>,
        lanes: i64,
        lane_len: Option<i64>,
        align: Option<&str>,
        max_doc_len: Option<i64>,
        max_docs: Option<i64>,
        bos_id: i64,
        schedule: Option<Vec<Stage>>,
        process_index: i64,
        process_count: i64,
        shuffle: Option<Shuffle>,
        epochs: Option<i64>,
        vocab_size: Option<i64>,
        prefetch: i64,
        backend: &str,
    ) -> PyResult<Self> {
        let catalog = catalog(shards)?;
        let config = || {
            let stages = stages(schedule, lane_len, max_doc_len, max_docs)?;
            let lanes = in_range("lanes", lanes, 1, MOST)?;
            let order = order(align, shuffle, &stages)?;
            let mut config = core::Config::new(lanes, order, stages);
            config.bos_id = in_range("bos_id", bos_id, 0, catalog.width().largest().into())?;
            config.process_count = in_range("process_count", process_count, 1, MOST)?;
            config.process_index = in_range("process_index", process_index, 0, process_count - 1)?;
            config.epochs =
                epochs.map(|epochs| in_range("epochs", epochs, 1, i64::MAX)).transpose()?;
            config.vocab_size = vocab_size
                .map(|size| in_range("vocab_size", size, 1, u32::MAX.into()))
                .transpose()?;
            config.prefetch = in_range("prefetch", prefetch, 0, MOST)?;
            config.backend = match backend {
                "mmap" => core::Backend::Map,
                "pread" => core::Backend::Pread,
                _ => return Err(no_word("backend", "\"mmap\" or \"pread\"", backend)),
            };
            Ok(config)
        };
        let config = config().map_err(|error| raise(py, &error))?;
        let loader = detached(py, || core::Loader::new(catalog, config))?;
        Ok(Self { loader })
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Batch> {
        let mut signals = Ok(());
        let go_on = || {
            Python::attach(|py| {
                signals = py.check_signals();
                signals.is_ok()
            })
        };
        let next = detached(py, || self.loader.next_batch(go_on));
        signals?;
        next?
            .map(|batch| Batch { inner: Arc::new(batch) })
            .ok_or_else(|| PyStopIteration::new_err(()))
    }

    fn start(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.loader.start())
    }

    fn state_dict(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in detached(py, || self.loader.state())? {
            match value {
                core::Value::Int(number) => dict.set_item(name, number)?,
                core::Value::Text(text) => dict.set_item(name, text)?,
            }
        }
        Ok(dict.unbind())
    }

    fn load_state_dict(
        &self,
        py: Python<'_>,
        state: BTreeMap<String, Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let fields = state.into_iter().map(|(name, value)| Ok((name, field(&value)?)));
        let fields = fields.collect::<PyResult<Vec<_>>>()?;
        detached(py, || self.loader.load_state(&fields))
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let stats = detached(py, || self.loader.stats())?;
        let dict = PyDict::new(py);
        dict.set_item("batches", stats.batches)?;
        dict.set_item("bytes_read", stats.bytes_read)?;
        dict.set_item("wait_seconds", stats.waited)?;
        for (name, percent) in [("wait_p50", 50), ("wait_p99", 99)] {
            dict.set_item(name, stats.wait_percentile(percent).as_secs_f64())?;
        }
        dict.set_item("wait_max", stats.longest_wait)?;
        dict.set_item("queue_empty", stats.queue_empty)?;
        dict.set_item("shard_switches", stats.shard_switches)?;
        dict.set_item("dropped_tokens", stats.dropped_tokens)?;
        Ok(dict.unbind())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.loader.close());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        self.loader.to_string()
    }
}

impl Drop for TokenLoader {
    fn drop(&mut self) {
        // The thread may be in the middle of a read. Without an interpreter the core closes itself.
        Python::try_attach(|py| py.detach(|| self.loader.close()));
    }
}

/// A stage of the schedule as Python has it.
#[derive(FromPyObject)]
struct Stage {
    steps: i64,
    lane_len: i64,
    max_doc_len: Option<i64>,
    max_docs: Option<i64>,
}

/// `jspeed.data.Shuffle`.
#[derive(FromPyObject)]
struct Shuffle {
    seed: i64,
    block_tokens: Option<i64>,
    unit: String,
}

/// The stages of a schedule, or the one of the arguments in place of it.
fn stages(
    schedule: Option<Vec<Stage>>,
    lane_len: Option<i64>,
    max_doc_len: Option<i64>,
    max_docs: Option<i64>,
) -> Result<Vec<core::Stage>, core::Error> {
    let Some(schedule) = schedule else {
        return Ok(vec![core::Stage::new(
            None,
            lane_len.unwrap_or(LANE_LEN),
            max_doc_len,
            max_docs,
        )?]);
    };
    if lane_len.or(max_doc_len).or(max_docs).is_some() {
        return Err(core::Error::argument(
            "lane_len, max_doc_len and max_docs belong to the stages when there is a schedule, \
             but were given beside it; give them in one place",
        ));
    }
    let stage = |stage: Stage| {
        core::Stage::new(Some(stage.steps), stage.lane_len, stage.max_doc_len, stage.max_docs)
    };
    schedule.into_iter().map(stage).collect()
}

/// The order that `align` and `shuffle` name.
fn order(
    align: Option<&str>,
    shuffle: Option<Shuffle>,
    stages: &[core::Stage],
) -> Result<core::Order, core::Error> {
    let plain = match align {
        Some("bos") => core::Order::Documents,
        None => core::Order::Contiguous,
        Some(other) => return Err(no_word("align", "\"bos\" or None", other)),
    };
    let Some(Shuffle { seed, block_tokens, unit }) = shuffle else { return Ok(plain) };
    let seed = in_range("the seed of Shuffle", seed, 0, i64::MAX)?;
    let shuffled = match (unit.as_str(), block_tokens) {
        ("block", block) => {
            let block = block.map(|block| in_range("block_tokens", block, 1, MOST)).transpose()?;
            let block_tokens = block.unwrap_or_else(|| core::smallest_block(stages));
            core::Order::Blocks { seed, block_tokens }
        }
        ("window", None) => core::Order::Windows { seed },
        ("window", Some(block)) => {
            return Err(core::Error::argument(format!(
                "Shuffle has block_tokens={block} beside unit=\"window\", which takes no blocks; \
                 drop one of the two"
            )));
        }
        _ => return Err(no_word("the unit of Shuffle", "\"block\" or \"window\"", &unit)),
    };
    if plain == core::Order::Documents {
        return Err(core::Error::argument(format!(
            "Shuffle(unit=\"{unit}\") needs align=None but align is \"bos\", which starts lanes \
             at documents; drop one of the two"
        )));
    }
    Ok(shuffled)
}

fn no_word(what: &str, choices: &str, given: &str) -> core::Error {
    core::Error::argument(format!(
        "{what} should be {choices} but is \"{given}\"; choose one of the two"
    ))
}

/// The shards that `open_shards` returned.
fn catalog(given: &Bound<'_, PyAny>) -> PyResult<Arc<core::Catalog>> {
    let Ok(shards) = given.cast::<Shards>() else {
        let message = format!(
            "the first argument of TokenLoader should be the shards that open_shards returned, \
             but is {}; call open_shards first",
            given.get_type()
        );
        return Err(raise(given.py(), &core::Error::argument(message)));
    };
    Ok(Arc::clone(&shards.get().catalog))
}

/// A value that is neither an integer nor a string keeps its repr, which no field of a state
/// equals.
fn field(value: &Bound<'_, PyAny>) -> PyResult<core::Value> {
    if let Ok(number) = value.extract::<i64>() {
        return Ok(core::Value::Int(number));
    }
    match value.extract::<String>() {
        Ok(text) => Ok(core::Value::Text(text)),
        Err(_) => Ok(core::Value::Text(value.repr()?.to_string())),
    }
}
