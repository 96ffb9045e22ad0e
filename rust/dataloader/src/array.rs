//! Parts of a batch, or bytes, as read-only `NumPy` arrays that share its memory and keep it alive.

use std::ffi::c_int;
use std::sync::Arc;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::header::Width;
use jspeed_dataloader_core::scan::Tokens;
use pyo3::ffi;
use pyo3::prelude::*;

/// Which part of a batch.
#[derive(Clone, Copy)]
pub enum Field {
    /// `(rows, lane_len + 1)` uint16 or uint32.
    Tokens,
    /// `(rows, max_docs + 1)` int32.
    DocOffsets,
    /// `(rows,)` int32.
    NumDocs,
    /// `(rows, lane_len)` bool.
    LossMask,
}

enum Content {
    Part(Arc<core::Batch>, Field),
    Bytes(Vec<u8>),
}

/// A read-only buffer of bytes that keeps what they belong to alive.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Array(Content);

impl Array {
    /// The `NumPy` array of a part of a batch.
    pub fn numpy<'py>(
        py: Python<'py>,
        batch: &Arc<core::Batch>,
        field: Field,
    ) -> PyResult<Bound<'py, PyAny>> {
        let core::buffer::Shape { lane_len, max_docs, width, .. } = batch.shape();
        let (dtype, columns) = match field {
            Field::Tokens if width == Width::Two => ("u2", Some(lane_len + 1)),
            Field::Tokens => ("u4", Some(lane_len + 1)),
            Field::DocOffsets => ("i4", Some(max_docs.unwrap_or_default() + 1)),
            Field::NumDocs => ("i4", None),
            Field::LossMask => ("?", Some(lane_len)),
        };
        Self(Content::Part(Arc::clone(batch), field)).shaped(py, dtype, columns)
    }

    /// The `NumPy` array of rows of so many bytes.
    pub fn of_bytes(py: Python<'_>, bytes: Vec<u8>, columns: usize) -> PyResult<Bound<'_, PyAny>> {
        Self(Content::Bytes(bytes)).shaped(py, "u1", Some(columns))
    }

    fn shaped<'py>(
        self,
        py: Python<'py>,
        dtype: &str,
        columns: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let flat = py.import("numpy")?.call_method1("frombuffer", (Bound::new(py, self)?, dtype))?;
        columns.map_or(Ok(flat.clone()), |columns| flat.call_method1("reshape", (-1, columns)))
    }

    fn bytes(&self) -> &[u8] {
        match &self.0 {
            Content::Part(batch, Field::Tokens) => match batch.tokens() {
                Tokens::U16(tokens) => core::buffer::bytes_of(tokens),
                Tokens::U32(tokens) => core::buffer::bytes_of(tokens),
            },
            Content::Part(batch, Field::DocOffsets) => core::buffer::bytes_of(batch.doc_offsets()),
            Content::Part(batch, Field::NumDocs) => core::buffer::bytes_of(batch.num_docs()),
            Content::Part(batch, Field::LossMask) => core::buffer::bytes_of(batch.loss_mask()),
            Content::Bytes(bytes) => bytes,
        }
    }
}

#[pymethods]
impl Array {
    /// Fill in a view.
    ///
    /// # Safety
    /// Called by the interpreter only, with a valid `view`.
    #[expect(unsafe_code, reason = "the buffer protocol has no safe interface")]
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = slf.get().bytes();
        let start = bytes.as_ptr().cast_mut().cast();
        // A length in memory always fits.
        let len = isize::try_from(bytes.len()).unwrap_or(isize::MAX);
        // SAFETY: the interpreter passes a valid view or null, which is refused. The view owns a reference to the
        // frozen object, which owns the memory that it shows, read-only.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
