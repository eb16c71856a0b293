//! Names of parameters that hold one layer of a stack of layers.

/// The name of row `row` of a stacked parameter.
pub fn row_name(stack: &str, row: u64) -> String {
    format!("{stack}[{row}]")
}

/// The stack and the row that a name may stand for. The inverse of [`row_name`].
///
/// ```
/// use altiplano_ir::names::stack_of;
/// assert_eq!(stack_of("params['w'][12]"), Some(("params['w']", 12)));
/// assert_eq!(stack_of("params['w']"), None);
/// ```
pub fn stack_of(name: &str) -> Option<(&str, u64)> {
    let (stack, row) = name.strip_suffix(']')?.rsplit_once('[')?;
    let digits = !row.is_empty() && row.bytes().all(|b| b.is_ascii_digit());
    Some((stack, row.parse().ok().filter(|_| digits && !stack.is_empty())?))
}
