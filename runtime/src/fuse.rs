//! Builds a [`Chain`] from a group of elementwise nodes: selects instructions, loads operands from outside the group,
//! stores results needed outside, and allocates registers by lifetime.

use crate::element::{Class, integer_from_f64};
use crate::kernel::chain::{Chain, Load, RowReduction, Source, Store};
use crate::kernel::instruction::{Code, Instruction, MAX_OPERANDS, float_reducer};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op, Unary};
use altiplano_ir::storage::view::View;
use altiplano_ir::storage::{Group, Place, Step};
use std::collections::BTreeMap;

/// A value of the chain before registers are assigned.
type Virtual = usize;

#[derive(Clone, Debug)]
enum Definition {
    Float(f32),
    Integer(i64),
    Load(Load),
    /// Code and operands.
    Op(Code, [Virtual; MAX_OPERANDS]),
}

struct Builder<'a> {
    graph: &'a Graph,
    group: &'a Group,
    values: Vec<Definition>,
    /// Stored values that the chain reads.
    inputs: &'a [ValueId],
    /// Members of the group computed so far.
    members: BTreeMap<ValueId, Virtual>,
    loads: Vec<(View, Class, Virtual)>,
}

/// The chain of a step that computes a group.
pub(crate) fn build<K>(graph: &Graph, group: &Group, step: &Step<K>) -> Chain {
    let mut builder =
        Builder { graph, group, values: Vec::new(), inputs: &step.inputs, members: BTreeMap::new(), loads: Vec::new() };
    for &v in &group.members {
        let value = builder.node(v);
        builder.members.insert(v, value);
    }
    let (mut stores, mut reductions) = (Vec::new(), Vec::new());
    for (output, stored) in step.outputs.iter().enumerate() {
        let (v, dtype, class) = (stored.value, stored.dtype, stored.class());
        match &graph.node(v).op {
            Op::Reduce(reduce) => {
                let value = builder.operand(graph.node(v).operands[0]);
                let reducer = if class.is_integer() { reduce.reducer } else { float_reducer(reduce.reducer, dtype) };
                reductions.push((value, RowReduction { output, class, dtype, reducer, register: 0 }));
            }
            _ => stores.push((builder.members[&v], Store { output, class, register: 0 })),
        }
    }
    let row = group.reductions.first().map_or(1, |r| r.1);
    let mut chain = builder.assign(row, stores, reductions);
    for &(output, v) in &step.in_place {
        let input = step.inputs.iter().position(|&i| i == v);
        for load in chain.loads.iter_mut().filter(|l| matches!(l.source, Source::Input(i) if Some(i) == input)) {
            load.source = Source::InPlace(output);
        }
    }
    chain
}

