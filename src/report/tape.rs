//! Prints the tape of one GPU as text.

use crate::error::Error;
use altiplano_ir::program::Programs;
use altiplano_runtime::tape::{Options, build};

/// The tape of the device of a rank, command by command.
///
/// # Errors
/// Fails if there is no such device, or if one of its kernels has no loop program yet.
pub fn tape_text(programs: &Programs, rank: u32) -> Result<String, Error> {
    let devices = programs.programs.iter().map(|p| p.devices.len() as u32).sum();
    let tapes = build(programs, &Options::default()).map_err(|error| Error::Tape { error: Box::new(error) })?;
    let tape = tapes.get(rank as usize).ok_or(Error::NoRank { rank, devices })?;
    Ok(tape.to_string())
}
