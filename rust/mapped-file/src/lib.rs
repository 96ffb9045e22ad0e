//! A mapped file that may be truncated while it is read: its reader gets zeros and a flag, no
//! signal.
//!
//! Touching a page of a mapping that its file no longer has raises SIGBUS in the thread that
//! touches it. Asking the kernel before every touch leaves a gap, which a truncation fits into. So
//! mappings are written down in a table, and a handler answers a fault inside one of them: it puts
//! zeros where the mapping was, sets its flag and returns. Whoever copied from a mapping looks at
//! the flag before the copy is used.
//!
//! Every other SIGBUS belongs to the handler that was there before. Calling it would mean to
//! imitate its flags, mask and stack, so it is put back instead, and the fault happens again; a
//! signal that was sent is sent again. Nothing is put on top of a handler that came later, such as
//! that of Python's faulthandler, which may call this one in turn: [`armed`] says no, and shards
//! are read by `pread` from then on.
//!
//! The handler loads and stores atomics and makes system calls, all of which a signal may
//! interrupt. It looks at the mappings of its own thread only, which cannot change meanwhile: a
//! [`Mapping`] is neither sent nor shared, so whoever unmaps one is not in the middle of reading
//! it. After a fork the child has the table and the handler, and no lock that another thread could
//! hold, but for the instant in which a process stores the action that its handler replaces.
#![deny(missing_docs)]

#[cfg_attr(not(all(target_os = "linux", not(miri))), path = "no_mapping.rs")]
mod mapping;

pub use mapping::{Mapping, armed};
