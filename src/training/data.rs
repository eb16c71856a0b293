//! Batches: cut from a file whose tensors have more samples than one batch, or made up.

use crate::error::{DataProblem, Error};
use crate::training::bounds::{Bound, Floats, bound};
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::without_composites;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Plan;
use altiplano_ir::sample::{RANDOM_KEY, SAMPLE_INDEX};
use altiplano_ir::types::TensorType;
use altiplano_runtime::data::{read_npy, read_safetensors, synthetic};
use altiplano_runtime::{HostData, HostTensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The inputs of one step, by name.
pub type Batch = BTreeMap<String, HostTensor>;

/// An endless supply of batches.
pub struct Batches {
    inputs: Vec<InputType>,
    source: Source,
    /// Inputs that are the same in all batches.
    state: BTreeMap<String, HostTensor>,
    /// The number of each sample in the batch, where random bits are counted by it.
    sample_index: Option<(String, HostTensor)>,
    /// Of the key that random bits are drawn with, where the model draws any.
    seed: Option<u64>,
    /// Batches given out.
    taken: u64,
}

/// What a step needs of one input.
struct InputType {
    name: String,
    /// At the global batch.
    ty: TensorType,
    batch_dim: Option<usize>,
    bound: Option<Bound>,
    floats: Floats,
}

enum Source {
    Synthetic { seed: u64 },
    File { file: PathBuf, tensors: BTreeMap<String, HostTensor>, samples: u64 },
}

impl Batches {
    /// One batch over and over: integers that index what the model looks up, normal floats. It is the same for the
    /// same seed whatever the plan, and since it can be learnt by heart, the loss falls where training works.
    pub fn synthetic(plan: &Plan, seed: u64) -> Batches {
        let source = Source::Synthetic { seed };
        let (sample_index, seed) = (sample_index(plan), random_seed(plan, seed));
        Batches { inputs: inputs(plan), source, state: BTreeMap::new(), sample_index, seed, taken: 0 }
    }

    /// [`Self::synthetic`], or batches of a file, for a model whose state (running statistics, tables) is as given where it
    /// has a tensor of an input's name.
    pub fn with_state(
        plan: &Plan,
        file: Option<&Path>,
        seed: u64,
        state: &BTreeMap<String, HostTensor>,
    ) -> Result<Batches, Error> {
        match file {
            Some(file) => {
                let found = Batches::read(plan, file, state)?;
                Ok(Batches { seed: random_seed(plan, seed), ..found })
            }
            None => {
                let made_up = Batches::synthetic(plan, seed);
                let given = |i: &&InputType| i.batch_dim.is_none();
                let tensor = |i: &InputType| {
                    let tensor = state.get(&i.name).filter(|t| t.ty.shape == i.ty.shape)?;
                    Some((i.name.clone(), tensor.cast(i.ty.dtype)))
                };
                let state = made_up.inputs.iter().filter(given).filter_map(tensor).collect();
                Ok(Batches { state, ..made_up })
            }
        }
    }

    /// Batches from a `.safetensors` file that names tensors as the model's inputs (`tokens` or `input/tokens`), or
    /// from a `.npy` file where there is one input. Of a model with tokens and labels, a `.npy` file of ids is cut
    /// into sequences whose labels are the next ids. After the last whole batch the first follows again.
    pub fn open(plan: &Plan, file: &Path) -> Result<Batches, Error> {
        Batches::read(plan, file, &BTreeMap::new())
    }

    fn read(plan: &Plan, file: &Path, state: &BTreeMap<String, HostTensor>) -> Result<Batches, Error> {
        let inputs = inputs(plan);
        let problem = |problem| Error::Data { file: file.to_path_buf(), problem: Box::new(problem) };
        let is_npy = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("npy"));
        let found = if is_npy { named(&inputs, read_npy(file)?).map_err(problem)? } else { read_safetensors(file)? };
        let mut tensors = BTreeMap::new();
        let mut samples: Option<(u64, u64)> = None;
        for input in &inputs {
            let name = &input.name;
            let tensor = found.get(name).or_else(|| found.get(&format!("input/{name}")));
            let tensor = tensor.or_else(|| state.get(name).filter(|_| input.batch_dim.is_none()));
            let tensor = tensor.ok_or_else(|| problem(DataProblem::Missing { name: name.clone() }))?;
            let mut wanted = input.ty.clone();
            if let Some(dim) = input.batch_dim {
                let given = tensor.ty.shape.get(dim).copied().unwrap_or(0);
                let needed = wanted.shape[dim];
                samples = Some(samples.map_or((given, needed), |(s, n)| (s.min(given), n)));
                wanted.shape[dim] = given;
            }
            let same_kind = tensor.ty.dtype.is_float() == wanted.dtype.is_float();
            if tensor.ty.shape != wanted.shape || !same_kind {
                let (found, expected) = (tensor.ty.clone(), input.ty.clone());
                return Err(problem(DataProblem::Type { name: name.clone(), found, expected }));
            }
            check_bound(input, tensor).map_err(problem)?;
            tensors.insert(name.clone(), tensor.cast(wanted.dtype));
        }
        if let Some((samples, needed)) = samples.filter(|(samples, needed)| samples < needed) {
            return Err(problem(DataProblem::TooFewSamples { samples, needed }));
        }
        let samples = samples.map_or(0, |(samples, _)| samples);
        let source = Source::File { file: file.to_path_buf(), tensors, samples };
        let (sample_index, seed) = (sample_index(plan), random_seed(plan, 0));
        Ok(Batches { inputs, source, state: BTreeMap::new(), sample_index, seed, taken: 0 })
    }

    /// The file that batches are cut from.
    pub fn file(&self) -> Option<&Path> {
        match &self.source {
            Source::File { file, .. } => Some(file),
            Source::Synthetic { .. } => None,
        }
    }

    /// The next batch.
    pub fn take(&mut self) -> Batch {
        let number = self.taken;
        self.taken += 1;
        let tensor = |input: &InputType| {
            let tensor = match &self.source {
                _ if self.state.contains_key(&input.name) => self.state[&input.name].clone(),
                Source::Synthetic { seed } => input.made_up(*seed),
                Source::File { tensors, samples, .. } => input.cut(&tensors[&input.name], number, *samples),
            };
            (input.name.clone(), tensor)
        };
        let key = self.seed.map(|seed| {
            let words = [seed as u32, number as u32].map(f64::from);
            (RANDOM_KEY.to_string(), HostTensor::from_f64(TensorType::new(DType::U32, [2]), &words))
        });
        self.inputs.iter().map(tensor).chain(self.sample_index.clone()).chain(key).collect()
    }
}

