//! Reads the program of one rank among several: the body of JAX's `shard_map`, with collectives over the axes of a mesh.
//!
//! Collectives name groups of devices, which become axes of the mesh. Values that depend on a device's position alone are
//! evaluated for all devices while the text is read, so `partition_id` divided and counted in any way becomes the index
//! along some axes, a slice at such an index a local slice, and a mask of the first device a value that it alone keeps.

use super::control::regions;
use super::convert::{Argument, Converter, Scope, import_module};
use super::lower::{Lowered, attribute, dim, exactly, result_type, sizes};
use super::parse::parse;
use super::report::{ImportError, Reject};
use super::sharding::{axes_of, shardy};
use super::syntax::{Attribute, Module, Operation, Type};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::mesh::{Axis, AxisId, Mesh};
use altiplano_ir::op::{AxisIndex, Binary, Input, Op, Operator, Reducer};
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::collections::HashMap;
use std::rc::Rc;

/// Values are known for each device, so larger meshes are refused.
const MOST_DEVICES: u64 = 4096;

/// The most numbers of single devices that are computed; later values count as unknown. It is what a thousand ops on
/// positions take on the largest mesh.
const MOST_NUMBERS: u64 = 1000 * MOST_DEVICES;

/// A program that every device of a mesh runs on its parts of the arguments.
#[derive(Debug, Clone)]
pub struct RankProgram {
    /// The program of one device. Each node is named after its place: `line 12, %3`.
    pub graph: Graph,
    pub mesh: Mesh,
    /// The arguments of the entry function. The values are those of the leaves that stand for whole arguments.
    pub arguments: Vec<Argument>,
    pub inputs: Vec<RankInput>,
    pub outputs: Vec<RankOutput>,
    /// Names of the results in order, where the text gives them.
    pub results: Vec<Option<String>>,
}

/// A device's part of an argument.
#[derive(Debug, Clone, PartialEq)]
pub struct RankInput {
    pub value: ValueId,
    /// The position of the argument of the entry function.
    pub argument: usize,
    pub sharding: Sharding,
}

/// A device's part of a result.
#[derive(Debug, Clone, PartialEq)]
pub struct RankOutput {
    pub value: ValueId,
    pub sharding: Sharding,
    /// The type of the whole result.
    pub ty: TensorType,
}

/// Facts about a per-rank program that its text may lack.
#[derive(Debug, Clone, Default)]
pub struct RankOptions {
    pub mesh: Option<Mesh>,
    /// The layout of an argument (`params['w']`, `arg0`) or a result (`result0`), as text: `[{data}, {}]`. Used if the
    /// text is a bare program of one rank. Values without a layout are whole on every device.
    pub layouts: Vec<(String, String)>,
    /// The types of whole arguments and results, for a bare program.
    pub arguments: Vec<TensorType>,
    pub results: Vec<TensorType>,
}

/// State of the import of a per-rank program.
pub(super) struct Ranks {
    mesh: Mesh,
    /// True inside the region that a device runs.
    inside: bool,
    /// True if the whole text is the program of a device.
    bare: bool,
    /// Layouts of whole values, as `mhlo.sharding` has them.
    tilings: HashMap<ValueId, String>,
    inputs: Vec<RankInput>,
    /// The local value, the layout and the type of each whole result of a region.
    wholes: HashMap<ValueId, RankOutput>,
    /// The number in all elements of a value on each device, for values that depend on the device's position.
    known: HashMap<ValueId, Rc<Vec<f64>>>,
    /// The numbers of single devices that may still be computed.
    left: u64,
}

/// Reads a per-rank program.
pub fn import_ranks(text: &str, options: &RankOptions) -> Result<RankProgram, ImportError> {
    let module = parse(text)?;
    let region = region_of(&module);
    let bare = region.is_none() && !has_old_region(&module);
    let stated = match region {
        Some(operation) => Some(mesh_of(&module, operation)?),
        None => None,
    };
    let mesh = match (stated, &options.mesh) {
        (Some(stated), Some(given)) if stated != *given => {
            return Err(ImportError::Mesh { problem: format!("the text has {stated}, the option {given}") });
        }
        (Some(mesh), _) => mesh,
        (None, Some(mesh)) => mesh.clone(),
        (None, None) => {
            let problem = "the text names no axes of a mesh, so a mesh must be given".to_string();
            return Err(ImportError::Mesh { problem });
        }
    };
    let devices = mesh.axes.iter().try_fold(1u64, |n, axis| n.checked_mul(u64::from(axis.size)));
    if !devices.is_some_and(|n| (1..=MOST_DEVICES).contains(&n)) {
        return Err(ImportError::Mesh { problem: format!("{mesh} has no devices, or more than {MOST_DEVICES}") });
    }
    let ranks = Ranks {
        mesh: mesh.clone(),
        inside: bare,
        bare,
        tilings: HashMap::new(),
        inputs: Vec::new(),
        wholes: HashMap::new(),
        known: HashMap::new(),
        left: MOST_NUMBERS,
    };
    let (imported, inputs, outputs) = import_module(&module, Some(ranks), |graph, arguments| match bare {
        false => Ok(Vec::new()),
        true => bare_inputs(graph, arguments, &mesh, options),
    })?;
    let outputs = match outputs {
        Some(outputs) => outputs,
        None => bare_outputs(&imported.graph, &mesh, options)?,
    };
    let (graph, arguments, results) = (imported.graph, imported.arguments, imported.results);
    expect_known(options, bare, &arguments, outputs.len())?;
    Ok(RankProgram { graph, mesh, arguments, inputs, outputs, results })
}

