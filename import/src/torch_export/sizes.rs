//! Evaluates open sizes of a program: expressions of symbols, as SymPy prints them, and the values of the
//! symbols.
//!
//! A size is `s77`, `2*s77`, `(s0//4)`, or `Mul(Integer(2), Symbol('s77', positive=True))` in newer files.

use std::collections::BTreeMap;

/// The maximum depth of expressions.
const MAX_DEPTH: usize = 64;

/// The value of an expression; `None` if it is malformed, uses a symbol without a value, or overflows.
pub(crate) fn evaluate(text: &str, values: &BTreeMap<String, i64>) -> Option<i64> {
    let mut parser = Parser { text, at: 0, depth: 0, symbol: &mut |name| values.get(name).copied() };
    let value = parser.sum()?;
    parser.skip_spaces();
    (parser.at == text.len()).then_some(value)
}

/// The symbol, if the expression consists of one symbol only.
pub(crate) fn only_symbol(text: &str) -> Option<String> {
    let mut names = symbols(text);
    let name = names.pop().filter(|_| names.is_empty())?;
    // An expression that differs from the symbol has a different value for at least one of these two.
    let is = |value: i64| evaluate(text, &BTreeMap::from([(name.clone(), value)])) == Some(value);
    (is(1009) && is(2003)).then_some(name)
}

/// The symbols of an expression, each once.
pub(crate) fn symbols(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut note = |name: &str| {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_string());
        }
        Some(1)
    };
    let mut parser = Parser { text, at: 0, depth: 0, symbol: &mut note };
    // Syntax errors are reported when the expression is evaluated.
    let _ = parser.sum();
    names
}

/// A parser that evaluates while it reads.
struct Parser<'t, 's> {
    text: &'t str,
    at: usize,
    depth: usize,
    symbol: &'s mut dyn FnMut(&str) -> Option<i64>,
}

