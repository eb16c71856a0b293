//! Text that may come from files, for a terminal: nothing in it moves the cursor, clears the screen or types.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters, but for ends of lines, tabs and sequences that only set colours.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(is_control) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let kept = colour(rest);
        if kept > 0 {
            out.push_str(&rest[..kept]);
            rest = &rest[kept..];
        } else if let Some(c) = rest.chars().next() {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
            rest = &rest[c.len_utf8()..];
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Length of the sequence at the start of a text that sets a colour (`ESC [ 1 ; 31 m`); 0 if there is none.
fn colour(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\u{1b}[") else { return 0 };
    let length = parameters.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b';').count();
    if parameters.as_bytes().get(length) == Some(&b'm') { length + 3 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_colours_pass() {
        for plain in ["a\tb\nc", "é 層", "\u{1b}[1mstrong\u{1b}[0m", "\u{1b}[38;5;1mred"] {
            assert!(matches!(printable(plain), Cow::Borrowed(_)) || printable(plain) == plain, "{plain:?}");
        }
        let cases = [
            ("\u{1b}]0;title\u{7}", r"\u{1b}]0;title\u{7}"),
            ("\u{1b}[2Jgone", r"\u{1b}[2Jgone"),
            ("\u{1b}[1", r"\u{1b}[1"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("a\rb\u{8}\u{0}", r"a\u{d}b\u{8}\u{0}"),
        ];
        for (text, expected) in cases {
            assert_eq!(printable(text), expected);
        }
    }
}
