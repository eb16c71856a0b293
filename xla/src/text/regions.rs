//! Ops with regions: reductions, windows, scatters and sorts.

use super::ops::dimension_numbers;
use super::types::{array, list, pairs, tensor, tensors};
use super::{Printer, Value};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{
    ArgSort, Binary, Combine, Cumulative, Direction, Extremum, GatherDims, Reducer, Scatter, ScatterAdd,
    SelectAndScatter, WindowDim,
};
use altiplano_ir::types::TensorType;

impl Printer {
    pub(super) fn reduce(&mut self, reducer: Reducer, dims: &[usize], x: &Value, ty: &TensorType) -> Value {
        let scalar = TensorType::scalar(ty.dtype);
        let init = self.splat(scalar, reducer.neutral(ty.dtype));
        let name = reducer.combine().name();
        let types = tensors([&x.ty, &init.ty]);
        let text = format!(
            "stablehlo.reduce({} init: {}) applies stablehlo.{name} across dimensions = {} : ({types}) -> {}",
            x.name,
            init.name,
            list(dims),
            tensor(ty)
        );
        self.op(text, ty.clone())
    }

    /// Windows that reach from one end to their own position.
    pub(super) fn cumulative(&mut self, op: &Cumulative, x: &Value, ty: &TensorType) -> Value {
        let mut window = vec![WindowDim::one(); ty.rank()];
        let size = ty.shape[op.dim];
        let before = size as i64 - 1;
        let (pad_low, pad_high) = if op.reverse { (0, before) } else { (before, 0) };
        window[op.dim] = WindowDim { size, pad_low, pad_high, ..WindowDim::one() };
        self.reduce_window(op.reducer, &window, x, ty)
    }

    pub(super) fn reduce_window(
        &mut self,
        reducer: Reducer,
        window: &[WindowDim],
        x: &Value,
        ty: &TensorType,
    ) -> Value {
        let scalar = TensorType::scalar(ty.dtype);
        let init = self.splat(scalar.clone(), reducer.neutral(ty.dtype));
        let region = self.combining(reducer.combine(), &scalar);
        let text = format!(
            "\"stablehlo.reduce_window\"({}, {}) <{{base_dilations = {}, {}, window_dilations = {}}}> ({{\n{region}    }}) : ({}) -> {}",
            x.name,
            init.name,
            array(window.iter().map(|w| w.base_dilation)),
            moving(window),
            array(window.iter().map(|w| w.window_dilation)),
            tensors([&x.ty, &init.ty]),
            tensor(ty)
        );
        self.op(text, ty.clone())
    }

    pub(super) fn select_and_scatter(
        &mut self,
        op: &SelectAndScatter,
        x: &Value,
        source: &Value,
        ty: &TensorType,
    ) -> Value {
        let scalar = TensorType::scalar(ty.dtype);
        let init = self.splat(scalar.clone(), 0.0);
        let keeps = if op.select == Extremum::Max { Direction::Ge } else { Direction::Le };
        let select = self.region(&[scalar.clone(), scalar.clone()], |p, x| p.compare(keeps, &x[0], &x[1]));
        let scatter = self.combining(Binary::Add, &scalar);
        let text = format!(
            "\"stablehlo.select_and_scatter\"({}, {}, {}) <{{{}}}> ({{\n{select}    }}, {{\n{scatter}    }}) : ({}) -> {}",
            x.name,
            source.name,
            init.name,
            moving(&op.window),
            tensors([&x.ty, &source.ty, &init.ty]),
            tensor(ty)
        );
        self.op(text, ty.clone())
    }

    pub(super) fn scatter_add(&mut self, op: &ScatterAdd, indices: &Value, updates: &Value, ty: &TensorType) -> Value {
        let zeros = self.zeros(ty);
        let scalar = TensorType::scalar(ty.dtype);
        let region = self.combining(Binary::Add, &scalar);
        self.scatter_by(&op.dims, &region, [&zeros, indices, updates])
    }

    pub(super) fn scatter(&mut self, op: &Scatter, x: &Value, indices: &Value, updates: &Value) -> Value {
        let scalar = TensorType::scalar(x.ty.dtype);
        let region = match op.combine.binary() {
            Some(binary) => self.combining(binary, &scalar),
            None => {
                debug_assert_eq!(op.combine, Combine::Replace);
                self.region(&[scalar.clone(), scalar], |_, x| x[1].clone())
            }
        };
        self.scatter_by(&op.dims, &region, [x, indices, updates])
    }

    fn scatter_by(&mut self, dims: &GatherDims, region: &str, [x, indices, updates]: [&Value; 3]) -> Value {
        let names = [
            "update_window_dims",
            "inserted_window_dims",
            "input_batching_dims",
            "scatter_indices_batching_dims",
            "scatter_dims_to_operand_dims",
        ];
        let numbers = dimension_numbers("scatter", names, dims);
        let text = format!(
            "\"stablehlo.scatter\"({}, {}, {}) <{{indices_are_sorted = false, scatter_dimension_numbers = {numbers}, unique_indices = false}}> ({{\n{region}    }}) : ({}) -> {}",
            x.name,
            indices.name,
            updates.name,
            tensors([&x.ty, &indices.ty, &updates.ty]),
            tensor(&x.ty)
        );
        self.op(text, x.ty.clone())
    }

