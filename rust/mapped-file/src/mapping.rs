//! Linux: mappings, and the handler of faults in them.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};

use libc::{sigaction, siginfo_t};
use memmap2::Mmap;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// A thread maps two shards at a time; where all slots are taken, `pread` reads.
static SLOTS: [Slot; 128] = [const { Slot::free() }; 128];

/// The action that the handler replaced.
static REPLACED: OnceLock<sigaction> = OnceLock::new();

/// A line of the table.
struct Slot {
    /// The thread that reads the mapping; 0 for a free slot.
    thread: AtomicI32,
    start: AtomicUsize,
    len: AtomicUsize,
    torn: AtomicBool,
}

impl Slot {
    const fn free() -> Self {
        let [start, len] = [const { AtomicUsize::new(0) }; 2];
        Self { thread: AtomicI32::new(0), start, len, torn: AtomicBool::new(false) }
    }
}

/// The bytes of a file, for the thread that mapped it alone.
pub struct Mapping {
    map: Mmap,
    slot: &'static Slot,
    one_thread: PhantomData<*const ()>,
}

impl Mapping {
    /// Map a file; `None` where that fails or faults cannot be answered, as too many are mapped.
    pub fn new(file: &File) -> Option<Self> {
        if !armed() {
            return None;
        }
        // SAFETY: another process may change or truncate the file. Its bytes have no invariant,
        // what is copied is used only if the file is found unchanged, and the handler
        // answers faults.
        #[expect(unsafe_code, reason = "mapping a file that may change has no safe interface")]
        let map = unsafe { Mmap::map(file) }.ok()?;
        let thread = this_thread();
        let free = |slot: &&Slot| slot.thread.compare_exchange(0, thread, SeqCst, SeqCst).is_ok();
        let slot = SLOTS.iter().find(free)?;
        slot.start.store(map.as_ptr().addr(), SeqCst);
        slot.len.store(map.len(), SeqCst);
        slot.torn.store(false, SeqCst);
        Some(Self { map, slot, one_thread: PhantomData })
    }

    /// The bytes. They mean nothing once [`Mapping::is_torn`].
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Whether a part was read that the file no longer had, or that could not be read.
    pub fn is_torn(&self) -> bool {
        self.slot.torn.load(SeqCst)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.slot.len.store(0, SeqCst);
        self.slot.thread.store(0, SeqCst);
    }
}

/// Whether faults of this thread are answered: the handler is installed, now or before, and the
/// signal not blocked, as it is where a thread was started with all signals blocked.
pub fn armed() -> bool {
    // SAFETY: the structures are zeroed, as C would have them, or filled in by the system. The
    // handler has the signature that SA_SIGINFO asks for, and the action that it replaces is
    // stored before.
    #[expect(unsafe_code, reason = "signal actions and masks have no safe interface")]
    unsafe {
        let mut bus: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut bus, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const bus, ptr::null_mut());
        let mut now: sigaction = std::mem::zeroed();
        if sigaction(libc::SIGBUS, ptr::null(), &raw mut now) != 0 {
            return false;
        }
        let ours = on_bus_error as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        if now.sa_sigaction == ours {
            return true;
        }
        if REPLACED.get_or_init(|| now).sa_sigaction != now.sa_sigaction {
            return false;
        }
        let mut action: sigaction = std::mem::zeroed();
        action.sa_sigaction = ours;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) == 0
    }
}

/// Answer a fault inside a mapping of this thread; leave any other to the action before.
extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the system passes a valid `info`. The zeros replace pages of a mapping that this
    // thread owns, and is reading, so it stays mapped. The action was stored before this
    // handler was installed. Nothing here allocates, locks or sets errno but for a failure that
    // ends the process.
    #[expect(unsafe_code, reason = "a signal handler has no safe interface")]
    unsafe {
        let caused_here = (*info).si_code > 0 && (*info).si_code != libc::BUS_MCEERR_AO;
        if caused_here {
            let (address, thread) = ((*info).si_addr().addr(), this_thread());
            for slot in SLOTS.iter().filter(|slot| slot.thread.load(SeqCst) == thread) {
                let (start, len) = (slot.start.load(SeqCst), slot.len.load(SeqCst));
                if (start..start + len).contains(&address) {
                    slot.torn.store(true, SeqCst);
                    let place = ptr::without_provenance_mut(start);
                    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
                    if mmap_anonymous(place, len, ProtFlags::READ, flags).is_ok() {
                        return;
                    }
                }
            }
        }
        sigaction(signal, REPLACED.get().map_or(ptr::null(), ptr::from_ref), ptr::null_mut());
        if !caused_here {
            libc::raise(signal);
        }
    }
}

fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A file of three pages of ones.
    fn ones() -> File {
        let mut file = tempfile();
        file.write_all(&[1; 3 * 4096]).unwrap();
        file
    }

    fn tempfile() -> File {
        let path = std::env::temp_dir().join(format!("jspeed-{}", this_thread()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        std::fs::remove_file(path).unwrap();
        file.unwrap()
    }

    #[test]
    fn a_page_that_the_file_no_longer_has_is_zeros_and_a_flag() {
        let files = [ones(), ones()];
        let [cut, whole] = files.each_ref().map(|file| Mapping::new(file).unwrap());
        files[0].set_len(4096).unwrap();
        assert_eq!((cut.bytes()[0], cut.is_torn()), (1, false));
        assert_eq!(cut.bytes()[4096], 0);
        assert!(cut.is_torn() && !whole.is_torn());
        assert_eq!(whole.bytes()[2 * 4096], 1);
        drop(cut);
        assert!(!Mapping::new(&files[0]).unwrap().is_torn());
    }

    #[test]
    fn threads_are_answered_apart() {
        let readers = (0..8).map(|reader| {
            std::thread::spawn(move || {
                for _ in 0..200 {
                    let file = ones();
                    let map = Mapping::new(&file).unwrap();
                    file.set_len(0).unwrap();
                    let sum: u32 =
                        map.bytes().iter().step_by(512).map(|&byte| u32::from(byte)).sum();
                    assert_eq!((sum, map.is_torn()), (0, true), "{reader}");
                }
            })
        });
        readers.collect::<Vec<_>>().into_iter().for_each(|reader| reader.join().unwrap());
        assert!(SLOTS.iter().filter(|slot| slot.thread.load(SeqCst) == this_thread()).count() == 0);
    }
}