/// The first region of the module that each device runs on its own.
fn region_of<'t, 'a>(module: &'t Module<'a>) -> Option<&'t Operation<'a>> {
    let all = module.functions.iter().flat_map(|function| &function.operations);
    all.into_iter().find(|operation| operation.dialect == "sdy" && operation.name == "manual_computation")
}

/// Returns true if the text has a region in the older form, between two custom calls.
fn has_old_region(module: &Module<'_>) -> bool {
    let all = module.functions.iter().flat_map(|function| &function.operations);
    all.into_iter().any(|operation| target(operation) == Some("SPMDFullToShardShape"))
}

fn target<'o>(operation: &'o Operation<'_>) -> Option<&'o str> {
    operation.attribute("call_target_name").and_then(Attribute::as_word)
}

/// The mesh that a region's layouts name.
fn mesh_of(module: &Module<'_>, operation: &Operation<'_>) -> Result<Mesh, ImportError> {
    let refused = |problem: String| ImportError::Ranks { place: operation.place, problem };
    let texts = ["in_shardings", "out_shardings"].map(|name| layouts_of(operation, name).unwrap_or_default());
    let Some(name) = texts.iter().flatten().find_map(|text| shardy(text)).map(|(mesh, _)| mesh) else {
        return Err(refused("its layouts name no mesh".into()));
    };
    let text = match name.starts_with('[') {
        true => name,
        false => match module.meshes.iter().find(|known| known.0 == name) {
            Some((_, text)) => text,
            None => return Err(refused(format!("there is no mesh @{name}"))),
        },
    };
    if text.contains("device_ids") {
        return Err(refused("its mesh has an order of devices of its own, which is not supported".into()));
    }
    let axes = axes_of(text);
    let sized = |(name, size): &(String, u64)| Some(Axis { name: name.clone(), size: u32::try_from(*size).ok()? });
    let sized: Option<Vec<Axis>> = axes.iter().map(sized).collect();
    match sized {
        Some(axes) if axes.len() <= 32 => Ok(Mesh { axes }),
        _ => Err(refused("its mesh is too large".into())),
    }
}

/// The layouts of an op's operands or results: a list, or the text of one.
fn layouts_of<'a>(operation: &Operation<'a>, name: &str) -> Option<Vec<&'a str>> {
    match operation.attribute(name)? {
        Attribute::Opaque(text) => Some(each_sharding(text)),
        Attribute::Array(items) => items
            .iter()
            .map(|item| match item {
                Attribute::Opaque(text) => Some(*text),
                _ => None,
            })
            .collect(),
        _ => None,
    }
}

/// The layouts in `[<@mesh, [{"x"}]>, <@mesh, []>]`.
fn each_sharding(text: &str) -> Vec<&str> {
    let inside = text.split_once('[').map_or("", |(_, rest)| rest);
    let (mut depth, mut start, mut found) = (0usize, 0, Vec::new());
    for (at, byte) in inside.bytes().enumerate() {
        match byte {
            b'<' => {
                if depth == 0 {
                    start = at;
                }
                depth += 1;
            }
            b'>' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    found.push(&inside[start..=at]);
                }
            }
            _ => {}
        }
    }
    found
}

/// The layouts of arguments of a bare per-rank program.
fn bare_inputs(
    graph: &Graph,
    arguments: &[Argument],
    mesh: &Mesh,
    options: &RankOptions,
) -> Result<Vec<RankInput>, ImportError> {
    let mut inputs = Vec::new();
    for (at, argument) in arguments.iter().enumerate() {
        let names = [argument.name.clone().unwrap_or_default(), format!("arg{at}")];
        let whole = options.arguments.get(at).unwrap_or(&argument.ty);
        let sharding = given_layout(&names, whole, graph.ty(argument.value), mesh, options)?;
        inputs.push(RankInput { value: argument.value, argument: at, sharding });
    }
    Ok(inputs)
}

fn bare_outputs(graph: &Graph, mesh: &Mesh, options: &RankOptions) -> Result<Vec<RankOutput>, ImportError> {
    let mut outputs = Vec::new();
    for (at, &value) in graph.outputs.iter().enumerate() {
        let ty = options.results.get(at).unwrap_or(graph.ty(value)).clone();
        let sharding = given_layout(&[format!("result{at}")], &ty, graph.ty(value), mesh, options)?;
        outputs.push(RankOutput { value, sharding, ty });
    }
    Ok(outputs)
}

