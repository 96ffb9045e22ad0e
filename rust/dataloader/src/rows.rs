//! The table of rows in the host's memory, as Python sees it.

use std::process;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::available_parallelism;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::bytes_of;
use jspeed_row_table as table;
use jspeed_row_table::{LEFT_OUT, Moment, Part, Rates};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::array::{Given, numbers, numpy};
use crate::{bad, check_process, detached, raise};

/// Bytes of a cache line, on which a buffer for rows begins.
const LINE: usize = 64;

/// A table of bf16 rows in the host's memory: gather rows, change them by their gradients.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct RowTable {
    inner: Arc<RwLock<table::RowTable>>,
    num_rows: usize,
    width: usize,
    capacity: usize,
    made_in: u32,
}

#[pymethods]
impl RowTable {
    #[new]
    #[pyo3(signature = (num_rows, width, *, capacity = None, threads = None))]
    fn new(
        py: Python<'_>,
        num_rows: i64,
        width: i64,
        capacity: Option<i64>,
        threads: Option<i64>,
    ) -> PyResult<Self> {
        let cores =
            || available_parallelism().map_or(1, |cores| i64::try_from(cores.get()).unwrap_or(1));
        let (capacity, threads) = (capacity.unwrap_or(num_rows), threads.unwrap_or_else(cores));
        let inner =
            detached(py, || table::RowTable::new(num_rows, width, capacity, threads).map_err(bad))?;
        let (num_rows, width, capacity) = (inner.rows(), inner.width(), inner.capacity());
        Ok(Self {
            inner: Arc::new(RwLock::new(inner)),
            num_rows,
            width,
            capacity,
            made_in: process::id(),
        })
    }

    #[pyo3(signature = (rows, out = None))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.check_process(py)?;
        let rows = list(rows)?;
        if let (None, Some(place)) = (&out, rows.iter().position(|&row| row == LEFT_OUT)) {
            return Err(raise(
                py,
                &core::Error::argument(format!(
                    "row {LEFT_OUT} at place {place} of the list keeps what out has there, and no \
                     out was given; give one, or a row"
                )),
            ));
        }
        let out = out.map_or_else(|| self.buffer(py, rows.len()), Ok)?;
        self.check_array(&out, rows.len(), "out", &["bfloat16"])?;
        let mut words = Memory::<u16>::new(&out, "out", true)?;
        detached(py, || {
            let table = self.inner.read().unwrap_or_else(PoisonError::into_inner);
            table.gather(&rows, words.all_mut()).map_err(bad)
        })?;
        Ok(out)
    }

    #[pyo3(signature = (step, rows, gradients, *, learning_rate, beta2, eps, weight_decay))]
    #[expect(clippy::too_many_arguments, reason = "names of Python")]
    fn update(
        &self,
        py: Python<'_>,
        step: u64,
        rows: &Bound<'_, PyAny>,
        gradients: &Bound<'_, PyAny>,
        learning_rate: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
    ) -> PyResult<()> {
        self.check_process(py)?;
        let rows = list(rows)?;
        let rates = Rates { learning_rate, beta2, eps, weight_decay };
        let parts: Vec<Bound<'_, PyAny>> = match gradients.cast::<PyList>() {
            Ok(parts) => parts.iter().collect(),
            Err(_) => vec![gradients.clone()],
        };
        let mut name = "bfloat16 or float32".to_owned();
        for part in &parts {
            let own = if parts.len() == 1 { rows.len() } else { part.len().unwrap_or_default() };
            let dtypes: Vec<&str> = name.split(" or ").collect();
            name = self.check_array(part, own, "gradients", &dtypes)?;
        }
        if name == "float32" {
            self.change::<f32>(py, step, &rows, &parts, rates)
        } else {
            self.change::<u16>(py, step, &rows, &parts, rates)
        }
    }

    fn read(&self, py: Python<'_>, first: usize, count: usize) -> PyResult<RowPart> {
        let part = Arc::new(self.ask(py, |table| Copies::new(table.part(first, count)))?);
        let rows = part.rows.len();
        let array =
            |of, dtype, shape: &[usize]| numpy(py, &part, of, dtype, shape).map(Bound::unbind);
        Ok(RowPart {
            rows: array(|part| bytes_of(&part.rows), "u4", &[rows])?,
            weights: array(|part| bytes_of(&part.weights), "u2", &[rows, self.width])?
                .call_method1(py, "view", (bfloat16(py)?,))?,
            squares: array(|part| bytes_of(&part.squares), "f4", &[rows])?,
            updates: array(|part| bytes_of(&part.updates), "u4", &[rows])?,
        })
    }

    fn append(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        squares: &Bound<'_, PyAny>,
        updates: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.check_process(py)?;
        let rows = list(rows)?.into_iter().map(|row| u32::try_from(row).unwrap_or(u32::MAX));
        let rows: Vec<u32> = rows.collect();
        self.check_array(weights, rows.len(), "weights", &["bfloat16"])?;
        let weights = Memory::<u16>::new(weights, "weights", false)?;
        let (squares, updates): (Vec<f32>, Vec<u32>) =
            (numbers(squares, "f4")?, numbers(updates, "u4")?);
        detached(py, || {
            let moments = squares.into_iter().zip(updates);
            let moments: Vec<Moment> =
                moments.map(|(square, updates)| Moment { square, updates }).collect();
            let part = Part { rows: &rows, weights: weights.all(), moments: &moments };
            self.inner.write().unwrap_or_else(PoisonError::into_inner).append(part).map_err(bad)
        })
    }

    fn resume(&self, py: Python<'_>, betas: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_process(py)?;
        let betas: Vec<f32> = numbers(betas, "f4")?;
        detached(py, || {
            let mut table = self.inner.write().unwrap_or_else(PoisonError::into_inner);
            table.resume(&betas).map_err(bad)
        })
    }

    #[getter]
    fn betas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let betas = Arc::new(self.ask(py, |table| table.betas().to_vec())?);
        numpy(py, &betas, |betas| bytes_of(betas), "f4", &[betas.len()])
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.num_rows
    }

    #[getter]
    fn width(&self) -> usize {
        self.width
    }

    #[getter]
    fn capacity(&self) -> usize {
        self.capacity
    }

    #[getter]
    fn used(&self, py: Python<'_>) -> PyResult<usize> {
        self.ask(py, table::RowTable::used)
    }

    #[getter]
    fn updates(&self, py: Python<'_>) -> PyResult<usize> {
        self.ask(py, |table| table.betas().len())
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.ask(py, table::RowTable::bytes)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.made_in != process::id() {
            return Ok("RowTable(made before a fork)".to_owned());
        }
        let used = self.used(py)?;
        Ok(format!(
            "RowTable({} x {}, {used} of {} rows in use)",
            self.num_rows, self.width, self.capacity
        ))
    }
}

