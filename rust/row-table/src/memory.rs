//! The memory of a table: how much it takes, how much there is, and mappings that take it as it is
//! touched.

use std::path::Path;

use memmap2::{MmapMut, MmapOptions};

use crate::{Error, Moment};

/// Bytes of a table of which so many rows are in use.
pub fn bytes(rows: usize, width: usize, used: usize) -> usize {
    let row = width * size_of::<u16>() + size_of::<Moment>() + size_of::<u32>();
    used * row + rows * size_of::<u32>()
}

/// Refuse a table that would not fit when full: the system would kill the process hours later.
pub fn check(
    rows: usize,
    width: usize,
    capacity: usize,
    available: Option<u64>,
) -> Result<(), Error> {
    let (full, empty) = (bytes(rows, width, capacity), bytes(rows, width, 0));
    let Some(there) = available.and_then(|bytes| usize::try_from(bytes).ok()) else {
        return Ok(());
    };
    if full <= there {
        return Ok(());
    }
    let most = there.saturating_sub(empty) / (bytes(0, width, 1));
    let lower = match most {
        0 => "lower num_rows".to_owned(),
        most => format!("lower capacity, to {most} or less"),
    };
    Err(Error(format!(
        "a table of {rows} rows of {width} numbers, {capacity} of them in use, needs {}, but this \
         process may use {} now; {lower}",
        gigabytes(full),
        gigabytes(there)
    )))
}

fn gigabytes(bytes: usize) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let bytes = bytes as f64;
    if bytes < 1e9 { format!("{:.3} MB", bytes / 1e6) } else { format!("{:.1} GB", bytes / 1e9) }
}

/// Zeros that take memory once they are touched; in large pages where `huge` and the system has
/// them.
pub fn map(bytes: usize, huge: bool, rows: usize, capacity: usize) -> Result<MmapMut, Error> {
    let map = MmapOptions::new().len(bytes).no_reserve_swap().map_anon().map_err(|error| {
        Error(format!(
            "the system has no {} of addresses for a table of {rows} rows, {capacity} in use \
             ({error}); lower capacity, or allow it (ulimit -v, vm.overcommit_memory)",
            gigabytes(bytes)
        ))
    })?;
    #[cfg(target_os = "linux")]
    if huge {
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = huge;
    Ok(map)
}

/// Bytes that this process may still use: what the system calls available, and no more than its
/// control groups have left. `None` where the system does not tell.
pub fn available() -> Option<u64> {
    available_under(Path::new("/"))
}

/// [`available`], of the files of Linux under `root`.
pub fn available_under(root: &Path) -> Option<u64> {
    let free = memory_available(&read(root.join("proc/meminfo"))?)?;
    let own = read(root.join("proc/self/cgroup")).unwrap_or_default();
    // Version 2 has one line, "0::/path"; a group is limited by all above it.
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let groups = root.join("sys/fs/cgroup");
    let own = groups.join(path);
    let left = own.ancestors().take_while(|group| group.starts_with(&groups));
    left.filter_map(group_left).chain([free]).min()
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// What a control group has left: its limit without what is in use but for files, whose pages the
/// kernel frees when it must.
fn group_left(group: &Path) -> Option<u64> {
    let number = |name| read(group.join(name))?.trim().parse::<u64>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    let files = read(group.join("memory.stat"))
        .and_then(|text| {
            let of = |name| {
                text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
            };
            Some(of("inactive_file ")? + of("active_file ")?)
        })
        .unwrap_or_default();
    Some(limit.saturating_sub(used.saturating_sub(files)))
}

fn memory_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(1024 * line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?)
}
