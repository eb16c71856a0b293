//! Messages on stderr.

/// Prints a line to stderr as `eprintln!` does, with control characters escaped. A stderr that cannot be written loses
/// the message and nothing else.
macro_rules! complain {
    ($($part:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "{}", altiplano::printable(&format!($($part)*)));
    }};
}
