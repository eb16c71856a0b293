//! Prints loop programs as CUDA C++, which NVRTC compiles for the installed device. The text includes no headers, so
//! that no toolkit is needed.
//!
//! A thread, or a block of threads, takes rows in a loop, so that a launch is right for any number of blocks. Floats of
//! 16 bits are computed in single precision and rounded where they are written or compared. A recomputed value must
//! equal the written one, as for the element that is the maximum. Equal programs have equal text and equal names.

use super::{Fold, Launch, Param, Phase, Scalar, Spread, Store, Var};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Binary, Direction, Reducer, ThreefryWord, Unary};
use std::fmt::Write;

/// The text of a launch, and the number of threads that run it.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// Name of the function, derived from its content.
    pub name: String,
    /// Compiled after [`PRELUDE`].
    pub source: String,
    pub threads: (u32, u32),
    /// Maximum number of blocks with work.
    pub blocks: u64,
    /// Dynamic shared memory of each block.
    pub shared_bytes: u32,
}

/// A type for which the text has no arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CUDA devices do not compute with elements of type {0}")]
pub struct NoArithmetic(pub DType);

/// Threads of a block, whether each takes rows of its own or all share one.
const THREADS: u32 = 256;
/// For [`Spread::Columns`]: adjacent rows of a block, and the threads of each.
const COLUMNS: (u32, u32) = (32, 16);

/// Definitions that every text needs.
pub const PRELUDE: &str = concat!(include_str!("prelude.cuh"), include_str!("tiles.cuh"));

/// Prints a launch.
pub fn text(launch: &Launch) -> Result<Text, NoArithmetic> {
    if matches!(launch.spread, Spread::Tiles(_)) {
        return super::tiles_text::text(launch);
    }
    let mut body = String::new();
    Printer { launch, out: &mut body }.launch()?;
    let name = format!("loops_{:016x}", fingerprint(&body));
    let (threads, blocks) = match launch.spread {
        Spread::Thread => ((THREADS, 1), launch.rows.div_ceil(u64::from(THREADS))),
        Spread::Block => ((block_threads(launch), 1), launch.rows),
        Spread::Columns | Spread::Tiles(_) => (COLUMNS, launch.rows.div_ceil(u64::from(COLUMNS.0))),
    };
    let source = format!("extern \"C\" __global__ void {name}{body}");
    Ok(Text { name, source, threads, blocks, shared_bytes: 0 })
}

/// Number of threads that the longest phase can use, in whole warps.
fn block_threads(launch: &Launch) -> u32 {
    let longest = launch.phases.iter().map(|p| p.length).max().unwrap_or(1);
    let warps = longest.div_ceil(32).clamp(1, u64::from(THREADS) / 32);
    32 * (warps as u32).next_power_of_two()
}

/// FNV-1a.
pub(super) fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The type of an element in memory.
pub(super) fn stored(dtype: DType) -> Result<&'static str, NoArithmetic> {
    Ok(match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => computed(dtype)?,
    })
}

/// The type in which an element is computed.
pub(super) fn computed(dtype: DType) -> Result<&'static str, NoArithmetic> {
    Ok(match dtype {
        DType::F64 => "double",
        DType::F32 | DType::BF16 | DType::F16 => "float",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::I16 => "short",
        DType::I8 => "signed char",
        DType::U64 => "unsigned long long",
        DType::U32 => "unsigned int",
        DType::U16 => "unsigned short",
        DType::U8 => "unsigned char",
        DType::Bool => "bool",
        _ => return Err(NoArithmetic(dtype)),
    })
}

/// The type of indices, wide enough for the largest one.
fn index_type(launch: &Launch) -> &'static str {
    let longest = launch.phases.iter().map(|p| p.length).max().unwrap_or(1);
    let most = launch.params.iter().map(|p| p.elements).chain([launch.rows.saturating_mul(longest)]).max().unwrap_or(0);
    // Products with strides that are later divided stay well below the limit.
    if let Spread::Tiles(_) = launch.spread {
        // No index combines rows and iterations, except those of large values, which are bounded by these sizes.
        let memory = launch.params.iter().map(|p| p.elements).max().unwrap_or(0);
        let fits = memory < 1 << 28 && launch.rows.saturating_mul(longest) < 1 << 31;
        return if fits { "int" } else { "long long" };
    }
    if most < 1 << 28 { "int" } else { "long long" }
}

/// Prints the parts of a kernel.
pub(super) struct Printer<'a> {
    pub launch: &'a Launch,
    pub out: &'a mut String,
}

