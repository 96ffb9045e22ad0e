//! The crate's error type. Every message names file, expected, found and remedy.

use std::fmt;
use std::path::PathBuf;

use crate::header::HeaderError;

/// The one error of this crate. `offset` is in bytes from the start of the file unless it says tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// An argument, or a call at the wrong time; the text is the complete message.
    Argument {
        /// The message.
        message: String,
    },
    /// The operating system refused to open or read a shard.
    Io {
        /// The shard.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// The system's reason.
        reason: String,
    },
    /// A file that is not a valid shard.
    Format {
        /// The shard.
        path: PathBuf,
        /// Byte offset of the fault.
        offset: u64,
        /// What it is.
        fault: HeaderError,
    },
    /// A shard changed its size after it was validated.
    Resized {
        /// The shard.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Size in bytes when the shard was validated.
        was: u64,
        /// Size in bytes now.
        now: u64,
    },
    /// A shard was written to, or its disk failed, while it was read.
    Changed {
        /// The shard.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
    },
    /// A token id outside the vocabulary.
    TokenRange {
        /// The shard.
        path: PathBuf,
        /// Position in tokens, from the first token of the shard.
        offset: usize,
        /// The id found.
        token: u32,
        /// The size of the vocabulary.
        vocab_size: u32,
    },
    /// A lane holds more documents than its table of offsets.
    DocOverflow {
        /// The shard in which the lane starts.
        path: PathBuf,
        /// Position in tokens at which the lane starts.
        offset: usize,
        /// The step, from 0.
        step: u64,
        /// The lane, counted over all processes.
        lane: usize,
        /// Documents in the lane.
        found: usize,
        /// The size of the table.
        max_docs: usize,
        /// The smallest table that this batch fits, where all of its lanes were counted.
        fits: Option<usize>,
    },
    /// A whole epoch went by without a single batch.
    NoBatch {
        /// The first shard.
        path: PathBuf,
        /// How many shards were searched.
        shards: usize,
        /// Lanes of a batch.
        lanes: usize,
        /// Tokens of a lane.
        lane_len: usize,
        /// The document marker that was looked for, when lanes start at documents.
        bos_id: Option<u32>,
    },
    /// A saved state that belongs to other data or another configuration.
    State {
        /// The field that differs.
        field: String,
        /// What this loader has.
        expected: String,
        /// What the state has.
        found: String,
    },
    /// The loader is used in another process than the one that made it.
    Forked {
        /// The process that made it.
        made_in: u32,
        /// This process.
        here: u32,
    },
    /// The producer was told to stop; never shown to a user.
    Stopped,
}

impl Error {
    /// A wrong argument, with its complete message.
    #[must_use]
    pub fn argument(message: impl Into<String>) -> Self {
        Self::Argument { message: message.into() }
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument { message } => f.write_str(message),
            Self::Io { path, offset, reason } => write!(
                f,
                "shard {} cannot be read at byte {offset} ({reason}); check the path and its permissions, or make \
                 shards with `jspeed prepare text FILES --out DIR`",
                path.display()
            ),
            Self::Format { path, fault, .. } => write!(f, "shard {} {fault}", path.display()),
            Self::Resized { path, offset, was, now } => write!(
                f,
                "shard {} had {was} bytes when it was opened and has {now} now, noticed while reading at byte \
                 {offset}; restore it, and replace shards by renaming a finished file over them",
                path.display()
            ),
            Self::Changed { path, offset } => write!(
                f,
                "shard {} was written to, or its disk failed, while it was read at byte {offset}; restore it, and \
                 replace shards by renaming a finished file over them",
                path.display()
            ),
            Self::TokenRange { path, offset, token, vocab_size } => write!(
                f,
                "shard {} holds token id {token} at token position {offset}, but vocab_size={vocab_size} allows \
                 ids below {vocab_size} only; use the vocabulary the shard was made with or make the shard again",
                path.display()
            ),
            Self::DocOverflow { path, offset, step, lane, found, max_docs, fits } => {
                write!(
                    f,
                    "step {step}, lane {lane} (shard {}, token {offset}) holds {found} documents but \
                     max_docs={max_docs}; set max_docs to at least ",
                    path.display()
                )?;
                match fits {
                    Some(fits) => write!(f, "{fits}, the most in a lane of this batch"),
                    None => write!(f, "{found}, or more where other lanes hold more"),
                }
            }
            Self::NoBatch { path, shards, lanes, lane_len, bos_id } => {
                write!(f, "no batch of {lanes} lanes x {lane_len} tokens")?;
                if let Some(bos_id) = bos_id {
                    write!(f, " that start at a document (token {bos_id})")?;
                }
                write!(
                    f,
                    " fits into any of {shards} shard(s) from {}; use fewer lanes, a shorter lane_len or larger shards",
                    path.display()
                )
            }
            Self::State { field, expected, found } => write!(
                f,
                "the saved state differs in {field}: this loader has {expected}, the state has {found}; resume with \
                 the data and settings that the state was saved with"
            ),
            Self::Forked { made_in, here } => write!(
                f,
                "this loader was made in process {made_in} and cannot be used in its fork {here}, which has none of \
                 its threads; make the loader in the child or start the child with spawn"
            ),
            Self::Stopped => f.write_str("the loader was stopped; make a new one"),
        }
    }
}
