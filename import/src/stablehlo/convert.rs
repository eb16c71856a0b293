//! Turns the syntax tree into a graph: inlines calls and regions, turns names into values, and drops values
//! that no result needs.
//!
//! An op that this crate cannot express does not stop the walk; it leaves a placeholder. One error can then
//! list all such ops, without those whose results are unused.

use std::collections::{BTreeMap, HashMap};

use super::known::Knowledge;
use super::lexer::{MAX_DEPTH, Place};
use super::literal::{same_type, tensor_type, tensor_type_with};
use super::open::{Opened, open};
use super::parse::parse;
use super::ranks::{RankInput, RankOutput, Ranks, passes_on};
use super::report::{ImportError, Problem, ProblemKind, Reject, Unsupported, full_name};
use super::syntax::{Argument as Named, Attribute, Function, LocationId, Module, Operation, Region, Type, find};
use super::update::Updates;
use crate::OpenSize;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, Pin, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Input, Op, ShapeError};
use altiplano_ir::types::TensorType;

/// The maximum number of ops in a module after calls are inlined and loops unrolled. It is ten times the ops of
/// a training step of a thousand layers, and about a gigabyte of nodes.
pub(crate) const MAX_OPERATIONS: u64 = 4_000_000;

/// A graph read from StableHLO.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// All arguments are [`Op::Input`]; the caller decides which are parameters. All results of the entry
    /// function are outputs, in order.
    pub graph: Graph,
    /// The arguments of the entry function in order, whether used or not.
    pub arguments: Vec<Argument>,
    /// Names of the results in order, where the text gives them: `result[0]`, `['loss']`.
    pub results: Vec<Option<String>>,
    /// Sizes that the text leaves open.
    pub open_sizes: Vec<OpenSize>,
    /// Assumptions that the import made.
    pub notes: Vec<Note>,
}

/// An assumption of an import that the user should know about.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Note {
    #[error(
        "the kernel {kernel} is taken to be attention{} with a scale of one over the root of the head size, which the file does not say; numbers may differ by that",
        if *.causal { " under a causal mask" } else { "" }
    )]
    KernelScale { kernel: String, causal: bool },
}

/// An argument of the entry function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argument {
    /// `params['h000']['fc']['w']`, if the text has locations. The leaf is named this or `argN`.
    pub name: Option<String>,
    pub ty: TensorType,
    pub value: ValueId,
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
/// let imported = altiplano_import::stablehlo::import(text)?;
/// assert_eq!(imported.graph.len(), 2);
/// # Ok::<(), altiplano_import::stablehlo::ImportError>(())
/// ```
pub fn import(text: &str) -> Result<Imported, ImportError> {
    import_with(text, &[])
}

/// [`import`] with given values for open sizes, by symbol (`b`) or by argument and dimension (`tokens.0`).
pub fn import_with(text: &str, sizes: &[(String, u64)]) -> Result<Imported, ImportError> {
    import_limited(text, sizes, MAX_OPERATIONS)
}

/// [`import_with`] with a different limit on the number of ops.
pub(super) fn import_limited(text: &str, sizes: &[(String, u64)], limit: u64) -> Result<Imported, ImportError> {
    let module = parse(text)?;
    let main = entry(&module)?;
    let Opened { names: argument_names, sizes, open } = open(&module, main, sizes)?;
    let mut converter = Converter::new(&module, main, limit);
    converter.is_open = !open.is_empty();
    let arguments = converter.arguments(main, &argument_names, &sizes)?;
    let values = arguments.iter().map(|argument| argument.value).collect();
    let results = converter.inline(main, values, main.place)?;
    for (value, result) in results.iter().zip(&main.results) {
        converter.pin_named(*value, &result.attributes);
    }
    let name = |attributes| find(attributes, "jax.result_info").and_then(Attribute::as_word).map(str::to_string);
    let mut named = results.iter().zip(&main.results).map(|(v, r)| (*v, name(&r.attributes))).collect::<Vec<_>>();
    named.retain(|(value, _)| !converter.is_opaque(*value));
    let (results, names): (Vec<ValueId>, Vec<Option<String>>) = named.into_iter().unzip();
    if results.is_empty() && !converter.problems.is_empty() {
        return Err(ImportError::Operations { unsupported: Vec::new(), problems: converter.problems });
    }
    if results.is_empty() {
        return Err(ImportError::NoResults { place: main.place, name: main.name.as_ref().into() });
    }
    converter.graph.outputs = results;
    let notes = std::mem::take(&mut converter.notes);
    let imported = converter.finish(arguments, names)?;
    Ok(Imported { open_sizes: open, notes, ..imported })
}

