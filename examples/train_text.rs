//! Trains a small GPT on the characters of this project's own documents, evaluates it on held-out text, and generates
//! some text: from a config through a plan to letters.
//!
//!     cargo run --release --example train_text -- --steps 600 --workers 2 --seed 0
//!
//! `--measure-noise-scale` also estimates up to which batch size larger batches would save steps.

use altiplano::ir::plan::Plan;
use altiplano::ir::types::TensorType;
use altiplano::planner::Silent;
use altiplano::runtime::{HostTensor, Options, Session};
use altiplano::training::evaluation::{Evaluation, EvaluationOptions};
use altiplano::training::noise::{NoiseEstimate, NoiseScale};
use altiplano::training::rate::{RateSchedule, Shape};
use altiplano::training::team::Team;
use altiplano::training::{DataOptions, Training, scalars, session, start};
use altiplano::{Error, ImportOptions, load_cluster, load_model, one_line, plan, request};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

const TEXTS: [&str; 9] = [
    include_str!("../README.md"),
    include_str!("../ARCHITECTURE.md"),
    include_str!("../CONTRIBUTING.md"),
    include_str!("../CHANGELOG.md"),
    include_str!("../docs/importing.md"),
    include_str!("../docs/planning.md"),
    include_str!("../docs/reading-a-plan.md"),
    include_str!("../docs/simulation.md"),
    include_str!("../docs/training.md"),
];
const POSITIONS: u64 = 64;
const BATCH: u64 = 16;
const CONFIG: &str =
    r#"{"model_type": "gpt2", "vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}"#;

/// The options of a run.
pub struct Asked {
    pub steps: u64,
    pub workers: u32,
    pub seed: u64,
    /// Number of characters to generate.
    pub characters: usize,
    pub measure_noise: bool,
}

