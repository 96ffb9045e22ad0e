//! A batch, as Python sees it.

use std::sync::Arc;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::{Shape, bytes_of};
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::array::numpy;

/// The lanes of this process in one step: `tokens`, `inputs`, `targets`, and with documents
/// `doc_offsets` and `num_docs`. The arrays are read-only and stay valid while they are kept.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Batch {
    pub inner: Arc<core::Batch>,
}

impl Batch {
    /// Some columns of the tokens, as a view.
    fn columns<'py>(
        &self,
        py: Python<'py>,
        columns: Bound<'py, PySlice>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.tokens(py)?.get_item((PySlice::full(py), columns))
    }
}

#[pymethods]
impl Batch {
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Shape { rows, lane_len, width, .. } = self.inner.shape();
        let dtype = width.to_string();
        numpy(py, &self.inner, |batch| batch.tokens().as_bytes(), &dtype, &[rows, lane_len + 1])
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
        let Shape { rows, max_docs, .. } = self.inner.shape();
        let array = |docs| {
            numpy(py, &self.inner, |batch| bytes_of(batch.doc_offsets()), "i4", &[rows, docs + 1])
        };
        max_docs.map(array).transpose()
    }

    #[getter]
    fn num_docs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Shape { rows, max_docs, .. } = self.inner.shape();
        let array = |_| numpy(py, &self.inner, |batch| bytes_of(batch.num_docs()), "i4", &[rows]);
        max_docs.map(array).transpose()
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
        let Shape { rows, lane_len, .. } = self.inner.shape();
        format!("Batch(step={step}, epoch={epoch}, {rows} lanes x {lane_len})")
    }
}
