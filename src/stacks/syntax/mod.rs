//! Files of stacks as settings: names with values and lines. Four syntaxes are read as text, without running anything:
//! shell commands with options, YAML with JSON inside it, TOML, and Python.

mod data;
mod python;
mod shell;

use serde_json::Value;

/// The way in which a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    Shell,
    Yaml,
    Json,
    Toml,
    Python,
}

/// The value of a setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    Literal(Value),
    /// The result of a call, by the name of the function or class. Its keyword arguments are settings of their own.
    Called(String),
    /// An expression that only a run of the program can tell.
    Expression(String),
}

/// A named value of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Names from the outermost to the innermost: `["parallelism", "tensor_parallel_degree"]`.
    pub path: Vec<String>,
    pub given: Given,
    /// Counted from 1.
    pub line: usize,
    /// True if the name is a variable, parameter or argument of a function that need not be an option.
    pub is_loose: bool,
}

impl Setting {
    /// The innermost name.
    pub fn name(&self) -> &str {
        self.path.last().map_or("", String::as_str)
    }
}

/// A place that cannot be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{line}{}: {problem}", column.map_or(String::new(), |column| format!(":{column}")))]
pub struct SyntaxProblem {
    pub line: usize,
    /// Counted from 1 in characters, where the reader knows it.
    pub column: Option<usize>,
    pub problem: String,
}

impl SyntaxProblem {
    fn at(line: usize, problem: impl Into<String>) -> SyntaxProblem {
        SyntaxProblem { line, column: None, problem: problem.into() }
    }

    /// A problem behind the first `bytes` of a text.
    fn behind(text: &str, bytes: usize, problem: impl Into<String>) -> SyntaxProblem {
        let before = text.get(..bytes).unwrap_or("");
        let (line, start) = (before.matches('\n').count() + 1, before.rfind('\n').map_or(0, |end| end + 1));
        SyntaxProblem { line, column: Some(before[start..].chars().count() + 1), problem: problem.into() }
    }
}

impl Syntax {
    /// The syntax of a text, by its content.
    pub fn of(text: &str) -> Syntax {
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let first = lines().next().unwrap_or("");
        if first.starts_with('{') || first.starts_with('[') && first.ends_with(['[', '{', '"']) {
            return Syntax::Json;
        }
        let is_name = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
        let is_table = |line: &str| {
            line.strip_prefix('[').and_then(|l| l.split(']').next()).is_some_and(|name| is_name(name.trim()))
        };
        if lines().any(is_table) && lines().any(|line| line.contains(" = ")) {
            return Syntax::Toml;
        }
        let python = |line: &str| {
            ["import ", "from ", "def ", "class ", "return ", "@"].iter().any(|word| line.starts_with(word))
                || line.ends_with('(') && line.contains('=') && !line.contains("=(")
                || line.split_once(" = ").is_some_and(|(name, _)| is_name(name.trim()))
                || line.split_once('(').is_some_and(|(name, _)| is_name(name) && line.contains('='))
        };
        let yaml = |line: &str| {
            let name = line.strip_prefix("- ").unwrap_or(line).split(": ").next().unwrap_or("");
            let name = name.strip_suffix(':').unwrap_or(name);
            (line.contains(": ") || line.ends_with(':')) && is_name(name.trim_matches('"'))
        };
        let options = lines().filter(|line| line.contains("--") && !line.contains("--:") && !yaml(line)).count();
        let [of_python, of_yaml] = [lines().filter(|l| python(l)).count(), lines().filter(|l| yaml(l)).count()];
        match () {
            () if options > of_python.max(of_yaml) => Syntax::Shell,
            () if of_yaml > of_python => Syntax::Yaml,
            () if of_python > 0 => Syntax::Python,
            () => Syntax::Shell,
        }
    }

    /// The settings of a text.
    pub fn settings(self, text: &str) -> Result<Vec<Setting>, SyntaxProblem> {
        match self {
            Syntax::Shell => shell::settings(text),
            Syntax::Yaml => data::yaml(text),
            Syntax::Json => data::json(text),
            Syntax::Toml => data::toml(text),
            Syntax::Python => python::settings(text),
        }
    }
}