impl<'t> Parser<'t, '_> {
    fn skip_spaces(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.skip_spaces();
        let found = self.text[self.at..].starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn word(&mut self, part: impl Fn(char) -> bool) -> &'t str {
        self.skip_spaces();
        let rest = &self.text[self.at..];
        let word = &rest[..rest.find(|c| !part(c)).unwrap_or(rest.len())];
        self.at += word.len();
        word
    }

    fn sum(&mut self) -> Option<i64> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let mut value = self.product()?;
        loop {
            if self.eat("+") {
                value = value.checked_add(self.product()?)?;
            } else if self.eat("-") {
                value = value.checked_sub(self.product()?)?;
            } else {
                self.depth -= 1;
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<i64> {
        let mut value = self.signed()?;
        loop {
            if self.eat("//") {
                value = floor_div(value, self.signed()?)?;
            } else if self.eat("/") {
                value = exact_div(value, self.signed()?)?;
            } else if self.eat("%") {
                value = modulo(value, self.signed()?)?;
            } else if self.eat("*") {
                value = value.checked_mul(self.signed()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn signed(&mut self) -> Option<i64> {
        if self.eat("-") {
            return self.power()?.checked_neg();
        }
        self.power()
    }

    fn power(&mut self) -> Option<i64> {
        let base = self.atom()?;
        if self.eat("**") { power(base, self.atom()?) } else { Some(base) }
    }

    fn atom(&mut self) -> Option<i64> {
        if self.eat("(") {
            let value = self.sum()?;
            return self.eat(")").then_some(value);
        }
        let digits = self.word(|c| c.is_ascii_digit());
        if !digits.is_empty() {
            return digits.parse().ok();
        }
        let name = self.word(|c| c.is_alphanumeric() || c == '_' || c == '.');
        if name.is_empty() {
            return None;
        }
        if name == "Symbol" && self.eat("(") {
            return self.quoted_symbol();
        }
        if !self.eat("(") {
            return match name {
                "One" => Some(1),
                "Zero" => Some(0),
                "NegativeOne" => Some(-1),
                _ => (self.symbol)(name),
            };
        }
        let mut arguments = vec![self.sum()?];
        while self.eat(",") {
            arguments.push(self.sum()?);
        }
        self.eat(")").then(|| apply(name, &arguments))?
    }

    /// Parses `'s77', positive=True, integer=True)`.
    fn quoted_symbol(&mut self) -> Option<i64> {
        if !self.eat("'") {
            return None;
        }
        let name = self.word(|c| c != '\'');
        let value = (self.symbol)(name)?;
        self.word(|c| c != ')');
        self.eat(")").then_some(value)
    }
}

fn apply(name: &str, arguments: &[i64]) -> Option<i64> {
    let fold = |f: fn(i64, i64) -> Option<i64>| {
        let (first, rest) = arguments.split_first()?;
        rest.iter().try_fold(*first, |all, &x| f(all, x))
    };
    let two = |f: fn(i64, i64) -> Option<i64>| match *arguments {
        [a, b] => f(a, b),
        _ => None,
    };
    match name.rsplit('.').next().unwrap_or(name) {
        "Integer" | "TruncToInt" | "ToFloat" | "Identity" => fold(|_, _| None),
        "Add" => fold(i64::checked_add),
        "Mul" => fold(i64::checked_mul),
        "Max" => fold(|a, b| Some(a.max(b))),
        "Min" => fold(|a, b| Some(a.min(b))),
        "Pow" | "PowByNatural" => two(power),
        "FloorDiv" => two(floor_div),
        "CleanDiv" | "IntTrueDiv" | "Rational" => two(exact_div),
        "CeilDiv" => two(|a, b| floor_div(a.checked_add(b)?.checked_sub(1)?, b)),
        "Mod" | "PythonMod" => two(modulo),
        _ => None,
    }
}

fn power(base: i64, exponent: i64) -> Option<i64> {
    base.checked_pow(u32::try_from(exponent).ok()?)
}

/// Division that rounds down, as Python's `//`.
pub(crate) fn floor_div(a: i64, b: i64) -> Option<i64> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

/// The remainder with the sign of the divisor, as Python's `%`.
pub(crate) fn modulo(a: i64, b: i64) -> Option<i64> {
    a.checked_sub(floor_div(a, b)?.checked_mul(b)?)
}

fn exact_div(a: i64, b: i64) -> Option<i64> {
    (a.checked_rem(b)? == 0).then(|| a / b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_evaluated_in_both_forms() {
        let values = BTreeMap::from([("s0".to_string(), 6), ("s77".to_string(), 4)]);
        for (text, expect) in [
            ("s0", Some(6)),
            ("2*s0 + 1", Some(13)),
            ("(s0//4)", Some(1)),
            ("-s0//4", Some(-2)),
            ("s0**2 - s77", Some(32)),
            ("Max(1, s0 - s77)", Some(2)),
            ("Mod(s0, s77)", Some(2)),
            ("s0 % 4", Some(2)),
            ("Mul(Integer(2), Symbol('s77', positive=True, integer=True))", Some(8)),
            ("Add(Integer(-1), Pow(Symbol('s77', integer=True), Integer(2)))", Some(15)),
            ("torch.utils._sympy.functions.FloorDiv(Symbol('s0'), Integer(4))", Some(1)),
            ("s1", None),
            ("s0 +", None),
            ("s0 s0", None),
            ("s0/4", None),
            ("s0//0", None),
            ("9223372036854775807*s0", None),
            ("Unknown(s0)", None),
            ("", None),
        ] {
            assert_eq!(evaluate(text, &values), expect, "{text}");
        }
        assert_eq!(evaluate(&"(".repeat(10_000), &values), None);
    }

    #[test]
    fn an_expression_may_be_a_symbol_and_nothing_more() {
        assert_eq!(only_symbol("s77"), Some("s77".to_string()));
        assert_eq!(only_symbol("Symbol('s77', positive=True)"), Some("s77".to_string()));
        assert_eq!(only_symbol("2*s77"), None);
        assert_eq!(only_symbol("s0 + s77"), None);
        assert_eq!(only_symbol("7"), None);
        assert_eq!(symbols("2*s0 + Symbol('s77') + s0"), ["s0", "s77"]);
    }
}
