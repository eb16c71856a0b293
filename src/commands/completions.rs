//! `altiplano completions SHELL`: prints the script by which a shell completes commands and options.

use crate::commands::say;
use altiplano::Error;
use clap::{Args, Command};
use clap_complete::{Shell, generate};

/// Print completions for a shell
#[derive(Args)]
#[command(
    after_help = "bash: altiplano completions bash > ~/.local/share/bash-completion/completions/altiplano\nzsh: write it as _altiplano into a folder of $fpath; fish: into ~/.config/fish/completions/altiplano.fish"
)]
pub(crate) struct Completions {
    shell: Shell,
}

impl Completions {
    /// `command` is the whole command line.
    pub(crate) fn run(self, mut command: Command) -> Result<(), Error> {
        let mut text = Vec::new();
        let name = command.get_name().to_string();
        generate(self.shell, &mut command, name, &mut text);
        say(String::from_utf8_lossy(&text).trim_end())
    }
}
