//! `altiplano man -o DIR`: writes the manual pages, one per command.

use crate::commands::say;
use altiplano::{Error, write_file};
use clap::{Args, Command};
use clap_mangen::Man;
use std::path::PathBuf;

/// Write manual pages
#[derive(Args)]
pub(crate) struct Manual {
    /// The folder to write to, created if missing
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

impl Manual {
    /// `command` is the whole command line.
    pub(crate) fn run(self, command: Command) -> Result<(), Error> {
        let write = |file: &PathBuf, error| Error::Write { file: file.clone(), error };
        std::fs::create_dir_all(&self.output).map_err(|error| write(&self.output, error))?;
        let name = command.get_name().to_string();
        let mut pages = vec![(name.clone(), command.clone())];
        for sub in command.get_subcommands() {
            let page = format!("{name}-{}", sub.get_name());
            pages.push((page.clone(), sub.clone().bin_name(format!("{name} {}", sub.get_name())).display_name(page)));
        }
        for (page, command) in &pages {
            let file = self.output.join(format!("{page}.1"));
            let mut text = Vec::new();
            Man::new(command.clone())
                .title(page.to_uppercase())
                .render(&mut text)
                .map_err(|error| write(&file, error))?;
            write_file(&file, &String::from_utf8_lossy(&text))?;
        }
        say(format!(
            "{} pages in {}; `man -l {}` shows the first",
            pages.len(),
            self.output.display(),
            self.output.join(format!("{name}.1")).display()
        ))
    }
}
