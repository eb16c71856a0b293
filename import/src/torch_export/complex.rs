//! Lowers ops on complex tensors, stored as pairs of real numbers along a last dimension of two.
//!
//! Most ops treat both parts alike, so the real op is applied to each part. A bilinear op becomes four real
//! products, and a view of a complex tensor is a view of its pairs. The few remaining ops have a formula of
//! their own.

use super::call::{Call, Item, Operand, Out};
use super::memory::{Tensor, View};
use super::report::{Reject, other};
use super::table::Lowering;
use altiplano_ir::array as a;
use altiplano_ir::array::complex::{self as k, Pair};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Binary;

/// Ops that treat the real and the imaginary part alike. Real operands of [`DATA`] have an imaginary part of
/// zero.
const ALIKE: &[&str] = &[
    "view",
    "_unsafe_view",
    "reshape",
    "view_as",
    "reshape_as",
    "flatten",
    "unflatten",
    "contiguous",
    "clone",
    "alias",
    "lift_fresh",
    "lift_fresh_copy",
    "detach",
    "detach_copy",
    "expand",
    "expand_as",
    "broadcast_to",
    "unsqueeze",
    "squeeze",
    "transpose",
    "swapdims",
    "swapaxes",
    "t",
    "numpy_T",
    "mT",
    "permute",
    "movedim",
    "moveaxis",
    "select",
    "slice",
    "narrow",
    "split",
    "split_with_sizes",
    "unsafe_split",
    "chunk",
    "unsafe_chunk",
    "tensor_split",
    "unbind",
    "unfold",
    "diagonal",
    "cat",
    "concat",
    "concatenate",
    "stack",
    "hstack",
    "vstack",
    "flip",
    "roll",
    "repeat",
    "tile",
    "repeat_interleave",
    "broadcast_tensors",
    "constant_pad_nd",
    "pad",
    "tril",
    "triu",
    "add",
    "sub",
    "subtract",
    "rsub",
    "neg",
    "negative",
    "sum",
    "mean",
    "cumsum",
    "where",
    "masked_fill",
    "index",
    "_unsafe_index",
    "index_select",
    "gather",
    "take_along_dim",
    "index_put",
    "_unsafe_index_put",
    "index_add",
    "index_copy",
    "scatter",
    "scatter_add",
    "select_scatter",
    "slice_scatter",
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty",
    "empty_like",
    "new_empty",
    "full",
    "full_like",
    "new_full",
    "ones",
    "ones_like",
    "new_ones",
    "copy",
    "fill",
    "zero",
    "fft_fftshift",
    "fft_ifftshift",
    "diag_embed",
];

/// Arguments that hold numbers, as opposed to positions or options.
const DATA: &[&str] = &["self", "other", "tensors", "input", "source", "src", "values", "value", "fill_value"];

/// Ops that are linear in each of two operands.
const BILINEAR: &[&str] = &[
    "mul", "multiply", "matmul", "mm", "bmm", "mv", "dot", "outer", "ger", "einsum", "linear", "conv1d", "conv2d",
    "conv3d",
];

impl Item {
    /// True if the item is complex, or contains a complex item.
    fn is_complex(&self) -> bool {
        match self {
            Item::Complex(_) | Item::ComplexNumber(_) => true,
            Item::List(items) => items.iter().any(Item::is_complex),
            _ => false,
        }
    }
}

/// The result of an op on one part: values, or views of the first argument.
enum Part {
    Values(Vec<ValueId>),
    Views(Vec<Vec<View>>),
}