/// Reads all results of a module's text, and refuses the text if one of them cannot be read. Each node is named after its
/// place: `line 12, %3`.
pub fn import_whole(text: &str) -> Result<Imported, ImportError> {
    let module = parse(text)?;
    let imported = import_module(&module, None, |_, _| Ok(Vec::new()))?;
    Ok(imported.0)
}

/// [`import_whole`] for the program of one device or of one rank. The parts of arguments that a rank takes come from the
/// text's regions or, if it has none, from `bare`. Results come without layouts if the text has no region.
pub(super) fn import_module(
    module: &Module<'_>,
    ranks: Option<Ranks>,
    bare: impl FnOnce(&Graph, &[Argument]) -> Result<Vec<RankInput>, ImportError>,
) -> Result<Parts, ImportError> {
    let main = entry(module)?;
    let Opened { names, sizes, open } = open(module, main, &[])?;
    let mut converter = Converter::new(module, main, MAX_OPERATIONS);
    (converter.is_open, converter.is_whole, converter.ranks) = (!open.is_empty(), true, ranks);
    let mut arguments = converter.arguments(main, &names, &sizes)?;
    converter.argument_values = arguments.iter().map(|argument| argument.value).collect();
    let results = converter.inline(main, converter.argument_values.clone(), main.place)?;
    let has_regions = converter.has_regions();
    let (mut inputs, wholes) = converter.take_ranks();
    let outputs: Option<Vec<RankOutput>> = results.iter().map(|value| wholes.get(value).cloned()).collect();
    let refused = |problem: &str| Err(ImportError::Ranks { place: main.place, problem: problem.into() });
    let locals: Vec<ValueId> = match (has_regions, &outputs) {
        (true, Some(outputs)) => outputs.iter().map(|output| output.value).collect(),
        (true, None) => return refused("a result is not computed by the program of one rank"),
        (false, _) if results.iter().any(|value| converter.is_opaque(*value)) => {
            return refused("a result is no tensor");
        }
        (false, _) => results,
    };
    if locals.is_empty() {
        return Err(ImportError::NoResults { place: main.place, name: main.name.as_ref().into() });
    }
    inputs.extend(bare(&converter.graph, &arguments)?);
    converter.graph.outputs = locals;
    let name = |attributes| find(attributes, "jax.result_info").and_then(Attribute::as_word).map(str::to_string);
    let names = main.results.iter().map(|result| name(&result.attributes)).collect();
    // Parts are renumbered as arguments are.
    let of_entry = arguments.len();
    let part =
        |input: &RankInput| Argument { name: None, ty: converter.graph.ty(input.value).clone(), value: input.value };
    arguments.extend(inputs.iter().map(part));
    let mut imported = converter.finish(arguments, names)?;
    for (input, part) in inputs.iter_mut().zip(imported.arguments.split_off(of_entry)) {
        input.value = part.value;
    }
    let renumbered = |(output, &value): (RankOutput, &ValueId)| RankOutput { value, ..output };
    let outputs = outputs.filter(|_| has_regions);
    let outputs = outputs.map(|all| all.into_iter().zip(&imported.graph.outputs).map(renumbered).collect());
    Ok((imported, inputs, outputs))
}

/// A module's graph, the parts of arguments that a rank takes, and its parts of results with their layouts.
type Parts = (Imported, Vec<RankInput>, Option<Vec<RankOutput>>);

