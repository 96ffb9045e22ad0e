//! The crate's error: its kind, a complete message (file, expected, found, remedy) and its cause.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// An argument, a call at the wrong time, or shards into which no batch fits.
    Argument,
    /// The operating system refused to open or read a shard.
    Io,
    /// A file is not a valid shard.
    Format,
    /// A shard changed its size or was written to after it was validated.
    Changed,
    /// A token id is outside the vocabulary.
    TokenRange,
    /// A lane holds more documents than its table of offsets.
    DocOverflow,
    /// A saved state belongs to other data or another configuration.
    State,
    /// The loader is used in another process than the one that made it.
    Forked,
}

/// The one error of this crate.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Error {
    /// What went wrong.
    pub kind: Kind,
    message: String,
    source: Option<Arc<std::io::Error>>,
}

impl Error {
    /// An error with its complete message.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// A wrong argument, with its complete message.
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(Kind::Argument, message)
    }

    /// What the system said when a shard was read from byte `offset` on.
    pub(crate) fn io(path: &Path, offset: u64, error: std::io::Error) -> Self {
        let (text, path) = (error.to_string(), path.display());
        let reason = text.split(" (os error").next().unwrap_or(&text);
        let message = format!(
            "shard {path} cannot be read at byte {offset} ({reason}); check the path and its \
             permissions"
        );
        Self { source: Some(Arc::new(error)), ..Self::new(Kind::Io, message) }
    }

    /// The producer was told to stop; never shown to a user.
    pub(crate) fn stopped() -> Self {
        Self::argument("the loader was stopped; make a new one")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|error| error as _)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Convert an argument that the caller called `name`.
///
/// # Errors
/// It is outside `low` to `high`, or of the type's range.
pub fn in_range<T: TryFrom<i64>>(name: &str, value: i64, low: i64, high: i64) -> Result<T, Error> {
    T::try_from(value).ok().filter(|_| (low..=high).contains(&value)).ok_or_else(|| {
        let from = format!("from {low} to {high}");
        let bound = if high == i64::MAX { format!("at least {low}") } else { from };
        Error::argument(format!("{name} should be {bound} but is {value}; choose another value"))
    })
}