impl Call<'_> {
    pub(crate) fn is_complex(&self) -> bool {
        self.arguments.iter().any(|(_, item)| item.is_complex())
    }

    /// The results of an op that takes or returns complex numbers.
    pub(crate) fn complex_results(&mut self, lowering: Option<Lowering>) -> Result<Vec<Item>, Reject> {
        let in_place = self.in_place();
        let name = if in_place { self.name.trim_end_matches('_') } else { self.name };
        let unsupported = || Err(Reject::Unsupported("of complex numbers"));
        let of_complex = self.arguments.first().is_some_and(|(_, item)| item.is_complex());
        let pair = match name {
            "view_as_complex" => return Ok(vec![Item::Complex(self.handle(0)?)]),
            "view_as_real" | "view_as_real_copy" => return Ok(vec![Item::Tensor(self.handle(0)?)]),
            "real" | "imag" if of_complex => return self.part_as_view(name == "imag"),
            "resolve_conj" | "resolve_neg" => return Ok(vec![self.first_item()?.clone()]),
            _ => self.complex_function(name)?,
        };
        if let Some(found) = pair {
            let items = match found {
                Found::Pair(pair) => {
                    let value = self.joined(pair)?;
                    if in_place {
                        return self.written_pair(value);
                    }
                    vec![Item::Complex(self.to.memory.fresh(value))]
                }
                Found::Real(value) => vec![Item::Tensor(self.to.memory.fresh(value))],
            };
            return Ok(items);
        }
        let Some(lowering) = lowering else { return Err(Reject::Unsupported("")) };
        if matches!(lowering, Lowering::Ignored) {
            return Ok(Vec::new());
        }
        if BILINEAR.contains(&name) {
            let pair = self.product_of_pairs(lowering)?;
            let value = self.joined(pair)?;
            if in_place {
                return self.written_pair(value);
            }
            return Ok(vec![Item::Complex(self.to.memory.fresh(value))]);
        }
        if !ALIKE.contains(&name) {
            return unsupported();
        }
        let re = self.apply_to_part(lowering, false)?;
        if let Part::Views(all) = re {
            return self.views_of_pairs(all);
        }
        let (Part::Values(re), Part::Values(im)) = (re, self.apply_to_part(lowering, true)?) else {
            return unsupported();
        };
        let mut values = Vec::with_capacity(re.len());
        for pair in re.into_iter().zip(im) {
            values.push(self.joined([pair.0, pair.1])?);
        }
        if let (true, [value]) = (in_place, values.as_slice()) {
            return self.written_pair(*value);
        }
        Ok(values.into_iter().map(|v| Item::Complex(self.to.memory.fresh(v))).collect())
    }

    /// Writes a pair to the first argument in place, and returns that argument.
    fn written_pair(&mut self, value: ValueId) -> Result<Vec<Item>, Reject> {
        let target = self.handle(0)?;
        let ty = {
            let old = self.read(target)?;
            self.g().ty(old).clone()
        };
        let value = a::convert(self.g(), value, ty.dtype)?;
        let value = a::broadcast_to(self.g(), value, &ty.shape)?;
        self.to.memory.write(&mut self.to.graph, target, value)?;
        Ok(vec![self.first_item()?.clone()])
    }

    /// A view of one part of the first argument.
    fn part_as_view(&mut self, imaginary: bool) -> Result<Vec<Item>, Reject> {
        let source = self.handle(0)?;
        let value = self.read(source)?;
        let mut shape = self.shape_of(value);
        shape.pop();
        let slice = View::Slice { dim: shape.len(), start: u64::from(imaginary), count: 1, step: 1 };
        let part = self.to.memory.view(&mut self.to.graph, source, slice)?;
        let part = self.to.memory.view(&mut self.to.graph, part, View::Reshape(shape))?;
        Ok(vec![Item::Tensor(part)])
    }

    /// Applies the views to pairs, keeping their last dimension.
    fn views_of_pairs(&mut self, all: Vec<Vec<View>>) -> Result<Vec<Item>, Reject> {
        let source = self.handle(0)?;
        let mut items = Vec::with_capacity(all.len());
        for views in all {
            let mut tensor = source;
            for view in views {
                let view = match view {
                    View::Reshape(shape) => View::Reshape([shape.as_slice(), &[2]].concat()),
                    View::Expand(shape) => View::Expand([shape.as_slice(), &[2]].concat()),
                    View::Permute(order) => View::Permute(order.iter().copied().chain([order.len()]).collect()),
                    view => view,
                };
                tensor = self.to.memory.view(&mut self.to.graph, tensor, view)?;
            }
            items.push(Item::Complex(tensor));
        }
        Ok(items)
    }

    /// Joins two parts to `[.., 2]`, and remembers them as the parts of the result.
    fn joined(&mut self, pair: Pair) -> Result<ValueId, Reject> {
        let [re, im] = pair;
        let (re, im) = a::broadcast(self.g(), re, im)?;
        let value = k::join(self.g(), [re, im])?;
        self.to.pairs.insert(value, [re, im]);
        Ok(value)
    }

    fn parts_of(&mut self, tensor: Tensor) -> Result<Pair, Reject> {
        let value = self.read(tensor)?;
        if let Some(pair) = self.to.pairs.get(&value) {
            return Ok(*pair);
        }
        let pair = k::parts(self.g(), value)?;
        self.to.pairs.insert(value, pair);
        Ok(pair)
    }

    /// The parts of an argument. A real argument has no imaginary part.
    fn complex_operand(&mut self, name: &str) -> Result<(ValueId, Option<ValueId>), Reject> {
        match self.get(name).cloned() {
            Some(Item::Complex(tensor)) => {
                let [re, im] = self.parts_of(tensor)?;
                Ok((re, Some(im)))
            }
            Some(Item::ComplexNumber([re, im])) => {
                let dtype = self.part_type();
                let re = a::scalar(self.g(), re, dtype)?;
                Ok((re, Some(a::scalar(self.g(), im, dtype)?)))
            }
            _ => {
                let operand = self.operand(name)?;
                let dtype = match operand {
                    Operand::Tensor(v) if self.dtype_of(v).is_float() => self.dtype_of(v),
                    _ => self.part_type(),
                };
                Ok((self.as_tensor(operand, dtype)?, None))
            }
        }
    }

    fn complex_pair(&mut self, name: &str) -> Result<Pair, Reject> {
        let (re, im) = self.complex_operand(name)?;
        Ok(match im {
            Some(im) => [re, im],
            None => k::of_real(self.g(), re)?,
        })
    }

    /// The element type of the parts of the complex operand or result.
    fn part_type(&self) -> DType {
        let of_items = self.arguments.iter().find_map(|(_, item)| self.part_of_item(item));
        of_items.unwrap_or_else(|| self.declared_dtype(DType::F32))
    }

    fn part_of_item(&self, item: &Item) -> Option<DType> {
        match item {
            Item::Complex(tensor) => Some(self.to.graph.ty(self.to.memory.last_value(*tensor)).dtype),
            Item::List(items) => items.iter().find_map(|item| self.part_of_item(item)),
            _ => None,
        }
    }

    /// Applies the real op to one part of each argument.
    fn apply_to_part(&mut self, lowering: Lowering, imaginary: bool) -> Result<Part, Reject> {
        let mut arguments = Vec::with_capacity(self.arguments.len());
        for (name, item) in self.arguments.clone() {
            let item = match &item {
                // A requested complex type becomes the type of its parts.
                Item::Opaque if name == "dtype" => Item::DType(self.part_type()),
                item => self.part_of(item, imaginary, DATA.contains(&name))?,
            };
            arguments.push((name, item));
        }
        // Ops that fill a tensor with ones give an imaginary part of zero.
        let ones = self.name.starts_with("ones") || self.name == "new_ones";
        let part = self.real_call(arguments, lowering)?;
        match part {
            Part::Values(values) if ones && imaginary => {
                let zeros = values.into_iter().map(|v| a::full_like(self.g(), v, 0.0)).collect::<Result<_, _>>()?;
                Ok(Part::Values(zeros))
            }
            part => Ok(part),
        }
    }

    fn part_of(&mut self, item: &Item, imaginary: bool, is_data: bool) -> Result<Item, Reject> {
        Ok(match item {
            Item::Complex(tensor) => {
                let part = self.parts_of(*tensor)?[usize::from(imaginary)];
                Item::Tensor(self.to.memory.fresh(part))
            }
            Item::ComplexNumber(number) => Item::Float(number[usize::from(imaginary)]),
            Item::List(items) => {
                Item::List(items.iter().map(|i| self.part_of(i, imaginary, is_data)).collect::<Result<_, _>>()?)
            }
            Item::Tensor(tensor) if imaginary && is_data => {
                let value = self.read(*tensor)?;
                let zero = a::full_like(self.g(), value, 0.0)?;
                Item::Tensor(self.to.memory.fresh(zero))
            }
            Item::Int(_) | Item::Float(_) | Item::Bool(_) if imaginary && is_data => Item::Float(0.0),
            item => item.clone(),
        })
    }

    /// Runs a lowering with these arguments.
    fn real_call(&mut self, arguments: Vec<(&str, Item)>, lowering: Lowering) -> Result<Part, Reject> {
        let real = |ty: &Option<altiplano_ir::types::TensorType>| {
            let ty = ty.as_ref()?;
            let (_, shape) = ty.shape.split_last()?;
            Some(ty.with_shape(shape.to_vec()))
        };
        let declared = self.declared.iter().map(real).collect();
        let mut call =
            Call { to: self.to, name: self.name, arguments, declared, number: None, row_major: self.row_major };
        let value = |call: &mut Call<'_>| call.first().map(|v| Part::Values(vec![v]));
        match lowering.apply(&mut call)? {
            Out::Value(v) | Out::Maybe(v) => Ok(Part::Values(vec![v])),
            Out::Values(values) => Ok(Part::Values(values)),
            Out::Views(views) => Ok(Part::Views(views)),
            Out::Same if call.is_function() => Ok(Part::Views(vec![Vec::new()])),
            Out::Same => value(&mut call),
            _ => Err(Reject::Unsupported("of complex numbers")),
        }
    }

    fn is_function(&self) -> bool {
        !self.in_place()
    }

    /// The product of two operands, of which at least one is complex.
    fn product_of_pairs(&mut self, lowering: Lowering) -> Result<Pair, Reject> {
        // The operands are two arguments, or one list of two.
        let (mut places, mut listed) = (Vec::new(), None);
        for (at, (name, item)) in self.arguments.iter().enumerate() {
            match item {
                Item::List(items) if items.iter().any(Item::is_complex) => listed = Some((at, items.clone())),
                Item::Complex(_) | Item::ComplexNumber(_) | Item::Tensor(_) | Item::Int(_) | Item::Float(_)
                    if !matches!(*name, "bias" | "groups") && places.len() < 2 =>
                {
                    places.push(at);
                }
                _ => {}
            }
        }
        let operands: Vec<Item> = match &listed {
            Some((_, items)) => items.clone(),
            None => places.iter().map(|&at| self.arguments[at].1.clone()).collect(),
        };
        let [left, right] = operands.as_slice() else { return Err(Reject::Unsupported("of complex numbers")) };
        let mut sides = Vec::new();
        for side in [left, right] {
            let re = self.part_of(side, false, true)?;
            sides.push((re, if side.is_complex() { Some(self.part_of(side, true, true)?) } else { None }));
        }
        let bias = self.arguments.iter().position(|(name, item)| *name == "bias" && item.is_complex());
        let without_bias = self.has("bias");
        let product = |c: &mut Self, x: &Item, y: &Item| -> Result<ValueId, Reject> {
            let mut arguments = c.arguments.clone();
            match &listed {
                Some((at, _)) => arguments[*at].1 = Item::List(vec![x.clone(), y.clone()]),
                None => (arguments[places[0]].1, arguments[places[1]].1) = (x.clone(), y.clone()),
            }
            if without_bias {
                arguments.retain(|(name, _)| *name != "bias");
            }
            match c.real_call(arguments, lowering)? {
                Part::Values(values) if values.len() == 1 => Ok(values[0]),
                _ => Err(other("gives no product")),
            }
        };
        let (a_re, a_im) = &sides[0];
        let (b_re, b_im) = &sides[1];
        let mut re = product(self, a_re, b_re)?;
        if let (Some(x), Some(y)) = (a_im, b_im) {
            let both = product(self, x, y)?;
            re = a::binary(self.g(), Binary::Subtract, re, both)?;
        }
        let mut im: Option<ValueId> = None;
        let terms = [b_im.as_ref().map(|y| (a_re, y)), a_im.as_ref().map(|x| (x, b_re))];
        for (x, y) in terms.into_iter().flatten() {
            let term = product(self, x, y)?;
            im = Some(match im {
                Some(sum) => a::binary(self.g(), Binary::Add, sum, term)?,
                None => term,
            });
        }
        let mut pair = match im {
            Some(im) => [re, im],
            None => k::of_real(self.g(), re)?,
        };
        if bias.is_some() {
            let bias = self.complex_pair("bias")?;
            pair = k::complex_add(self.g(), pair, bias)?;
        }
        Ok(pair)
    }

    /// Ops with a formula for complex numbers; `None` for other ops.
    fn complex_function(&mut self, name: &str) -> Result<Option<Found>, Reject> {
        let x = |c: &mut Self| c.complex_pair("self");
        Ok(Some(match name {
            "complex" => Found::Pair([self.tensor("real")?, self.tensor("imag")?]),
            "polar" => {
                let (radius, angle) = (self.tensor("abs")?, self.tensor("angle")?);
                Found::Pair(k::polar(self.g(), radius, angle)?)
            }
            "conj" | "_conj" | "conj_physical" | "_conj_physical" | "_conj_copy" => {
                let x = x(self)?;
                Found::Pair(k::conjugate(self.g(), x)?)
            }
            "abs" | "absolute" => {
                let x = x(self)?;
                Found::Real(k::complex_abs(self.g(), x)?)
            }
            "angle" => {
                let x = x(self)?;
                Found::Real(k::angle(self.g(), x)?)
            }
            "exp" => {
                let x = x(self)?;
                Found::Pair(k::complex_exp(self.g(), x)?)
            }
            "log" => {
                let x = x(self)?;
                Found::Pair(k::complex_log(self.g(), x)?)
            }
            "sqrt" => {
                let x = x(self)?;
                Found::Pair(k::complex_sqrt(self.g(), x)?)
            }
            "square" => {
                let x = x(self)?;
                Found::Pair(k::complex_multiply(self.g(), x, x)?)
            }
            "reciprocal" => {
                let x = x(self)?;
                let one = a::full_like(self.g(), x[0], 1.0)?;
                let one = k::of_real(self.g(), one)?;
                Found::Pair(k::complex_divide(self.g(), one, x)?)
            }
            "pow" => {
                let power = self.needed_int("exponent")?;
                let x = x(self)?;
                let Ok(power) = u32::try_from(power) else { return Err(Reject::Unsupported("of complex numbers")) };
                Found::Pair(k::complex_power(self.g(), x, power)?)
            }
            "div" | "divide" | "true_divide" => {
                let (x, (re, im)) = (x(self)?, self.complex_operand("other")?);
                Found::Pair(match im {
                    Some(im) => k::complex_divide(self.g(), x, [re, im])?,
                    None => {
                        let quotient = |c: &mut Self, part| a::binary(c.g(), Binary::Divide, part, re);
                        [quotient(self, x[0])?, quotient(self, x[1])?]
                    }
                })
            }
            "vdot" => {
                let (x, y) = (x(self)?, self.complex_pair("other")?);
                let x = k::conjugate(self.g(), x)?;
                let dot = |g: &mut _, x, y| a::matmul(g, x, y);
                Found::Pair(k::bilinear(self.g(), x, y, dot)?)
            }
            "to" | "_to_copy" | "type_as" => {
                let dtype = self.declared_dtype(DType::F32);
                let x = x(self)?;
                // Conversion to a real type drops the imaginary part.
                match self.declares_pairs(x[0]) {
                    true => Found::Pair(k::complex_convert(self.g(), x, dtype)?),
                    false => Found::Real(a::convert(self.g(), x[0], dtype)?),
                }
            }
            _ => return super::ops::spectral::complex(self, name),
        }))
    }

    /// True if the declared result has one dimension more than this part, so that it is complex.
    fn declares_pairs(&self, part: ValueId) -> bool {
        let rank = self.to.graph.shape(part).len();
        self.declared.first().and_then(|ty| ty.as_ref()).is_some_and(|ty| ty.rank() == rank + 1)
    }

    /// The parts of an operand of a transform, converted to floats.
    pub(crate) fn spectral_operand(&mut self, name: &str) -> Result<(ValueId, Option<ValueId>), Reject> {
        let (re, im) = self.complex_operand(name)?;
        let dtype = self.dtype_of(re);
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let im = im.map(|im| a::convert(self.g(), im, wide)).transpose()?;
        Ok((a::convert(self.g(), re, wide)?, im))
    }
}

/// The result of a complex function.
pub(crate) enum Found {
    Pair(Pair),
    Real(ValueId),
}
