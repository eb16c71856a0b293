//! A graph under construction, with weights named by the path of their module, and the blocks that families share.

use super::config::Fields;
use super::error::{ConfigError, Note};
use super::{ConfigOptions, DEFAULT_SEQUENCE, Imported};
use altiplano_ir::array;
use altiplano_ir::cluster::Routing;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Input, Op, Parameter, ShapeError};
use altiplano_ir::types::TensorType;

/// The result of a block.
pub(crate) type Block = Result<ValueId, ConfigError>;

/// A graph, and the module under construction.
pub(crate) struct Builder {
    pub graph: Graph,
    /// The precision of the weights and of computations with them.
    pub dtype: DType,
    pub batch: u64,
    pub options: ConfigOptions,
    pub notes: Vec<Note>,
    /// How the last layer of experts routes tokens.
    pub routing: Option<Routing>,
    /// The path of the module, such as `model.layers.0.mlp`.
    path: String,
    /// The length of the path of a module that has the weights of another, and the path of that one.
    weights_of: Option<(usize, String)>,
}

impl Builder {
    pub(crate) fn new(name: &str, dtype: DType, options: &ConfigOptions) -> Self {
        let batch = options.batch.max(1);
        let graph = Graph { batch, ..Graph::new(name) };
        let (options, notes) = (options.clone(), Vec::new());
        Builder { graph, dtype, batch, options, notes, routing: None, path: String::new(), weights_of: None }
    }

    pub(crate) fn finish(self) -> Imported {
        Imported { graph: self.graph, notes: self.notes, routing: self.routing }
    }

    /// Builds the module `name` within this one. An empty name stands for this module. Ops and errors of the module are
    /// named after it.
    pub(crate) fn within<T>(
        &mut self,
        name: &str,
        build: impl FnOnce(&mut Builder) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        if name.is_empty() {
            return build(self);
        }
        let outer = self.path.len();
        if outer > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        let first = self.graph.len();
        let built = build(self).map_err(|error| match error {
            ConfigError::Shape { place, error } if place.is_empty() => {
                ConfigError::Shape { place: self.path.clone(), error }
            }
            error => error,
        });
        for node in self.graph.nodes[first..].iter_mut().filter(|node| node.name.is_empty()) {
            node.name.clone_from(&self.path);
        }
        self.path.truncate(outer);
        built
    }

    fn leaf(&mut self, op: Op, name: String, ty: TensorType, batched: bool) -> Block {
        if !ty.check() {
            return Err(ConfigError::Shape { place: name, error: ShapeError::TooLarge { shape: ty.shape } });
        }
        let leaf = self.graph.push(op, &[])?;
        self.graph.nodes[leaf.index()].name = name;
        self.graph.nodes[leaf.index()].batch_dims = u32::from(batched);
        Ok(leaf)
    }

    fn name_of(&self, name: &str) -> String {
        let path = match &self.weights_of {
            Some((own, first)) => &format!("{first}{}", &self.path[*own..]),
            None => &self.path,
        };
        if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
    }

    /// Builds this module with the weights of the module `first`, which may be this one. Weights that `first` does not
    /// have yet are added to it.
    pub(crate) fn with_weights_of<T>(
        &mut self,
        first: &str,
        build: impl FnOnce(&mut Builder) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        let outer = self.weights_of.replace((self.path.len(), first.to_string()));
        let built = build(self);
        self.weights_of = outer;
        built
    }

    /// A trained weight of this module.
    pub(crate) fn weight(&mut self, name: &str, shape: &[u64]) -> Block {
        let (name, ty) = (self.name_of(name), TensorType::new(self.dtype, shape));
        if self.weights_of.is_some() {
            let known = |v: &ValueId| self.graph.node(*v).op.is_leaf() && self.graph.node(*v).name == name;
            if let Some(known) = self.graph.values().find(known) {
                return Ok(known);
            }
        }
        self.leaf(Op::Parameter(Parameter::new(name.clone(), ty.clone())), name, ty, false)
    }

    /// A buffer of this module, which is state that no gradient changes.
    pub(crate) fn buffer(&mut self, name: &str, shape: &[u64], dtype: DType) -> Block {
        let (name, ty) = (self.name_of(name), TensorType::new(dtype, shape));
        self.leaf(Op::Input(Input { name: name.clone(), ty: ty.clone() }), name, ty, false)
    }