/// Refuses given layouts that no value has.
fn expect_known(
    options: &RankOptions,
    bare: bool,
    arguments: &[Argument],
    num_results: usize,
) -> Result<(), ImportError> {
    let refused = |name: &str, problem: &str| Err(ImportError::Mesh { problem: format!("{name}: {problem}") });
    for (at, (name, _)) in options.layouts.iter().enumerate() {
        let number = |prefix: &str| name.strip_prefix(prefix).and_then(|number| number.parse::<usize>().ok());
        let is_argument = number("arg").is_some_and(|number| number < arguments.len())
            || arguments.iter().any(|argument| argument.name.as_ref() == Some(name));
        if !bare {
            return refused(name, "the text has the layouts of its region, so that none can be given");
        }
        if !is_argument && number("result").is_none_or(|number| number >= num_results) {
            return refused(name, "a layout is given, but the program has no such argument or result");
        }
        if options.layouts[..at].iter().any(|(other, _)| other == name) {
            return refused(name, "two layouts are given");
        }
    }
    Ok(())
}

/// The layout that an option gives the value of one of these names. The local type must agree with it.
fn given_layout(
    names: &[String],
    whole: &TensorType,
    local: &TensorType,
    mesh: &Mesh,
    options: &RankOptions,
) -> Result<Sharding, ImportError> {
    let text = options.layouts.iter().find(|(name, _)| names.contains(name)).map(|(_, text)| text);
    let name = names.last().map_or("", String::as_str);
    let refused = |problem: String| ImportError::Mesh { problem: format!("{name}: {problem}") };
    let sharding = match text {
        None => Sharding::replicated(&whole.shape),
        Some(text) => {
            let parsed = Sharding::parse(text, &whole.shape, mesh).filter(|s| s.is_valid(&whole.shape, mesh));
            parsed.ok_or_else(|| refused(format!("'{text}' is no layout of {whole} on {mesh}")))?
        }
    };
    if sharding.local_shape(mesh) != local.shape {
        let layout = sharding.display(mesh);
        return Err(refused(format!("the layout {layout} of {whole} gives a device other sizes than {local}")));
    }
    Ok(sharding)
}

