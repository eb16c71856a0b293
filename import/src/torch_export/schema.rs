//! The JSON of an exported program, restricted to the fields that an import needs. Other fields are ignored, so
//! that files of other PyTorch versions can be read as far as possible.

use altiplano_ir::dtype::DType;
use altiplano_ir::types::TensorType;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// `models/model.json`, or `serialized_exported_program.json` in older versions.
#[derive(Debug, Deserialize)]
pub struct Program {
    #[serde(default)]
    pub schema_version: Version,
    pub graph_module: GraphModule,
    #[serde(default)]
    pub range_constraints: BTreeMap<String, Range>,
    /// Dialects of the program: `TRAINING`, or `ATEN` after decomposition.
    #[serde(default)]
    pub verifiers: Vec<String>,
}

/// The format version. The major number changes when older readers may misread a file.
#[derive(Debug, Default, Deserialize)]
pub struct Version {
    #[serde(default)]
    pub major: i64,
}

/// The newest supported major version, used by PyTorch 2.5 to 2.15.
pub const NEWEST: i64 = 8;

#[derive(Debug, Deserialize)]
pub struct Range {
    pub min_val: Option<i64>,
    pub max_val: Option<i64>,
}

#[derive(Debug, Deserialize)]
pub struct GraphModule {
    pub graph: Graph,
    pub signature: Signature,
    #[serde(default)]
    pub module_call_graph: Vec<ModuleCall>,
}

#[derive(Debug, Deserialize)]
pub struct ModuleCall {
    #[serde(default)]
    pub fqn: String,
    pub signature: Option<CallSignature>,
}

#[derive(Debug, Deserialize)]
pub struct CallSignature {
    #[serde(default)]
    pub out_spec: String,
}

#[derive(Debug, Deserialize)]
pub struct Graph {
    pub inputs: Vec<Argument>,
    pub outputs: Vec<Argument>,
    pub nodes: Vec<Node>,
    #[serde(default)]
    pub tensor_values: BTreeMap<String, TensorMeta>,
    /// Integer results of nodes, as expressions of symbols.
    #[serde(default)]
    pub sym_int_values: BTreeMap<String, Size>,
}

#[derive(Debug, Deserialize)]
pub struct Node {
    pub target: String,
    #[serde(default)]
    pub inputs: Vec<NamedArgument>,
    #[serde(default)]
    pub outputs: Vec<Argument>,
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
pub struct NamedArgument {
    pub name: String,
    pub arg: Argument,
}

/// A tagged value, as an object whose only key names the kind: `{"as_int": 3}`.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub struct Argument(pub Map<String, Value>);

impl Argument {
    /// The kind and the value. Older files list all kinds, with null for those that do not apply.
    pub fn parts(&self) -> Option<(&str, &Value)> {
        let mut given = self.0.iter().filter(|(_, value)| !value.is_null());
        let (kind, value) = given.next().or_else(|| self.0.iter().next())?;
        Some((kind, value))
    }

    /// The name of the value that the argument refers to, if there is exactly one.
    pub fn name(&self) -> Option<&str> {
        let (kind, value) = self.parts()?;
        match kind {
            "as_tensor" | "as_custom_obj" => value.get("name")?.as_str(),
            "as_sym_int" | "as_sym_float" | "as_sym_bool" => value.get("as_name")?.as_str(),
            _ => None,
        }
    }
}

#[derive(Debug, Deserialize)]
pub struct TensorMeta {
    pub dtype: u32,
    pub sizes: Vec<Size>,
    #[serde(default)]
    pub requires_grad: Option<bool>,
    #[serde(default)]
    pub strides: Vec<Size>,
    #[serde(default)]
    pub storage_offset: Option<Size>,
    pub device: Option<Device>,
}

impl TensorMeta {
    pub(crate) fn is_complex(&self) -> bool {
        complex_part(self.dtype.into()).is_some()
    }

    /// The graph's type of a tensor of this shape. Complex numbers are pairs along a last dimension.
    pub fn with_shape(&self, mut shape: Vec<u64>) -> Option<TensorType> {
        let part = complex_part(self.dtype.into());
        shape.extend(part.map(|_| 2));
        let ty = TensorType::new(part.or_else(|| dtype(self.dtype.into()))?, shape);
        ty.check().then_some(ty)
    }

    /// True for tensors on PyTorch's meta device, which have a type but no values.
    pub(crate) fn is_meta(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.kind == "meta")
    }
}

#[derive(Debug, Deserialize)]
pub struct Device {
    #[serde(rename = "type", default)]
    pub kind: String,
}

/// A number, or an expression of symbols.
#[derive(Debug, Deserialize)]
pub enum Size {
    #[serde(rename = "as_int")]
    Int(i64),
    #[serde(rename = "as_expr")]
    Expr(SizeExpr),
}

#[derive(Debug, Deserialize)]
pub struct SizeExpr {
    pub expr_str: String,
    /// The value in the example that the program was traced with: a number, or `{"as_int": 6}`.
    #[serde(default)]
    pub hint: Value,
}

impl SizeExpr {
    pub fn hint(&self) -> Option<i64> {
        self.hint.as_i64().or_else(|| self.hint.get("as_int")?.as_i64())
    }
}

#[derive(Debug, Deserialize)]
pub struct Signature {
    pub input_specs: Vec<Map<String, Value>>,
    pub output_specs: Vec<Map<String, Value>>,
}

/// `data/weights/model_weights_config.json`, and the same for constants.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Payloads {
    pub config: BTreeMap<String, Payload>,
}

#[derive(Debug, Deserialize)]
pub struct Payload {
    pub path_name: String,
    #[serde(default)]
    pub use_pickle: bool,
    pub tensor_meta: Option<TensorMeta>,
}

impl Payload {
    pub(crate) fn is_meta(&self) -> bool {
        self.tensor_meta.as_ref().is_some_and(TensorMeta::is_meta)
    }
}

/// The element type of the parts of a complex `ScalarType`.
pub(crate) fn complex_part(code: u64) -> Option<DType> {
    match code {
        9 => Some(DType::F16),
        10 => Some(DType::F32),
        11 => Some(DType::F64),
        _ => None,
    }
}

/// The element type of a PyTorch `ScalarType`. Complex and quantised types have none here.
pub(crate) fn dtype(code: u64) -> Option<DType> {
    Some(match code {
        1 => DType::U8,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        6 => DType::F16,
        7 => DType::F32,
        8 => DType::F64,
        12 => DType::Bool,
        13 => DType::BF16,
        28 => DType::U16,
        29 => DType::F8E4M3FN,
        30 => DType::F8E5M2,
        31 => DType::F8E4M3FNUZ,
        32 => DType::F8E5M2FNUZ,
        _ => return None,
    })
}
