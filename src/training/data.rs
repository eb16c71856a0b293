//! Batches: from files, whose samples are read on demand and may be shuffled, or synthetic.
//!
//! A run takes samples from one endless sequence: epoch after epoch, each in its own order if they are shuffled. The
//! sample at a position follows from the position's number. So a run can resume anywhere, under any plan.

use crate::error::{DataProblem, Error};
use crate::training::bounds::{Bound, Floats, bound};
use crate::training::checkpoint::{DataContent, Position};
use crate::training::shuffle::Permutation;
use crate::training::source::{BatchRows, Source, content, open};
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::without_composites;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Plan;
use altiplano_ir::rng::{RANDOM_KEY, SAMPLE_INDEX};
use altiplano_ir::types::TensorType;
use altiplano_runtime::data::synthetic;
use altiplano_runtime::{HostData, HostTensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The inputs of one step, by name.
pub type Batch = BTreeMap<String, HostTensor>;

/// The source of batches, and their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataOptions {
    /// File of the data; synthetic if absent.
    pub file: Option<PathBuf>,
    /// Element type of a file of bare ids, if its name does not tell.
    pub token_type: Option<DType>,
    /// Seed of the order of samples, which changes every epoch; file order if absent.
    pub shuffle: Option<u64>,
}

/// An endless supply of batches.
pub struct Batches {
    inputs: Vec<InputType>,
    source: Option<Source>,
    content: Option<DataContent>,
    options: DataOptions,
    /// Seed of synthetic values.
    made_up_seed: u64,
    /// Inputs that are the same in all batches.
    state: BTreeMap<String, HostTensor>,
    /// The index of each sample in the batch, if random bits depend on it.
    sample_index: Option<(String, HostTensor)>,
    /// Seed of the key for random bits, if the model draws any.
    seed: Option<u64>,
    /// The rows of the batch to read from files, by input; all for inputs without an entry.
    wanted: BTreeMap<String, Vec<bool>>,
    /// Bytes read from files so far.
    bytes_read: u64,
    /// Number of equal parts into which all inputs of a batch can be cut.
    units: u64,
    global_batch: u64,
    position: Position,
}

/// The requirements of a step on one input.
pub(super) struct InputType {
    pub name: String,
    /// Type at the global batch.
    pub ty: TensorType,
    pub batch_dim: Option<usize>,
    pub bound: Option<Bound>,
    pub floats: Floats,
}

impl Batches {
    /// The same synthetic batch every time: valid indices for the model's lookups, normal floats. It depends on the
    /// seed but not on the plan. Since it can be memorised, the loss falls if training works.
    pub(crate) fn synthetic(plan: &Plan, seed: u64) -> Batches {
        let inputs = inputs(plan);
        let sizes = inputs.iter().filter_map(|i| Some(i.ty.shape[i.batch_dim?]));
        let units = sizes.fold(plan.global_batch, greatest_common_divisor).max(1);
        Batches {
            inputs,
            source: None,
            content: None,
            options: DataOptions::default(),
            made_up_seed: seed,
            state: BTreeMap::new(),
            sample_index: sample_index(plan),
            seed: random_seed(plan, seed),
            wanted: BTreeMap::new(),
            bytes_read: 0,
            units,
            global_batch: plan.global_batch,
            position: Position::default(),
        }
    }

    /// `Self::synthetic`, or batches of a file. The model's state (running statistics, tables) comes from `state` if
    /// that has a tensor of the input's name.
    pub fn with_state(
        plan: &Plan,
        options: &DataOptions,
        seed: u64,
        state: &BTreeMap<String, HostTensor>,
    ) -> Result<Batches, Error> {
        let mut batches = Batches::synthetic(plan, seed);
        let tensor = |i: &InputType| {
            let tensor = state.get(&i.name).filter(|t| t.ty.shape == i.ty.shape)?;
            Some((i.name.clone(), tensor.cast(i.ty.dtype)))
        };
        batches.state = batches.inputs.iter().filter(|i| i.batch_dim.is_none()).filter_map(tensor).collect();
        if let Some(file) = &options.file {
            let source = open(&batches.inputs, &batches.state, file, options.token_type, batches.units)?;
            if source.units < batches.units {
                let (samples, needed) = (source.units * batches.unit_samples(), batches.global_batch);
                let problem = DataProblem::TooFewSamples { samples, needed };
                return Err(Error::Data { file: file.clone(), problem: Box::new(problem) });
            }
            batches.source = Some(source);
            batches.content = Some(content(file)?);
        }
        batches.options = options.clone();
        Ok(batches)
    }

    /// Opens a file of batches; see `open`.
    pub(crate) fn open(plan: &Plan, file: &Path) -> Result<Batches, Error> {
        let options = DataOptions { file: Some(file.to_path_buf()), ..DataOptions::default() };
        Batches::with_state(plan, &options, 0, &BTreeMap::new())
    }

    /// The file of the data, if there is one.
    pub fn file(&self) -> Option<&Path> {
        self.options.file.as_deref()
    }

    /// Number of files that are open.
    pub(crate) fn num_files(&self) -> u64 {
        self.source.as_ref().map_or(0, |source| source.starts.len().saturating_sub(1) as u64)
    }

    /// Describes the data that is read from the file; `None` for synthetic batches.
    pub fn description(&self) -> Option<String> {
        let source = self.source.as_ref()?;
        let file = self.options.file.as_deref()?.display();
        let samples = source.units * self.unit_samples();
        let order = match self.options.shuffle {
            Some(seed) => format!("in another order each epoch (seed {seed})"),
            None => "as they come".to_string(),
        };
        Some(format!("data: {samples} samples of {file}, {order}{}", source.assumed))
    }