fn entry<'t, 'a>(module: &'t Module<'a>) -> Result<&'t Function<'a>, ImportError> {
    let mut public = module.functions.iter().filter(|function| function.visibility != "private");
    match (module.function("main"), public.next(), public.next()) {
        (Some(main), ..) => Ok(main),
        (None, Some(only), None) => Ok(only),
        _ => Err(ImportError::NoMain { functions: module.functions.len() }),
    }
}

/// Stands for the result of an op that could not be converted, or for a value that is not a tensor.
struct Placeholder {
    /// The unsupported op; `None` if the op only uses another placeholder.
    op: Option<(String, Place)>,
    /// True if the type in the graph matches the text. Otherwise ops that use the value cannot be checked.
    typed: bool,
    /// True for a token or a tuple, which is passed around but never computed with.
    opaque: bool,
}

/// The names of a region. Names of the enclosing regions are visible as well.
pub(super) struct Scope<'s, 't> {
    names: HashMap<(&'t str, u32), ValueId>,
    outer: Option<&'s Scope<'s, 't>>,
}

impl Scope<'_, '_> {
    fn find(&self, name: &str, index: u32) -> Option<ValueId> {
        let mut scope = Some(self);
        while let Some(Scope { names, outer }) = scope {
            if let Some(value) = names.get(&(name, index)) {
                return Some(*value);
            }
            scope = *outer;
        }
        None
    }
}

pub(super) struct Converter<'t, 'a> {
    pub module: &'t Module<'a>,
    functions: HashMap<&'t str, &'t Function<'a>>,
    pub graph: Graph,
    /// Location of the op that is being converted. An inlined op without a location has that of its call.
    pub location: Option<LocationId>,
    placeholders: BTreeMap<ValueId, Placeholder>,
    /// Elements of each tuple.
    pub tuples: HashMap<ValueId, Vec<ValueId>>,
    pub knowledge: Knowledge,
    pub updates: Updates,
    /// The shape of the tensors to which a region of scalars is being applied, if any.
    pub lifted: Option<Vec<u64>>,
    problems: Vec<Problem>,
    notes: Vec<Note>,
    /// True if the text leaves sizes open, from which others are computed.
    is_open: bool,
    /// Caches for each called function whether it is the cipher of JAX's random bits.
    threefry: HashMap<&'t str, bool>,
    /// Requested splits of values, in the order of the text.
    pub pins: Vec<Pin>,
    /// Functions that are being inlined, outermost first.
    callers: Vec<&'t str>,
    /// Functions and regions around the op that is being converted.
    depth: u32,
    limit: u64,
    operations: u64,
    /// The program of one rank among several, if the text may be one.
    pub ranks: Option<Ranks>,
    /// The leaves of the entry function's arguments.
    pub argument_values: Vec<ValueId>,
    /// True if no result may be left out, and nodes are named after their places.
    is_whole: bool,
    /// The place of the op that is being converted, in words.
    here: String,
}

impl<'t, 'a> Converter<'t, 'a> {
    fn new(module: &'t Module<'a>, main: &Function<'_>, limit: u64) -> Converter<'t, 'a> {
        Converter {
            module,
            functions: module.functions.iter().map(|function| (&*function.name, function)).collect(),
            graph: Graph::new(module.name.as_deref().unwrap_or(&main.name)),
            location: None,
            placeholders: BTreeMap::new(),
            tuples: HashMap::new(),
            knowledge: Knowledge::default(),
            updates: Updates::default(),
            lifted: None,
            problems: Vec::new(),
            notes: Vec::new(),
            is_open: false,
            threefry: HashMap::new(),
            pins: Vec::new(),
            callers: Vec::new(),
            depth: 0,
            limit,
            operations: 0,
            ranks: None,
            argument_values: Vec::new(),
            is_whole: false,
            here: String::new(),
        }
    }