impl<'t, 'a> Converter<'t, 'a> {
    /// True if an op of a per-rank program stands outside the region that devices run.
    pub(super) fn is_outside(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| !ranks.inside)
    }

    /// True if the text is a program of ranks with regions, whose operands and results are whole.
    pub(super) fn has_regions(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| !ranks.bare)
    }

    /// Remembers the layout that `custom_call @Sharding` gives a value outside regions.
    pub(super) fn note_tiling(&mut self, operation: &Operation<'_>, value: ValueId) {
        if let (Some(ranks), Some(text)) =
            (&mut self.ranks, operation.attribute("mhlo.sharding").and_then(Attribute::as_word))
        {
            ranks.tilings.insert(value, text.to_string());
        }
    }

    /// Lowers the beginning of a region in the older form: a device's part of a whole value.
    pub(super) fn full_to_shard(&mut self, operation: &Operation<'_>, operands: &[ValueId]) -> Lowered {
        let [x] = exactly(operands)?;
        let Some(ranks) = &self.ranks else { return Err(Reject::Unsupported("programs of one device are planned")) };
        let mesh = ranks.mesh.clone();
        let whole = ranks.wholes.get(&x).map_or_else(|| self.graph.ty(x).clone(), |whole| whole.ty.clone());
        let text = ranks.tilings.get(&x).cloned().unwrap_or_default();
        let sharding = tiled(&text, &whole, &mesh).map_err(|problem| at(operation, problem))?;
        let part = self.part(operation, x, (sharding, &whole), &mesh)?;
        self.set_inside(true);
        Ok(vec![part])
    }

    /// Lowers the end of a region in the older form: the whole value of which a device has a part.
    pub(super) fn shard_to_full(&mut self, operation: &Operation<'_>, operands: &[ValueId]) -> Lowered {
        let [value] = exactly(operands)?;
        let Some(ranks) = &self.ranks else { return Err(Reject::Unsupported("programs of one device are planned")) };
        let mesh = ranks.mesh.clone();
        let ty = result_type(operation)?;
        let text = operation.attribute("mhlo.sharding").and_then(Attribute::as_word).unwrap_or_default();
        let sharding = tiled(text, &ty, &mesh).map_err(|problem| at(operation, problem))?;
        self.set_inside(false);
        Ok(vec![self.whole_of(operation, value, sharding, ty)?])
    }

    /// Takes what is known of the parts of arguments and of whole results.
    pub(super) fn take_ranks(&mut self) -> (Vec<RankInput>, HashMap<ValueId, RankOutput>) {
        self.ranks.take().map(|ranks| (ranks.inputs, ranks.wholes)).unwrap_or_default()
    }

    /// Lowers a region that each device runs on parts of its operands.
    pub(super) fn manual_computation(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let refused =
            |problem: &str| Err(Reject::Stop(ImportError::Ranks { place: operation.place, problem: problem.into() }));
        let [region] = regions(operation)?;
        let Some(ranks) = &self.ranks else { return refused("it is no program of one rank") };
        if ranks.inside {
            return refused("it lies inside another");
        }
        let mesh = ranks.mesh.clone();
        if mesh_of(self.module, operation)? != mesh {
            return refused("its mesh is another than that of the first such op");
        }
        let manual = match operation.attribute("manual_axes") {
            Some(Attribute::Dictionary(axes)) => axes.iter().map(|axis| axis.0.to_string()).collect(),
            Some(Attribute::Opaque(text)) => text.split('"').skip(1).step_by(2).map(str::to_string).collect(),
            _ => Vec::new(),
        };
        if mesh.axes.iter().any(|axis| axis.size > 1 && !manual.contains(&axis.name)) {
            return refused(
                "some axes of its mesh are not manual; what the compiler does along them is not in the text",
            );
        }
        let layouts = |name: &'static str| layouts_of(operation, name).ok_or_else(|| attribute(name));
        let (of_operands, of_results) = (layouts("in_shardings")?, layouts("out_shardings")?);
        if of_operands.len() != operands.len() || of_results.len() != operation.result_types.len() {
            return refused("it has not one layout for each operand and result");
        }
        let mut locals = Vec::with_capacity(operands.len());
        for (&operand, text) in operands.iter().zip(of_operands) {
            let of_region = self.ranks.as_ref().and_then(|ranks| ranks.wholes.get(&operand));
            let ty = of_region.map_or_else(|| self.graph.ty(operand).clone(), |whole| whole.ty.clone());
            let sharding = sharding_of(text, &ty, &mesh).map_err(|problem| at(operation, problem))?;
            locals.push(self.part(operation, operand, (sharding, &ty), &mesh)?);
        }
        self.set_inside(true);
        let values = self.region(operation, region, locals, operation.result_types.len(), scope);
        self.set_inside(false);
        let mut wholes = Vec::new();
        for ((value, text), ty) in values?.into_iter().zip(of_results).zip(&operation.result_types) {
            let Some(ty) = super::literal::tensor_type(ty) else { return refused("a result is no tensor") };
            let sharding = sharding_of(text, &ty, &mesh).map_err(|problem| at(operation, problem))?;
            wholes.push(self.whole_of(operation, value, sharding, ty)?);
        }
        Ok(wholes)
    }

    /// A value that stands for the whole of which a region computes a part.
    fn whole_of(
        &mut self,
        operation: &Operation<'_>,
        value: ValueId,
        sharding: Sharding,
        ty: TensorType,
    ) -> Result<ValueId, Reject> {
        let Some(ranks) = &self.ranks else { return Ok(value) };
        if sharding.local_shape(&ranks.mesh) != self.graph.shape(value) {
            return Err(at(operation, "the layout of a result contradicts its sizes".into()));
        }
        let whole = self.stand_for(ty.clone(), value);
        if let Some(ranks) = &mut self.ranks {
            ranks.wholes.insert(whole, RankOutput { value, sharding, ty });
        }
        Ok(whole)
    }

    fn set_inside(&mut self, inside: bool) {
        if let Some(ranks) = &mut self.ranks {
            ranks.inside = inside;
        }
    }

    /// A device's part of an operand of a region: of an argument, of a result of another region, or of a constant.
    fn part(
        &mut self,
        operation: &Operation<'_>,
        operand: ValueId,
        (sharding, ty): (Sharding, &TensorType),
        mesh: &Mesh,
    ) -> Result<ValueId, Reject> {
        let whole = self.ranks.as_ref().and_then(|ranks| ranks.wholes.get(&operand)).cloned();
        let local = sharding.local_type(ty, mesh);
        let node = self.graph.node(operand).clone();
        let problem = match (&whole, &node.op) {
            (Some(whole), _) if whole.sharding == sharding => return Ok(whole.value),
            (Some(_), _) => "an operand has another layout than the region that computes it",
            (None, Op::Constant(literal)) => match literal.as_splat() {
                Some(value) => return Ok(self.push(Op::Constant(Literal::splat(local, value)), &[])?),
                None if local == *ty => return Ok(operand),
                None => "an operand is a part of a constant with several numbers",
            },
            (None, Op::Input(_)) => {
                let argument = self.argument_values.iter().position(|v| *v == operand);
                if let Some(argument) = argument {
                    let op = Op::Input(Input { name: node.name.clone(), ty: local.clone() });
                    let value =
                        self.append(Node { op, operands: Vec::new(), ty: local, batch_dims: 0, name: node.name });
                    let input = RankInput { value, argument, sharding };
                    self.ranks.iter_mut().for_each(|ranks| ranks.inputs.push(input.clone()));
                    return Ok(value);
                }
                "an operand is computed outside any region"
            }
            _ => "an operand is computed outside any region",
        };
        Err(at(operation, problem.to_string()))
    }

    /// Lowers a collective, and the number of the device.
    pub(super) fn collective(&mut self, operation: &'t Operation<'a>, operands: &[ValueId]) -> Lowered {
        let Some(mesh) = self.ranks.as_ref().map(|ranks| ranks.mesh.clone()) else {
            return Err(Reject::Unsupported("programs of one device are planned, this is one of several"));
        };
        let narrow = |value: Result<usize, Reject>| value.map(|dim| u8::try_from(dim).unwrap_or(u8::MAX));
        let op = match operation.name {
            "partition_id" => {
                let axes = mesh.axis_ids().filter(|&a| mesh.size(a) > 1).collect();
                return self.one(Op::AxisIndex(AxisIndex { axes, mesh, dtype: DType::U32 }), &[]);
            }
            "all_reduce" | "reduce_scatter" => {
                let axes = groups(operation, &mesh, operation.name == "reduce_scatter")?;
                let [region] = regions(operation)?;
                let reducer = match region.applies() {
                    Some("add") => Reducer::Sum,
                    Some("multiply") => Reducer::Product,
                    Some("maximum") => Reducer::Max,
                    Some("minimum") => Reducer::Min,
                    _ => return Err(Reject::Unsupported("with this reduction")),
                };
                match operation.name {
                    "all_reduce" => Collective::AllReduce { axes, reducer },
                    _ => {
                        let dim = narrow(dim(operation, "scatter_dimension"))?;
                        Collective::ReduceScatter { axes, reducer, dim, outer: 1 }
                    }
                }
            }
            "all_gather" => {
                let axes = groups(operation, &mesh, true)?;
                Collective::AllGather { axes, dim: narrow(dim(operation, "all_gather_dim"))?, outer: 1 }
            }
            "all_to_all" => {
                let axes = groups(operation, &mesh, true)?;
                if sizes(operation, "split_count")? != [mesh.product(&axes)] {
                    return Err(at(operation, "its split_count is not the size of its groups".into()));
                }
                Collective::AllToAll {
                    axes,
                    split_dim: narrow(dim(operation, "split_dimension"))?,
                    split_outer: 1,
                    concat_dim: narrow(dim(operation, "concat_dimension"))?,
                    concat_outer: 1,
                }
            }
            "collective_permute" => {
                let (axes, by) = ring(operation, &mesh)?;
                Collective::Shift { axes, by }
            }
            _ => return Err(Reject::Unsupported("in a program of one rank")),
        };
        let op = Op::collective(op, &mesh);
        operands.iter().map(|&x| Ok(self.push(op.clone(), &[x])?)).collect()
    }

    /// Notes the value of a node on each device, if it follows from the device's position.
    pub(super) fn note_position(&mut self, value: ValueId) {
        let node = self.graph.node(value);
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.inside && ranks.left > 0) else { return };
        let mesh = &ranks.mesh;
        let devices = 0..mesh.num_devices();
        let numbers: Vec<f64> = match &node.op {
            Op::AxisIndex(op) => devices.map(|d| mesh.index_along(&op.axes, &mesh.coordinates(d)) as f64).collect(),
            op if node.operands.iter().any(|o| ranks.known.contains_key(o)) => {
                let moves = matches!(op, Op::BroadcastInDim(_) | Op::Reshape(_));
                let operands: Option<Vec<Rc<Vec<f64>>>> = node.operands.iter().map(|&o| self.on_each(o)).collect();
                let Some(operands) = operands else { return };
                let scalar = TensorType::scalar(node.ty.dtype);
                let on = |d: usize| {
                    let of =
                        |(numbers, o): (&Rc<Vec<f64>>, &ValueId)| Tensor::scalar(self.graph.ty(*o).dtype, numbers[d]);
                    let values: Vec<Tensor> = operands.iter().zip(&node.operands).map(of).collect();
                    op.eval(&values.iter().collect::<Vec<_>>(), &scalar).data[0]
                };
                match op {
                    _ if moves => operands[0].to_vec(),
                    op if op.is_elementwise() => devices.map(|d| on(d as usize)).collect(),
                    _ => return,
                }
            }
            _ => return,
        };
        if let Some(ranks) = &mut self.ranks {
            ranks.left = ranks.left.saturating_sub(numbers.len() as u64);
            ranks.known.insert(value, Rc::new(numbers));
        }
    }

    /// The number in all elements of a value on each device.
    fn on_each(&self, value: ValueId) -> Option<Rc<Vec<f64>>> {
        let ranks = self.ranks.as_ref()?;
        if let Some(known) = ranks.known.get(&value) {
            return Some(known.clone());
        }
        let number = self.splat_of(value)?;
        Some(Rc::new(vec![number; ranks.mesh.num_devices() as usize]))
    }

    /// The number in all elements of a constant, or of a broadcast or conversion of one.
    fn splat_of(&self, mut value: ValueId) -> Option<f64> {
        loop {
            let node = self.graph.node(value);
            match &node.op {
                Op::Constant(literal) => return literal.as_splat(),
                Op::BroadcastInDim(_) | Op::Reshape(_) => value = node.operands[0],
                _ => return None,
            }
        }
    }

    /// Writes an integer that counts devices along some axes as the index along them times its step.
    pub(super) fn positioned(&mut self, value: ValueId) -> Result<ValueId, Reject> {
        let ty = self.graph.ty(value).clone();
        let Some(ranks) = self.ranks.as_ref().filter(|_| ty.rank() == 0 && !ty.dtype.is_float()) else {
            return Ok(value);
        };
        let mesh = ranks.mesh.clone();
        let Some((axes, step)) = ranks.known.get(&value).and_then(|numbers| steps(numbers, &mesh)) else {
            return Ok(value);
        };
        if ty.dtype == DType::Bool {
            return Ok(value);
        }
        if axes.is_empty() {
            return Ok(self.push(Op::Constant(Literal::splat(ty, 0.0)), &[])?);
        }
        let index = self.push(Op::AxisIndex(AxisIndex { axes, mesh, dtype: ty.dtype }), &[])?;
        let step = self.push(Op::Constant(Literal::splat(ty, step)), &[])?;
        self.binary(Binary::Multiply, index, step)
    }

    /// A slice of `length` of a dimension that begins at a device's index along some axes times `length`.
    pub(super) fn local_slice(&mut self, x: ValueId, dim: usize, start: ValueId, length: u64) -> Option<Op> {
        let ranks = self.ranks.as_ref()?;
        let (axes, step) = steps(ranks.known.get(&start)?, &ranks.mesh)?;
        let size = *self.graph.shape(x).get(dim)?;
        let tiles = step == length as f64 && ranks.mesh.product(&axes).checked_mul(length) == Some(size);
        let dim = u8::try_from(dim).ok()?;
        tiles.then(|| Op::collective(Collective::LocalSlice { axes, dim, outer: 1 }, &ranks.mesh))
    }

    /// The op that keeps a value on the first devices along some axes alone, for a mask of numbers that are 1 there and 0
    /// elsewhere.
    pub(super) fn kept_first(&self, mask: ValueId, inverted: bool) -> Option<Op> {
        let ranks = self.ranks.as_ref()?;
        let numbers = ranks.known.get(&mask)?;
        let mesh = &ranks.mesh;
        let is_kept = |d: u32| (numbers[d as usize] != 0.0) != inverted;
        if numbers.iter().any(|n| *n != 0.0 && *n != 1.0) {
            return None;
        }
        let axes: Vec<AxisId> = mesh.axis_ids().filter(|&a| mesh.size(a) > 1 && !is_kept(mesh.stride(a))).collect();
        let first = |d: u32| mesh.index_along(&axes, &mesh.coordinates(d)) == 0;
        let fits = !axes.is_empty() && (0..mesh.num_devices()).all(|d| is_kept(d) == first(d));
        fits.then(|| Op::collective(Collective::KeepFirst { axes, reducer: Reducer::Sum }, mesh))
    }

    /// Lowers a choice between a value and 0 by the device's position to the value that the first device keeps.
    pub(super) fn masked(&mut self, operands: [ValueId; 3]) -> Result<Option<ValueId>, Reject> {
        let [mask, a, b] = operands;
        let (kept, other, inverted) = match (self.splat_of(a), self.splat_of(b)) {
            (_, Some(0.0)) => (a, b, false),
            (Some(0.0), _) => (b, a, true),
            _ => return Ok(None),
        };
        match self.kept_first(mask, inverted) {
            Some(op) if self.graph.ty(kept) == self.graph.ty(other) => Ok(Some(self.push(op, &[kept])?)),
            _ => Ok(None),
        }
    }

    /// Lowers a product with a mask of the first device.
    pub(super) fn product_with_mask(&mut self, a: ValueId, b: ValueId) -> Result<Option<ValueId>, Reject> {
        let float = self.graph.ty(a).dtype.is_float() && self.graph.ty(a) == self.graph.ty(b);
        for (mask, kept) in [(a, b), (b, a)] {
            if let (true, Some(op)) = (float, self.kept_first(mask, false)) {
                return Ok(Some(self.push(op, &[kept])?));
            }
        }
        Ok(None)
    }
}