/// The seed of random bits, where a plan's graph draws any with a key that is made here.
fn random_seed(plan: &Plan, seed: u64) -> Option<u64> {
    plan.graph.inputs().any(|(_, name)| name == RANDOM_KEY).then_some(seed)
}

/// The numbers of the samples of a global batch, where a plan's graph asks for them.
fn sample_index(plan: &Plan) -> Option<(String, HostTensor)> {
    let (v, name) = plan.graph.inputs().find(|(_, name)| *name == SAMPLE_INDEX)?;
    let samples = plan.graph.shape(v)[0] * plan.num_microbatches as u64;
    let numbers: Vec<f64> = (0..samples).map(|i| i as f64).collect();
    let ty = TensorType::new(plan.graph.ty(v).dtype, [samples]);
    Some((name.to_string(), HostTensor::from_f64(ty, &numbers)))
}

/// The inputs of a plan's graph at the global batch.
fn inputs(plan: &Plan) -> Vec<InputType> {
    let graph = without_composites(&plan.graph);
    let input = |(v, name): (ValueId, &str)| {
        let mut ty = graph.ty(v).clone();
        let marked = graph.node(v).batch_dims;
        let batch_dim = (marked != 0).then(|| marked.trailing_zeros() as usize);
        if let Some(dim) = batch_dim {
            ty.shape[dim] *= plan.num_microbatches as u64;
        }
        let bound = if ty.dtype.is_integer() { bound(&graph, v) } else { None };
        let floats = if ty.dtype.is_float() { Floats::of(&graph, v) } else { Floats::Any };
        InputType { name: name.to_string(), ty, batch_dim, bound, floats }
    };
    graph.inputs().filter(|(_, name)| ![SAMPLE_INDEX, RANDOM_KEY].contains(name)).map(input).collect()
}

