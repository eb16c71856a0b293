//! Lowers loops, branches, and regions of scalars that are applied to whole tensors.
//!
//! A graph has no control flow. A loop whose condition follows from constants is unrolled. A branch with a
//! known index converts only the chosen region. With a computed index, all regions are converted and each
//! element is selected.

use super::convert::{Converter, Scope};
use super::lower::{Lowered, exactly, is_elementwise};
use super::report::{ProblemKind, Reject};
use super::syntax::{Operation, Region};
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Compare, Direction, Op, Select};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::rc::Rc;

/// The first turn of a loop whose effect is compared with the turn before. Later ones are powers of two.
const FIRST_LOOK: u64 = 256;

impl<'t, 'a> Converter<'t, 'a> {
    /// Runs the body on the carried values while the condition holds.
    pub(crate) fn while_loop(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let [condition, body] = regions(operation)?;
        let mut carried = operands.to_vec();
        let mut turn = 0u64;
        loop {
            let holds = self.region(operation, condition, carried.clone(), 1, scope)?;
            match self.known_scalar(holds[0]) {
                Some(0.0) => return Ok(carried),
                Some(_) => {}
                None => return Err(Reject::Unsupported("whose number of turns is not known before it runs")),
            }
            let before = (turn >= FIRST_LOOK && turn.is_power_of_two()).then(|| self.known_of(&carried));
            carried = self.region(operation, body, carried, operands.len(), scope)?;
            if before.is_some_and(|before| before == self.known_of(&carried)) {
                return Err(Reject::Unsupported("that never ends: no turn changes what its condition depends on"));
            }
            // A faulty loop may never end, and one iteration has already reported the fault.
            if self.is_refused() {
                return Ok(carried);
            }
            turn += 1;
        }
    }

    /// The elements of each value that follows from constants.
    fn known_of(&mut self, values: &[ValueId]) -> Vec<Option<Rc<Tensor>>> {
        values.iter().map(|&value| self.known(value)).collect()
    }

    /// Lowers branches. `case` takes the branch of its index, or the last one if the index is out of range;
    /// `if` takes the first branch if its predicate holds.
    pub fn branch(&mut self, operation: &'t Operation<'a>, operands: &[ValueId], scope: &Scope<'_, 't>) -> Lowered {
        let [index] = exactly(operands)?;
        let results = operation.result_types.len();
        let branches = &operation.regions;
        let needed = if operation.name == "if" { 2 } else { 1 };
        if branches.len() < needed || operation.name == "if" && branches.len() > needed {
            let kind = ProblemKind::RegionCount { expected: needed, found: branches.len() };
            return Err(Reject::Invalid(kind));
        }
        let last = branches.len() - 1;
        if let Some(known) = self.known_scalar(index) {
            let chosen = match operation.name {
                "if" => usize::from(known == 0.0),
                _ if known < 0.0 || known > last as f64 => last,
                _ => known as usize,
            };
            return Ok(self.region(operation, &branches[chosen], Vec::new(), results, scope)?);
        }
        let mut chosen = self.region(operation, &branches[last], Vec::new(), results, scope)?;
        for (number, branch) in branches[..last].iter().enumerate().rev() {
            let values = self.region(operation, branch, Vec::new(), results, scope)?;
            let predicate = match operation.name {
                "if" => index,
                _ => {
                    let ty = self.graph.ty(index).clone();
                    let number = self.push(Op::Constant(Literal::splat(ty, number as f64)), &[])?;
                    self.push(Op::Compare(Compare { direction: Direction::Eq }), &[index, number])?
                }
            };
            for (chosen, value) in chosen.iter_mut().zip(values) {
                if *chosen != value && !self.is_opaque(value) {
                    *chosen = self.select_between(predicate, value, *chosen)?;
                }
            }
        }
        Ok(chosen)
    }

    /// Selects between two values. Any scalar among the three operands applies to all elements.
    fn select_between(&mut self, predicate: ValueId, a: ValueId, b: ValueId) -> Result<ValueId, Reject> {
        let rank = |v: &ValueId| self.graph.ty(*v).rank();
        let like = [predicate, a, b].into_iter().max_by_key(rank).unwrap_or(a);
        let predicate = self.broadcast_scalar(predicate, like)?;
        let (a, b) = (self.broadcast_scalar(a, like)?, self.broadcast_scalar(b, like)?);
        Ok(self.push(Op::Select(Select {}), &[predicate, a, b])?)
    }

    /// Applies a region of scalars to tensors of one shape, element by element.
    pub fn apply(
        &mut self,
        operation: &'t Operation<'a>,
        region: &'t Region<'a>,
        arguments: Vec<ValueId>,
        results: usize,
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let shape = arguments.first().map(|&first| self.graph.shape(first).to_vec()).unwrap_or_default();
        let lifted = (!shape.is_empty()).then(|| shape.clone());
        let around = std::mem::replace(&mut self.lifted, lifted);
        let values = self.region(operation, region, arguments, results, scope);
        self.lifted = around;
        // A result that does not depend on the arguments is still a scalar.
        let values: Result<Vec<ValueId>, Reject> = values?
            .into_iter()
            .map(|value| match self.graph.ty(value) {
                ty if ty.shape == shape => Ok(value),
                ty if ty.rank() == 0 => self.broadcast(value, shape.clone(), Vec::new()),
                // A non-scalar value from outside the region: repeated application never shrinks it.
                ty => {
                    Err(Reject::Invalid(ProblemKind::ResultType { declared: "a scalar".into(), inferred: ty.clone() }))
                }
            })
            .collect();
        values
    }

    /// Lowers an op of a region that is applied to tensors of this shape. The tensors stand where the text has
    /// scalars.
    pub(crate) fn lower_lifted(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        shape: Vec<u64>,
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        if operands.iter().all(|&o| self.graph.shape(o) != shape) {
            return self.lower(operation, operands, scope);
        }
        if is_elementwise(operation) {
            let mut wide = Vec::with_capacity(operands.len());
            for &operand in operands {
                wide.push(match self.graph.ty(operand).rank() {
                    0 => self.broadcast(operand, shape.clone(), Vec::new())?,
                    _ => operand,
                });
            }
            return self.lower(operation, &wide, scope);
        }
        match operation.name {
            "reshape" | "broadcast_in_dim" | "broadcast" | "transpose" => Ok(operands.to_vec()),
            "case" | "if" | "while" | "optimization_barrier" | "tuple" | "get_tuple_element" => {
                self.lower(operation, operands, scope)
            }
            _ => Err(Reject::Unsupported("inside a region that is applied to whole tensors")),
        }
    }

    /// A scalar constant with the element type of `like`.
    pub fn scalar(&mut self, like: ValueId, value: f64) -> Result<ValueId, Reject> {
        let ty = TensorType::scalar(self.graph.ty(like).dtype);
        Ok(self.push(Op::Constant(Literal::splat(ty, value)), &[])?)
    }
}

/// The regions of an op, which must have exactly `N`.
pub(super) fn regions<'t, 'a, const N: usize>(operation: &'t Operation<'a>) -> Result<[&'t Region<'a>; N], Reject> {
    let regions: Vec<&'t Region<'a>> = operation.regions.iter().collect();
    let found = regions.len();
    regions.try_into().map_err(|_| Reject::Invalid(ProblemKind::RegionCount { expected: N, found }))
}
