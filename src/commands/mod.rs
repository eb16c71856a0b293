//! The subcommands, and the writing to stdout that they share.

pub mod calibrate;
pub mod clusters;
pub mod compare;
pub mod demo;
pub mod fidelity;
pub mod import;
pub mod inspect;
pub mod options;
pub mod plan;
pub mod probe;
pub mod profile;
pub mod run;
pub mod show;
pub mod simulate;
pub mod verify;

use altiplano::{Error, Model};
use std::fmt::Display;
use std::io::Write;

/// Writes a line to stdout; a reader that has gone away is an error like any other, which `main` takes for the end.
fn say(text: impl Display) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Error::Output)
}

/// Says on stderr what was odd about a model.
fn warn(model: &Model) {
    for warning in &model.warnings {
        eprintln!("{}: {warning}", if warning.is_note() { "note" } else { "warning" });
    }
}