    fn arguments(
        &mut self,
        main: &'t Function<'a>,
        said: &[Option<String>],
        sizes: &BTreeMap<(usize, usize), u64>,
    ) -> Result<Vec<Argument>, ImportError> {
        let mut arguments = Vec::with_capacity(main.arguments.len());
        let mut names = std::collections::BTreeSet::new();
        for (index, argument) in main.arguments.iter().enumerate() {
            // A name shared by two arguments is ambiguous, so it is dropped.
            let name = said.get(index).cloned().flatten();
            let name = name.filter(|name| names.insert(name.clone()));
            let mut leaf = name.clone().unwrap_or_else(|| format!("arg{index}"));
            while name.is_none() && !names.insert(leaf.clone()) {
                leaf.push('_');
            }
            let Some(ty) = tensor_type_with(&argument.ty, |dim| sizes.get(&(index, dim)).copied()) else {
                let kind = ProblemKind::ArgumentType { index, ty: argument.ty.to_string().into() };
                self.problems.push(Problem { place: argument.place, op: String::new(), kind });
                let value = self.placeholder(&argument.ty, &[], None);
                arguments.push(Argument { name, ty: self.graph.ty(value).clone(), value });
                continue;
            };
            let op = Op::Input(Input { name: leaf.clone(), ty: ty.clone() });
            let value = self.append(Node { op, operands: Vec::new(), ty: ty.clone(), batch_dims: 0, name: leaf });
            self.pin_named(value, &argument.attributes);
            arguments.push(Argument { name, ty, value });
        }
        Ok(arguments)
    }

    /// Converts the body of a function on these arguments and returns its results.
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
        if self.threefry_named(function)?
            && let Ok(words) = self.threefry(&arguments)
        {
            return Ok(words);
        }
        self.inline_body(function, arguments, place)
    }

    /// [`Converter::is_threefry`], cached per function.
    fn threefry_named(&mut self, function: &'t Function<'a>) -> Result<bool, ImportError> {
        if let Some(&known) = self.threefry.get(&*function.name) {
            return Ok(known);
        }
        // During the test, the function is treated like any other.
        self.threefry.insert(&function.name, false);
        let known = self.is_threefry(function)?;
        self.threefry.insert(&function.name, known);
        Ok(known)
    }

