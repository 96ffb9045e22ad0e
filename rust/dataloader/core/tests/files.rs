//! Damaged and changing shard files; lifetime of the prefetch thread.

mod common;

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Folder, config, loader, next, shard, wide_shard};
use jspeed_dataloader_core::{Backend, Catalog, Config, Kind, Loader, Order};

fn contiguous() -> Config {
    let mut made = config(2, &[(1000, 1000, None)]);
    (made.order, made.epochs) = (Order::Contiguous, None);
    made
}

fn big(folder: &Folder, backend: Backend) -> (PathBuf, Loader) {
    let paths = folder.write(&[vec![3; 100_000]]);
    (paths[0].clone(), loader(&paths, &contiguous(), backend).unwrap())
}

fn cut(path: &Path, size: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(size).unwrap();
}

#[test]
fn shards_of_two_widths_are_refused() {
    let folder = Folder::new();
    let (narrow, wide) = (folder.path().join("narrow.bin"), folder.path().join("wide.bin"));
    std::fs::write(&narrow, shard(&[1, 2, 3])).unwrap();
    std::fs::write(&wide, wide_shard(&[1, 2, 3])).unwrap();
    let mixed = Catalog::open(vec![wide, narrow]).unwrap_err().to_string();
    assert!(mixed.contains("wide.bin holds uint32 tokens but "), "{mixed}");
}

#[test]
fn the_fingerprint_depends_on_names_and_sizes_but_not_on_the_folder() {
    let (one, two) = (Folder::new(), Folder::new());
    let print = |paths| Catalog::open(paths).unwrap().fingerprint().to_owned();
    let first = print(one.write(&[vec![1; 9], vec![2; 5]]));
    let mut turned = two.write(&[vec![1; 9], vec![2; 5]]);
    turned.reverse();
    assert_eq!(first, print(turned));
    assert_ne!(first, print(two.write(&[vec![1; 9], vec![2; 6]])));
    assert_eq!(first.len(), 32);
}

#[test]
fn a_shard_that_shrinks_is_an_error_and_not_a_signal() {
    for backend in [Backend::Map, Backend::Pread] {
        for size in [0, 5_100, 90_000, 201_022] {
            let folder = Folder::new();
            let (path, made) = big(&folder, backend);
            next(&made).unwrap();
            cut(&path, size);
            let error = next(&made).err().unwrap();
            let told = format!("had 201024 bytes when it was opened and has {size} now");
            assert!(error.kind == Kind::Changed && error.to_string().contains(&told), "{error}");
        }
    }
}

#[test]
fn a_shard_written_in_place_is_an_error_and_a_renamed_one_is_not() {
    let folder = Folder::new();
    let (path, made) = big(&folder, Backend::Map);
    next(&made).unwrap();
    std::fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    assert!(next(&made).unwrap().is_some());
    std::fs::remove_file(folder.path().join("elsewhere")).unwrap();
    assert!(next(&made).unwrap().is_some());

    let (path, made) = big(&folder, Backend::Map);
    next(&made).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let mut file = OpenOptions::new().write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(50_000)).unwrap();
    file.write_all(&[1, 1]).unwrap();
    let error = next(&made).err().unwrap();
    assert!(error.kind == Kind::Changed && error.to_string().contains("was written to"), "{error}");
}

/// A stream whose thread scans for minutes: shards without a single document start.
fn slow(folder: &Folder) -> Loader {
    let paths: Vec<_> = (0..500)
        .map(|index| {
            let path = folder.path().join(format!("slow_{index:03}.bin"));
            if index == 0 {
                std::fs::write(&path, &shard(&[1; 8])[..1024]).unwrap();
                let mut file = OpenOptions::new().write(true).open(&path).unwrap();
                file.seek(SeekFrom::Start(8)).unwrap();
                file.write_all(&100_000_000i32.to_le_bytes()).unwrap();
                cut(&path, 1024 + 200_000_000);
            } else {
                std::fs::hard_link(folder.path().join("slow_000.bin"), &path).unwrap();
            }
            path
        })
        .collect();
    let mut given = config(2, &[(10, 1000, None)]);
    (given.bos_id, given.prefetch) = (7, 2);
    loader(&paths, &given, Backend::Map).unwrap()
}

#[test]
fn waits_end_in_time_and_closing_does_not_wait_for_the_scan() {
    let folder = Folder::new();
    let made = slow(&folder);
    let began = Instant::now();
    assert!(made.next_batch(|| false).err().unwrap().to_string().contains("was stopped"));
    assert_eq!(made.stats().unwrap().queue_empty, 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| next(&made).err());
        std::thread::sleep(Duration::from_millis(50));
        made.close();
        assert!(waiting.join().unwrap().unwrap().to_string().contains("closed"));
    });
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}
