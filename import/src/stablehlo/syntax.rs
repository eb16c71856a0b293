//! The syntax tree of an MLIR module.
//!
//! The tree keeps only the parts of an op that the graph needs, for any dialect, and borrows its strings from
//! the text. An op in its own syntax and the same op in MLIR's generic quoted form give the same tree:
//! attributes always have their generic names.

use std::borrow::Cow;
use std::fmt;

pub use super::lexer::Place;

#[derive(Debug, Clone, PartialEq)]
pub struct Module<'a> {
    pub name: Option<Cow<'a, str>>,
    pub functions: Vec<Function<'a>>,
    /// Device meshes of Shardy, with the text after their names: `<["x"=2]>`.
    pub meshes: Vec<(Cow<'a, str>, &'a str)>,
    /// The resolved name of each location that the text mentions.
    pub location_names: Vec<Option<Cow<'a, str>>>,
}

/// Index into `Module::location_names`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocationId(pub u32);

#[derive(Debug, Clone, PartialEq)]
pub struct Function<'a> {
    pub name: Cow<'a, str>,
    /// `public`, `private`, or empty.
    pub visibility: &'a str,
    pub arguments: Vec<Argument<'a>>,
    pub results: Vec<FunctionResult<'a>>,
    pub operations: Vec<Operation<'a>>,
    pub place: Place,
}

/// An argument of a function or of a region.
#[derive(Debug, Clone, PartialEq)]
pub struct Argument<'a> {
    pub name: &'a str,
    pub ty: Type<'a>,
    pub attributes: Attributes<'a>,
    pub location: Option<LocationId>,
    pub place: Place,
}

#[derive(Debug, Clone, PartialEq)]
pub struct FunctionResult<'a> {
    pub ty: Type<'a>,
    pub attributes: Attributes<'a>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Operation<'a> {
    /// `stablehlo`, `chlo`, `func`. A name without a dialect belongs to `func`, whose `call` and `return` are
    /// printed that way.
    pub dialect: &'a str,
    /// `dot_general`.
    pub name: &'a str,
    pub results: Vec<ResultName<'a>>,
    pub operands: Vec<Operand<'a>>,
    pub attributes: Attributes<'a>,
    pub regions: Vec<Region<'a>>,
    /// Empty if the op's own syntax omits them.
    pub operand_types: Vec<Type<'a>>,
    pub result_types: Vec<Type<'a>>,
    pub location: Option<LocationId>,
    pub place: Place,
}

/// `%5:2` names two results, used as `%5#0` and `%5#1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResultName<'a> {
    pub name: &'a str,
    pub count: u32,
}

/// A use of a value: `%5` or `%5#1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand<'a> {
    pub name: &'a str,
    pub index: u32,
    pub place: Place,
}