impl Drop for RowTable {
    /// In a fork nothing is freed: there are no threads to end, and a lock of theirs may be taken.
    fn drop(&mut self) {
        if self.made_in != process::id() {
            std::mem::forget(Arc::clone(&self.inner));
        }
    }
}

/// Copies of what is in some slots, read-only arrays.
#[pyclass(frozen, get_all, module = "jspeed._dataloader")]
pub struct RowPart {
    rows: Py<PyAny>,
    weights: Py<PyAny>,
    squares: Py<PyAny>,
    updates: Py<PyAny>,
}

/// The memory of a [`RowPart`].
struct Copies {
    rows: Vec<u32>,
    weights: Vec<u16>,
    squares: Vec<f32>,
    updates: Vec<u32>,
}

impl Copies {
    fn new(part: Part<'_>) -> Self {
        Self {
            rows: part.rows.to_vec(),
            weights: part.weights.to_vec(),
            squares: part.moments.iter().map(|moment| moment.square).collect(),
            updates: part.moments.iter().map(|moment| moment.updates).collect(),
        }
    }
}

impl RowTable {
    fn change<T: Element + table::Gradient>(
        &self,
        py: Python<'_>,
        step: u64,
        rows: &[i64],
        parts: &[Bound<'_, PyAny>],
        rates: Rates,
    ) -> PyResult<()> {
        let parts = parts
            .iter()
            .map(|part| Memory::<T>::new(part, "gradients", false))
            .collect::<PyResult<Vec<_>>>()?;
        detached(py, || {
            let gradients: Vec<&[T]> = parts.iter().map(Memory::all).collect();
            let mut table = self.inner.write().unwrap_or_else(PoisonError::into_inner);
            table.update(step, rows, &gradients, &rates).map_err(bad)
        })
    }

    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&table::RowTable) -> T + Send,
    ) -> PyResult<T> {
        self.check_process(py)?;
        Ok(py.detach(|| what(&self.inner.read().unwrap_or_else(PoisonError::into_inner))))
    }

    /// A fork may have half of an update, too.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.made_in, "table", "has none of its threads")
    }

    /// Refuse an array of another shape or dtype, and return the dtype's name.
    fn check_array(
        &self,
        given: &Bound<'_, PyAny>,
        rows: usize,
        name: &str,
        dtypes: &[&str],
    ) -> PyResult<String> {
        let found = || -> PyResult<(Vec<usize>, String)> {
            Ok((
                given.getattr("shape")?.extract()?,
                given.getattr("dtype")?.getattr("name")?.extract()?,
            ))
        };
        match found() {
            Ok((shape, dtype)) if shape == [rows, self.width] && dtypes.contains(&&dtype[..]) => {
                Ok(dtype)
            }
            other => {
                let found = match other {
                    Ok((shape, dtype)) => format!("{shape:?} of {dtype}"),
                    Err(_) => given.get_type().name()?.to_string(),
                };
                let dtypes = dtypes.join(" or ");
                Err(raise(
                    given.py(),
                    &core::Error::argument(format!(
                        "{name} should be an array [{rows}, {}] of {dtypes} but is {found}; give \
                         one row for each row of the list",
                        self.width
                    )),
                ))
            }
        }
    }

    /// An array for so many rows that begins on a cache line.
    fn buffer<'py>(&self, py: Python<'py>, rows: usize) -> PyResult<Bound<'py, PyAny>> {
        let bytes = rows * self.width * size_of::<u16>();
        let memory = py.import("numpy")?.call_method1("empty", (bytes + LINE, "u1"))?;
        let start = PyBuffer::<u8>::get(&memory)?.buf_ptr().align_offset(LINE);
        memory
            .get_item(pyo3::types::PySlice::new(
                py,
                isize::try_from(start).unwrap_or_default(),
                isize::try_from(start + bytes).unwrap_or(isize::MAX),
                1,
            ))?
            .call_method1("view", (bfloat16(py)?,))?
            .call_method1("reshape", ((rows, self.width),))
    }
}

