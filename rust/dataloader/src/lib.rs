//! The Python face of the loader: converts, detaches from the interpreter and maps errors; decides nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jspeed_dataloader_core as core;
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

mod array;

use array::{Array, Part};

/// How long a wait stays away from Python's signal handlers.
const PATIENCE: Duration = Duration::from_millis(100);

/// Build the exception of `jspeed.data.errors` that stands for `error`.
fn raise(py: Python<'_>, error: &core::Error) -> PyErr {
    let name = match error.kind() {
        core::Kind::Argument => "BadInput",
        core::Kind::Shard => "ShardError",
        core::Kind::Format => "ShardFormatError",
        core::Kind::Truncated => "ShardTruncatedError",
        core::Kind::TokenRange => "TokenRangeError",
        core::Kind::DocOverflow => "DocOverflowError",
        core::Kind::State => "StateMismatchError",
    };
    let made = py
        .import("jspeed.data.errors")
        .and_then(|module| module.getattr(name))
        .and_then(|class| class.call1((error.to_string(),)));
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// Run `work` detached from the interpreter and map its error.
fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, core::Error> + Send) -> PyResult<T> {
    py.detach(work).map_err(|error| raise(py, &error))
}

/// Validated token shards; see `jspeed.data.open_shards`.
#[pyclass(frozen, module = "jspeed._dataloader")]
struct Shards {
    catalog: Arc<core::Catalog>,
}

#[pymethods]
impl Shards {
    #[new]
    fn new(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Self> {
        let catalog = detached(py, || core::Catalog::open(paths))?;
        Ok(Self { catalog: Arc::new(catalog) })
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.catalog.num_tokens()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        self.catalog.fingerprint()
    }

    #[getter]
    fn paths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let path = py.import("pathlib")?.getattr("Path")?;
        let shards = self.catalog.shards().iter();
        PyList::new(
            py,
            shards.map(|shard| path.call1((shard.path.as_os_str(),))).collect::<PyResult<Vec<_>>>()?,
        )
    }

    fn __len__(&self) -> usize {
        self.catalog.shards().len()
    }

    fn __repr__(&self) -> String {
        self.catalog.to_string()
    }
}

/// The order of a shuffled stream; see the stubs.
#[pyclass(frozen, eq, hash, get_all, module = "jspeed._dataloader")]
#[derive(PartialEq, Eq, Hash)]
struct Shuffle {
    seed: i64,
    block_tokens: Option<i64>,
}

#[pymethods]
impl Shuffle {
    #[new]
    #[pyo3(signature = (seed = 0, block_tokens = None))]
    fn new(seed: i64, block_tokens: Option<i64>) -> Self {
        Self { seed, block_tokens }
    }

    fn __repr__(&self) -> String {
        let block = self.block_tokens.map_or_else(|| "None".to_owned(), |tokens| tokens.to_string());
        format!("Shuffle(seed={}, block_tokens={block})", self.seed)
    }
}

/// One batch of this process; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
struct Batch {
    inner: Arc<core::Batch>,
}

#[pymethods]
impl Batch {
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Array::numpy(py, &self.inner, Part::Tokens)
    }

    #[getter]
    fn inputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Array::numpy(py, &self.inner, Part::Inputs)
    }

    #[getter]
    fn targets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Array::numpy(py, &self.inner, Part::Targets)
    }

    #[getter]
    fn doc_offsets<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.max_docs().map(|_| Array::numpy(py, &self.inner, Part::DocOffsets)).transpose()
    }

    #[getter]
    fn num_docs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.max_docs().map(|_| Array::numpy(py, &self.inner, Part::NumDocs)).transpose()
    }

    #[getter]
    fn step(&self) -> u64 {
        self.inner.step
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.inner.epoch
    }

    #[getter]
    fn dropped_tokens(&self) -> u64 {
        self.inner.dropped
    }

    fn __repr__(&self) -> String {
        let core::Batch { step, epoch, .. } = *self.inner;
        format!("Batch(step={step}, epoch={epoch}, {} lanes x {})", self.inner.rows(), self.inner.lane_len())
    }
}

/// The stream of batches; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
struct TokenLoader {
    loader: core::Loader,
}

#[pymethods]
impl TokenLoader {
    #[new]
    #[pyo3(
        signature = (
            shards, *, lanes = 8, lane_len = None, align = None, max_doc_len = None,
            max_docs = None, bos_id = 50_256, schedule = None, process_index = 0, process_count = 1,
            shuffle = None, epochs = Some(1), vocab_size = None, prefetch = 2
        ),
        text_signature = "(shards, *, lanes=8, lane_len=None, align=None, max_doc_len=None, max_docs=None, \
            bos_id=50256, schedule=None, process_index=0, process_count=1, shuffle=None, epochs=1, \
            vocab_size=None, prefetch=2)"
    )]
    #[allow(clippy::too_many_arguments, reason = "these are the keyword arguments of the Python class")]
    fn new(
        py: Python<'_>,
        shards: &Bound<'_, Shards>,
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
        prefetch: i64,
    ) -> PyResult<Self> {
        let schedule =
            schedule.map(|stages| stages.iter().map(stage).collect::<PyResult<Vec<_>>>()).transpose()?;
        let arguments = core::Arguments {
            lanes,
            align,
            bos_id,
            whole: core::StageArguments { steps: None, lane_len, max_doc_len, max_docs },
            schedule,
            process_index,
            process_count,
            shuffle: shuffle.map(|shuffle| (shuffle.get().seed, shuffle.get().block_tokens)),
            epochs,
            vocab_size,
            prefetch,
        };
        let catalog = Arc::clone(&shards.get().catalog);
        let loader = detached(py, || core::Loader::open(catalog, &arguments))?;
        Ok(Self { loader })
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Batch> {
        let mut wait = core::Wait::default();
        loop {
            match detached(py, || self.loader.next(&mut wait, PATIENCE))? {
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
        for (name, value) in py.detach(|| self.loader.state()) {
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
        let stats = py.detach(|| self.loader.stats());
        let dict = PyDict::new(py);
        dict.set_item("batches", stats.batches)?;
        dict.set_item("bytes_read", stats.bytes_read)?;
        dict.set_item("wait_seconds", stats.waited.as_secs_f64())?;
        dict.set_item("wait_p50", stats.wait_percentile(50).as_secs_f64())?;
        dict.set_item("wait_p99", stats.wait_percentile(99).as_secs_f64())?;
        dict.set_item("wait_max", stats.longest.as_secs_f64())?;
        dict.set_item("queue_empty", stats.queue_empty)?;
        dict.set_item("shard_switches", stats.shard_switches())?;
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

#[pymodule(gil_used = false)]
mod _dataloader {
    #[pymodule_export]
    use super::{Batch, Shards, Shuffle, TokenLoader};
}
