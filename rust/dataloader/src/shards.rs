//! Shards, as Python sees them.

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
            shards
                .map(|shard| path.call1((shard.path.as_os_str(),)))
                .collect::<PyResult<Vec<_>>>()?,
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
}
