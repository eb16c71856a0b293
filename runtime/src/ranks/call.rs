//! The file by which the processes of a run find its first one: an address, and the process that wrote it.

use crate::files;
use crate::ranks::connect::Address;
use std::fs::DirBuilder;
use std::io::{Error, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

/// The content of the first process's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub address: Address,
    pub pid: u32,
    pub host: String,
}

/// The first line of the file, with the version of the protocol on the connections.
const TITLE: &str = "altiplano rendezvous 3";

/// Limit on the length of the file.
const LONGEST: u64 = 1 << 16;

impl Call {
    fn encode(&self) -> String {
        format!("{TITLE}\n{}\n{}\n{}\n", self.address.encode(), self.pid, self.host)
    }

    fn decode(text: &str) -> Option<Call> {
        let mut lines = text.lines();
        lines.next().filter(|&title| title == TITLE)?;
        let (address, pid) = (Address::decode(lines.next()?)?, lines.next()?.parse().ok()?);
        Some(Call { address, pid, host: lines.next()?.to_string() })
    }

    /// Reads the file, if it is there, complete, and this user's alone.
    pub fn read(file: &Path) -> Option<Call> {
        let open = files::open(file).ok()?;
        // Other writers could name another hub, and other readers could join.
        let found = open.metadata().ok()?;
        if found.uid() != nix::unistd::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            return None;
        }
        let mut text = String::new();
        open.take(LONGEST).read_to_string(&mut text).ok()?;
        Call::decode(&text)
    }

    /// Writes the file atomically: a reader sees the old file or the complete new one. Only this user can read it, and
    /// enter folders that are created for it.
    pub fn write(&self, file: &Path) -> Result<(), Error> {
        let folder = file.parent().unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut beside = tempfile::Builder::new().prefix(".rank-0.").tempfile_in(folder)?;
        beside.write_all(self.encode().as_bytes())?;
        beside.as_file().sync_all()?;
        beside.persist(file).map(drop).map_err(|error| error.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn calls_are_read_as_they_were_written() {
        let address = Address { hosts: vec!["10.0.0.7".parse().expect("an address")], port: 4, token: [9; 16] };
        let call = Call { address, pid: 17, host: "node-b".to_string() };
        assert_eq!(Call::decode(&call.encode()), Some(call.clone()));
        for cut in ["altiplano rendezvous 2", "", "altiplano rendezvous 3\n"] {
            assert_eq!(Call::decode(cut), None);
        }
        let folder = std::env::temp_dir().join(format!("altiplano-call-{}", std::process::id()));
        let file = folder.join("deeper/rank-0");
        call.write(&file).expect("it is written");
        assert_eq!(Call::read(&file).as_ref(), Some(&call));
        // Nobody else may know the token, and a file of which others could know it is not believed.
        let mode = |path: &Path| std::fs::metadata(path).expect("it is there").mode() & 0o777;
        assert_eq!([mode(&file), mode(&folder), mode(&folder.join("deeper"))], [0o600, 0o700, 0o700]);
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).expect("it is ours");
        assert_eq!(Call::read(&file), None);
        let long = folder.join("long");
        let endless = Call { host: "x".repeat(LONGEST as usize), ..call };
        endless.write(&long).expect("it is written");
        assert!(
            Call::read(&long).is_some_and(|found| found.host.len() < endless.host.len()),
            "no more than is allowed"
        );
        assert_eq!(std::fs::read_dir(folder.join("deeper")).expect("a folder").count(), 1);
        std::fs::remove_dir_all(folder).expect("it goes");
    }
}
