//! A batch, as Python sees it.

use std::sync::Arc;

use jspeed_dataloader_core as core;
use pyo3::prelude::*;

use crate::array::{Array, Part};

/// One batch of this process; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Batch {
    pub inner: Arc<core::Batch>,
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
        self.inner.shape().max_docs.map(|_| Array::numpy(py, &self.inner, Part::DocOffsets)).transpose()
    }

    #[getter]
    fn num_docs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.shape().max_docs.map(|_| Array::numpy(py, &self.inner, Part::NumDocs)).transpose()
    }

    #[getter]
    fn loss_mask<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let mask = self.inner.shape().loss_mask;
        mask.then(|| Array::numpy(py, &self.inner, Part::LossMask)).transpose()
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
        let core::buffer::Shape { rows, lane_len, .. } = self.inner.shape();
        format!("Batch(step={step}, epoch={epoch}, {rows} lanes x {lane_len})")
    }
}