    pub(crate) fn inline_body(
        &mut self,
        function: &'t Function<'a>,
        arguments: Vec<ValueId>,
        place: Place,
    ) -> Result<Vec<ValueId>, ImportError> {
        let name = || function.name.as_ref().into();
        self.callers.push(&function.name);
        let returned = self.walk(&function.arguments, &function.operations, arguments, None, place)?;
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

    /// Converts a region of an op on these arguments and returns its results.
    pub fn region(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        arguments: Vec<ValueId>,
        results: usize,
        scope: &Scope<'_, 't>,
    ) -> Result<Vec<ValueId>, ImportError> {
        let mismatch = ImportError::RegionMismatch {
            place: operation.place,
            op: full_name(operation).into(),
            arguments: arguments.len(),
            results,
        };
        if region.arguments.len() != arguments.len() {
            return Err(mismatch);
        }
        let location = self.location;
        let returned = self.walk(&region.arguments, &region.operations, arguments, Some(scope), operation.place)?;
        self.location = location;
        match returned {
            Some((values, _)) if values.len() == results => Ok(values),
            _ => Err(mismatch),
        }
    }

    /// Converts ops in order up to a return, and gives the returned values.
    fn walk(
        &mut self,
        parameters: &'t [Named<'a>],
        operations: &'t [Operation<'a>],
        arguments: Vec<ValueId>,
        outer: Option<&Scope<'_, 't>>,
        place: Place,
    ) -> Result<Option<(Vec<ValueId>, &'t Operation<'a>)>, ImportError> {
        if self.depth >= MAX_DEPTH {
            return Err(ImportError::CallsTooDeep { place });
        }
        self.depth += 1;
        let call = self.location;
        let mut scope = Scope { names: HashMap::with_capacity(parameters.len() + operations.len()), outer };
        for (argument, value) in parameters.iter().zip(arguments) {
            // Arguments of a declaration have no names.
            let named = !argument.name.is_empty();
            if named && scope.names.insert((argument.name, 0), value).is_some() {
                return Err(ImportError::Redefined { place: argument.place, name: argument.name.into() });
            }
        }
        let mut returned = None;
        for operation in operations {
            self.operations += 1;
            if self.operations > self.limit {
                return Err(ImportError::TooManyOperations { place: operation.place, limit: self.limit });
            }
            let mut operands = Vec::with_capacity(operation.operands.len());
            for operand in &operation.operands {
                let Some(value) = scope.find(operand.name, operand.index) else {
                    return Err(ImportError::Undefined { place: operand.place, name: operand.name.into() });
                };
                operands.push(value);
            }
            if operation.name == "return" {
                returned = Some((operands, operation));
                break;
            }
            let results = self.operation(operation, operands, &scope, call)?;
            let mut results = results.into_iter();
            for result in &operation.results {
                for (index, value) in (0..result.count).zip(&mut results) {
                    if scope.names.insert((result.name, index), value).is_some() {
                        return Err(ImportError::Redefined { place: operation.place, name: result.name.into() });
                    }
                }
            }
        }
        self.location = call;
        self.depth -= 1;
        Ok(returned)
    }

    /// The values of an op's results, one per result type.
    fn operation(
        &mut self,
        operation: &'t Operation<'a>,
        operands: Vec<ValueId>,
        scope: &Scope<'_, 't>,
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
        self.location = location;
        if self.is_whole {
            let result = operation.results.first().map_or("", |result| result.name);
            self.here = format!("line {}, %{result}", place.line);
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
            return self.inline(function, operands, place);
        }
        if !moves_only(operation) && operands.iter().any(|operand| self.is_untyped(*operand)) {
            return Ok(self.stand_in(operation, &operands, None));
        }
        if self.is_outside() && !passes_on(operation) {
            let problem = format!("{} stands outside the region that devices run", full_name(operation));
            return Err(ImportError::Ranks { place, problem });
        }
        let types = operation.result_types.len();
        let lowered = match &self.lifted {
            Some(shape) => self.lower_lifted(operation, &operands, shape.clone(), scope),
            None => self.lower(operation, &operands, scope),
        };
        self.location = location;
        let rejected = match lowered {
            Ok(values) if values.len() == types => {
                let values = self.check_results(operation, values);
                return Ok(values.into_iter().map(|value| self.settled(value)).collect());
            }
            Ok(values) => Reject::Invalid(ProblemKind::ResultCount { expected: values.len(), found: types }),
            Err(reject) => reject,
        };
        let unsupported = match rejected {
            Reject::Stop(error) => return Err(error),
            Reject::Unsupported("") => Some((full_name(operation), place)),
            Reject::Unsupported(detail) => Some((format!("{} ({detail})", full_name(operation)), place)),
            Reject::Invalid(kind) => {
                self.report(operation, kind);
                None
            }
        };
        Ok(self.stand_in(operation, &operands, unsupported))
    }

    /// A result in the form in which later ops see it.
    fn settled(&mut self, value: ValueId) -> ValueId {
        let value = self.counted(value);
        self.positioned(value).unwrap_or(value)
    }

    /// Replaces a scalar that follows from formerly open sizes with its constant. Counts that scale with the
    /// batch can then be found where they divide.
    fn counted(&mut self, value: ValueId) -> ValueId {
        let node = self.graph.node(value);
        if !self.is_open || node.ty.rank() > 0 || matches!(node.op, Op::Constant(_)) {
            return value;
        }
        let Some(tensor) = self.known(value) else { return value };
        let (ty, Some(&number)) = (self.graph.ty(value).clone(), tensor.data.first()) else { return value };
        self.push(Op::Constant(Literal::splat(ty, number)), &[]).unwrap_or(value)
    }

    fn check_operand(&mut self, index: usize, declared: &Type, operand: ValueId, operation: &Operation) {
        if !self.is_untyped(operand) && !self.is_opaque(operand) && !self.fits(declared, operand) {
            let actual = self.graph.ty(operand).clone();
            let declared = declared.to_string().into();
            self.report(operation, ProblemKind::OperandType { index, declared, actual });
        }
    }

    /// True if a value has the declared type. Inside a lifted region, a tensor stands for a scalar.
    fn fits(&self, declared: &Type, value: ValueId) -> bool {
        let actual = self.graph.ty(value);
        same_type(declared, actual)
            || self
                .lifted
                .as_ref()
                .is_some_and(|shape| *shape == actual.shape && same_type(declared, &TensorType::scalar(actual.dtype)))
    }

    fn is_untyped(&self, value: ValueId) -> bool {
        let placeholder = self.placeholders.get(&value);
        placeholder.is_some_and(|placeholder| !placeholder.typed && !placeholder.opaque)
    }

    pub(crate) fn is_opaque(&self, value: ValueId) -> bool {
        self.placeholders.get(&value).is_some_and(|placeholder| placeholder.opaque)
    }

    /// True if the text has an error, so that the import can only end in a list of errors.
    pub(crate) fn is_refused(&self) -> bool {
        !self.problems.is_empty()
    }

    /// Keeps a note, without repeating one that is already kept.
    pub fn note(&mut self, note: Note) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Keeps a problem, once even if its function is called repeatedly. At most 100 are kept.
    fn report(&mut self, operation: &Operation, kind: ProblemKind) {
        let problem = Problem { place: operation.place, op: full_name(operation), kind };
        if self.problems.len() < 100 && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// The results, each replaced with a placeholder of the declared type if the graph infers another.
    fn check_results(&mut self, operation: &Operation, mut values: Vec<ValueId>) -> Vec<ValueId> {
        for (value, declared) in values.iter_mut().zip(&operation.result_types) {
            if self.fits(declared, *value) || self.placeholders.contains_key(value) {
                continue;
            }
            let inferred = self.graph.ty(*value).clone();
            let kind = ProblemKind::ResultType { declared: declared.to_string().into(), inferred };
            self.report(operation, kind);
            *value = self.placeholder(declared, &[], None);
        }
        values
    }

    fn stand_in(&mut self, operation: &Operation, operands: &[ValueId], op: Option<(String, Place)>) -> Vec<ValueId> {
        // Later results depend on the first, so that an op with several is counted once.
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

    /// Appends an input that stands for a missing value. Unlike other inputs it has operands, and no returned
    /// graph contains it.
    fn placeholder(&mut self, ty: &Type, operands: &[ValueId], op: Option<(String, Place)>) -> ValueId {
        let known = tensor_type(ty);
        // In a lifted region, a stand-in for a scalar may have any shape.
        let typed = known.is_some() && self.lifted.is_none();
        let ty = known.unwrap_or_else(|| TensorType::scalar(DType::Bool));
        self.pseudo(ty, operands, Placeholder { op, typed, opaque: false })
    }

    /// A token, or a tuple of these values.
    pub(crate) fn opaque(&mut self, operands: &[ValueId]) -> ValueId {
        let placeholder = Placeholder { op: None, typed: false, opaque: true };
        self.pseudo(TensorType::scalar(DType::Bool), operands, placeholder)
    }

    /// A value of this type that stands for the parts of a whole that devices compute.
    pub(super) fn stand_for(&mut self, ty: TensorType, part: ValueId) -> ValueId {
        self.pseudo(ty, &[part], Placeholder { op: None, typed: true, opaque: false })
    }

    fn pseudo(&mut self, ty: TensorType, operands: &[ValueId], placeholder: Placeholder) -> ValueId {
        let leaf = Op::Input(Input { name: String::new(), ty: ty.clone() });
        let node = Node { op: leaf, operands: operands.to_vec(), ty, batch_dims: 0, name: String::new() };
        let value = self.append(node);
        self.placeholders.insert(value, placeholder);
        value
    }

    /// Appends a node under the name of the op that is being converted.
    pub fn push(&mut self, op: Op, operands: &[ValueId]) -> Result<ValueId, ShapeError> {
        let ty = {
            let types: Vec<&TensorType> = operands.iter().map(|&v| self.graph.ty(v)).collect();
            altiplano_ir::op::Operator::infer(&op, &types)?
        };
        let name = match self.is_whole {
            true => self.here.clone(),
            false => self.module.location_name(self.location).unwrap_or_default().to_owned(),
        };
        Ok(self.append(Node { op, operands: operands.to_vec(), ty, batch_dims: 0, name }))
    }

    pub fn append(&mut self, node: Node) -> ValueId {
        self.knowledge.note(&node);
        let value = self.graph.append(node);
        self.note_position(value);
        value
    }

    /// Reports the ops that were not converted, and drops values that no output needs. The first output is the
    /// loss. Another output that depends on something unsupported, such as an accuracy, is dropped instead of
    /// refused.
    fn finish(
        mut self,
        mut arguments: Vec<Argument>,
        mut results: Vec<Option<String>>,
    ) -> Result<Imported, ImportError> {
        let unsupported = |v: ValueId| self.placeholders.get(&v).is_some_and(|p| p.op.is_some() || p.opaque);
        let tainted = self.graph.depends_on(unsupported);
        let first = self.graph.outputs.first().copied();
        let keeps: Vec<bool> =
            self.graph.outputs.iter().map(|o| self.is_whole || Some(*o) == first || !tainted[o.index()]).collect();
        let mut kept = keeps.iter();
        self.graph.outputs.retain(|_| kept.next() == Some(&true));
        let mut kept = keeps.iter();
        results.retain(|_| kept.next() == Some(&true));
        let live = self.resolve_updates();
        let unsupported = self.unsupported(&live);
        if !unsupported.is_empty() || !self.problems.is_empty() {
            self.problems.sort_by_key(|problem| problem.place);
            return Err(ImportError::Operations { unsupported, problems: self.problems });
        }
        let mut live = live;
        for argument in &arguments {
            live[argument.value.index()] = true;
        }
        let mut graph = Graph::new(std::mem::take(&mut self.graph.name));
        let mut renumbered = vec![ValueId(0); live.len()];
        let nodes = std::mem::take(&mut self.graph.nodes);
        for (old, mut node) in nodes.into_iter().enumerate() {
            if !live[old] {
                continue;
            }
            if let Some(pieces) = self.updates.resolved(ValueId(old as u32)) {
                renumbered[old] = pieces.emit(&mut graph, &renumbered, &node.name);
                continue;
            }
            for operand in &mut node.operands {
                *operand = renumbered[operand.index()];
            }
            renumbered[old] = graph.append(node);
        }
        graph.outputs = self.graph.outputs.iter().map(|output| renumbered[output.index()]).collect();
        for argument in &mut arguments {
            argument.value = renumbered[argument.value.index()];
        }
        for pin in self.pins.into_iter().filter(|pin| live[pin.value.index()]) {
            graph.pin(Pin { value: renumbered[pin.value.index()], ..pin });
        }
        Ok(Imported { graph, arguments, results, open_sizes: Vec::new(), notes: Vec::new() })
    }

    /// The needed ops that the graph cannot express, each listed once.
    fn unsupported(&self, live: &[bool]) -> Vec<Unsupported> {
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
        unsupported
    }
}

/// The function that an op calls. The decomposition of a composite op is such a function.
fn callee<'o>(operation: &'o Operation) -> Option<&'o str> {
    let attribute = match (operation.dialect, operation.name) {
        ("func", "call") => "callee",
        ("stablehlo", "composite") => "decomposition",
        _ => return None,
    };
    operation.attribute(attribute)?.as_word()
}

/// Ops that pass any kind of operand on unchanged.
fn moves_only(operation: &Operation) -> bool {
    operation.dialect == "stablehlo"
        && matches!(operation.name, "optimization_barrier" | "tuple" | "get_tuple_element" | "while" | "after_all")
}
