//! Batches: of files, whose samples are read as they are needed and may be taken in another order, or made up.
//!
//! A run takes samples from one endless row: epoch after epoch, each in an order of its own where they are shuffled. Which sample
//! is where in that row follows from its number, so that a run goes on at any place of it, under any plan.

use crate::error::{DataProblem, Error};
use crate::training::bounds::{Bound, Floats, bound};
use crate::training::checkpoint::{DataContent, Position};
use crate::training::shuffle::Permutation;
use crate::training::source::{BatchRows, Source, content, open};
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::without_composites;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Plan;
use altiplano_ir::sample::{RANDOM_KEY, SAMPLE_INDEX};
use altiplano_ir::types::TensorType;
use altiplano_runtime::data::synthetic;
use altiplano_runtime::{HostData, HostTensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The inputs of one step, by name.
pub type Batch = BTreeMap<String, HostTensor>;

/// Where batches come from, and in which order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataOptions {
    /// Made up where there is none.
    pub file: Option<PathBuf>,
    /// The type of the ids in a file of nothing else, where its name does not say it.
    pub token_type: Option<DType>,
    /// Samples in an order by this seed, another in each epoch; else as they come.
    pub shuffle: Option<u64>,
}

/// An endless supply of batches.
pub struct Batches {
    inputs: Vec<InputType>,
    source: Option<Source>,
    content: Option<DataContent>,
    options: DataOptions,
    /// Of what is made up.
    made_up_seed: u64,
    /// Inputs that are the same in all batches.
    state: BTreeMap<String, HostTensor>,
    /// The number of each sample in the batch, where random bits are counted by it.
    sample_index: Option<(String, HostTensor)>,
    /// Of the key that random bits are drawn with, where the model draws any.
    seed: Option<u64>,
    /// By input, which rows of the batch are read from files; all where it is not said.
    wanted: BTreeMap<String, Vec<bool>>,
    /// Bytes that were read from files.
    bytes_read: u64,
    /// In how many equal parts all inputs of a batch can be cut.
    units: u64,
    global_batch: u64,
    position: Position,
}

/// What a step needs of one input.
pub(super) struct InputType {
    pub name: String,
    /// At the global batch.
    pub ty: TensorType,
    pub batch_dim: Option<usize>,
    pub bound: Option<Bound>,
    pub floats: Floats,
}

impl Batches {
    /// One batch over and over: integers that index what the model looks up, normal floats. It is the same for the
    /// same seed whatever the plan, and since it can be learnt by heart, the loss falls where training works.
    pub fn synthetic(plan: &Plan, seed: u64) -> Batches {
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

    /// [`Self::synthetic`], or batches of a file, for a model whose state (running statistics, tables) is as given where it
    /// has a tensor of an input's name.
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

    /// Batches from a file: see [`open`].
    pub fn open(plan: &Plan, file: &Path) -> Result<Batches, Error> {
        let options = DataOptions { file: Some(file.to_path_buf()), ..DataOptions::default() };
        Batches::with_state(plan, &options, 0, &BTreeMap::new())
    }

    /// The file that batches are cut from.
    pub fn file(&self) -> Option<&Path> {
        self.options.file.as_deref()
    }

    /// Files that are open for it.
    pub fn num_files(&self) -> u64 {
        self.source.as_ref().map_or(0, |source| source.starts.len().saturating_sub(1) as u64)
    }

    /// What is taken from the file, in words; none where batches are made up.
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

    /// What tells the file's data from others.
    pub fn content(&self) -> Option<&DataContent> {
        self.content.as_ref()
    }

    /// How much was taken.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Goes on as if so much had been taken.
    pub fn seek(&mut self, position: Position) {
        self.position = position;
    }

    /// From here on only those rows of an input are read from files that `rows` marks, given its name, the dimension of the batch and how
    /// many rows that has; all where it says nothing. The others are zeros, which nobody here looks at.
    pub fn read_only(&mut self, rows: impl Fn(&str, usize, usize) -> Option<Vec<bool>>) {
        let of = |input: &InputType| {
            let dim = input.batch_dim?;
            Some((input.name.clone(), rows(&input.name, dim, input.ty.shape[dim] as usize)?))
        };
        self.wanted = self.inputs.iter().filter_map(of).collect();
    }

    /// Bytes of samples that were read from files so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Bytes of a batch.
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
                // What is not given is made up, once.
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

    /// The units of the batch whose first is `first` of the endless row, as runs of neighbours in the file: first and count.
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

/// The seed of random bits, where a plan's graph draws any with a key that is made here.
fn random_seed(plan: &Plan, seed: u64) -> Option<u64> {
    plan.own().0.inputs().any(|(_, name)| name == RANDOM_KEY).then_some(seed)
}

/// The numbers of the samples of a global batch, where a plan's graph asks for them.
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
}