fn at(operation: &Operation<'_>, problem: String) -> Reject {
    Reject::Stop(ImportError::Ranks { place: operation.place, problem })
}

/// The layout that Shardy's text describes.
fn sharding_of(text: &str, ty: &TensorType, mesh: &Mesh) -> Result<Sharding, String> {
    let Some((_, dims)) = shardy(text).filter(|(_, dims)| dims.len() == ty.rank()) else {
        return Err(format!("the layout {text} is none of {ty}, or splits an axis"));
    };
    let mut sharding = Sharding { dims: Vec::with_capacity(dims.len()), partial: Vec::new() };
    for (dim, &size) in dims.iter().zip(&ty.shape) {
        let axes: Option<Vec<AxisId>> = dim.axes.iter().map(|name| mesh.find(name)).collect();
        let Some(axes) = axes else { return Err(format!("the layout {text} has an axis that {mesh} lacks")) };
        sharding.dims.push(DimLayout::split(size, axes.into_iter().filter(|&a| mesh.size(a) > 1)));
    }
    match sharding.is_valid(&ty.shape, mesh) {
        true => Ok(sharding),
        false => Err(format!("the layout {text} does not divide {ty} evenly on {mesh}")),
    }
}

/// The layout of `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`, which numbers the parts of each dimension by device.
fn tiled(text: &str, ty: &TensorType, mesh: &Mesh) -> Result<Sharding, String> {
    let whole = Sharding::replicated(&ty.shape);
    let inside = text.trim().trim_start_matches('{').trim_end_matches('}').trim();
    if inside == "replicated" {
        return Ok(whole);
    }
    let refused = || format!("the layout '{text}' of {ty} follows from no axes of {mesh}");
    let rest = inside.strip_prefix("devices=[").ok_or_else(refused)?;
    let (parts, rest) = rest.split_once(']').ok_or_else(refused)?;
    let ints = |list: &str| list.split(',').map(|n| n.trim().parse::<u64>().ok()).collect::<Option<Vec<u64>>>();
    let parts = ints(parts).ok_or_else(refused)?;
    let (order, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let replicates = match rest.trim() {
        "" => false,
        "last_tile_dim_replicate" => true,
        _ => return Err(refused()),
    };
    let devices = order_of(order).filter(|devices| is_order(devices, mesh)).ok_or_else(refused)?;
    let tiles = parts.iter().try_fold(1u64, |n, part| n.checked_mul(*part));
    if tiles != Some(devices.len() as u64) || parts.len() != ty.rank() + usize::from(replicates) {
        return Err(refused());
    }
    let mut sharding = whole;
    for (dim, &size) in ty.shape.iter().enumerate() {
        let minor: u64 = parts[dim + 1..].iter().product();
        let mut numbers = vec![0.0; devices.len()];
        for (tile, &device) in (0u64..).zip(&devices) {
            numbers[device as usize] = (tile / minor % parts[dim]) as f64;
        }
        let (axes, step) = steps(&numbers, mesh).ok_or_else(refused)?;
        if mesh.product(&axes) != parts[dim] || parts[dim] > 1 && step != 1.0 {
            return Err(refused());
        }
        sharding.dims[dim] = DimLayout::split(size, axes);
    }
    if sharding.is_valid(&ty.shape, mesh) { Ok(sharding) } else { Err(refused()) }
}

/// The devices in the order of tiles: `0,2,1,3`, or `<=[2,4]T(1,0)`, which counts devices and permutes dimensions.
fn order_of(text: &str) -> Option<Vec<u64>> {
    let ints = |list: &str| list.split(',').map(|n| n.trim().parse::<u64>().ok()).collect::<Option<Vec<u64>>>();
    let Some(counted) = text.strip_prefix("<=[") else { return ints(text) };
    let (dims, rest) = counted.split_once(']')?;
    let dims = ints(dims)?;
    let all = dims.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim)).filter(|n| *n <= MOST_DEVICES)?;
    let permutation = match rest.trim() {
        "" => (0..dims.len()).collect(),
        rest => ints(rest.strip_prefix("T(")?.strip_suffix(')')?)?.into_iter().map(|d| d as usize).collect::<Vec<_>>(),
    };
    let mut sorted = permutation.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..dims.len()) {
        return None;
    }
    let stride = |dim: usize| dims[dim + 1..].iter().product::<u64>();
    let device = |mut tile: u64| {
        let mut device = 0;
        for &dim in permutation.iter().rev() {
            device += tile % dims[dim] * stride(dim);
            tile /= dims[dim];
        }
        device
    };
    Some((0..all).map(device).collect())
}