/// One array of ids serves a model of one input as it is, and one of tokens and labels shifted by one.
fn named(inputs: &[InputType], ids: HostTensor) -> Result<BTreeMap<String, HostTensor>, DataProblem> {
    let is_label = |i: &InputType| i.name.contains("label") || i.name.contains("target");
    match inputs {
        [only] => Ok(BTreeMap::from([(only.name.clone(), ids)])),
        [a, b] if a.ty == b.ty && a.ty.rank() == 2 && a.ty.dtype.is_integer() && ids.ty.dtype.is_integer() => {
            let (tokens, labels) = if is_label(a) { (b, a) } else { (a, b) };
            let length = a.ty.shape[1] as usize;
            // Rows that are one longer than a sequence, or one long row of which every sequence takes its next id too.
            let all = ids.to_f64();
            let stride = if ids.ty.shape.last() == Some(&(length as u64 + 1)) { length + 1 } else { length };
            let count = all.len().saturating_sub(1) / stride.max(1);
            let rows = |shift: usize| {
                let row = |r: usize| all[r * stride + shift..][..length].iter().copied();
                let data: Vec<f64> = (0..count).flat_map(row).collect();
                HostTensor::from_f64(TensorType::new(a.ty.dtype, [count as u64, length as u64]), &data)
            };
            Ok(BTreeMap::from([(tokens.name.clone(), rows(0)), (labels.name.clone(), rows(1))]))
        }
        _ => Err(DataProblem::OneTensor { inputs: inputs.len() }),
    }
}

fn check_bound(input: &InputType, tensor: &HostTensor) -> Result<(), DataProblem> {
    let Some(Bound { table, rows }) = &input.bound else { return Ok(()) };
    let outside = |x: i64| x < 0 || x as u64 >= *rows;
    let found = match &tensor.data {
        HostData::I32(v) => v.iter().map(|&x| x as i64).find(|&x| outside(x)),
        HostData::I64(v) => v.iter().copied().find(|&x| outside(x)),
        _ => None,
    };
    match found {
        // Labels of -100 and the like mark what is left out of a loss, and the graph says how.
        Some(value) if value >= 0 => {
            let (name, table) = (input.name.clone(), table.clone());
            Err(DataProblem::IndexOutOfRange { name, value, table, rows: *rows })
        }
        _ => Ok(()),
    }
}

impl InputType {
    /// Something to train on.
    fn made_up(&self, seed: u64) -> HostTensor {
        let tensor = synthetic(&self.name, &self.ty, self.bound.as_ref().map_or(2, |b| b.rows), seed);
        if self.floats == Floats::Any {
            return tensor;
        }
        let numbers: Vec<f64> = tensor.to_f64().into_iter().map(|x| self.floats.made_of(x)).collect();
        HostTensor::from_f64(tensor.ty, &numbers)
    }

    /// Batch `number` of a tensor of `samples`.
    fn cut(&self, tensor: &HostTensor, number: u64, samples: u64) -> HostTensor {
        let Some(dim) = self.batch_dim else { return tensor.clone() };
        let size = self.ty.shape[dim];
        let first = number % (samples / size.max(1)).max(1) * size;
        let class = tensor.data.class();
        let inner = self.ty.shape[dim + 1..].iter().product::<u64>() as usize * class.bytes();
        let outer = self.ty.shape[..dim].iter().product::<u64>() as usize;
        let (row, from, length) =
            (tensor.ty.shape[dim] as usize * inner, first as usize * inner, size as usize * inner);
        let bytes = tensor.data.as_bytes();
        let cut: Vec<u8> = (0..outer).flat_map(|o| &bytes[o * row + from..][..length]).copied().collect();
        HostTensor { ty: self.ty.clone(), data: HostData::from_bytes(class, &cut) }
    }
}