/// A region of one block. More blocks would mean jumps, which StableHLO does not have.
#[derive(Debug, Clone, PartialEq)]
pub struct Region<'a> {
    pub arguments: Vec<Argument<'a>>,
    pub operations: Vec<Operation<'a>>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Type<'a> {
    Tensor(TensorType<'a>),
    Tuple(Vec<Type<'a>>),
    Function(Vec<Type<'a>>, Vec<Type<'a>>),
    /// Any other type, as written: `i64`, `index`, `!stablehlo.token`, `complex<f32>`.
    Other(&'a str),
}

#[derive(Debug, Clone, PartialEq)]
pub struct TensorType<'a> {
    /// `None` is `?`.
    pub dims: Vec<Option<u64>>,
    /// False for `tensor<*xf32>`.
    pub ranked: bool,
    /// As written: `f32`, `bf16`, `ui32`, `i1`, `complex<f32>`.
    pub element: &'a str,
    /// The text after a comma inside the type, such as bounds.
    pub encoding: Option<&'a str>,
}

pub type Attributes<'a> = Vec<(Cow<'a, str>, Attribute<'a>)>;

#[derive(Debug, Clone, PartialEq)]
pub enum Attribute<'a> {
    Unit,
    Bool(bool),
    /// At most 64 bits, signed or unsigned.
    Int(i128),
    Float(f64),
    String(Cow<'a, str>),
    /// `[...]` and `array<i64: ...>`.
    Array(Vec<Attribute<'a>>),
    Dictionary(Attributes<'a>),
    Dense(Dense<'a>),
    /// `#stablehlo.gather<offset_dims = [0], ...>`, in the order written.
    DimensionNumbers(Attributes<'a>),
    /// `#stablehlo<precision DEFAULT>` and words of an op's own syntax, such as `LT`.
    Enum(&'a str),
    /// `@name`.
    Symbol(Cow<'a, str>),
    Type(Type<'a>),
    /// Anything else, as written.
    Opaque(&'a str),
}

/// `dense<...> : type`.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense<'a> {
    pub ty: Type<'a>,
    pub elements: Elements<'a>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Elements<'a> {
    Splat(Scalar),
    /// Row-major elements, and the shape of the nested lists as written.
    List {
        shape: Vec<u64>,
        values: Vec<Scalar>,
    },
    /// The digits after `0x` of `dense<"0x...">`: the bytes in memory order, or those of one element.
    Hex(&'a str),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    Bool(bool),
    /// At most 64 bits, signed or unsigned.
    Int(i128),
    Float(f64),
    /// `0xFF800000`: the bit pattern of a float, or an integer.
    Bits(u64),
    Complex(f64, f64),
}

impl<'a> Module<'a> {
    pub fn function(&self, name: &str) -> Option<&Function<'a>> {
        self.functions.iter().find(|function| function.name == name)
    }

    /// The name of a location, such as `jit(gpt)/dot_general` or `params['wte']`.
    pub(crate) fn location_name(&self, location: Option<LocationId>) -> Option<&str> {
        let name = self.location_names.get(usize::try_from(location?.0).ok()?)?;
        name.as_deref()
    }
}

impl<'a> Operation<'a> {
    /// An attribute by its generic name; the fields of dimension numbers are found as well.
    pub fn attribute(&self, name: &str) -> Option<&Attribute<'a>> {
        find(&self.attributes, name)
    }

    /// True if this is `stablehlo.name`.
    pub fn is(&self, name: &str) -> bool {
        self.dialect == "stablehlo" && self.name == name
    }
}

impl<'a> Region<'a> {
    /// `Some("add")` if the region only applies that op to its two arguments, in either order, and returns the
    /// result. All reducers are commutative, so the order is irrelevant.
    pub(crate) fn applies(&self) -> Option<&'a str> {
        let [apply, end] = self.operations.as_slice() else {
            return None;
        };
        let ([left, right], [result], [returned]) =
            (self.arguments.as_slice(), apply.results.as_slice(), end.operands.as_slice())
        else {
            return None;
        };
        let [first, second] = apply.operands.as_slice() else {
            return None;
        };
        let operands = [first.name, second.name];
        let simple = apply.dialect == "stablehlo"
            && end.name == "return"
            && apply.attributes.is_empty()
            && (operands == [left.name, right.name] || operands == [right.name, left.name])
            && returned.name == result.name;
        simple.then_some(apply.name)
    }

    /// `Some("GE")` if the region only compares its first argument with its second.
    pub fn compares(&self) -> Option<&str> {
        let [compare, end] = self.operations.as_slice() else {
            return None;
        };
        let ([left, right], [result], [returned]) =
            (self.arguments.as_slice(), compare.results.as_slice(), end.operands.as_slice())
        else {
            return None;
        };
        let names: Vec<&str> = compare.operands.iter().map(|operand| operand.name).collect();
        let simple = compare.is("compare")
            && end.name == "return"
            && names == [left.name, right.name]
            && returned.name == result.name;
        simple.then(|| compare.attribute("comparison_direction")?.as_word()).flatten()
    }
}

pub(crate) fn find<'t, 'a>(attributes: &'t Attributes<'a>, name: &str) -> Option<&'t Attribute<'a>> {
    let direct = attributes.iter().find(|(key, _)| key == name);
    let nested = || {
        attributes.iter().find_map(|(_, value)| match value {
            Attribute::DimensionNumbers(fields) => fields.iter().find(|(key, _)| key == name),
            _ => None,
        })
    };
    direct.or_else(nested).map(|(_, value)| value)
}

impl Attribute<'_> {
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Attribute::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Attribute::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The word of an enum or a string or a symbol.
    pub(crate) fn as_word(&self) -> Option<&str> {
        match self {
            Attribute::Enum(word) => Some(word),
            Attribute::String(word) | Attribute::Symbol(word) => Some(word),
            _ => None,
        }
    }

    /// All integers in row-major order, from a list, a nested list or a dense literal of any of the forms.
    /// A splat gives one integer per element of its type, up to a million.
    pub fn ints(&self) -> Option<Vec<i64>> {
        let mut ints = Vec::new();
        self.collect_ints(&mut ints).then_some(ints)
    }

    fn collect_ints(&self, ints: &mut Vec<i64>) -> bool {
        let mut push = |value: i128| match i64::try_from(value) {
            Ok(value) => {
                ints.push(value);
                true
            }
            Err(_) => false,
        };
        match self {
            Attribute::Int(value) => push(*value),
            Attribute::Bool(value) => push(i128::from(*value)),
            Attribute::Array(items) => items.iter().all(|item| item.collect_ints(ints)),
            Attribute::Dense(Dense { ty, elements }) => match elements {
                Elements::Splat(scalar) => {
                    let count = ty.num_elements().filter(|count| *count <= 1_000_000);
                    match (scalar.as_int(), count) {
                        (Some(value), Some(count)) => (0..count).all(|_| push(value)),
                        _ => false,
                    }
                }
                Elements::List { values, .. } => values.iter().all(|value| value.as_int().is_some_and(&mut push)),
                Elements::Hex(_) => false,
            },
            _ => false,
        }
    }
}

impl Type<'_> {
    /// The number of elements of a tensor. `None` if a dimension is open or the number overflows.
    fn num_elements(&self) -> Option<u64> {
        match self {
            Type::Tensor(TensorType { dims, ranked: true, .. }) => {
                dims.iter().try_fold(1u64, |product, dim| product.checked_mul((*dim)?))
            }
            _ => None,
        }
    }
}

impl Scalar {
    pub(crate) fn as_int(&self) -> Option<i128> {
        match *self {
            Scalar::Bool(value) => Some(i128::from(value)),
            Scalar::Int(value) => Some(value),
            Scalar::Bits(value) => Some(i128::from(value)),
            Scalar::Float(_) | Scalar::Complex(..) => None,
        }
    }
}

/// Prints the MLIR form.
impl fmt::Display for Type<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, types: &[Type]| -> fmt::Result {
            for (index, ty) in types.iter().enumerate() {
                write!(f, "{}{ty}", if index == 0 { "" } else { ", " })?;
            }
            Ok(())
        };
        match self {
            Type::Tensor(tensor) => {
                f.write_str("tensor<")?;
                for dim in &tensor.dims {
                    match dim {
                        Some(size) => write!(f, "{size}x")?,
                        None => f.write_str("?x")?,
                    }
                }
                f.write_str(if tensor.ranked { "" } else { "*x" })?;
                f.write_str(tensor.element)?;
                if let Some(encoding) = tensor.encoding {
                    write!(f, ", {encoding}")?;
                }
                f.write_str(">")
            }
            Type::Tuple(items) => {
                f.write_str("tuple<")?;
                list(f, items)?;
                f.write_str(">")
            }
            Type::Function(operands, results) => {
                f.write_str("(")?;
                list(f, operands)?;
                f.write_str(") -> (")?;
                list(f, results)?;
                f.write_str(")")
            }
            Type::Other(text) => f.write_str(text),
        }
    }
}
