//! Bytes as read-only `NumPy` arrays that share their memory and keep it alive.

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;

/// A read-only buffer of bytes that keeps what they belong to alive.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Array(Box<dyn AsRef<[u8]> + Send + Sync>);

/// The `NumPy` array over `bytes`: flat, or in rows of so many `columns`.
pub fn numpy<'py>(
    py: Python<'py>,
    bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    dtype: &str,
    columns: Option<usize>,
) -> PyResult<Bound<'py, PyAny>> {
    let array = Bound::new(py, Array(Box::new(bytes)))?;
    let flat = py.import("numpy")?.call_method1("frombuffer", (array, dtype))?;
    columns.map_or(Ok(flat.clone()), |columns| flat.call_method1("reshape", (-1, columns)))
}

#[pymethods]
impl Array {
    /// Fill in a view.
    ///
    /// # Safety
    /// Called by the interpreter only, with a valid `view`.
    #[expect(unsafe_code, reason = "the buffer protocol has no safe interface")]
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = slf.get().0.as_ref().as_ref();
        let start = bytes.as_ptr().cast_mut().cast();
        // A length in memory always fits.
        let len = isize::try_from(bytes.len()).unwrap_or(isize::MAX);
        // SAFETY: the interpreter passes a valid view or null, which is refused. The view owns a reference to the
        // frozen object, which owns the memory that it shows, read-only.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