    /// An input of the batch. `shape` is that of one sample.
    pub(crate) fn input(&mut self, name: &str, shape: &[u64], dtype: DType) -> Block {
        let ty = TensorType::new(dtype, [&[self.batch], shape].concat());
        self.leaf(Op::Input(Input { name: name.to_string(), ty: ty.clone() }), name.to_string(), ty, true)
    }

    /// The number of tokens in a sample: the requested number, or the one that the model is made for.
    pub(crate) fn sequence(&mut self, positions: u64) -> u64 {
        self.options.sequence.unwrap_or_else(|| {
            let tokens = positions.min(DEFAULT_SEQUENCE);
            self.notes.push(Note::Sequence { tokens });
            tokens
        })
    }

    /// The same for a model in which every position has a row in a table of `positions`.
    pub(crate) fn learned_sequence(&mut self, field: &'static str, positions: u64) -> Result<u64, ConfigError> {
        let sequence = self.sequence(positions);
        if sequence > positions {
            return Err(ConfigError::TooLong { sequence, positions, field });
        }
        Ok(sequence)
    }

    /// Notes that the graph has no dropout if the config asks for it.
    pub(crate) fn without_dropout(&mut self, fields: &Fields<'_>, keys: &[&str]) -> Result<(), ConfigError> {
        let mut dropped = None;
        for key in keys {
            let asked = fields.number_or(key, 0.0)? > 0.0;
            dropped = dropped.or(asked.then(|| Note::Dropout { field: key.to_string() }));
        }
        self.notes.extend(dropped);
        Ok(())
    }

    /// `x weight^T + bias` for the linear layer `name`, whose weight is `[out, in]`.
    pub(crate) fn linear(&mut self, name: &str, x: ValueId, out: u64, bias: bool) -> Block {
        self.matrix(name, x, out, Matrix { bias, transposed: false })
    }

    /// The linear layer `name`, applied to the last dimension of `x`.
    pub(crate) fn matrix(&mut self, name: &str, x: ValueId, out: u64, how: Matrix) -> Block {
        self.within(name, |b| {
            let last = b.graph.shape(x).len().saturating_sub(1);
            let input = b.graph.shape(x).last().copied().unwrap_or(1);
            let weight = b.weight("weight", &if how.transposed { [input, out] } else { [out, input] })?;
            let bias = if how.bias { Some(b.weight("bias", &[out])?) } else { None };
            if !how.transposed {
                return Ok(array::linear(&mut b.graph, x, weight, bias)?);
            }
            let y = array::contract(&mut b.graph, x, weight, last, 0)?;
            bias.map_or(Ok(y), |bias| b.add(y, bias))
        })
    }

    pub(crate) fn layer_norm(&mut self, name: &str, x: ValueId, eps: f64) -> Block {
        self.norm(name, x, &Norm::layer(eps))
    }

    pub(crate) fn rms_norm(&mut self, name: &str, x: ValueId, eps: f64) -> Block {
        self.norm(name, x, &Norm::rms(eps))
    }

    /// The norm `name` over the last dimension of `x`.
    pub(crate) fn norm(&mut self, name: &str, x: ValueId, norm: &Norm) -> Block {
        self.within(name, |b| {
            let width = b.graph.shape(x).last().copied().unwrap_or(1);
            let mut weight = if norm.weight { Some(b.weight("weight", &[width])?) } else { None };
            if let Some(stored) = weight.filter(|_| norm.less_one) {
                weight = Some(array::with_number(&mut b.graph, altiplano_ir::op::Binary::Add, stored, 1.0)?);
            }
            let bias = if norm.bias { Some(b.weight("bias", &[width])?) } else { None };
            Ok(norm.apply(&mut b.graph, x, weight, bias)?)
        })
    }

    /// A table of `rows` rows, without a lookup.
    pub(crate) fn table(&mut self, name: &str, rows: u64, width: u64) -> Block {
        self.within(name, |b| b.weight("weight", &[rows, width]))
    }

    pub(crate) fn add(&mut self, a: ValueId, b: ValueId) -> Block {
        Ok(array::binary(&mut self.graph, altiplano_ir::op::Binary::Add, a, b)?)
    }

    pub(crate) fn multiply(&mut self, a: ValueId, b: ValueId) -> Block {
        Ok(array::binary(&mut self.graph, altiplano_ir::op::Binary::Multiply, a, b)?)
    }