/// The memory of an array, which is held while this lives. Nobody else may write to it meanwhile:
/// the interpreter's other threads run.
struct Memory<T: Element> {
    buffer: PyBuffer<T>,
}

impl<T: Element + Sync> Memory<T> {
    /// That of a contiguous array, whose numbers it takes for words of their size.
    fn new(given: &Bound<'_, PyAny>, name: &str, writable: bool) -> PyResult<Self> {
        let words = if size_of::<T>() == 2 { "u2" } else { "f4" };
        let buffer = PyBuffer::<T>::get(&given.call_method1("view", (words,))?)?;
        if buffer.is_c_contiguous() && !(writable && buffer.readonly()) {
            return Ok(Self { buffer });
        }
        let how = if writable { "contiguous and writable" } else { "contiguous" };
        Err(raise(
            given.py(),
            &core::Error::argument(format!(
                "{name} should be {how} but is not; copy it with numpy.array"
            )),
        ))
    }

    fn all(&self) -> &[T] {
        if self.buffer.item_count() == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous, of this type and aligned, which PyBuffer checked, and
        // held; the stub says that nobody may write meanwhile.
        #[expect(unsafe_code, reason = "a copy of all gradients would cost what an update does")]
        unsafe {
            std::slice::from_raw_parts(self.buffer.buf_ptr().cast(), self.buffer.item_count())
        }
    }

    fn all_mut(&mut self) -> &mut [T] {
        if self.buffer.item_count() == 0 {
            return &mut [];
        }
        // SAFETY: as above, and writable.
        #[expect(unsafe_code, reason = "rows are written where they are wanted")]
        unsafe {
            std::slice::from_raw_parts_mut(self.buffer.buf_ptr().cast(), self.buffer.item_count())
        }
    }
}

fn bfloat16(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("ml_dtypes")?.getattr("bfloat16")
}

/// The list of rows, of integers of any size but those that int64 cannot hold.
fn list(given: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = given.py();
    let Given { array, dtype, stored: (kind, bytes), shape } = Given::new(given)?;
    if shape.len() != 1 || !(kind == 'i' || (kind == 'u' && bytes <= 4)) {
        return Err(raise(
            py,
            &core::Error::argument(format!(
                "rows should be a list of int32, int64 or uint32 numbers, but its shape is \
                 {shape:?} and its type {dtype}; give it the numbers of rows, one after the other"
            )),
        ));
    }
    numbers(&array, "i8")
}