/// Returns true if a list has each device of the mesh once.
fn is_order(devices: &[u64], mesh: &Mesh) -> bool {
    let mut sorted = devices.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..u64::from(mesh.num_devices()))
}

/// The devices of `dense<[[0, 1], [2, 3]]>`, by rows.
fn rows(operation: &Operation<'_>, name: &'static str, mesh: &Mesh) -> Result<Vec<Vec<u32>>, Reject> {
    let value = operation.attribute(name).ok_or_else(|| attribute(name))?;
    let ints = value.ints().ok_or_else(|| attribute(name))?;
    let width = match value {
        Attribute::Dense(dense) => match &dense.ty {
            Type::Tensor(ty) => ty.dims.get(1).copied().flatten(),
            _ => None,
        },
        Attribute::Array(rows) => rows.first().and_then(Attribute::ints).map(|row| row.len() as u64),
        _ => None,
    };
    let width = width.and_then(|width| usize::try_from(width).ok()).filter(|width| *width > 0);
    let width = width.ok_or_else(|| attribute(name))?;
    let devices = i64::from(mesh.num_devices());
    if ints.len() % width != 0 || ints.iter().any(|d| !(0..devices).contains(d)) {
        return Err(at(operation, format!("{name} has devices that {mesh} lacks, or rows of several lengths")));
    }
    Ok(ints.chunks(width).map(|row| row.iter().map(|&d| d as u32).collect()).collect())
}