    /// The logits of each token from the head `name`. A tied head uses the embedding table, and others their own
    /// matrix.
    pub(crate) fn head(
        &mut self,
        name: &str,
        hidden: ValueId,
        tied: Option<ValueId>,
        vocabulary: u64,
        bias: bool,
    ) -> Block {
        let Some(table) = tied else { return self.linear(name, hidden, vocabulary, bias) };
        self.within(name, |b| {
            let bias = if bias { Some(b.weight("bias", &[vocabulary])?) } else { None };
            Ok(array::linear(&mut b.graph, hidden, table, bias)?)
        })
    }

    /// Makes the mean cross-entropy the graph's output, with classes in the last dimension and an input `labels`.
    /// Without a requested loss, the output is the logits.
    pub(crate) fn loss(&mut self, logits: ValueId) -> Result<(), ConfigError> {
        if self.options.without_loss {
            self.graph.outputs = vec![logits];
            return Ok(());
        }
        let classes = self.graph.shape(logits).len() - 1;
        let of_sample = self.graph.shape(logits)[1..classes].to_vec();
        let labels = self.input("labels", &of_sample, DType::I32)?;
        self.within("loss", |b| {
            let loss = array::cross_entropy(&mut b.graph, logits, labels, classes)?;
            b.graph.outputs = vec![loss];
            Ok(())
        })
    }
}

/// The storage of a linear layer's weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub bias: bool,
    /// True if the weight is `[in, out]`.
    pub transposed: bool,
}

/// A norm over the last dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Norm {
    /// True if the norm subtracts the mean (layer norm), false if not (RMS norm).
    pub centred: bool,
    pub weight: bool,
    /// True if the stored weight is the factor minus one.
    pub less_one: bool,
    pub bias: bool,
    pub eps: f64,
}

impl Norm {
    pub(crate) fn layer(eps: f64) -> Norm {
        Norm { centred: true, weight: true, less_one: false, bias: true, eps }
    }

    pub(crate) fn rms(eps: f64) -> Norm {
        Norm { centred: false, bias: false, ..Norm::layer(eps) }
    }

    /// The same norm with another weight and bias, or none.
    pub(crate) fn apply(
        &self,
        g: &mut Graph,
        x: ValueId,
        weight: Option<ValueId>,
        bias: Option<ValueId>,
    ) -> array::Built {
        match self.centred {
            true => array::layer_norm(g, x, 1, weight, bias, self.eps),
            false => array::rms_norm(g, x, 1, weight, self.eps),
        }
    }
}

/// The functions between the matrices of a layer, by their names in configs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    GeluErf,
    GeluTanh,
    GeluSigmoid,
    Relu,
    ReluSquared,
    Silu,
    Tanh,
}

const ACTIVATIONS: &[(&str, Activation)] = &[
    ("gelu", Activation::GeluErf),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_python", Activation::GeluErf),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("quick_gelu", Activation::GeluSigmoid),
    ("relu", Activation::Relu),
    ("relu2", Activation::ReluSquared),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("tanh", Activation::Tanh),
];

impl Activation {
    pub(crate) fn read(fields: &Fields<'_>, key: &str, default: &str) -> Result<Activation, ConfigError> {
        let word = fields.word_or(key, default)?;
        let found = ACTIVATIONS.iter().find(|(name, _)| *name == word).map(|(_, activation)| *activation);
        found.ok_or_else(|| fields.unsupported(key, &ACTIVATIONS.iter().map(|(name, _)| *name).collect::<Vec<_>>()))
    }

    pub(crate) fn apply(self, g: &mut Graph, x: ValueId) -> array::Built {
        match self {
            Activation::GeluErf => array::gelu_erf(g, x),
            Activation::GeluTanh => array::gelu_tanh(g, x),
            Activation::GeluSigmoid => array::gelu_sigmoid(g, x),
            Activation::Relu => array::relu(g, x),
            Activation::ReluSquared => {
                let kept = array::relu(g, x)?;
                array::binary(g, altiplano_ir::op::Binary::Multiply, kept, kept)
            }
            Activation::Silu => array::silu(g, x),
            Activation::Tanh => array::unary(g, altiplano_ir::op::Unary::Tanh, x),
        }
    }
}