    /// A sort of the keys together with their positions, of which the positions are kept.
    pub(super) fn arg_sort(&mut self, op: &ArgSort, keys: &[Value], ty: &TensorType) -> Value {
        let positions = self.op(format!("stablehlo.iota dim = {} : {}", op.dim, tensor(ty)), ty.clone());
        let sorted: Vec<Value> = keys.iter().cloned().chain([positions]).collect();
        let scalars: Vec<TensorType> =
            sorted.iter().flat_map(|x| [TensorType::scalar(x.ty.dtype), TensorType::scalar(x.ty.dtype)]).collect();
        let region = self.region(&scalars, |p, x| p.comes_first(&op.descending, x));
        let names: Vec<&str> = sorted.iter().map(|x| x.name.as_str()).collect();
        let types = tensors(sorted.iter().map(|x| &x.ty));
        let name = self.fresh();
        let text = format!(
            "    {name}:{} = \"stablehlo.sort\"({}) <{{dimension = {} : i64, is_stable = true}}> ({{\n{region}    }}) : ({types}) -> ({types}){}\n",
            sorted.len(),
            names.join(", "),
            op.dim,
            self.location
        );
        self.body.push_str(&text);
        Value { name: format!("{name}#{}", keys.len()), ty: ty.clone() }
    }

    /// True if the first of two elements comes before the second, by keys of which the first counts most.
    fn comes_first(&mut self, descending: &[bool], x: &[Value]) -> Value {
        let mut order: Option<Value> = None;
        for (key, &descending) in descending.iter().enumerate().rev() {
            let (a, b) = (self.ordered(&x[2 * key]), self.ordered(&x[2 * key + 1]));
            let by = match a.ty.dtype {
                dtype if dtype.is_float() => "TOTALORDER",
                dtype if dtype.is_signed_integer() => "SIGNED",
                _ => "UNSIGNED",
            };
            let direction = if descending { Direction::Gt } else { Direction::Lt };
            let first = self.compare_by(by, direction, &a, &b);
            order = Some(match order {
                None => first,
                Some(rest) => {
                    let equal = self.compare_by(by, Direction::Eq, &a, &b);
                    let rest = self.binary(Binary::And, &equal, &rest);
                    self.binary(Binary::Or, &first, &rest)
                }
            });
        }
        order.unwrap_or_else(|| self.splat(TensorType::scalar(DType::Bool), 0.0))
    }

    /// A float whose total order is that of the graph: one zero, and one NaN above infinity.
    fn ordered(&mut self, x: &Value) -> Value {
        if !x.ty.dtype.is_float() {
            return x.clone();
        }
        let zero = self.splat(x.ty.clone(), 0.0);
        let is_zero = self.compare(Direction::Eq, x, &zero);
        let plain = self.select(&is_zero, &zero, x);
        let nan = self.splat(x.ty.clone(), f64::NAN);
        let is_nan = self.compare(Direction::Ne, x, x);
        self.select(&is_nan, &nan, &plain)
    }

    /// A region that combines two scalars.
    fn combining(&mut self, op: Binary, scalar: &TensorType) -> String {
        self.region(&[scalar.clone(), scalar.clone()], |p, x| p.binary(op, &x[0], &x[1]))
    }

    /// The text of a region with arguments of these types that returns one value.
    pub(super) fn region(
        &mut self,
        types: &[TensorType],
        body: impl FnOnce(&mut Printer, &[Value]) -> Value,
    ) -> String {
        let outer = std::mem::take(&mut self.body);
        let location = std::mem::take(&mut self.location);
        let arguments: Vec<Value> = types.iter().map(|ty| Value { name: self.fresh(), ty: ty.clone() }).collect();
        let result = body(self, &arguments);
        let inner = std::mem::replace(&mut self.body, outer);
        self.location = location;
        let arguments: Vec<String> = arguments.iter().map(|x| format!("{}: {}", x.name, tensor(&x.ty))).collect();
        format!(
            "    ^bb0({}):\n{inner}    stablehlo.return {} : {}\n",
            arguments.join(", "),
            result.name,
            tensor(&result.ty)
        )
    }
}

/// The attributes of a window that moves over a tensor: padding, sizes and strides.
fn moving(window: &[WindowDim]) -> String {
    let padding: Vec<(i64, i64)> = window.iter().map(|w| (w.pad_low, w.pad_high)).collect();
    format!(
        "padding = {}, window_dimensions = {}, window_strides = {}",
        pairs(&padding),
        array(window.iter().map(|w| w.size)),
        array(window.iter().map(|w| w.stride))
    )
}
