//! The index of contexts, as Python sees it.

use std::process;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::available_parallelism;

use jspeed_context_index as index;
use jspeed_dataloader_core as core;
use jspeed_dataloader_core::bytes_of;
use pyo3::prelude::*;

use crate::array::{Given, numbers, numpy};
use crate::{bad, check_process, detached, raise};

/// What followed this context earlier: an index of the documents of the steps so far. Query a step,
/// then push it; answers are exact and the same for any number of threads.
#[pyclass(frozen, module = "jspeed._dataloader")]
pub struct ContextIndex {
    inner: RwLock<index::ContextIndex>,
    made_in: u32,
}

/// What a query found for each position of its rows: `lengths`, `occurrences`, `tokens` and `counts`,
/// read-only arrays.
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
            capacity, *, lengths = vec![6, 10, 20], recent = 96, top = 8, bos_id = 50_256,
            threads = None
        ),
        text_signature = "(capacity, *, lengths=(6, 10, 20), recent=96, top=8, bos_id=50256, \
                          threads=None)"
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
        let arguments = index::IndexArguments { capacity, lengths, recent, top, bos_id, threads };
        let inner = detached(py, || index::ContextIndex::new(&arguments).map_err(bad))?;
        Ok(Self { inner: RwLock::new(inner), made_in: process::id() })
    }

    fn push(&self, py: Python<'_>, step: u64, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = Rows::new(rows)?;
        self.check_process(py)?;
        detached(py, || {
            let mut index = self.inner.write().unwrap_or_else(PoisonError::into_inner);
            index.push(step, &rows.tokens, rows.shape.1).map_err(bad)
        })
    }

    fn query(&self, py: Python<'_>, step: u64, rows: &Bound<'_, PyAny>) -> PyResult<Matches> {
        let rows = Rows::new(rows)?;
        self.check_process(py)?;
        let matches = detached(py, || {
            let index = self.inner.read().unwrap_or_else(PoisonError::into_inner);
            index.query(step, &rows.tokens, rows.shape.1).map_err(bad)
        })?;
        let (height, width) = rows.shape;
        let (each, all) =
            ([height, width], [height, width, self.read(py, index::ContextIndex::top)?]);
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
    fn steps(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, index::ContextIndex::steps)
    }

    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, index::ContextIndex::tokens)
    }

    #[getter]
    fn capacity(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, index::ContextIndex::capacity)
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, index::ContextIndex::bytes)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.made_in != process::id() {
            return Ok("ContextIndex(made before a fork)".to_owned());
        }
        self.read(py, |index| {
            let (tokens, capacity, steps) = (index.tokens(), index.capacity(), index.steps());
            format!("ContextIndex({tokens} of {capacity} tokens in {steps} steps)")
        })
    }
}

impl ContextIndex {
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&index::ContextIndex) -> T + Send,
    ) -> PyResult<T> {
        self.check_process(py)?;
        Ok(py.detach(|| what(&self.inner.read().unwrap_or_else(PoisonError::into_inner))))
    }

    /// A fork while the index was written to left the lock taken, and the index half written.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.made_in, "index", "may have half of it")
    }
}

/// A copy of two-dimensional tokens.
struct Rows {
    tokens: Vec<u32>,
    shape: (usize, usize),
}

impl Rows {
    /// Any order, strides, alignment and byte order of two-dimensional tokens.
    fn new(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = given.py();
        let Given { array, dtype, stored, shape } = Given::new(given)?;
        let (('u', 2 | 4), &[height, width @ 1..=usize::MAX]) = (stored, &shape[..]) else {
            return Err(raise(
                py,
                &core::Error::argument(format!(
                    "rows should be an array [rows, tokens] of uint16 or uint32, but its shape is \
                     {shape:?} and its type {dtype}; give it the tokens of a batch, as the loader \
                     has them"
                )),
            ));
        };
        Ok(Self { tokens: numbers(&array, "u4")?, shape: (height, width) })
    }
}
