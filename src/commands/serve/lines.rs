//! Lines in and out. A line is one message; its length is limited, and lines of several threads do not mix.

use crate::commands::serve::failure::Failure;
use serde_json::{Value, json};
use std::io::{BufRead, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Most bytes of a line. Models and plans are named by files, so that no question is long.
pub const MOST_BYTES: u64 = 1 << 20;

/// A line of the input.
pub enum Line {
    Text(Vec<u8>),
    /// A longer one than is accepted, which is skipped.
    TooLong,
    /// The input has ended, or cannot be read.
    End,
}

/// Reads the next line, without its end.
pub fn read_line(input: &mut impl BufRead) -> Line {
    let mut line = Vec::new();
    match input.by_ref().take(MOST_BYTES + 1).read_until(b'\n', &mut line) {
        Ok(0) | Err(_) => Line::End,
        Ok(_) if line.ends_with(b"\n") => {
            line.pop();
            Line::Text(line)
        }
        Ok(_) if line.len() as u64 <= MOST_BYTES => Line::Text(line),
        Ok(_) => match skip_line(input) {
            true => Line::TooLong,
            false => Line::End,
        },
    }
}

/// Skips the rest of a line, a buffer at a time. False if the input ends or cannot be read.
fn skip_line(input: &mut impl BufRead) -> bool {
    loop {
        let Ok(buffer) = input.fill_buf() else { return false };
        match buffer.iter().position(|&b| b == b'\n') {
            Some(at) => {
                input.consume(at + 1);
                return true;
            }
            None if buffer.is_empty() => return true,
            None => {
                let length = buffer.len();
                input.consume(length);
            }
        }
    }
}

/// The output, shared by all calls.
#[derive(Clone, Default)]
pub struct Output {
    lock: Arc<Mutex<()>>,
    closed: Arc<AtomicBool>,
}

impl Output {
    pub fn result(&self, id: &Value, result: &Value) {
        self.write(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
    }

    pub fn failure(&self, id: &Value, failure: &Failure) {
        self.write(&json!({"jsonrpc": "2.0", "id": id, "error": failure.json()}));
    }

    pub fn notification(&self, method: &str, params: &Value) {
        self.write(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    /// True if the reader has gone, so that no work is worth finishing.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn write(&self, message: &Value) {
        let mut line = message.to_string();
        line.push('\n');
        let _turn = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = std::io::stdout().lock();
        if out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_err() {
            self.closed.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_skipped_and_the_next_is_read() {
        let mut text = vec![b'x'; MOST_BYTES as usize + 10];
        text.extend(b"\nshort\nlast");
        let mut input = text.as_slice();
        assert!(matches!(read_line(&mut input), Line::TooLong));
        assert!(matches!(read_line(&mut input), Line::Text(line) if line == b"short"));
        assert!(matches!(read_line(&mut input), Line::Text(line) if line == b"last"));
        assert!(matches!(read_line(&mut input), Line::End));
    }
}
