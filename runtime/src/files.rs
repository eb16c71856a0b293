//! Opens files that others made: only files of bounded length, and only those that memory can hold.
//!
//! A pipe without a writer would block forever, a device may never end, and a sparse file may be longer than memory. All
//! of them are refused before a byte is read. Pipes that this process inherited are read, as a shell passes them.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Opens a regular file, or a pipe or terminal that this process inherited (`/dev/stdin`, `/dev/fd/63`).
///
/// # Errors
/// [`ErrorKind::IsADirectory`] for a folder, and [`ErrorKind::InvalidInput`] for pipes, sockets and devices.
pub fn open(file: &Path) -> Result<File> {
    let is_inherited = ["/dev/stdin", "/dev/fd", "/proc/self/fd"].iter().any(|own| file.starts_with(own));
    let mut how = OpenOptions::new();
    how.read(true);
    if !is_inherited {
        // Opening a pipe would wait for its writer.
        how.custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY);
    }
    let opened = how.open(file)?;
    let kind = opened.metadata()?.file_type();
    let refused = |what: &str| Err(Error::new(ErrorKind::InvalidInput, format!("is {what}, not a file")));
    match () {
        _ if kind.is_file() => Ok(opened),
        _ if kind.is_dir() => Err(Error::new(ErrorKind::IsADirectory, "is a directory, not a file")),
        _ if kind.is_block_device() => refused("a device"),
        _ if is_inherited => Ok(opened),
        _ if kind.is_fifo() => refused("a pipe"),
        _ if kind.is_socket() => refused("a socket"),
        _ => refused("a device"),
    }
}

/// Reads a whole file.
///
/// # Errors
/// Those of [`open`], and [`ErrorKind::OutOfMemory`] if the file is longer than the memory that is available.
pub fn read(file: &Path) -> Result<Vec<u8>> {
    read_within(file, available_memory().unwrap_or(u64::MAX))
}

/// Reads a whole file of at most `most` bytes.
fn read_within(file: &Path, most: u64) -> Result<Vec<u8>> {
    let mut opened = open(file)?;
    let metadata = opened.metadata()?;
    let length = if metadata.is_file() { metadata.len() } else { 0 };
    let too_long = |length: &str| {
        let problem = format!("has {length} bytes, but only {most} bytes of memory are available");
        Error::new(ErrorKind::OutOfMemory, problem)
    };
    if length > most {
        return Err(too_long(&length.to_string()));
    }
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(usize::try_from(length).unwrap_or(usize::MAX))
        .map_err(|_| too_long(&length.to_string()))?;
    // A file may grow while it is read, and files of the system have no length.
    (&mut opened).take(most).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == most && most > length {
        return Err(too_long("at least as many"));
    }
    Ok(bytes)
}

/// Reads a whole file of UTF-8 text.
///
/// # Errors
/// Those of [`read`], and [`ErrorKind::InvalidData`] for other text.
pub fn read_text(file: &Path) -> Result<String> {
    String::from_utf8(read(file)?).map_err(|_| Error::new(ErrorKind::InvalidData, "is not UTF-8 text"))
}

/// Where the content of a file goes that the user named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A file, old or new: a complete one is renamed over it.
    Renamed(PathBuf),
    /// A device, a pipe, or a file that a process has open: it is written to, as it would be lost if it were replaced.
    Written(PathBuf),
}

impl Destination {
    /// Follows links, so that a link stays a link.
    pub fn of(file: &Path) -> Destination {
        // A dangling link does not resolve; opening it creates its target.
        let target = file.canonicalize().unwrap_or(file.to_path_buf());
        // Files that are open here belong to a process that would not see them replaced.
        let is_open = ["/dev", "/proc"].iter().any(|directory| file.starts_with(directory));
        match std::fs::symlink_metadata(&target) {
            Ok(found) if is_open || !found.is_file() => Destination::Written(target),
            _ => Destination::Renamed(target),
        }
    }
}

