//! Prints tapes as text, with a line for each command.

use super::*;
use std::fmt;

impl Tape {
    fn named(&self, id: RegionId) -> String {
        let region = self.region(id);
        let at = |microbatch: Option<u32>| microbatch.map_or(String::new(), |m| format!("#{m}"));
        let what = match region.content {
            Content::Buffer { buffer, microbatch } => format!("{buffer}{}", at(microbatch)),
            Content::Value { value, .. } => value.to_string(),
            Content::Constant { value, .. } => format!("constant {value}"),
            Content::Staging { .. } => "staging".to_string(),
        };
        format!("{what} {}[{}]@{}", region.dtype, region.elements, region.offset)
    }

    /// Describes a command, without its stream and events.
    fn said(&self, what: &What) -> String {
        let list = |regions: Vec<RegionId>| {
            let named: Vec<String> = regions.into_iter().map(|r| self.named(r)).collect();
            named.join(", ")
        };
        let accesses = self.accesses(what);
        let of = |writes: bool| {
            let mut regions: Vec<RegionId> = accesses.iter().filter(|a| a.writes == writes).map(|a| a.region).collect();
            regions.dedup();
            list(regions)
        };
        let verb = match what {
            What::Launch { launch, .. } => format!("launch {}", launch.0),
            What::Matmul(call) => {
                let batches: Vec<String> = call.batches.iter().map(|b| format!("{} x ", b.count)).collect();
                format!("matmul {}[{} x {} x {}]", batches.concat(), call.m, call.k, call.n)
            }
            What::Fill { value, .. } => format!("fill {value}"),
            What::Copy { .. } => "copy".to_string(),
            What::Upload { .. } => "upload".to_string(),
            What::Download { .. } => "download".to_string(),
            What::Collective { communicator, kind, elements, .. } => {
                let kind = match kind {
                    CollectiveKind::AllReduce(reducer) => format!("all_reduce {reducer:?}").to_lowercase(),
                    CollectiveKind::ReduceScatter(reducer) => format!("reduce_scatter {reducer:?}").to_lowercase(),
                    CollectiveKind::AllGather => "all_gather".to_string(),
                };
                format!("{kind} {elements} {}", self.communicators[communicator.0 as usize])
            }
            What::Exchange { communicator, .. } => {
                format!("exchange {}", self.communicators[communicator.0 as usize])
            }
        };
        let (read, written) = (of(false), of(true));
        match (read.is_empty(), written.is_empty()) {
            (false, false) => format!("{verb}: {read} -> {written}"),
            (true, _) => format!("{verb}: -> {written}"),
            (_, true) => format!("{verb}: {read} ->"),
        }
    }
}

impl fmt::Display for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.ranks.iter().map(u32::to_string).collect();
        match self.purpose {
            Purpose::Collectives => write!(f, "among {}", ranks.join(", ")),
            Purpose::Channel => write!(f, "from {}", ranks.join(" to ")),
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stream::Compute => f.write_str("compute"),
            Stream::Collectives => f.write_str("collectives"),
            Stream::Send(to) => write!(f, "send {to}"),
            Stream::Receive(from) => write!(f, "receive {from}"),
            Stream::Upload => f.write_str("upload"),
            Stream::Download => f.write_str("download"),
        }
    }
}

impl fmt::Display for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Arena { bytes, lasting_bytes, live_bytes, host_bytes } = self.arena;
        writeln!(
            f,
            "tape of rank {}, device {} of program {}: {} commands, {} launches",
            self.rank,
            self.position,
            self.program,
            self.commands.len(),
            self.launches.len()
        )?;
        writeln!(f, "arena of {bytes} bytes, {lasting_bytes} of them lasting; at most {live_bytes} live at once")?;
        if host_bytes > 0 {
            writeln!(f, "{host_bytes} bytes in the memory of the host")?;
        }
        for (number, command) in self.commands.iter().enumerate() {
            let stream = self.streams[command.stream.0 as usize].to_string();
            let waits: Vec<String> = command.waits.iter().map(|e| format!("e{}", e.0)).collect();
            let after = if waits.is_empty() { String::new() } else { format!(" after {}", waits.join(", ")) };
            let records = command.records.map_or(String::new(), |e| format!(" => e{}", e.0));
            writeln!(f, "{number:6} {stream:<12} {}{after}{records}", self.said(&command.what))?;
        }
        Ok(())
    }
}