impl Builder<'_> {
    fn push(&mut self, definition: Definition) -> Virtual {
        self.values.push(definition);
        self.values.len() - 1
    }

    fn op(&mut self, code: Code, operands: &[Virtual]) -> Virtual {
        let mut all = [0; MAX_OPERANDS];
        all[..operands.len()].copy_from_slice(operands);
        self.push(Definition::Op(code, all))
    }

    /// The value of an operand: a member's, a constant, or a load.
    fn operand(&mut self, o: ValueId) -> Virtual {
        let dtype = self.graph.ty(o).dtype;
        let class = Class::of(dtype);
        match &self.group.places[&o] {
            Place::Splat(value) if class.is_integer() => {
                self.push(Definition::Integer(integer_from_f64(*value, dtype)))
            }
            Place::Splat(value) => self.push(Definition::Float(*value as f32)),
            Place::View(view) => {
                if let Some(&value) = self.members.get(&view.root) {
                    return value;
                }
                if let Some(known) = self.loads.iter().find(|(v, c, _)| v == view && *c == class) {
                    return known.2;
                }
                let input = self.inputs.iter().position(|&i| i == view.root);
                let input = input.unwrap_or_else(|| unreachable!("a chain's step reads what its group reads"));
                let mut runs = view.runs();
                if runs.iter().all(|r| r.1 == 0) {
                    runs.clear();
                }
                let load = Load { source: Source::Input(input), class, register: 0, offset: view.offset, runs };
                let value = self.push(Definition::Load(load));
                self.loads.push((view.clone(), class, value));
                value
            }
        }
    }

    /// Instructions of one node.
    fn node(&mut self, v: ValueId) -> Virtual {
        let graph = self.graph;
        let node = graph.node(v);
        let to = node.ty.dtype;
        let from = graph.ty(node.operands[0]).dtype;
        let operands: Vec<Virtual> = node.operands.iter().map(|&o| self.operand(o)).collect();
        let integers = Class::of(from).is_integer();
        let result = match &node.op {
            Op::Unary(op) if integers => return self.op(Code::IUnary(*op, from), &operands),
            // Negation, absolute value and sign are exact in every format, so the result needs no rounding.
            Op::Unary(op @ (Unary::Negate | Unary::Abs | Unary::Sign)) => return self.op(Code::FUnary(*op), &operands),
            Op::Unary(op) => self.op(Code::FUnary(*op), &operands),
            Op::Binary(op) if integers => return self.op(Code::IBinary(*op, from), &operands),
            Op::Binary(op) if from == DType::Bool => {
                let op = match op {
                    Binary::Add | Binary::Maximum => Binary::Or,
                    Binary::Multiply | Binary::Minimum => Binary::And,
                    Binary::Subtract => Binary::Xor,
                    other => *other,
                };
                return self.op(Code::FBinary(op), &operands);
            }
            Op::Binary(Binary::Power) => self.power(operands[0], operands[1]),
            Op::Binary(op @ (Binary::Maximum | Binary::Minimum)) => return self.op(Code::FBinary(*op), &operands),
            Op::Binary(op) => self.op(Code::FBinary(*op), &operands),
            Op::Compare(op) if integers => return self.op(Code::ICompare(op.direction, from), &operands),
            Op::Compare(op) => return self.op(Code::FCompare(op.direction), &operands),
            Op::Select(_) if Class::of(to).is_integer() => return self.op(Code::ISelect, &operands),
            Op::Select(_) => return self.op(Code::FSelect, &operands),
            Op::Convert(_) => match (integers, Class::of(to)) {
                (true, Class::Bool) => return self.op(Code::IToBool, &operands),
                (true, Class::I32 | Class::I64) => return self.op(Code::IWrap(to), &operands),
                (true, _) => self.op(Code::IToF(from), &operands),
                (false, Class::Bool) => return self.op(Code::FToBool, &operands),
                (false, Class::I32 | Class::I64) => return self.op(Code::FToI(to), &operands),
                (false, _) => operands[0],
            },
            Op::BitcastConvert(_) => {
                let code = match (integers, Class::of(to).is_integer()) {
                    (true, true) => Code::IWrap(to),
                    (true, false) => Code::IToFBits(from, to),
                    (false, true) => Code::FToIBits(from, to),
                    (false, false) => Code::FToFBits(from, to),
                };
                return self.op(code, &operands);
            }
            Op::ReducePrecision(op) => self.op(Code::FReduce(*op, from), &operands),
            Op::Threefry(op) => return self.op(Code::IThreefry(op.word), &operands),
            _ => operands[0],
        };
        let exact = from == to && matches!(node.op, Op::Convert(_));
        if Class::of(to).is_half() && !exact { self.op(Code::FRound(to), &[result]) } else { result }
    }

    /// Expands small constant powers, the usual ones in models, into products and roots.
    fn power(&mut self, base: Virtual, exponent: Virtual) -> Virtual {
        let Definition::Float(constant) = self.values[exponent] else {
            return self.op(Code::FBinary(Binary::Power), &[base, exponent]);
        };
        let times = |b: &mut Self, x, y| b.op(Code::FBinary(Binary::Multiply), &[x, y]);
        match constant {
            1.0 => base,
            2.0 => times(self, base, base),
            3.0 => {
                let square = times(self, base, base);
                times(self, square, base)
            }
            4.0 => {
                let square = times(self, base, base);
                times(self, square, square)
            }
            -1.0 => {
                let one = self.push(Definition::Float(1.0));
                self.op(Code::FBinary(Binary::Divide), &[one, base])
            }
            _ => self.op(Code::FBinary(Binary::Power), &[base, exponent]),
        }
    }

    /// Allocates registers and lists the instructions.
    fn assign(
        self,
        row: usize,
        mut stores: Vec<(Virtual, Store)>,
        mut reductions: Vec<(Virtual, RowReduction)>,
    ) -> Chain {
        let n = self.values.len();
        let mut last_use = vec![0; n];
        for (i, value) in self.values.iter().enumerate() {
            if let Definition::Op(code, operands) = value {
                operands[..code.operands()].iter().for_each(|&o| last_use[o] = i);
            }
        }
        for v in stores.iter().map(|s| s.0).chain(reductions.iter().map(|r| r.0)) {
            last_use[v] = usize::MAX;
        }
        let mut chain = Chain { elements: self.group.elements, row, ..Default::default() };
        let mut register = vec![0u16; n];
        // Constants and loads are ready before the first instruction.
        for (i, value) in self.values.iter().enumerate() {
            match value {
                Definition::Float(x) => {
                    register[i] = chain.float_registers as u16;
                    chain.float_registers += 1;
                    chain.float_constants.push((register[i], *x));
                }
                Definition::Integer(x) => {
                    register[i] = chain.integer_registers as u16;
                    chain.integer_registers += 1;
                    chain.integer_constants.push((register[i], *x));
                }
                Definition::Load(load) => {
                    let count =
                        if load.class.is_integer() { &mut chain.integer_registers } else { &mut chain.float_registers };
                    register[i] = *count as u16;
                    *count += 1;
                    chain.loads.push(Load { register: register[i], ..load.clone() });
                }
                Definition::Op(..) => {}
            }
        }
        let (mut free_floats, mut free_integers) = (Vec::new(), Vec::new());
        for (i, value) in self.values.iter().enumerate() {
            let Definition::Op(code, operands) = value else { continue };
            let (free, count) = if code.writes_integers() {
                (&mut free_integers, &mut chain.integer_registers)
            } else {
                (&mut free_floats, &mut chain.float_registers)
            };
            register[i] = free.pop().unwrap_or_else(|| {
                *count += 1;
                (*count - 1) as u16
            });
            let [a, b, c, d] = operands.map(|o| register[o]);
            chain.instructions.push(Instruction { code: *code, target: register[i], a, b, c, d });
            // Operands are freed after the target is chosen, so that an instruction never writes a register that it
            // reads.
            for (k, &o) in operands[..code.operands()].iter().enumerate() {
                let constant = matches!(self.values[o], Definition::Float(_) | Definition::Integer(_));
                if last_use[o] == i && !constant && !operands[..k].contains(&o) {
                    if code.reads_integers()[k] {
                        free_integers.push(register[o])
                    } else {
                        free_floats.push(register[o])
                    }
                }
            }
        }
        stores.iter_mut().for_each(|(v, s)| s.register = register[*v]);
        reductions.iter_mut().for_each(|(v, r)| r.register = register[*v]);
        chain.stores = stores.into_iter().map(|s| s.1).collect();
        chain.reductions = reductions.into_iter().map(|r| r.1).collect();
        chain
    }
}