/// A word as the value that it looks like: a number, a truth value, nothing, or text.
fn scalar(word: &str) -> Value {
    match word {
        "true" | "True" | "yes" | "on" => return Value::Bool(true),
        "false" | "False" | "no" | "off" => return Value::Bool(false),
        "null" | "None" | "~" => return Value::Null,
        _ => {}
    }
    let digits = word.replace('_', "");
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    if is_number && let Ok(whole) = digits.parse::<i64>() {
        return Value::from(whole);
    }
    match digits.parse::<f64>() {
        Ok(number) if is_number && number.is_finite() => Value::from(number),
        _ => Value::from(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings as `a.b=value` words.
    pub fn said(text: &str) -> Vec<String> {
        let word = |s: Setting| {
            let value = match s.given {
                Given::Literal(value) => value.to_string(),
                Given::Called(_) => return None,
                Given::Expression(text) => format!("<{text}>"),
            };
            Some(format!("{}:{}={value}", s.line, s.path.join(".")))
        };
        Syntax::of(text).settings(text).expect("a text that can be read").into_iter().filter_map(word).collect()
    }

    #[test]
    fn syntaxes_are_told_apart() {
        let table = [
            ("torchrun pretrain_gpt.py --num-layers 4 \\\n  --hidden-size 8", Syntax::Shell),
            ("TP=2\nARGS=(\n  --tensor-model-parallel-size $TP\n)", Syntax::Shell),
            ("{\"train_batch_size\": 4}", Syntax::Json),
            ("# a\nfsdp_config:\n  fsdp_version: 2\n", Syntax::Yaml),
            ("MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 8\n", Syntax::Yaml),
            ("[parallelism]\ntensor_parallel_degree = 2\n", Syntax::Toml),
            ("def recipe():\n    cfg = base()\n    cfg.model.tensor_model_parallel_size = 2\n", Syntax::Python),
            ("x = ParallelismConfig(\n  tensor_parallel_degree=2,\n)", Syntax::Python),
            ("DistributedConfig(tp_size=2)", Syntax::Python),
        ];
        for (text, expect) in table {
            assert_eq!(Syntax::of(text), expect, "{text}");
        }
    }

    #[test]
    fn settings_have_names_values_and_lines() {
        let table: [(&str, &[&str]); 8] = [
            (
                "#!/bin/bash\nTP=2\nSEQ=$((1024 * 4))\nARGS=(\n  --tensor-model-parallel-size ${TP}\n  --swiglu # gated\n  --seq-length $SEQ\n)\ntorchrun --nproc_per_node=8 train.py ${ARGS[@]} --lr $LR",
                &[
                    "5:tensor-model-parallel-size=2",
                    "6:swiglu=true",
                    "7:seq-length=4096",
                    "9:nproc_per_node=8",
                    "9:lr=<$LR>",
                ],
            ),
            ("a.py --x \"a b\" \\\n --y 1 2 --z", &["1:x=\"a b\"", "2:y=[1,2]", "2:z=true"]),
            ("{\"a\": {\"b\": 1},\n \"c\": [1, 2.5]}", &["1:a.b=1", "2:c=[1,2.5]"]),
            (
                "a:\n  b: 1 # one\n  c: 'x: y'\nd: [1, 2]\ne:\n- 3\n- 4\nf: {g: true}\n",
                &["2:a.b=1", "3:a.c=\"x: y\"", "4:d=[1,2]", "6:e=[3,4]", "8:f.g=true"],
            ),
            ("[a.b]\nc = 2\n", &["2:a.b.c=2"]),
            (
                "def f(tp: int = 2):\n    cfg.model.pp = 2 * 4  # eight\n    cfg.x = other\n",
                &["1:tp=2", "2:cfg.model.pp=8", "3:cfg.x=<other>"],
            ),
            (
                "c = Trainer.Config(\n  parallelism=ParallelismConfig(tp=2, names=['a', \"b\"]),\n  n=f(x=1),\n)",
                &["2:c.parallelism.tp=2", "2:c.parallelism.names=[\"a\",\"b\"]", "3:c.n.x=1"],
            ),
            ("c = dict(a=None, b={'k': 1, 'l': (2, 3)})", &["1:c.a=null", "1:c.b={\"k\":1,\"l\":[2,3]}"]),
        ];
        for (text, expect) in table {
            assert_eq!(said(text), expect, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named_by_line() {
        let problem = |syntax: Syntax, text: &str| syntax.settings(text).expect_err("unreadable").to_string();
        assert_eq!(problem(Syntax::Json, "{\"a\": 1,\n \"b\": }"), "2:7: expected a value, found `}`");
        assert_eq!(problem(Syntax::Json, "{\"ä\" 1}"), "1:6: expected `:`, found `1`");
        assert_eq!(problem(Syntax::Json, "{\"a\": 1}\n]"), "2:1: expected the end, found `]`");
        assert_eq!(problem(Syntax::Json, "{\"a\":\n \"b"), "2:2: a text that begins here does not end");
        assert_eq!(problem(Syntax::Yaml, "a: 1\n b: 2"), "2: this line is indented unlike those above it");
        assert_eq!(problem(Syntax::Python, "a = 'x"), "1: a text that begins here does not end");
        assert_eq!(problem(Syntax::Shell, "a --x 'y"), "1: a quote that begins here does not end");
        assert!(problem(Syntax::Toml, "[a]\nb = = 1").starts_with("2:"));
        // No input makes a reader panic or run forever.
        for text in ["(((((", "--", "a: *b", "f(a=[[[", "$((1/0))", "x=${", "{{{{", "'", "a:\n- b:\n  - c", "\u{0}\n\t"]
        {
            for syntax in [Syntax::Shell, Syntax::Yaml, Syntax::Json, Syntax::Toml, Syntax::Python] {
                let _ = syntax.settings(text);
            }
        }
    }
}