/// The axes of the mesh along which the groups of a collective lie. If `ordered`, devices must come in the order of the
/// axes, major first.
fn groups(operation: &Operation<'_>, mesh: &Mesh, ordered: bool) -> Result<Vec<AxisId>, Reject> {
    let handle = operation.attribute("handle").and_then(Attribute::as_int).unwrap_or(0);
    let global = match operation.attribute("use_global_device_ids") {
        Some(Attribute::Bool(global)) => *global,
        Some(_) => true,
        None => operation.name == "all_to_all",
    };
    if handle <= 0 || !global {
        let problem = "its groups are of replicas; a mesh consists of partitions, with a channel and global ids";
        return Err(at(operation, problem.to_string()));
    }
    let groups = rows(operation, "replica_groups", mesh)?;
    let unmatched = || at(operation, format!("its replica groups lie along no axes of {mesh}"));
    let first = groups.iter().find(|group| group.contains(&0)).ok_or_else(unmatched)?;
    let place = |axis: &AxisId| first.iter().position(|&d| d == mesh.stride(*axis));
    let mut axes: Vec<(usize, AxisId)> =
        mesh.axis_ids().filter(|&a| mesh.size(a) > 1).filter_map(|a| place(&a).map(|at| (at, a))).collect();
    axes.sort_by_key(|(at, axis)| if ordered { (usize::MAX - at, axis.0) } else { (0, axis.0) });
    let axes: Vec<AxisId> = axes.into_iter().map(|(_, axis)| axis).collect();
    let mut members = 0;
    let mut seen = std::collections::HashSet::new();
    for group in &groups {
        let mut wanted = mesh.group(&axes, group[0]);
        let mut found = group.clone();
        if !ordered {
            wanted.sort_unstable();
            found.sort_unstable();
        }
        members += group.len();
        seen.extend(group.iter().copied());
        if wanted != found {
            return Err(unmatched());
        }
    }
    let all = mesh.num_devices() as usize;
    if members == all && seen.len() == all { Ok(axes) } else { Err(unmatched()) }
}