/// Writes a file that the user named: as [`replace`] does, or into what its name stands for.
pub fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    match Destination::of(file) {
        Destination::Renamed(target) => replace(&target, bytes),
        Destination::Written(target) => std::fs::write(target, bytes),
    }
}

/// Writes a file by renaming a complete one over it, so that a reader sees the old content or the new, and so does
/// whoever starts after the power failed. The temporary file beside it has a name that cannot be guessed, and never
/// follows a link. An existing file keeps its permissions.
pub fn replace(file: &Path, bytes: &[u8]) -> Result<()> {
    let mut beside = beside(file)?;
    beside.write_all(bytes)?;
    publish(beside, file)
}

/// A temporary file for the new content of a file, which [`publish`] makes visible.
pub fn beside(file: &Path) -> Result<NamedTempFile> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    // As any new file, as far as the user's mask leaves it.
    let new = Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(&format!(".{name}.")).suffix(".part").permissions(new).tempfile_in(folder_of(file))
}

/// Flushes a complete temporary file and renames it, as [`replace`] does.
pub fn publish(beside: NamedTempFile, file: &Path) -> Result<()> {
    let found = std::fs::symlink_metadata(file).ok().filter(|found| found.is_file());
    found.map_or(Ok(()), |found| beside.as_file().set_permissions(found.permissions()))?;
    beside.as_file().sync_all()?;
    beside.persist(file).map_err(|error| error.error)?;
    // A system that cannot flush folders has renamed nevertheless.
    let _ = File::open(folder_of(file)).and_then(|folder| folder.sync_all());
    Ok(())
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Bytes of memory that this process can still take: what the system has left, or what its control groups leave.
/// `None` if the system reports neither.
pub fn available_memory() -> Option<u64> {
    available_under(&limits())
}

fn available_under(limits: &[Limit]) -> Option<u64> {
    let of_groups = limits.iter().map(|limit| limit.most.saturating_sub(limit.used)).min();
    of_system("MemAvailable").into_iter().chain(of_groups).min()
}

/// Bytes of memory and swap that this machine has, or of memory that the control groups of this process allow. `None`
/// if the system reports neither.
pub fn whole_memory() -> Option<u64> {
    whole_under(&limits())
}

fn whole_under(limits: &[Limit]) -> Option<u64> {
    let of_groups = limits.iter().map(|limit| limit.most).min();
    let of_machine = of_system("MemTotal").map(|bytes| bytes + of_system("SwapTotal").unwrap_or(0));
    of_machine.into_iter().chain(of_groups).min()
}

/// A line of `/proc/meminfo`, in bytes.
fn of_system(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// A limit of a control group, and the bytes that count against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    most: u64,
    used: u64,
}

fn limits() -> Vec<Limit> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limits_in(Path::new("/sys/fs/cgroup"), &groups)
}

/// The limits of this process's control groups and those above them. `groups` is the text of `/proc/self/cgroup`:
/// `0::/PATH` for version 2, and `N:memory:/PATH` for version 1.
fn limits_in(root: &Path, groups: &str) -> Vec<Limit> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (mount, [most, used]) = match controllers {
            "" => (root.to_path_buf(), ["memory.max", "memory.current"]),
            list if list.split(',').any(|controller| controller == "memory") => {
                (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => continue,
        };
        // Inside a container the path may be that of the host, and the mount itself is the group.
        let own = mount.join(path.trim_start_matches('/'));
        for folder in own.ancestors().take_while(|folder| folder.starts_with(&mount)) {
            let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
            // A group without a limit says `max`, or a number near the largest.
            if let Some(most) = number(most).filter(|&most| most < i64::MAX as u64 / 2) {
                let cached = cached_bytes(&folder.join("memory.stat"));
                found.push(Limit { most, used: number(used).unwrap_or(0).saturating_sub(cached) });
            }
        }
    }
    found
}

