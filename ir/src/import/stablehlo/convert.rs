//! Turns the syntax tree into a graph: calls are inlined, names become values, and what no result needs is dropped.
//!
//! What this crate cannot express does not stop the walk. Such an op leaves a placeholder behind, so that one error
//! can list all of them, and none is reported whose result nobody uses.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use super::lexer::{MAX_DEPTH, ParseError, Place};
use super::literal::{same_type, tensor_type};
use super::parse::parse;
use super::syntax::{Function, LocationId, Module, Operation, Type};
use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::op::{Input, Op, ShapeError};
use crate::types::TensorType;

/// The most ops that a module may have once its calls are inlined.
pub const MAX_OPERATIONS: u64 = 10_000_000;

/// A graph read from StableHLO.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// All arguments are [`Op::Input`]; which of them are parameters is for the caller to say. All results of the
    /// entry function are outputs, in order.
    pub graph: Graph,
    /// The arguments of the entry function in order, whether used or not.
    pub arguments: Vec<Argument>,
}

/// An argument of the entry function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argument {
    /// `params['h000']['fc']['w']`, where the text has locations. The leaf's name is this or `argN`.
    pub name: Option<String>,
    pub ty: TensorType,
    pub value: ValueId,
}

/// Why the text gives no graph. The caller puts the file name in front.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error("found {functions} functions, but none is named @main and there is not just one public function")]
    NoMain { functions: usize },
    #[error("{place}: argument {index} has type {ty}; supported are tensors of known sizes of {DTYPES}")]
    ArgumentType { place: Place, index: usize, ty: Box<str> },
    #[error("{place}: %{name} is not defined before this")]
    Undefined { place: Place, name: Box<str> },
    #[error("{place}: %{name} is defined twice")]
    Redefined { place: Place, name: Box<str> },
    #[error("{place}: there is no function @{name}")]
    UnknownFunction { place: Place, name: Box<str> },
    #[error("{place}: @{name} calls itself")]
    Recursive { place: Place, name: Box<str> },
    #[error("{place}: calls are nested more than {MAX_DEPTH} levels deep")]
    CallsTooDeep { place: Place },
    #[error("{place}: @{name} takes {expected} arguments and gives {results} results, which this call does not match")]
    CallMismatch { place: Place, name: Box<str>, expected: usize, results: usize },
    #[error("{place}: @{name} does not end with a return of {expected} results")]
    NoReturn { place: Place, name: Box<str>, expected: usize },
    #[error("{place}: the module has more than {limit} operations once its calls are inlined")]
    TooManyOperations { place: Place, limit: u64 },
    #[error("{place}: @{name} returns nothing; a model returns its loss first")]
    NoResults { place: Place, name: Box<str> },
    #[error("{}", list(.unsupported, .problems))]
    Operations { unsupported: Vec<Unsupported>, problems: Vec<Problem> },
}

const DTYPES: &str = "f64, f32, f16, bf16, the 8-bit floats, i64 to i2, ui64 to ui2 or i1";

/// An op that the graph cannot express.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// `stablehlo.sort`, or with what makes it unsupported: `stablehlo.scatter (other than addition)`.
    pub name: String,
    /// How many there are once calls are inlined.
    pub count: u64,
    /// The first places in the text, three at most.
    pub places: Vec<Place>,
    /// There are other places.
    pub more_places: bool,
}

