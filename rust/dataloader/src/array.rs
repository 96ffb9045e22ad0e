//! Parts of a batch as read-only buffers, so that `NumPy` sees the memory itself and keeps it alive.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::header::Width;
use jspeed_dataloader_core::scan::Tokens;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Which part of a batch.
#[derive(Clone, Copy)]
pub enum Part {
    /// `(rows, lane_len + 1)` uint16 or uint32.
    Tokens,
    /// `(rows, lane_len)` uint16 or uint32, all but the last column of the tokens.
    Inputs,
    /// `(rows, lane_len)` uint16 or uint32, all but the first column of the tokens.
    Targets,
    /// `(rows, max_docs + 1)` int32.
    DocOffsets,
    /// `(rows,)` int32.
    NumDocs,
    /// `(rows, lane_len)` bool.
    LossMask,
}

/// A read-only buffer that owns a share of its batch.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Array {
    batch: Arc<core::Batch>,
    part: Part,
    format: &'static CStr,
    item: isize,
    dimensions: c_int,
    shape: [isize; 2],
    strides: [isize; 2],
}

impl Array {
    /// The `NumPy` array of a part of a batch.
    pub fn numpy<'py>(py: Python<'py>, batch: &Arc<core::Batch>, part: Part) -> PyResult<Bound<'py, PyAny>> {
        let array = Bound::new(py, Self::new(Arc::clone(batch), part))?;
        py.import("numpy")?.call_method1("asarray", (array,))
    }

    fn new(batch: Arc<core::Batch>, part: Part) -> Self {
        let shape = batch.shape();
        let (rows, lane_len) = (signed(shape.rows), signed(shape.lane_len));
        let docs = signed(shape.max_docs.unwrap_or_default());
        let (letter, item) = match shape.width {
            Width::Two => (c"H", 2),
            Width::Four => (c"I", 4),
        };
        let (format, item, row, columns) = match part {
            Part::Tokens => (letter, item, lane_len + 1, lane_len + 1),
            Part::Inputs | Part::Targets => (letter, item, lane_len + 1, lane_len),
            Part::DocOffsets => (c"i", 4, docs + 1, docs + 1),
            Part::NumDocs => (c"i", 4, 1, 1),
            Part::LossMask => (c"?", 1, lane_len, lane_len),
        };
        let dimensions = if matches!(part, Part::NumDocs) { 1 } else { 2 };
        let (shape, strides) = ([rows, columns], [row * item, item]);
        Self { batch, part, format, item, dimensions, shape, strides }
    }

    /// Where the part begins.
    fn start(&self) -> *const c_void {
        let skipped = usize::from(matches!(self.part, Part::Targets));
        match self.part {
            Part::Tokens | Part::Inputs | Part::Targets => match self.batch.tokens() {
                Tokens::U16(tokens) => tokens[skipped..].as_ptr().cast(),
                Tokens::U32(tokens) => tokens[skipped..].as_ptr().cast(),
            },
            Part::DocOffsets => self.batch.doc_offsets().as_ptr().cast(),
            Part::NumDocs => self.batch.num_docs().as_ptr().cast(),
            Part::LossMask => self.batch.loss_mask().as_ptr().cast(),
        }
    }

    fn contiguous(&self) -> bool {
        self.dimensions == 1 || self.strides[0] == self.shape[1] * self.item
    }
}

#[pymethods]
impl Array {
    /// Fill in a view.
    ///
    /// # Safety
    /// Called by the interpreter only, with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let array = slf.get();
        let wants = |flag: c_int| flags & flag == flag;
        let refusal = if view.is_null() {
            Some("a buffer needs a view")
        } else if wants(ffi::PyBUF_WRITABLE) {
            Some("the arrays of a batch are read-only; copy them to change them")
        } else if !array.contiguous() && !wants(ffi::PyBUF_STRIDES) {
            Some("inputs and targets are strided views; copy them or use tokens")
        } else if wants(ffi::PyBUF_F_CONTIGUOUS) || (wants(ffi::PyBUF_C_CONTIGUOUS) && !array.contiguous()) {
            Some("this part of a batch does not have that memory order; copy it or use tokens")
        } else {
            None
        };
        let items: isize = array.shape[..if array.dimensions == 1 { 1 } else { 2 }].iter().product();
        // SAFETY: the interpreter passes a valid view. Shape, strides and format live in the frozen object, which
        // the view owns, and the memory lives in the batch, which the object owns.
        unsafe {
            if let Some(refusal) = refusal {
                if let Some(view) = view.as_mut() {
                    view.obj = ptr::null_mut();
                }
                return Err(PyBufferError::new_err(refusal));
            }
            let view = &mut *view;
            view.buf = array.start().cast_mut();
            view.len = items * array.item;
            view.itemsize = array.item;
            view.readonly = 1;
            view.ndim = array.dimensions;
            view.format =
                if wants(ffi::PyBUF_FORMAT) { array.format.as_ptr().cast_mut() } else { ptr::null_mut() };
            view.shape = if wants(ffi::PyBUF_ND) { array.shape.as_ptr().cast_mut() } else { ptr::null_mut() };
            view.strides =
                if wants(ffi::PyBUF_STRIDES) { array.strides.as_ptr().cast_mut() } else { ptr::null_mut() };
            view.suboffsets = ptr::null_mut();
            view.internal = ptr::null_mut();
            view.obj = slf.into_any().into_ptr();
        }
        Ok(())
    }
}

/// A length in memory always fits.
fn signed(length: usize) -> isize {
    isize::try_from(length).unwrap_or(isize::MAX)
}