/// The results of a run, in nats per character.
pub struct Learnt {
    /// The entropy of the character frequencies.
    pub unigram_entropy: f64,
    pub first_loss: f64,
    pub last_loss: f64,
    pub held_out_loss: f64,
    pub written: String,
    /// The noise scale in samples of 64 characters.
    pub noise: Option<NoiseEstimate>,
    /// Half of the steps were faster.
    pub median_step_s: f64,
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: u64| {
        let at = arguments.iter().position(|a| a == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(default)
    };
    let (steps, workers, seed) = (number("--steps", 600), number("--workers", 2) as u32, number("--seed", 0));
    let measure_noise = arguments.iter().any(|a| a == "--measure-noise-scale");
    let learnt =
        learn(&Asked { steps, workers, seed, characters: 200, measure_noise }, &mut |line| println!("{line}"))?;
    println!("guessing by frequency takes {:.3} nats a character", learnt.unigram_entropy);
    println!(
        "the loss went from {:.3} to {:.3}, {:.3} on held-out text",
        learnt.first_loss, learnt.last_loss, learnt.held_out_loss
    );
    println!("a step took {:.2} ms", 1e3 * learnt.median_step_s);
    if let Some(noise) = learnt.noise {
        println!("{noise}");
    }
    println!("---\n{}", learnt.written);
    Ok(())
}

/// Trains the model, and reports progress to `say`.
pub fn learn(asked: &Asked, say: &mut dyn FnMut(String)) -> Result<Learnt, Error> {
    let folder = std::env::temp_dir().join(format!("altiplano-train-text-{}-{}", std::process::id(), asked.seed));
    std::fs::create_dir_all(&folder).map_err(|error| Error::Write { file: folder.clone(), error })?;
    let learnt = learn_in(&folder, asked, say);
    // Failing to remove a temporary folder is no reason to fail.
    let _ = std::fs::remove_dir_all(&folder);
    learnt
}

fn learn_in(folder: &Path, asked: &Asked, say: &mut dyn FnMut(String)) -> Result<Learnt, Error> {
    let text = characters();
    // Every tenth page, so that held-out text is of the same kinds as training text.
    let pages = |held_out: bool| -> Vec<u8> {
        let of = text.chunks(1024).enumerate().filter(|(i, _)| (i % 10 == 9) == held_out);
        of.flat_map(|(_, page)| page.iter().copied()).collect()
    };
    let (train, held_out) = (&pages(false), &pages(true));
    let as_ids = |name: &str, text: &[u8]| -> Result<PathBuf, Error> {
        let file = folder.join(name);
        let ids: Vec<u8> = text.iter().flat_map(|&c| u16::from(c).to_le_bytes()).collect();
        std::fs::write(&file, ids).map_err(|error| Error::Write { file: file.clone(), error })?;
        Ok(file)
    };
    let data = |file, shuffle| DataOptions { file: Some(file), token_type: None, shuffle };
    let evaluation = EvaluationOptions {
        data: data(as_ids("held-out.u16", held_out)?, None),
        every: (asked.steps / 4).max(1),
        steps: 4,
    };

    let plan = Plan { measure_noise: asked.measure_noise, ..planned(folder, BATCH, None, asked.workers)? };
    say(format!("{} characters; {}", train.len(), one_line(&plan)));
    let training = Training {
        steps: asked.steps,
        learning_rate: 3e-3,
        rate_schedule: RateSchedule {
            shape: Shape::Cosine,
            warmup_steps: asked.steps / 20,
            total_steps: asked.steps,
            final_rate: 3e-4,
            ..RateSchedule::default()
        },
        seed: asked.seed,
        data: data(as_ids("train.u16", train)?, Some(asked.seed)),
        ..Training::default()
    };
    let mut workers = Team::Alone.session(&plan, &training)?;
    let mut evaluations = Evaluation::new(&plan, &training, &evaluation, &mut workers)?;
    let (weights, mut batches) = start(&plan, &training)?;
    for (name, tensor) in &weights {
        workers.load_parameter(name, tensor)?;
    }
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    let mut noise = NoiseScale::new(plan.global_batch);
    let mut held_out_loss = f64::NAN;
    for number in 1..=asked.steps {
        let rate = training.rate_schedule.at(number, training.learning_rate);
        let batch = batches.take()?;
        let begun = Instant::now();
        losses.push(workers.step(&batch, &scalars(rate, number))?.loss);
        if asked.measure_noise {
            noise.measure(&mut workers)?;
        }
        times.push(begun.elapsed().as_secs_f64());
        if number.is_multiple_of(evaluation.every) || number == asked.steps {
            held_out_loss = evaluations.loss(&mut workers)?;
            say(format!("step {number}: loss {:.3}, held out {held_out_loss:.3}", tail(&losses)));
        }
    }

    let of_one = planned(folder, 1, Some("none"), 1)?;
    let mut writer = session(&of_one, &Options::default())?;
    for name in weights.keys() {
        writer.load_parameter(name, &workers.parameter(name)?)?;
    }
    let written = write(&mut writer, "## ", asked.characters, asked.seed)?;
    Ok(Learnt {
        unigram_entropy: unigram_entropy(train),
        first_loss: losses.first().copied().unwrap_or(f64::NAN),
        last_loss: tail(&losses),
        held_out_loss,
        written,
        noise: noise.estimate(),
        median_step_s: median(&mut times),
    })
}

/// Plans the model for the cores of this machine, for training or with another `loss`.
fn planned(folder: &Path, batch: u64, loss: Option<&str>, workers: u32) -> Result<Plan, Error> {
    let file = folder.join("config.json");
    std::fs::write(&file, CONFIG).map_err(|error| Error::Write { file: file.clone(), error })?;
    let import = ImportOptions {
        batch: Some(batch),
        sequence: Some(POSITIONS),
        loss: loss.map(String::from),
        ..ImportOptions::default()
    };
    let mut request = request(&load_model(&file, &import)?, load_cluster(&format!("local:{workers}"))?);
    request.batch.global = Some(batch);
    request.baselines = false;
    // The parts of a batch show how noisy its gradient is.
    request.batch.num_microbatches = Some(if batch > 1 { 2 } else { 1 });
    Ok(plan(&request, &Silent)?)
}

/// All texts, in ASCII.
fn characters() -> Vec<u8> {
    TEXTS.concat().chars().map(|c| if c.is_ascii() { c as u8 } else { b'?' }).collect()
}

/// The mean of the last losses.
fn tail(losses: &[f64]) -> f64 {
    let last = &losses[losses.len() - losses.len().min(20)..];
    last.iter().sum::<f64>() / last.len() as f64
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn unigram_entropy(text: &[u8]) -> f64 {
    let mut counts = [0u64; 256];
    text.iter().for_each(|&c| counts[usize::from(c)] += 1);
    let part = |n: u64| n as f64 / text.len() as f64;
    -counts.iter().filter(|&&n| n > 0).map(|&n| part(n) * part(n).ln()).sum::<f64>()
}

/// Samples characters from the model's probabilities, slightly sharpened.
fn write(session: &mut Session, begin: &str, count: usize, seed: u64) -> Result<String, Error> {
    let mut text: Vec<u8> = begin.bytes().collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for _ in 0..count {
        let first = text.len().saturating_sub(POSITIONS as usize);
        let seen = &text[first..];
        // Padding after the text does not affect the positions before it.
        let ids: Vec<f64> = (0..POSITIONS as usize).map(|i| f64::from(seen.get(i).copied().unwrap_or(b' '))).collect();
        let ty = TensorType::new(altiplano::ir::dtype::DType::I32, [1, POSITIONS]);
        let batch = BTreeMap::from([("input_ids".to_string(), HostTensor::from_f64(ty, &ids))]);
        let (_, results) = session.evaluate(&batch)?;
        let logits: Vec<f64> = results.values().flatten().next().map(HostTensor::to_f64).unwrap_or_default();
        let width = logits.len() / POSITIONS as usize;
        let row = &logits[(seen.len() - 1) * width..seen.len() * width];
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push(drawn(row, 0.7, (state >> 11) as f64 / (1u64 << 53) as f64));
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The character at quantile `at` of the probabilities of `logits`.
fn drawn(logits: &[f64], temperature: f64, at: f64) -> u8 {
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| ((x - most) / temperature).exp()).collect();
    let mut left = at * weights.iter().sum::<f64>();
    for (character, weight) in (0u8..).zip(&weights) {
        left -= weight;
        if left <= 0.0 {
            return character;
        }
    }
    b' '
}