/// Bytes of a group that are only copies of files, which the system gives up when memory is short.
fn cached_bytes(stat: &Path) -> u64 {
    let text = std::fs::read_to_string(stat).unwrap_or_default();
    let number = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let of_list = |list: &str| number(&format!("total_{list} ")).or(number(&format!("{list} "))).unwrap_or(0);
    of_list("inactive_file") + of_list("active_file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("altiplano-files-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    #[test]
    fn pipes_folders_devices_and_endless_files_are_refused_at_once() {
        let folder = scratch("kinds");
        let pipe = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
        let sparse = folder.join("sparse");
        File::create(&sparse).and_then(|file| file.set_len(1 << 42)).expect("a sparse file");
        let cases = [
            (pipe.as_path(), ErrorKind::InvalidInput, "is a pipe"),
            (&folder, ErrorKind::IsADirectory, "is a directory"),
            (Path::new("/dev/zero"), ErrorKind::InvalidInput, "is a device"),
            (&sparse, ErrorKind::OutOfMemory, "has 4398046511104 bytes"),
        ];
        for (file, kind, text) in cases {
            let error = read(file).expect_err("it is refused");
            assert_eq!(error.kind(), kind, "{}", file.display());
            assert!(error.to_string().starts_with(text), "{error}");
        }
        let plain = folder.join("plain");
        std::fs::write(&plain, b"text\xff").expect("a file");
        assert_eq!(read(&plain).expect("it is read"), b"text\xff");
        assert_eq!(read_text(&plain).expect_err("it is no text").kind(), ErrorKind::InvalidData);
        std::fs::remove_dir_all(folder).expect("it goes");
    }

    #[test]
    fn files_are_replaced_whole_and_no_link_is_followed() {
        let folder = scratch("replace");
        let file = folder.join("plan.json");
        let bait = folder.join("bait");
        std::fs::write(&bait, "bait").expect("a file");
        // The names that temporary files had when they could be guessed.
        for name in ["plan.json.part", &format!("plan.json.{}.part", std::process::id())] {
            std::os::unix::fs::symlink(&bait, folder.join(name)).expect("a link");
        }
        replace(&file, b"one").expect("it is written");
        std::fs::set_permissions(&file, Permissions::from_mode(0o640)).expect("it is ours");
        replace(&file, b"two").expect("it is written");
        assert_eq!(std::fs::read(&file).expect("a file"), b"two");
        assert_eq!(std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o640);
        assert_eq!(std::fs::read(&bait).expect("a file"), b"bait");
        assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 4, "nothing is left");
        std::fs::remove_dir_all(folder).expect("it goes");
    }

    #[test]
    fn control_groups_of_both_versions_limit_memory() {
        let root = scratch("groups");
        let write = |path: &str, text: &str| {
            let file = root.join(path);
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            std::fs::write(file, text).expect("a file");
        };
        write("job/memory.max", "4096\n");
        write("job/memory.current", "1024\n");
        write("job/memory.stat", "anon 1\nactive_file 4\ninactive_file 20\n");
        write("job/step/memory.max", "max\n");
        let job = limits_in(&root, "0::/job/step\n");
        assert_eq!(job, [Limit { most: 4096, used: 1000 }]);
        assert_eq!((available_under(&job), whole_under(&job)), (Some(3096), Some(4096)));
        let file = root.join("long");
        for (length, fits) in [(3096, true), (3097, false)] {
            std::fs::write(&file, vec![0; length]).expect("a file");
            let read = read_within(&file, 3096).map_err(|error| error.kind());
            assert_eq!(read.map(|bytes| bytes.len()), if fits { Ok(length) } else { Err(ErrorKind::OutOfMemory) });
        }
        write("memory/memory.limit_in_bytes", "8192\n");
        write("memory/memory.usage_in_bytes", "100\n");
        write("memory/b/memory.limit_in_bytes", "9223372036854771712\n");
        let first = "11:cpu,cpuacct:/b\n9:memory:/b\n";
        assert_eq!(limits_in(&root, first), [Limit { most: 8192, used: 100 }]);
        // The path of a host, as a container sees it.
        assert_eq!(limits_in(&root, "9:memory:/docker/0123\n"), [Limit { most: 8192, used: 100 }]);
        assert_eq!(limits_in(&root, "1:cpu:/b\n"), []);
        std::fs::remove_dir_all(root).expect("it goes");
    }
}
