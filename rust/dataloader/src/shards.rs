//! Shards and their order, as Python sees them.

use std::path::PathBuf;
use std::sync::Arc;

use jspeed_dataloader_core as core;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::detached;

/// Validated token shards; see `jspeed.data.open_shards`.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Shards {
    pub catalog: Arc<core::Catalog>,
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

    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("numpy")?.getattr("dtype")?.call1((self.catalog.width().to_string(),))
    }

    fn __len__(&self) -> usize {
        self.catalog.shards().len()
    }

    fn __repr__(&self) -> String {
        self.catalog.to_string()
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyList>,)> {
        Ok((self.paths(py)?,))
    }
}

/// The order of a shuffled stream; see the stubs.
#[pyclass(frozen, eq, hash, get_all, module = "jspeed._dataloader")]
#[derive(PartialEq, Eq, Hash)]
pub struct Shuffle {
    seed: i64,
    block_tokens: Option<i64>,
    unit: String,
}

#[pymethods]
impl Shuffle {
    #[new]
    #[pyo3(signature = (seed = 0, block_tokens = None, unit = "block"), text_signature = "(seed=0, block_tokens=None, unit='block')")]
    fn new(seed: i64, block_tokens: Option<i64>, unit: &str) -> Self {
        Self { seed, block_tokens, unit: unit.to_owned() }
    }

    fn __repr__(&self) -> String {
        let block = self.block_tokens.map_or_else(|| "None".to_owned(), |tokens| tokens.to_string());
        format!("Shuffle(seed={}, block_tokens={block}, unit='{}')", self.seed, self.unit)
    }

    fn __getnewargs__(&self) -> (i64, Option<i64>, &str) {
        (self.seed, self.block_tokens, &self.unit)
    }
}

impl Shuffle {
    pub fn arguments(&self) -> core::ShuffleArguments {
        core::ShuffleArguments { seed: self.seed, unit: self.unit.clone(), block_tokens: self.block_tokens }
    }
}
