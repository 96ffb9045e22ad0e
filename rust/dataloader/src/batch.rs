//! A batch, as Python sees it.

use std::sync::Arc;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::buffer::bytes_of;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::array::numpy;

/// One batch of this process; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Batch {
    pub inner: Arc<core::Batch>,
}

/// The bytes of a part of a batch.
struct Part(Arc<core::Batch>, fn(&core::Batch) -> &[u8]);

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        self.1(&self.0)
    }
}

impl Batch {
    fn array<'py>(
        &self,
        py: Python<'py>,
        part: fn(&core::Batch) -> &[u8],
        dtype: &str,
        columns: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        numpy(py, Part(Arc::clone(&self.inner), part), dtype, columns)
    }

    /// Some columns of the tokens, as a view.
    fn columns<'py>(&self, py: Python<'py>, columns: Bound<'py, PySlice>) -> PyResult<Bound<'py, PyAny>> {
        self.tokens(py)?.get_item((PySlice::full(py), columns))
    }
}

#[pymethods]
impl Batch {
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let core::buffer::Shape { lane_len, width, .. } = self.inner.shape();
        self.array(py, |batch| batch.tokens().as_bytes(), &width.to_string(), Some(lane_len + 1))
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
        let array = |docs| self.array(py, |batch| bytes_of(batch.doc_offsets()), "i4", Some(docs + 1));
        self.inner.shape().max_docs.map(array).transpose()
    }

    #[getter]
    fn num_docs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let array = |_| self.array(py, |batch| bytes_of(batch.num_docs()), "i4", None);
        self.inner.shape().max_docs.map(array).transpose()
    }

    #[getter]
    fn loss_mask<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let core::buffer::Shape { lane_len, loss_mask, .. } = self.inner.shape();
        loss_mask.then(|| self.array(py, core::Batch::loss_mask, "?", Some(lane_len))).transpose()
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