    /// The fingerprint of the file's data.
    pub fn content(&self) -> Option<&DataContent> {
        self.content.as_ref()
    }

    /// The amount of data taken so far.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Continues from a position.
    pub fn seek(&mut self, position: Position) {
        self.position = position;
    }

    /// Restricts reading to the rows of an input that `rows` marks, given the input's name, its batch dimension and
    /// number of rows. `None` marks all rows. The other rows are zeros, which this process does not read.
    pub fn read_only(&mut self, rows: impl Fn(&str, usize, usize) -> Option<Vec<bool>>) {
        let of = |input: &InputType| {
            let dim = input.batch_dim?;
            Some((input.name.clone(), rows(&input.name, dim, input.ty.shape[dim] as usize)?))
        };
        self.wanted = self.inputs.iter().filter_map(of).collect();
    }

    /// Bytes of samples read from files so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Size of a batch in bytes.
    pub fn bytes(&self) -> u64 {
        self.inputs.iter().map(|input| input.ty.bytes()).sum()
    }

    fn unit_samples(&self) -> u64 {
        (self.global_batch / self.units).max(1)
    }

    /// The next batch.
    pub fn take(&mut self) -> Result<Batch, Error> {
        let Position { batches: number, samples } = self.position;
        let mut batch = Batch::new();
        let runs = match &self.source {
            Some(source) => self.runs(samples / self.unit_samples(), source.units),
            None => Vec::new(),
        };
        for input in &self.inputs {
            let tensor = match &self.source {
                Some(source) => {
                    let wanted = self.wanted.get(&input.name).map(Vec::as_slice);
                    let batch = BatchRows { units: self.units, runs: &runs, starts: &source.starts, wanted };
                    let (tensor, bytes) = source.columns[&input.name].gather(input, &batch)?;
                    self.bytes_read += bytes;
                    check_bound(input, &tensor).map_err(|problem| {
                        let file = self.options.file.clone().unwrap_or_default();
                        Error::Data { file, problem: Box::new(problem) }
                    })?;
                    tensor
                }
                // A missing input is synthesised once.
                None => {
                    let made_up = || input.made_up(self.made_up_seed);
                    self.state.entry(input.name.clone()).or_insert_with(made_up).clone()
                }
            };
            batch.insert(input.name.clone(), tensor);
        }
        batch.extend(self.sample_index.clone());
        batch.extend(self.seed.map(|seed| {
            let words = [seed as u32, number as u32].map(f64::from);
            (RANDOM_KEY.to_string(), HostTensor::from_f64(TensorType::new(DType::U32, [2]), &words))
        }));
        self.position = Position { batches: number + 1, samples: samples + self.global_batch };
        Ok(batch)
    }

    /// The units of the batch that starts at `first` in the endless sequence, as runs in the file: start and count.
    fn runs(&self, first: u64, units: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for place in first..first + self.units {
            let (epoch, place) = (place / units, place % units);
            let unit = self.options.shuffle.map_or(place, |seed| Permutation::new(units, seed, epoch).at(place));
            match runs.last_mut() {
                Some((from, count)) if *from + *count == unit => *count += 1,
                _ => runs.push((unit, 1)),
            }
        }
        runs
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// The seed of random bits, if a plan's graph draws any with the key made here.
fn random_seed(plan: &Plan, seed: u64) -> Option<u64> {
    plan.own().0.inputs().any(|(_, name)| name == RANDOM_KEY).then_some(seed)
}

/// The indices of the samples of a global batch, if a plan's graph needs them.
fn sample_index(plan: &Plan) -> Option<(String, HostTensor)> {
    let (v, name) = plan.own().0.inputs().find(|(_, name)| *name == SAMPLE_INDEX)?;
    let samples = plan.own().0.shape(v)[0] * plan.num_microbatches as u64;
    let numbers: Vec<f64> = (0..samples).map(|i| i as f64).collect();
    let ty = TensorType::new(plan.own().0.ty(v).dtype, [samples]);
    Some((name.to_string(), HostTensor::from_f64(ty, &numbers)))
}

/// The inputs of a plan's graph at the global batch.
fn inputs(plan: &Plan) -> Vec<InputType> {
    let graph = without_composites(plan.own().0);
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

fn check_bound(input: &InputType, tensor: &HostTensor) -> Result<(), DataProblem> {
    let Some(Bound { table: Some(table), rows }) = &input.bound else { return Ok(()) };
    let outside = |x: i64| x < 0 || x as u64 >= *rows;
    let found = match &tensor.data {
        HostData::I32(v) => v.iter().map(|&x| x as i64).find(|&x| outside(x)),
        HostData::I64(v) => v.iter().copied().find(|&x| outside(x)),
        _ => None,
    };
    match found {
        // Negative labels such as -100 mark samples to ignore, and the graph handles them.
        Some(value) if value >= 0 => {
            let (name, table) = (input.name.clone(), table.clone());
            Err(DataProblem::IndexOutOfRange { name, value, table, rows: *rows })
        }
        _ => Ok(()),
    }
}

impl InputType {
    /// Makes a synthetic value for the input.
    fn made_up(&self, seed: u64) -> HostTensor {
        let tensor = synthetic(&self.name, &self.ty, self.bound.as_ref().map_or(2, |b| b.rows), seed);
        if self.floats == Floats::Any {
            return tensor;
        }
        let numbers: Vec<f64> = tensor.to_f64().into_iter().map(|x| self.floats.made_of(x)).collect();
        HostTensor::from_f64(tensor.ty, &numbers)
    }
}
