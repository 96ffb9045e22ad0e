//! Bytes as read-only `NumPy` arrays that share their memory and keep it alive; and arrays that
//! Python gives.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::ffi;
use pyo3::prelude::*;

/// A read-only buffer of bytes that keeps what they belong to alive.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct Array(Box<dyn AsRef<[u8]> + Send + Sync>);

/// Some of the memory of an owner.
struct Part<T>(Arc<T>, fn(&T) -> &[u8]);

impl<T> AsRef<[u8]> for Part<T> {
    fn as_ref(&self) -> &[u8] {
        self.1(&self.0)
    }
}

/// The `NumPy` array of this type and shape over a part of `owner`.
pub fn numpy<'py, T: Send + Sync + 'static>(
    py: Python<'py>,
    owner: &Arc<T>,
    part: fn(&T) -> &[u8],
    dtype: &str,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let array = Bound::new(py, Array(Box::new(Part(Arc::clone(owner), part))))?;
    py.import("numpy")?
        .call_method1("frombuffer", (array, dtype))?
        .call_method1("reshape", (shape,))
}

/// What `given` is as an array.
pub struct Given<'py> {
    pub array: Bound<'py, PyAny>,
    pub dtype: Bound<'py, PyAny>,
    /// `NumPy`'s letter for a kind of numbers, and bytes of one.
    pub stored: (char, usize),
    pub shape: Vec<usize>,
}

impl<'py> Given<'py> {
    pub fn new(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = given.py().import("numpy")?.call_method1("asarray", (given,))?;
        let dtype = array.getattr("dtype")?;
        let stored = (dtype.getattr("kind")?.extract()?, dtype.getattr("itemsize")?.extract()?);
        let shape = array.getattr("shape")?.extract()?;
        Ok(Self { array, dtype, stored, shape })
    }
}

/// A copy of an array's numbers, converted to `dtype`, whatever their order, strides and alignment.
pub fn numbers<T: Element>(given: &Bound<'_, PyAny>, dtype: &str) -> PyResult<Vec<T>> {
    let py = given.py();
    let here = py.import("numpy")?.call_method1("require", (given, dtype, ["C", "A"]))?;
    PyBuffer::get(&here)?.to_vec(py)
}

#[pymethods]
impl Array {
    /// Fill in a view.
    ///
    /// # Safety
    /// Called by the interpreter only, with a valid `view`.
    #[expect(unsafe_code, reason = "the buffer protocol has no safe interface")]
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = slf.get().0.as_ref().as_ref();
        let start = bytes.as_ptr().cast_mut().cast();
        // A length in memory always fits.
        let len = isize::try_from(bytes.len()).unwrap_or(isize::MAX);
        // SAFETY: the interpreter passes a valid view or null, which is refused. The view owns a
        // reference to the frozen object, which owns the memory that it shows, read-only.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 1, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