/// An op that contradicts itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    pub place: Place,
    pub op: String,
    pub kind: ProblemKind,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemKind {
    #[error("{0}")]
    Shape(#[from] ShapeError),
    #[error("is declared to give {declared}, but gives {inferred}")]
    ResultType { declared: Box<str>, inferred: TensorType },
    #[error("operand {index} is declared as {declared}, but is {actual}")]
    OperandType { index: usize, declared: Box<str>, actual: TensorType },
    #[error("takes {expected} operands, found {found}")]
    OperandCount { expected: usize, found: usize },
    #[error("gives {expected} results, but {found} are declared")]
    ResultCount { expected: usize, found: usize },
    #[error("attribute '{name}' is missing or has another form")]
    Attribute { name: &'static str },
    #[error("the literal does not have as many elements as its type")]
    LiteralCount,
    #[error("the literal has an element that its type cannot hold")]
    LiteralElement,
}

/// Reads the text of a module, as JAX prints it, into a graph.
///
/// The entry is `@main` or the only public function.
///
/// ```
/// let text = "func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
///     %0 = stablehlo.tanh %arg0 : tensor<2xf32>
///     return %0 : tensor<2xf32>
/// }";
/// let imported = altiplano_ir::import::stablehlo::import(text)?;
/// assert_eq!(imported.graph.len(), 2);
/// # Ok::<(), altiplano_ir::import::stablehlo::ImportError>(())
/// ```
pub fn import(text: &str) -> Result<Imported, ImportError> {
    import_limited(text, MAX_OPERATIONS)
}

/// [`import`] with another bound on the number of ops.
pub(super) fn import_limited(text: &str, limit: u64) -> Result<Imported, ImportError> {
    let module = parse(text)?;
    let main = entry(&module)?;
    let mut converter = Converter {
        module: &module,
        functions: module.functions.iter().map(|function| (&*function.name, function)).collect(),
        graph: Graph::new(module.name.as_deref().unwrap_or(&main.name)),
        location: None,
        placeholders: BTreeMap::new(),
        problems: Vec::new(),
        callers: Vec::new(),
        limit,
        operations: 0,
    };
    let arguments = converter.arguments(main)?;
    let values = arguments.iter().map(|argument| argument.value).collect();
    let results = converter.inline(main, values, main.place)?;
    if results.is_empty() {
        return Err(ImportError::NoResults { place: main.place, name: main.name.as_ref().into() });
    }
    converter.graph.outputs = results;
    converter.finish(arguments)
}

fn entry<'t, 'a>(module: &'t Module<'a>) -> Result<&'t Function<'a>, ImportError> {
    let mut public = module.functions.iter().filter(|function| function.visibility != "private");
    match (module.function("main"), public.next(), public.next()) {
        (Some(main), ..) => Ok(main),
        (None, Some(only), None) => Ok(only),
        _ => Err(ImportError::NoMain { functions: module.functions.len() }),
    }
}

/// Why one op cannot be converted.
pub(super) enum Reject {
    /// With what is special about it, or an empty string.
    Unsupported(&'static str),
    Invalid(ProblemKind),
}

impl From<ShapeError> for Reject {
    fn from(error: ShapeError) -> Self {
        Reject::Invalid(error.into())
    }
}

/// Stands for the result of an op that could not be converted.
struct Placeholder {
    /// The op, unless it only uses another placeholder.
    op: Option<(String, Place)>,
    /// The type in the graph is that of the text. Otherwise nothing can be said of ops that use it.
    typed: bool,
}

pub(super) struct Converter<'t, 'a> {
    module: &'t Module<'a>,
    functions: HashMap<&'t str, &'t Function<'a>>,
    pub graph: Graph,
    /// Of the op that is being converted; of the call where an inlined op has none.
    location: Option<LocationId>,
    placeholders: BTreeMap<ValueId, Placeholder>,
    problems: Vec<Problem>,
    /// Functions that are being inlined, outermost first.
    callers: Vec<&'t str>,
    limit: u64,
    operations: u64,
}

impl<'t, 'a> Converter<'t, 'a> {
    fn arguments(&mut self, main: &'t Function<'a>) -> Result<Vec<Argument>, ImportError> {
        let mut arguments = Vec::with_capacity(main.arguments.len());
        let mut names = std::collections::BTreeSet::new();
        for (index, argument) in main.arguments.iter().enumerate() {
            let Some(ty) = tensor_type(&argument.ty) else {
                let ty = argument.ty.to_string().into();
                return Err(ImportError::ArgumentType { place: argument.place, index, ty });
            };
            // A name that two arguments share tells nothing.
            let name = self.module.location_name(argument.location).map(str::to_owned);
            let name = name.filter(|name| names.insert(name.clone()));
            let mut leaf = name.clone().unwrap_or_else(|| format!("arg{index}"));
            while name.is_none() && !names.insert(leaf.clone()) {
                leaf.push('_');
            }
            let op = Op::Input(Input { name: leaf.clone(), ty: ty.clone() });
            let value = self.graph.append(Node { op, operands: Vec::new(), ty: ty.clone(), batch_dims: 0, name: leaf });
            arguments.push(Argument { name, ty, value });
        }
        Ok(arguments)
    }

    /// Converts the body of a function on these arguments and returns what it returns.
    fn inline(
        &mut self,
        function: &'t Function<'a>,
        arguments: Vec<ValueId>,
        place: Place,
    ) -> Result<Vec<ValueId>, ImportError> {
        let name = || function.name.as_ref().into();
        if self.callers.contains(&&*function.name) {
            return Err(ImportError::Recursive { place, name: name() });
        }
        if self.callers.len() >= MAX_DEPTH as usize {
            return Err(ImportError::CallsTooDeep { place });
        }
        self.callers.push(&function.name);
        let call = self.location;
        let mut scope: HashMap<(&'t str, u32), ValueId> = HashMap::with_capacity(2 * function.operations.len());
        for (argument, value) in function.arguments.iter().zip(arguments) {
            // Arguments of a declaration have no names.
            let named = !argument.name.is_empty();
            if named && scope.insert((argument.name, 0), value).is_some() {
                return Err(ImportError::Redefined { place: argument.place, name: argument.name.into() });
            }
        }
        let mut returned = None;
        for operation in &function.operations {
            self.operations += 1;
            if self.operations > self.limit {
                return Err(ImportError::TooManyOperations { place: operation.place, limit: self.limit });
            }
            let mut operands = Vec::with_capacity(operation.operands.len());
            for operand in &operation.operands {
                let Some(value) = scope.get(&(operand.name, operand.index)) else {
                    return Err(ImportError::Undefined { place: operand.place, name: operand.name.into() });
                };
                operands.push(*value);
            }
            if operation.name == "return" {
                returned = Some((operands, operation));
                break;
            }
            let results = self.operation(operation, operands, call)?;
            let mut results = results.into_iter();
            for result in &operation.results {
                for (index, value) in (0..result.count).zip(&mut results) {
                    if scope.insert((result.name, index), value).is_some() {
                        return Err(ImportError::Redefined { place: operation.place, name: result.name.into() });
                    }
                }
            }
        }
        self.callers.pop();
        let expected = function.results.len();
        match returned {
            Some((values, end)) if values.len() == expected => {
                for (index, (result, value)) in function.results.iter().zip(&values).enumerate() {
                    self.check_operand(index, &result.ty, *value, end);
                }
                Ok(values)
            }
            _ => Err(ImportError::NoReturn { place: function.place, name: name(), expected }),
        }
    }

    /// The values of an op's results, one for each result type.
    fn operation(
        &mut self,
        operation: &'t Operation<'a>,
        operands: Vec<ValueId>,
        call: Option<LocationId>,
    ) -> Result<Vec<ValueId>, ImportError> {
        let place = operation.place;
        let location = match self.module.location_name(operation.location) {
            Some(_) => operation.location,
            None => call,
        };
        if operands.len() == operation.operand_types.len() {
            for (index, (declared, operand)) in operation.operand_types.iter().zip(&operands).enumerate() {
                self.check_operand(index, declared, *operand, operation);
            }
        }
        if let Some(callee) = callee(operation) {
            let Some(&function) = self.functions.get(callee) else {
                return Err(ImportError::UnknownFunction { place, name: callee.into() });
            };
            let (expected, results) = (function.arguments.len(), function.results.len());
            if operands.len() != expected || operation.result_types.len() != results {
                return Err(ImportError::CallMismatch { place, name: callee.into(), expected, results });
            }
            for (index, (argument, operand)) in function.arguments.iter().zip(&operands).enumerate() {
                self.check_operand(index, &argument.ty, *operand, operation);
            }
            self.location = location;
            return self.inline(function, operands, place);
        }
        if operands.iter().any(|operand| self.is_untyped(*operand)) {
            return Ok(self.stand_in(operation, &operands, None));
        }
        self.location = location;
        let types = operation.result_types.len();
        let rejected = match self.lower(operation, &operands) {
            Ok(values) if values.len() == types => return Ok(self.check_results(operation, values)),
            Ok(values) => Reject::Invalid(ProblemKind::ResultCount { expected: values.len(), found: types }),
            Err(reject) => reject,
        };
        let unsupported = match rejected {
            Reject::Unsupported("") => Some((full_name(operation), place)),
            Reject::Unsupported(detail) => Some((format!("{} ({detail})", full_name(operation)), place)),
            Reject::Invalid(kind) => {
                self.report(operation, kind);
                None
            }
        };
        Ok(self.stand_in(operation, &operands, unsupported))
    }

    fn check_operand(&mut self, index: usize, declared: &Type, operand: ValueId, operation: &Operation) {
        let actual = self.graph.ty(operand);
        if !self.is_untyped(operand) && !same_type(declared, actual) {
            let declared = declared.to_string().into();
            let actual = actual.clone();
            self.report(operation, ProblemKind::OperandType { index, declared, actual });
        }
    }

    fn is_untyped(&self, value: ValueId) -> bool {
        let placeholder = self.placeholders.get(&value);
        placeholder.is_some_and(|placeholder| !placeholder.typed)
    }

    /// Keeps a problem, once however often its function is called. A text with hundreds is hopeless anyway.
    fn report(&mut self, operation: &Operation, kind: ProblemKind) {
        let problem = Problem { place: operation.place, op: full_name(operation), kind };
        if self.problems.len() < 100 && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// The results, or placeholders of the declared type where the graph infers another.
    fn check_results(&mut self, operation: &Operation, mut values: Vec<ValueId>) -> Vec<ValueId> {
        for (value, declared) in values.iter_mut().zip(&operation.result_types) {
            let inferred = self.graph.ty(*value);
            if same_type(declared, inferred) {
                continue;
            }
            let inferred = inferred.clone();
            let kind = ProblemKind::ResultType { declared: declared.to_string().into(), inferred };
            self.report(operation, kind);
            *value = self.placeholder(declared, &[], None);
        }
        values
    }

    fn stand_in(&mut self, operation: &Operation, operands: &[ValueId], op: Option<(String, Place)>) -> Vec<ValueId> {
        // Results after the first depend on it, so that an op with several is counted once.
        let mut depends = operands.to_vec();
        let mut op = op;
        let mut values = Vec::with_capacity(operation.result_types.len());
        for ty in &operation.result_types {
            let value = self.placeholder(ty, &depends, op.take());
            depends = vec![*values.first().unwrap_or(&value)];
            values.push(value);
        }
        values
    }

    /// An input that is none: it has operands, and no graph is given out that contains it.
    fn placeholder(&mut self, ty: &Type, operands: &[ValueId], op: Option<(String, Place)>) -> ValueId {
        let known = tensor_type(ty);
        let placeholder = Placeholder { op, typed: known.is_some() };
        let ty = known.unwrap_or_else(|| TensorType::scalar(DType::Bool));
        let leaf = Op::Input(Input { name: String::new(), ty: ty.clone() });
        let value =
            self.graph.append(Node { op: leaf, operands: operands.to_vec(), ty, batch_dims: 0, name: String::new() });
        self.placeholders.insert(value, placeholder);
        value
    }

    /// Appends a node under the name of the op that is being converted.
    pub fn push(&mut self, op: Op, operands: &[ValueId]) -> Result<ValueId, ShapeError> {
        let value = self.graph.push(op, operands)?;
        if let Some(name) = self.module.location_name(self.location) {
            name.clone_into(&mut self.graph.nodes[value.index()].name);
        }
        Ok(value)
    }

    /// Reports what was not converted, and drops what no output needs. The first output is the loss; another one that
    /// rests on something unsupported (an accuracy beside the loss, say) is dropped instead of refused.
    fn finish(mut self, mut arguments: Vec<Argument>) -> Result<Imported, ImportError> {
        let unsupported = |v: ValueId| self.placeholders.get(&v).is_some_and(|p| p.op.is_some());
        let tainted = self.graph.depends_on(unsupported);
        let first = self.graph.outputs.first().copied();
        self.graph.outputs.retain(|o| Some(*o) == first || !tainted[o.index()]);
        let mut live = vec![false; self.graph.len()];
        for output in &self.graph.outputs {
            live[output.index()] = true;
        }
        for value in self.graph.values().rev() {
            if live[value.index()] {
                for operand in &self.graph.node(value).operands {
                    live[operand.index()] = true;
                }
            }
        }
        let mut unsupported: Vec<Unsupported> = Vec::new();
        let mut positions: HashMap<&str, usize> = HashMap::new();
        for (value, placeholder) in &self.placeholders {
            let (true, Some((name, place))) = (live[value.index()], &placeholder.op) else {
                continue;
            };
            let position = *positions.entry(name).or_insert(unsupported.len());
            if position == unsupported.len() {
                unsupported.push(Unsupported { name: name.clone(), count: 0, places: Vec::new(), more_places: false });
            }
            let entry = &mut unsupported[position];
            entry.count += 1;
            if !entry.places.contains(place) {
                if entry.places.len() < 3 {
                    entry.places.push(*place);
                } else {
                    entry.more_places = true;
                }
            }
        }
        if !unsupported.is_empty() || !self.problems.is_empty() {
            return Err(ImportError::Operations { unsupported, problems: self.problems });
        }
        for argument in &arguments {
            live[argument.value.index()] = true;
        }
        let mut graph = Graph::new(self.graph.name);
        let mut renumbered = vec![ValueId(0); live.len()];
        for (old, mut node) in self.graph.nodes.into_iter().enumerate() {
            if live[old] {
                for operand in &mut node.operands {
                    *operand = renumbered[operand.index()];
                }
                renumbered[old] = graph.append(node);
            }
        }
        graph.outputs = self.graph.outputs.iter().map(|output| renumbered[output.index()]).collect();
        for argument in &mut arguments {
            argument.value = renumbered[argument.value.index()];
        }
        Ok(Imported { graph, arguments })
    }
}

fn full_name(operation: &Operation) -> String {
    format!("{}.{}", operation.dialect, operation.name)
}

/// The function that an op calls. A composite op says in a function what it means.
fn callee<'o>(operation: &'o Operation) -> Option<&'o str> {
    let attribute = match (operation.dialect, operation.name) {
        ("func", "call") => "callee",
        ("stablehlo", "composite") => "decomposition",
        _ => return None,
    };
    operation.attribute(attribute)?.as_word()
}

/// One line for each unsupported op and each problem, of which the first twenty are shown.
fn list(unsupported: &[Unsupported], problems: &[Problem]) -> String {
    const SHOWN: usize = 20;
    let mut lines: Vec<String> = Vec::new();
    for problem in problems.iter().take(SHOWN) {
        lines.push(problem.to_string());
    }
    if problems.len() > SHOWN {
        lines.push(format!("and {} more such problems", problems.len() - SHOWN));
    }
    if !unsupported.is_empty() {
        lines.push("these operations are not supported:".into());
    }
    for entry in unsupported {
        lines.push(format!("  {entry}"));
    }
    lines.join("\n")
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<String> = self.places.iter().map(Place::to_string).collect();
        let more = if self.more_places { ", ..." } else { "" };
        write!(f, "{}: {} at {}{more}", self.name, self.count, places.join(", "))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.place, self.op, self.kind)
    }
}
