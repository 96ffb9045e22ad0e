//! `PyO3` module of the loader: type conversion, releasing the GIL, error mapping; no logic.

use std::process;
use std::sync::Arc;

use jspeed_dataloader_core as core;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

mod array;
mod batch;
mod index;
mod loader;
mod rows;
mod shards;

/// Build the exception of `jspeed.data.errors` that stands for `error`.
fn raise(py: Python<'_>, error: &core::Error) -> PyErr {
    use core::Kind;
    let (name, how) = match error.kind {
        Kind::Io => ("ShardError", ", or make shards with `jspeed prepare text FILES --out DIR`"),
        Kind::Format => ("ShardFormatError", " with `jspeed prepare`"),
        Kind::Changed => ("ShardTruncatedError", ""),
        Kind::TokenRange => ("TokenRangeError", ""),
        Kind::DocOverflow => ("DocOverflowError", ""),
        Kind::State => ("StateMismatchError", ""),
        Kind::Forked => ("LoaderForkedError", ""),
        _ => ("BadInput", ""),
    };
    let made = py
        .import("jspeed.data.errors")
        .and_then(|module| module.getattr(name))
        .and_then(|class| class.call1((format!("{error}{how}"),)));
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// A bad argument, in the words of another crate.
fn bad(error: impl std::fmt::Display) -> core::Error {
    core::Error::argument(error.to_string())
}

/// Run `work` detached from the interpreter and map its error.
fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, core::Error> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| raise(py, &error))
}

/// Refuse `what` where this process is a fork of `made_in`, in which it was made, and `why`.
fn check_process(py: Python<'_>, made_in: u32, what: &str, why: &str) -> PyResult<()> {
    let here = process::id();
    if made_in == here {
        return Ok(());
    }
    let message = format!(
        "this {what} was made in process {made_in} and cannot be used in its fork {here}, which \
         {why}; make the {what} in the child or start the child with spawn"
    );
    Err(raise(py, &core::Error::new(core::Kind::Forked, message)))
}

/// The header of a shard with `tokens` uint16 tokens, or uint32 ones if `wide`.
#[pyfunction]
#[pyo3(signature = (tokens, wide=false))]
fn header(py: Python<'_>, tokens: i32, wide: bool) -> Bound<'_, PyBytes> {
    let width = if wide { core::Width::Four } else { core::Width::Two };
    PyBytes::new(py, &core::encode_header(tokens, width))
}

/// Which token is never written directly after which other one, as bits: uint8
/// `(size, size / 8)`, the lowest bit first.
#[pyfunction]
fn canonical_mask(
    py: Python<'_>,
    tokens: Vec<PyBackedBytes>,
    size: usize,
) -> PyResult<Bound<'_, PyAny>> {
    let mask =
        detached(py, move || jspeed_tokenizer_mask::canonical_mask(&tokens, size).map_err(bad))?;
    array::numpy(py, &Arc::new(mask), |mask| mask, "u1", &[size, size / 8])
}

/// Bytes of memory that this process may still use, None where the system does not tell.
#[pyfunction]
fn available_memory() -> Option<u64> {
    jspeed_row_table::available_memory()
}

#[pymodule(gil_used = false)]
mod _dataloader {
    #[pymodule_export]
    const HEADER_BYTES: usize = super::core::HEADER_BYTES;
    #[pymodule_export]
    use super::available_memory;
    #[pymodule_export]
    use super::batch::Batch;
    #[pymodule_export]
    use super::canonical_mask;
    #[pymodule_export]
    use super::header;
    #[pymodule_export]
    use super::index::{ContextIndex, Matches};
    #[pymodule_export]
    use super::loader::TokenLoader;
    #[pymodule_export]
    use super::rows::{RowPart, RowTable};
    #[pymodule_export]
    use super::shards::Shards;
}
