//! Messages on stderr.

/// Prints a line to stderr as `eprintln!` does. A stderr that cannot be written loses the message and nothing else.
macro_rules! complain {
    ($($part:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($part)*);
    }};
}
