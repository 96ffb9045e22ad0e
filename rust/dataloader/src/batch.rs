//! A batch, as Python sees it.

use std::sync::Arc;

use jspeed_dataloader_core as core;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::array::{Array, Field};

/// One batch of this process; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Batch {
    pub inner: Arc<core::Batch>,
}

impl Batch {
    /// Some columns of the tokens, as a view.
    fn columns<'py>(&self, py: Python<'py>, columns: Bound<'py, PySlice>) -> PyResult<Bound<'py, PyAny>> {
        Array::numpy(py, &self.inner, Field::Tokens)?.get_item((PySlice::full(py), columns))
    }
}

#[pymethods]
impl Batch {
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Array::numpy(py, &self.inner, Field::Tokens)
    }

    #[getter]
    fn inputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.columns(py, PySlice::new(py, 0, -1, 1))
    }

    #[getter]
    fn targets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.columns(py, PySlice::new(py, 1, isize::MAX, 1))
    }

    #[getter]
    fn doc_offsets<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.shape().max_docs.map(|_| Array::numpy(py, &self.inner, Field::DocOffsets)).transpose()
    }

    #[getter]
    fn num_docs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.shape().max_docs.map(|_| Array::numpy(py, &self.inner, Field::NumDocs)).transpose()
    }

    #[getter]
    fn loss_mask<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let mask = self.inner.shape().loss_mask;
        mask.then(|| Array::numpy(py, &self.inner, Field::LossMask)).transpose()
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
