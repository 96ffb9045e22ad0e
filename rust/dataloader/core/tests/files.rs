//! Damaged and changing shard files; lifetime of the prefetch thread.

mod common;

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Folder, arguments, loader, next, shard, wide_shard};
use jspeed_dataloader_core::header::{HeaderError, Width};
use jspeed_dataloader_core::reader::Backend;
use jspeed_dataloader_core::{Arguments, Catalog, Error, Loader, Next, Wait};

fn contiguous() -> Arguments {
    let mut given = arguments(2, &[(1000, 1000, None)]);
    (given.align, given.epochs) = (None, None);
    given
}

fn big(folder: &Folder, backend: Backend) -> (PathBuf, Loader) {
    let paths = folder.write(&[vec![3; 100_000]]);
    (paths[0].clone(), loader(&paths, &contiguous(), backend).unwrap())
}

fn cut(path: &Path, size: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(size).unwrap();
}

#[test]
fn wrong_files_are_told_apart() {
    let folder = Folder::new();
    let open = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Catalog::open(vec![path]).unwrap_err()
    };
    let good = shard(&[1, 2, 3]);
    let fault = |error: Error| match error {
        Error::Format { fault, .. } => fault,
        other => panic!("{other}"),
    };
    assert_eq!(fault(open("a.bin", &good[..1023])), HeaderError::NoHeader(1023));
    assert_eq!(fault(open("b.bin", &[])), HeaderError::NoHeader(0));
    assert_eq!(
        fault(open("c.bin", &good[..1029])),
        HeaderError::Short { count: 3, width: Width::Two, size: 1029 }
    );
    assert_eq!(
        fault(open("d.bin", &[&good[..], &[0]].concat())),
        HeaderError::Long { count: 3, width: Width::Two, size: 1031 }
    );
    assert_eq!(fault(open("e.bin", &shard(&[]))), HeaderError::Count(0));
    assert_eq!(fault(open("f.bin", &[9; 2000])), HeaderError::Magic(0x0909_0909));
    let missing = Catalog::open(vec![folder.path().join("none.bin")]).unwrap_err();
    assert!(missing.to_string().contains("No such file or directory") && matches!(missing, Error::Io { .. }));
    assert!(matches!(Catalog::open(vec![folder.path().to_owned()]), Err(Error::Io { .. })));
    let (narrow, wide) = (folder.path().join("narrow.bin"), folder.path().join("wide.bin"));
    std::fs::write(&narrow, &good).unwrap();
    std::fs::write(&wide, wide_shard(&[1, 2, 3])).unwrap();
    let mixed = Catalog::open(vec![wide, narrow]).unwrap_err().to_string();
    assert!(mixed.contains("wide.bin holds uint32 tokens but "), "{mixed}");
    assert!(matches!(Catalog::open(vec![]), Err(Error::Argument { .. })));
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
            assert!(matches!(error, Error::Resized { was: 201_024, now, .. } if now == size), "{error}");
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
    assert!(matches!(next(&made), Err(Error::Changed { .. })));
}

#[test]
fn a_token_outside_the_vocabulary_is_named_by_position() {
    let folder = Folder::new();
    let mut tokens = vec![3; 5000];
    tokens[2500] = 70;
    let paths = folder.write(&[tokens]);
    let mut given = contiguous();
    given.vocab_size = Some(70);
    let made = loader(&paths, &given, Backend::Map).unwrap();
    next(&made).unwrap();
    let Err(Error::TokenRange { path, offset, token, vocab_size }) = next(&made) else { panic!() };
    assert_eq!((path, offset, token, vocab_size), (paths[0].clone(), 2500, 70, 70));
    given.vocab_size = Some(71);
    let made = loader(&paths, &given, Backend::Map).unwrap();
    assert!((0..4).all(|_| next(&made).is_ok()));
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
    let mut given = arguments(2, &[(10, 1000, None)]);
    (given.bos_id, given.prefetch) = (7, 2);
    loader(&paths, &given, Backend::Map).unwrap()
}

#[test]
fn waits_end_in_time_and_closing_does_not_wait_for_the_scan() {
    let folder = Folder::new();
    let made = slow(&folder);
    let began = Instant::now();
    assert!(matches!(made.next(&mut Wait::default(), Duration::from_millis(50)), Ok(Next::Pending)));
    assert_eq!(made.stats().unwrap().queue_empty, 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| made.next(&mut Wait::default(), Duration::from_secs(60)).err());
        std::thread::sleep(Duration::from_millis(50));
        made.close();
        assert!(matches!(waiting.join().unwrap(), Some(Error::Argument { .. })));
    });
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn many_consumers_get_every_batch_once() {
    let folder = Folder::new();
    let mut given = contiguous();
    (given.epochs, given.prefetch) = (Some(1), 2);
    let paths = folder.write(&[vec![3; 100_001]]);
    let made = loader(&paths, &given, Backend::Map).unwrap();
    let mut steps: Vec<u64> = std::thread::scope(|scope| {
        let consume =
            || std::iter::from_fn(|| next(&made).unwrap().map(|batch| batch.step)).collect::<Vec<_>>();
        let consumers: Vec<_> = (0..4).map(|_| scope.spawn(consume)).collect();
        consumers.into_iter().flat_map(|consumer| consumer.join().unwrap()).collect()
    });
    steps.sort_unstable();
    assert_eq!(steps, (0..50).collect::<Vec<_>>());
    assert_eq!(made.stats().unwrap().batches, 50);
}
