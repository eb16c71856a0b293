//! Prints programs as text: the buffers, bodies and schedule of each submesh.

use altiplano_ir::program::{BufferKind, Call, Program, Programs};
use std::fmt::Write;

/// The text of all programs of a plan.
pub fn programs(programs: &Programs) -> String {
    let mut out = String::new();
    for (i, program) in programs.programs.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = write_program(&mut out, i, program, programs);
    }
    out
}

fn write_program(out: &mut String, index: usize, program: &Program, all: &Programs) -> std::fmt::Result {
    let devices: Vec<String> = program.devices.iter().map(u32::to_string).collect();
    writeln!(out, "program {index} on {} (devices {})", program.mesh, devices.join(", "))?;
    for (id, buffer) in program.buffers.iter().enumerate() {
        let kind = match &buffer.kind {
            BufferKind::Parameter { name } => format!("parameter {name}"),
            BufferKind::State { parameter, slot } => format!("state {slot} of {parameter}"),
            BufferKind::Accumulator { parameter } => format!("gradient of {parameter}"),
            BufferKind::Input { name } => format!("input {name}"),
            BufferKind::Scalar { name } => format!("scalar {name}"),
            BufferKind::Loss => "loss".to_string(),
            BufferKind::Output { index } => format!("result {index}"),
            BufferKind::Value => format!("value {}", buffer.name),
        };
        writeln!(out, "  b{id}: {} {}  {kind}", buffer.ty, buffer.sharding.display(&program.mesh))?;
    }
    for (id, body) in program.bodies.iter().enumerate() {
        writeln!(out, "  body {id} '{}' ({:?})", body.name, body.phase)?;
        for (leaf, buffer) in &body.reads {
            writeln!(out, "    {leaf} = read {buffer}")?;
        }
        for line in body.graph.to_string().lines() {
            writeln!(out, "    {line}")?;
        }
        for (buffer, value) in &body.writes {
            writeln!(out, "    write {buffer} = {value}")?;
        }
        if !body.frees.is_empty() {
            let freed: Vec<String> = body.frees.iter().map(|b| b.to_string()).collect();
            writeln!(out, "    free {}", freed.join(", "))?;
        }
    }
    writeln!(out, "  schedule")?;
    for (position, call) in program.schedule.iter().chain(&program.flush).enumerate() {
        if position == program.schedule.len() {
            writeln!(out, "  in a flush")?;
        }
        if let Some(after) = position.checked_sub(program.num_prompt()).and_then(|i| program.late.get(i))
            && (position == program.num_prompt() || program.late[position - program.num_prompt() - 1] != *after)
        {
            writeln!(out, "    after {after} calls of the next step:")?;
        }
        let (what, microbatch) = match call {
            Call::Run { body, microbatch } => (format!("run {}", program.bodies[*body as usize].name), microbatch),
            Call::Send { transfer, microbatch, .. } => {
                let (target, buffer) = all.transfers[transfer.0 as usize].target;
                (format!("send {transfer} to program {target} {buffer}"), microbatch)
            }
            Call::Receive { transfer, microbatch } => {
                let (source, buffer) = all.transfers[transfer.0 as usize].source;
                (format!("receive {transfer} from program {source} {buffer}"), microbatch)
            }
        };
        match microbatch {
            Some(m) => writeln!(out, "    {what} [{m}]")?,
            None => writeln!(out, "    {what}")?,
        }
    }
    Ok(())
}