/// The axes of a ring along which a permutation moves values, and the number of places.
fn ring(operation: &Operation<'_>, mesh: &Mesh) -> Result<(Vec<AxisId>, u64), Reject> {
    let pairs = rows(operation, "source_target_pairs", mesh)?;
    let refused =
        || at(operation, format!("its pairs are no ring along axes of {mesh}, in which all devices take part"));
    let mut source: Vec<Option<u32>> = vec![None; mesh.num_devices() as usize];
    for pair in &pairs {
        let &[from, to] = pair.as_slice() else { return Err(refused()) };
        if source[to as usize].replace(from).is_some() {
            return Err(refused());
        }
    }
    let source: Vec<u32> = source.into_iter().collect::<Option<_>>().ok_or_else(refused)?;
    let wide: Vec<AxisId> = mesh.axis_ids().filter(|&a| mesh.size(a) > 1).take(8).collect();
    for chosen in 1..1u32 << wide.len() {
        let axes: Vec<AxisId> = (0..wide.len()).filter(|i| chosen >> i & 1 == 1).map(|i| wide[i]).collect();
        let Some(by) = mesh.group(&axes, 0).iter().position(|d| *d == source[0]) else { continue };
        let moves = |d: u32| {
            let group = mesh.group(&axes, d);
            let here = group.iter().position(|m| *m == d).unwrap_or(0);
            group[(here + by) % group.len()] == source[d as usize]
        };
        if (0..mesh.num_devices()).all(moves) {
            return Ok((axes, by as u64));
        }
    }
    Err(refused())
}

/// The axes and the step of numbers that are an index along axes times a step. No axes if all numbers are 0.
fn steps(numbers: &[f64], mesh: &Mesh) -> Option<(Vec<AxisId>, f64)> {
    let along = |axis: AxisId| numbers.get(mesh.stride(axis) as usize).copied().unwrap_or(0.0);
    let mut axes: Vec<AxisId> = mesh.axis_ids().filter(|&a| mesh.size(a) > 1 && along(a) != 0.0).collect();
    axes.sort_by(|a, b| along(*b).total_cmp(&along(*a)));
    let step = axes.last().map_or(0.0, |&last| along(last));
    let fits = |(d, number): (u32, &f64)| *number == mesh.index_along(&axes, &mesh.coordinates(d)) as f64 * step;
    ((0..).zip(numbers).all(fits) && step >= 0.0).then_some((axes, step))
}

/// Ops that stand for their operand outside the region that devices run.
pub(super) fn passes_on(operation: &Operation<'_>) -> bool {
    matches!(
        (operation.dialect, operation.name),
        ("sdy", "manual_computation" | "sharding_constraint" | "reshard" | "propagation_barrier" | "sharding_group")
            | ("stablehlo", "optimization_barrier" | "constant")
    ) || matches!(target(operation), Some("Sharding" | "SPMDFullToShardShape" | "SPMDShardToFullShape"))
}
