//! Outputs of a command that would replace one of its inputs.

use altiplano::Error;
use clap::ArgMatches;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;

/// The arguments that name files to write.
const OUTPUTS: [(&str, &str); 5] = [
    ("output", "--output"),
    ("html", "--html"),
    ("trace", "--trace"),
    ("metrics", "--metrics"),
    ("write_config", "--write-config"),
];

/// Arguments that name a former output, which a new one may replace.
const FORMER: [&str; 1] = ["from"];

/// Arguments of commands whose output has all that the file had.
const KEPT: [(&str, &str); 2] = [("certify", "plan"), ("prove", "plan")];

/// Fails if an output of a command line is a file that the command reads, under any name.
pub fn expect_apart(command: &ArgMatches) -> Result<(), Error> {
    let Some((name, given)) = command.subcommand() else { return Ok(()) };
    let output_of = |id: &str| OUTPUTS.iter().find(|(output, _)| *output == id);
    let files = |id: &str| {
        let values = given.try_get_raw(id).ok().flatten().into_iter().flatten();
        values.filter_map(identity).collect::<Vec<_>>()
    };
    let ids = || given.ids().map(|id| id.as_str()).filter(|id| !FORMER.contains(id) && !KEPT.contains(&(name, *id)));
    let inputs: Vec<(u64, u64)> = ids().filter(|id| output_of(id).is_none()).flat_map(files).collect();
    for &(output, option) in ids().filter_map(output_of) {
        if files(output).iter().any(|file| inputs.contains(file)) {
            return Err(Error::Option { option, problem: "is a file that the command reads; name another" });
        }
    }
    Ok(())
}

/// The identity of a regular file; `None` for anything else, such as a word or a device.
fn identity(value: &OsStr) -> Option<(u64, u64)> {
    let found = std::fs::metadata(value).ok()?;
    found.is_file().then(|| (found.dev(), found.ino()))
}