impl Printer<'_> {
    pub(crate) fn line(&mut self, depth: usize, text: impl AsRef<str>) {
        let _ = writeln!(self.out, "{:1$}{2}", "", 2 * depth, text.as_ref());
    }

    /// Prints the parameters and the type of indices.
    pub(crate) fn signature(&mut self) -> Result<(), NoArithmetic> {
        let launch = self.launch;
        let mut params = Vec::new();
        for (i, p) in launch.params.iter().enumerate() {
            let constant = if p.written { "" } else { "const " };
            // A written parameter may alias a read one of the same size.
            let takes_place =
                |q: &Param| q.written != p.written && (q.elements, q.dtype.bytes()) == (p.elements, p.dtype.bytes());
            let alone = if launch.params.iter().any(takes_place) { "" } else { " __restrict__" };
            params.push(format!("{constant}{}*{alone} p{i}", stored(p.dtype)?));
        }
        params.extend((0..launch.coordinates.len()).map(|i| format!("int own{i}")));
        self.line(0, format!("({}) {{", params.join(", ")));
        self.line(1, format!("typedef {} I;", index_type(launch)));
        Ok(())
    }

    fn launch(&mut self) -> Result<(), NoArithmetic> {
        self.signature()?;
        let launch = self.launch;
        let rows = launch.rows;
        match launch.spread {
            Spread::Thread => {
                let next = "(I)gridDim.x * (I)blockDim.x";
                let first = "(I)blockIdx.x * (I)blockDim.x + (I)threadIdx.x";
                self.line(1, format!("for (I row = {first}; row < {rows}; row += {next}) {{"));
                for phase in &launch.phases {
                    self.phase(phase, "0", "1", None)?;
                }
                self.line(1, "}");
            }
            Spread::Block => {
                self.line(1, "__shared__ double shared[32];");
                self.line(1, format!("for (I row = blockIdx.x; row < {rows}; row += gridDim.x) {{"));
                for phase in &launch.phases {
                    self.phase(phase, "threadIdx.x", "blockDim.x", Some("threadIdx.x == 0"))?;
                }
                self.line(1, "}");
            }
            Spread::Columns | Spread::Tiles(_) => {
                let (x, y) = COLUMNS;
                self.line(1, format!("__shared__ double shared[{}];", x * y));
                let tiles = rows.div_ceil(u64::from(x));
                self.line(1, format!("for (I tile = blockIdx.x; tile < {tiles}; tile += gridDim.x) {{"));
                self.line(2, format!("const I row = tile * {x} + (I)threadIdx.x;"));
                self.line(2, format!("const bool is_row = row < {rows};"));
                for phase in &launch.phases {
                    self.phase(phase, "threadIdx.y", "blockDim.y", Some("threadIdx.y == 0"))?;
                }
                self.line(1, "}");
            }
        }
        self.line(0, "}");
        Ok(())
    }

    /// Prints a phase whose iterations run from `first` by `stride`. Work done once runs only if `once` holds.
    fn phase(&mut self, phase: &Phase, first: &str, stride: &str, once: Option<&str>) -> Result<(), NoArithmetic> {
        for fold in &phase.folds {
            let neutral = number(fold.reducer.neutral(fold.dtype), fold.dtype)?;
            self.line(2, format!("{} s{} = {neutral};", computed(fold.dtype)?, fold.slot));
        }
        let columns = self.launch.spread == Spread::Columns;
        let is_row = if columns { "is_row" } else { "" };
        let conditions: Vec<&str> = match phase.length {
            1 if phase.folds.is_empty() => once.into_iter().chain([is_row]).filter(|c| !c.is_empty()).collect(),
            _ => [is_row].into_iter().filter(|c| !c.is_empty()).collect(),
        };
        match (phase.length, once) {
            (1, _) if phase.folds.is_empty() || once.is_none() => {
                let condition = if conditions.is_empty() { "" } else { "if " };
                let condition = match conditions.as_slice() {
                    [] => condition.to_string(),
                    all => format!("if ({}) ", all.join(" && ")),
                };
                self.line(2, format!("{condition}{{"));
                self.line(3, "const I step = 0; (void)step;");
            }
            (length, _) => {
                let condition =
                    if conditions.is_empty() { String::new() } else { format!("if ({}) ", conditions.join(" && ")) };
                self.line(2, format!("{condition}for (I step = {first}; step < {length}; step += {stride}) {{"));
            }
        }
        for var in self.launch.needs(phase) {
            self.scalar(var)?;
        }
        for Fold { value, reducer, dtype, slot } in &phase.folds {
            let combined = combined(*reducer, *dtype, &format!("s{slot}"), &format!("v{}", value.0));
            self.line(3, format!("s{slot} = {combined};"));
        }
        for store in &phase.stores {
            self.store(store)?;
        }
        self.line(2, "}");
        for Fold { reducer, dtype, slot, .. } in &phase.folds {
            let ty = computed(*dtype)?;
            let combine = functor(*reducer, *dtype);
            match self.launch.spread {
                Spread::Thread => {}
                Spread::Block => {
                    self.line(2, format!("s{slot} = over_block<{ty}, {combine}>(s{slot}, shared);"));
                }
                Spread::Columns | Spread::Tiles(_) => {
                    self.line(2, format!("s{slot} = over_column<{ty}, {combine}>(s{slot}, shared);"));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn store(&mut self, store: &Store) -> Result<(), NoArithmetic> {
        let Store { param, index, value, guard, combines } = *store;
        let dtype = self.launch.params[param as usize].dtype;
        let bits = match dtype {
            DType::BF16 => format!("to_bf16(v{})", value.0),
            DType::F16 => format!("to_f16(v{})", value.0),
            _ => format!("v{}", value.0),
        };
        let guard = guard.map_or(String::new(), |g| format!("if (v{}) ", g.0));
        let place = format!("p{param}[v{}]", index.0);
        let text = match combines {
            None => format!("{place} = {bits};"),
            // The device has an atomic instruction for it.
            Some(Reducer::Sum) if adds_at_once(dtype) => format!("add_to(&{place}, {bits});"),
            Some(reducer) => format!("combine_with<{}>(&{place}, v{});", functor(reducer, dtype), value.0),
        };
        self.line(3, format!("{guard}{text}"));
        Ok(())
    }

    pub(crate) fn scalar(&mut self, var: Var) -> Result<(), NoArithmetic> {
        let scalar = self.launch.scalars.get(var);
        let (ty, value) = self.expression(scalar)?;
        self.line(3, format!("const {ty} v{} = {value};", var.0));
        Ok(())
    }

    /// The type and the text of a scalar.
    fn expression(&self, scalar: &Scalar) -> Result<(&'static str, String), NoArithmetic> {
        let v = |var: &Var| format!("v{}", var.0);
        if scalar.is_index() {
            return Ok(("I", index_text(scalar)));
        }
        Ok(match scalar {
            Scalar::Slot(slot, dtype) => (computed(*dtype)?, format!("s{slot}")),
            Scalar::Number(bits, dtype) => (computed(*dtype)?, number(f64::from_bits(*bits), *dtype)?),
            Scalar::Load { param, index, guard, dtype } => {
                let element = format!("p{param}[{}]", v(index));
                let element = match dtype {
                    DType::BF16 => format!("from_bf16({element})"),
                    DType::F16 => format!("from_f16({element})"),
                    _ => element,
                };
                let ty = computed(*dtype)?;
                (ty, guard.map_or(element.clone(), |g| format!("{} ? {element} : ({ty})0", v(&g))))
            }
            Scalar::Within(a, n) => ("bool", format!("{0} >= 0 && {0} < {n}", v(a))),
            Scalar::And(a, b) => ("bool", format!("{} && {}", v(a), v(b))),
            Scalar::AsElement(a, dtype) => {
                (computed(*dtype)?, rounded(*dtype, &format!("({}){}", computed(*dtype)?, v(a))))
            }
            Scalar::Unary(op, dtype, a) => {
                let ty = if *op == Unary::IsFinite { "bool" } else { computed(*dtype)? };
                (ty, unary(*op, *dtype, &v(a))?)
            }
            Scalar::Binary(op, dtype, a, b) => (computed(*dtype)?, binary(*op, *dtype, &v(a), &v(b))?),
            Scalar::Compare(direction, dtype, a, b) => {
                let sign = match direction {
                    Direction::Eq => "==",
                    Direction::Ne => "!=",
                    Direction::Lt => "<",
                    Direction::Le => "<=",
                    Direction::Gt => ">",
                    Direction::Ge => ">=",
                };
                ("bool", format!("{} {sign} {}", rounded(*dtype, &v(a)), rounded(*dtype, &v(b))))
            }
            Scalar::Select(dtype, [p, a, b]) => (computed(*dtype)?, format!("{} ? {} : {}", v(p), v(a), v(b))),
            Scalar::Convert { from, to, value } => {
                let value = v(value);
                let text = match to {
                    DType::Bool => format!("{value} != 0"),
                    to if to.is_integer() && from.is_float() => format!("to_integer<{}>({value})", computed(*to)?),
                    to => rounded(*to, &format!("({}){value}", computed(*to)?)),
                };
                (computed(*to)?, text)
            }
            Scalar::Bitcast { from, to, value } => {
                let bits = match from {
                    DType::BF16 => format!("to_bf16({})", v(value)),
                    DType::F16 => format!("to_f16({})", v(value)),
                    _ => v(value),
                };
                let cast = format!("same_bits<{}>({bits})", stored(*to)?);
                let text = match to {
                    DType::BF16 => format!("from_bf16({cast})"),
                    DType::F16 => format!("from_f16({cast})"),
                    _ => cast,
                };
                (computed(*to)?, text)
            }
            Scalar::ReducePrecision { exponent_bits, mantissa_bits, dtype, value } => {
                (computed(*dtype)?, format!("with_precision({}, {exponent_bits}, {mantissa_bits})", v(value)))
            }
            Scalar::Threefry(word, all) => {
                let word = match word {
                    ThreefryWord::First => 0,
                    ThreefryWord::Second => 1,
                    ThreefryWord::Xor => 2,
                };
                let words: Vec<String> = all.iter().map(v).collect();
                ("unsigned int", format!("threefry({word}, {})", words.join(", ")))
            }
            _ => ("I", "0".into()),
        })
    }
}

/// The text of an index.
fn index_text(scalar: &Scalar) -> String {
    let v = |var: &Var| format!("v{}", var.0);
    match scalar {
        Scalar::Row => "row".to_string(),
        Scalar::Step => "step".to_string(),
        Scalar::Coordinate(at) => format!("own{at}"),
        Scalar::Index(value) => value.to_string(),
        Scalar::Add(a, b) => format!("{} + {}", v(a), v(b)),
        Scalar::Times(a, by) => format!("{} * {by}", v(a)),
        Scalar::Quotient(a, by) => format!("{} / {by}", v(a)),
        Scalar::Remainder(a, by) => format!("{} % {by}", v(a)),
        Scalar::Clamp(a, most) => format!("{0} < 0 ? 0 : {0} > {most} ? {most} : {0}", v(a)),
        // Truncation must not turn an out-of-range element into a valid index.
        Scalar::AsIndex(a, dtype) if dtype.bytes() == 8 => format!("as_index<I>({})", v(a)),
        Scalar::AsIndex(a, _) => format!("(I){}", v(a)),
        _ => String::new(),
    }
}

/// Rounds a value computed in single precision to its type.
fn rounded(dtype: DType, value: &str) -> String {
    match dtype {
        DType::BF16 => format!("from_bf16(to_bf16({value}))"),
        DType::F16 => format!("from_f16(to_f16({value}))"),
        _ => value.to_string(),
    }
}

/// An exact literal.
pub(super) fn number(value: f64, dtype: DType) -> Result<String, NoArithmetic> {
    Ok(match dtype {
        DType::F64 => format!("__longlong_as_double({:#x}LL)", value.to_bits()),
        d if d.is_float() => format!("__int_as_float({:#010x})", (value as f32).to_bits()),
        DType::Bool => (value != 0.0).to_string(),
        d => {
            let suffix = if d.is_unsigned_integer() { "ULL" } else { "LL" };
            let value = d.to_integer(value);
            // The smallest integer has no literal of its own.
            match value == i128::from(i64::MIN) {
                true => format!("({})(-9223372036854775807LL - 1)", computed(d)?),
                false => format!("({}){value}{suffix}", computed(d)?),
            }
        }
    })
}

fn unary(op: Unary, dtype: DType, a: &str) -> Result<String, NoArithmetic> {
    let ty = computed(dtype)?;
    if !dtype.is_float() {
        return Ok(match op {
            Unary::Negate => format!("({ty})(-{a})"),
            Unary::Abs if dtype.is_signed_integer() => format!("({ty})({a} < 0 ? -{a} : {a})"),
            Unary::Sign if dtype.is_signed_integer() => format!("({ty})(({a} > 0) - ({a} < 0))"),
            Unary::Sign => format!("({ty})({a} > 0)"),
            Unary::Not if dtype == DType::Bool => format!("!{a}"),
            Unary::Not => format!("({ty})~{a}"),
            Unary::PopulationCount => format!("({ty})bits_set({a})"),
            Unary::CountLeadingZeros => format!("({ty})leading_zeros({a})"),
            Unary::IsFinite => "true".into(),
            _ => a.to_string(),
        });
    }
    let f = if dtype == DType::F64 { "" } else { "f" };
    Ok(match op {
        Unary::Negate => format!("-{a}"),
        Unary::Exponential => format!("exp{f}({a})"),
        Unary::ExponentialMinusOne => format!("expm1{f}({a})"),
        Unary::Log => format!("log{f}({a})"),
        Unary::LogPlusOne => format!("log1p{f}({a})"),
        Unary::Logistic => format!("({ty})1 / (({ty})1 + exp{f}(-{a}))"),
        Unary::Tanh => format!("tanh{f}({a})"),
        Unary::Sqrt => format!("sqrt{f}({a})"),
        Unary::Rsqrt => format!("rsqrt{f}({a})"),
        Unary::Cbrt => format!("cbrt{f}({a})"),
        Unary::Sine => format!("sin{f}({a})"),
        Unary::Cosine => format!("cos{f}({a})"),
        Unary::Tan => format!("tan{f}({a})"),
        Unary::Erf => format!("erf{f}({a})"),
        Unary::Erfc => format!("erfc{f}({a})"),
        Unary::Abs => format!("fabs{f}({a})"),
        Unary::Sign => format!("({a} > 0 ? ({ty})1 : {a} < 0 ? ({ty})-1 : {a})"),
        Unary::Floor => format!("floor{f}({a})"),
        Unary::Ceil => format!("ceil{f}({a})"),
        Unary::RoundNearestEven => format!("rint{f}({a})"),
        Unary::RoundNearestAfz => format!("round{f}({a})"),
        Unary::IsFinite => format!("isfinite({a})"),
        Unary::StopGradient => a.to_string(),
        Unary::Not | Unary::PopulationCount | Unary::CountLeadingZeros => return Err(NoArithmetic(dtype)),
    })
}

fn binary(op: Binary, dtype: DType, a: &str, b: &str) -> Result<String, NoArithmetic> {
    let ty = computed(dtype)?;
    let f = if dtype == DType::F64 { "" } else { "f" };
    Ok(match op {
        Binary::Add | Binary::Or if dtype == DType::Bool => format!("{a} || {b}"),
        Binary::Multiply | Binary::And if dtype == DType::Bool => format!("{a} && {b}"),
        Binary::Xor if dtype == DType::Bool => format!("{a} != {b}"),
        Binary::Add => format!("({ty})({a} + {b})"),
        Binary::Subtract => format!("({ty})({a} - {b})"),
        Binary::Multiply => format!("({ty})({a} * {b})"),
        Binary::Maximum | Binary::Minimum => {
            let name = if op == Binary::Maximum { "greater" } else { "lesser" };
            format!("{name}<{ty}>({a}, {b})")
        }
        Binary::Divide if dtype.is_float() => format!("{a} / {b}"),
        Binary::Remainder if dtype.is_float() => format!("fmod{f}({a}, {b})"),
        Binary::Power if dtype.is_float() => format!("pow{f}({a}, {b})"),
        Binary::Atan2 if dtype.is_float() => format!("atan2{f}({a}, {b})"),
        Binary::Divide => format!("quotient<{ty}>({a}, {b})"),
        Binary::Remainder => format!("remainder<{ty}>({a}, {b})"),
        Binary::Power => format!("power<{ty}>({a}, {b})"),
        Binary::And => format!("({ty})({a} & {b})"),
        Binary::Or => format!("({ty})({a} | {b})"),
        Binary::Xor => format!("({ty})({a} ^ {b})"),
        Binary::ShiftLeft => format!("shift_left<{ty}>({a}, {b})"),
        Binary::ShiftRightLogical => format!("shift_right<{ty}>({a}, {b})"),
        Binary::ShiftRightArithmetic => format!("shift_right_signed<{ty}>({a}, {b})"),
        Binary::Atan2 => return Err(NoArithmetic(dtype)),
    })
}

/// Returns whether the device has an atomic addition for a type.
fn adds_at_once(dtype: DType) -> bool {
    let wide = matches!(dtype, DType::I32 | DType::U32 | DType::I64 | DType::U64);
    wide || matches!(dtype, DType::F64 | DType::F32)
}

/// The name of the functor that combines two values of a reduction.
pub(super) fn functor(reducer: Reducer, dtype: DType) -> &'static str {
    let logical = dtype == DType::Bool;
    match reducer {
        Reducer::Sum | Reducer::Or if logical => "LogicalOr",
        Reducer::Product | Reducer::And if logical => "LogicalAnd",
        Reducer::Sum => "Sum",
        Reducer::Product => "Product",
        Reducer::Max => "Greater",
        Reducer::Min => "Lesser",
        Reducer::And => "BitAnd",
        Reducer::Or => "BitOr",
    }
}

pub(super) fn combined(reducer: Reducer, dtype: DType, a: &str, b: &str) -> String {
    format!("{}::of({a}, {b})", functor(reducer, dtype))
}
