//! The index of contexts, as Python sees it.

use std::sync::{Arc, PoisonError, RwLock};
use std::thread::available_parallelism;

use jspeed_dataloader_core as core;
use jspeed_dataloader_core::bytes_of;
use jspeed_dataloader_core::scan::Tokens;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::array::numpy;
use crate::{detached, raise};

/// What followed a context earlier; see the stubs.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct ContextIndex {
    inner: RwLock<core::ContextIndex>,
}

/// Answers to a query; see the stubs.
#[pyclass(frozen, get_all, module = "jspeed._dataloader")]
pub struct Matches {
    lengths: Py<PyAny>,
    occurrences: Py<PyAny>,
    tokens: Py<PyAny>,
    counts: Py<PyAny>,
}

#[pymethods]
impl ContextIndex {
    #[new]
    #[pyo3(
        signature = (
            capacity, *, lengths = vec![6, 10, 20], recent = 96, top = 8, bos_id = 50_256, threads = None
        ),
        text_signature = "(capacity, *, lengths=(6, 10, 20), recent=96, top=8, bos_id=50256, threads=None)"
    )]
    fn new(
        py: Python<'_>,
        capacity: i64,
        lengths: Vec<i64>,
        recent: i64,
        top: i64,
        bos_id: i64,
        threads: Option<i64>,
    ) -> PyResult<Self> {
        let cores =
            || available_parallelism().map_or(1, |cores| i64::try_from(cores.get()).unwrap_or(1));
        let threads = threads.unwrap_or_else(cores);
        let arguments = core::IndexArguments { capacity, lengths, recent, top, bos_id, threads };
        let inner = detached(py, || core::ContextIndex::new(&arguments))?;
        Ok(Self { inner: RwLock::new(inner) })
    }

    fn push(&self, py: Python<'_>, step: u64, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = Rows::new(rows)?;
        detached(py, || {
            let mut index = self.inner.write().unwrap_or_else(PoisonError::into_inner);
            index.push(step, rows.tokens(), rows.shape.1)
        })
    }

    fn query(&self, py: Python<'_>, step: u64, rows: &Bound<'_, PyAny>) -> PyResult<Matches> {
        let rows = Rows::new(rows)?;
        let matches = detached(py, || {
            let index = self.inner.read().unwrap_or_else(PoisonError::into_inner);
            index.query(step, rows.tokens(), rows.shape.1)
        })?;
        let (height, width) = rows.shape;
        let (each, all) =
            ([height, width], [height, width, self.read(py, core::ContextIndex::top)]);
        let matches = Arc::new(matches);
        let array = |part, dtype, shape: &[usize]| {
            numpy(py, &matches, part, dtype, shape).map(Bound::unbind)
        };
        Ok(Matches {
            lengths: array(|matches| &matches.lengths, "u1", &each)?,
            occurrences: array(|matches| &matches.occurrences, "u1", &each)?,
            tokens: array(|matches| bytes_of(&matches.tokens), "u4", &all)?,
            counts: array(|matches| &matches.counts, "u1", &all)?,
        })
    }

    #[getter]
    fn steps(&self, py: Python<'_>) -> u64 {
        self.read(py, core::ContextIndex::steps)
    }

    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> usize {
        self.read(py, core::ContextIndex::tokens)
    }

    #[getter]
    fn capacity(&self, py: Python<'_>) -> usize {
        self.read(py, core::ContextIndex::capacity)
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> usize {
        self.read(py, core::ContextIndex::bytes)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        self.read(py, |index| {
            format!(
                "ContextIndex({} of {} tokens in {} steps)",
                index.tokens(),
                index.capacity(),
                index.steps()
            )
        })
    }
}

impl ContextIndex {
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&core::ContextIndex) -> T + Send,
    ) -> T {
        py.detach(|| what(&self.inner.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// A copy of two-dimensional tokens.
struct Rows {
    tokens: Stored,
    shape: (usize, usize),
}

enum Stored {
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl Rows {
    fn new(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = given.py();
        let array = py.import("numpy")?.call_method1("ascontiguousarray", (given,))?;
        let shape: Vec<usize> = array.getattr("shape")?.extract()?;
        let tokens = PyBuffer::<u16>::get(&array)
            .and_then(|buffer| buffer.to_vec(py).map(Stored::U16))
            .or_else(|_| {
                PyBuffer::<u32>::get(&array).and_then(|buffer| buffer.to_vec(py).map(Stored::U32))
            });
        match (tokens, &shape[..]) {
            (Ok(tokens), &[height, width]) if width > 0 => {
                Ok(Self { tokens, shape: (height, width) })
            }
            _ => Err(raise(
                py,
                &core::Error::argument(format!(
                    "rows should be an array [rows, tokens] of uint16 or uint32, but its shape is {shape:?} and its \
                     type {}; give it the tokens of a batch, as the loader has them",
                    array.getattr("dtype")?
                )),
            )),
        }
    }

    fn tokens(&self) -> Tokens<'_> {
        match &self.tokens {
            Stored::U16(tokens) => Tokens::U16(tokens),
            Stored::U32(tokens) => Tokens::U32(tokens),
        }
    }
}
