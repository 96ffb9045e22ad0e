//! The loader, as Python sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jspeed_dataloader_core as core;
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::Batch;
use crate::shards::{Shards, Shuffle};
use crate::{detached, raise};

/// Interval between checks for signals while waiting.
const POLL: Duration = Duration::from_millis(100);

/// The stream of batches; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct TokenLoader {
    loader: core::Loader,
    /// The first argument and the others, to make an equal loader from.
    shards: Py<PyAny>,
    kwargs: Py<PyDict>,
}

#[pymethods]
impl TokenLoader {
    #[new]
    #[pyo3(
        signature = (
            shards, *, lanes = 8, lane_len = None, align = None, max_doc_len = None,
            max_docs = None, bos_id = 50_256, schedule = None, process_index = 0, process_count = 1,
            shuffle = None, epochs = Some(1), vocab_size = None, loss_mask = false,
            prefetch = 2, backend = "mmap"
        ),
        text_signature = "(shards, *, lanes=8, lane_len=None, align=None, max_doc_len=None, max_docs=None, \
            bos_id=50256, schedule=None, process_index=0, process_count=1, shuffle=None, epochs=1, \
            vocab_size=None, loss_mask=False, prefetch=2, backend='mmap')"
    )]
    #[allow(clippy::too_many_arguments, reason = "these are the keyword arguments of the Python class")]
    fn new(
        py: Python<'_>,
        shards: Bound<'_, PyAny>,
        lanes: i64,
        lane_len: Option<i64>,
        align: Option<String>,
        max_doc_len: Option<i64>,
        max_docs: Option<i64>,
        bos_id: i64,
        schedule: Option<Vec<Bound<'_, PyAny>>>,
        process_index: i64,
        process_count: i64,
        shuffle: Option<&Bound<'_, Shuffle>>,
        epochs: Option<i64>,
        vocab_size: Option<i64>,
        loss_mask: bool,
        prefetch: i64,
        backend: &str,
    ) -> PyResult<Self> {
        let kwargs = PyDict::new(py);
        kwargs.set_item("lanes", lanes)?;
        kwargs.set_item("lane_len", lane_len)?;
        kwargs.set_item("align", align.as_deref())?;
        kwargs.set_item("max_doc_len", max_doc_len)?;
        kwargs.set_item("max_docs", max_docs)?;
        kwargs.set_item("bos_id", bos_id)?;
        kwargs.set_item("schedule", schedule.clone())?;
        kwargs.set_item("process_index", process_index)?;
        kwargs.set_item("process_count", process_count)?;
        kwargs.set_item("shuffle", shuffle)?;
        kwargs.set_item("epochs", epochs)?;
        kwargs.set_item("vocab_size", vocab_size)?;
        kwargs.set_item("loss_mask", loss_mask)?;
        kwargs.set_item("prefetch", prefetch)?;
        kwargs.set_item("backend", backend)?;
        let schedule =
            schedule.map(|stages| stages.iter().map(stage).collect::<PyResult<Vec<_>>>()).transpose()?;
        let arguments = core::Arguments {
            lanes,
            align,
            bos_id,
            single_stage: core::StageArguments { steps: None, lane_len, max_doc_len, max_docs },
            schedule,
            process_index,
            process_count,
            shuffle: shuffle.map(|shuffle| shuffle.get().arguments()),
            epochs,
            vocab_size,
            loss_mask,
            prefetch,
            backend: backend.to_owned(),
        };
        let sources = sources(&shards)?;
        let loader = detached(py, || core::Loader::open(sources, &arguments))?;
        Ok(Self { loader, shards: shards.unbind(), kwargs: kwargs.unbind() })
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> ((Bound<'py, PyAny>,), Bound<'py, PyDict>) {
        ((self.shards.bind(py).clone(),), self.kwargs.bind(py).clone())
    }

    fn __getstate__(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        self.state_dict(py)
    }

    fn __setstate__(&self, py: Python<'_>, state: BTreeMap<String, Bound<'_, PyAny>>) -> PyResult<()> {
        self.load_state_dict(py, state)
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Batch> {
        let mut wait = core::Wait::default();
        loop {
            match detached(py, || self.loader.next(&mut wait, POLL))? {
                core::Next::Batch(batch) => return Ok(Batch { inner: Arc::new(batch) }),
                core::Next::End => return Err(PyStopIteration::new_err(())),
                core::Next::Pending => py.check_signals()?,
            }
        }
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

    fn load_state_dict(&self, py: Python<'_>, state: BTreeMap<String, Bound<'_, PyAny>>) -> PyResult<()> {
        let fields = state.into_iter().map(|(name, value)| Ok((name, field(&value)?)));
        let fields = fields.collect::<PyResult<Vec<_>>>()?;
        detached(py, || self.loader.load_state(&fields))
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let stats = detached(py, || self.loader.stats())?;
        let dict = PyDict::new(py);
        dict.set_item("batches", stats.batches)?;
        dict.set_item("bytes_read", stats.bytes_read)?;
        dict.set_item("wait_seconds", stats.waited.as_secs_f64())?;
        dict.set_item("wait_p50", stats.wait_percentile(50).as_secs_f64())?;
        dict.set_item("wait_p99", stats.wait_percentile(99).as_secs_f64())?;
        dict.set_item("wait_max", stats.longest.as_secs_f64())?;
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

/// One set of shards, or pairs of a set and its weight.
fn sources(given: &Bound<'_, PyAny>) -> PyResult<core::Sources> {
    if let Ok(shards) = given.cast::<Shards>() {
        return Ok(Arc::clone(&shards.get().catalog).into());
    }
    let py = given.py();
    let pairs: Vec<(Bound<'_, Shards>, i64)> = given.extract().map_err(|_| {
        let found = given.get_type();
        let message = format!(
            "the first argument of TokenLoader should be the shards that open_shards returned, or pairs of shards and \
             a whole-number weight, but is {found}; call open_shards first"
        );
        raise(py, &core::Error::argument(message))
    })?;
    let pairs = pairs.into_iter().map(|(shards, weight)| (Arc::clone(&shards.get().catalog), weight));
    core::Sources::mixed(pairs.collect()).map_err(|error| raise(py, &error))
}

fn stage(given: &Bound<'_, PyAny>) -> PyResult<core::StageArguments> {
    Ok(core::StageArguments {
        steps: Some(given.getattr("steps")?.extract()?),
        lane_len: Some(given.getattr("lane_len")?.extract()?),
        max_doc_len: given.getattr("max_doc_len")?.extract()?,
        max_docs: given.getattr("max_docs")?.extract()?,
    })
}

/// A value that is neither an integer nor a string keeps its repr, which no field of a state equals.
fn field(value: &Bound<'_, PyAny>) -> PyResult<core::Value> {
    if let Ok(number) = value.extract::<i64>() {
        return Ok(core::Value::Int(number));
    }
    match value.extract::<String>() {
        Ok(text) => Ok(core::Value::Text(text)),
        Err(_) => Ok(core::Value::Text(value.repr()?.to_string())),
    }
}
