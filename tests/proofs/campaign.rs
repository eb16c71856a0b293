//! Random bugs in the programs of random plans of random small models. The interpreter decides which of them change a
//! result; none of those is proved.

use crate::common::{Scratch, altiplano};
use crate::is_located;
use crate::mutations::{Mutant, Place, equal, mutants, results};
use altiplano::ir::plan::Plan;
use altiplano::ir::program::Programs;
use altiplano_prover::prove;

/// A seeded source of choices.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n.max(1) as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// A config of a small model.
fn config(draw: &mut Draw) -> String {
    let (heads, width, layers) = (draw.of(&[2, 4]), draw.of(&[4, 8]), draw.of(&[1, 2, 4]));
    let (hidden, inner, words) = (heads * width, heads * width * draw.of(&[2, 4]), draw.of(&[32, 48, 64]));
    let experts = draw.of(&[2, 4]);
    let shape = format!(
        r#""hidden_size": {hidden}, "num_hidden_layers": {layers}, "num_attention_heads": {heads},
           "intermediate_size": {inner}, "vocab_size": {words}, "max_position_embeddings": 64"#
    );
    let (family, rest) = match draw.below(6) {
        0 => (
            "gpt2",
            format!(
                r#""n_embd": {hidden}, "n_layer": {layers}, "n_head": {heads}, "n_positions": 64, "vocab_size": {words}"#
            ),
        ),
        1 => ("llama", format!(r#"{shape}, "num_key_value_heads": {heads}"#)),
        2 => ("qwen3", format!(r#"{shape}, "num_key_value_heads": 2, "head_dim": {width}"#)),
        3 => (
            "mixtral",
            format!(r#"{shape}, "num_key_value_heads": 2, "num_local_experts": {experts}, "num_experts_per_tok": 1"#),
        ),
        4 => ("bert", shape),
        _ => (
            "t5",
            format!(
                r#""d_model": {hidden}, "d_kv": {width}, "d_ff": {inner}, "num_layers": {layers}, "num_heads": {heads}, "vocab_size": {words}"#
            ),
        ),
    };
    format!(r#"{{"model_type": "{family}", {rest}}}"#)
}

/// A plan of a random model under random options. `None` if the options have no plan.
fn drawn(draw: &mut Draw, scratch: &Scratch) -> Option<(String, Plan, Programs)> {
    let config = config(draw);
    let model = scratch.file("config.json", &config);
    let file = scratch.path("plan.json").display().to_string();
    let options: &[&str] = draw.of(&[
        &["--dp", "4"],
        &["--tp", "2"],
        &["--tp", "4"],
        &["--dp", "2", "--tp", "2"],
        &["--dp", "2", "--pp", "2", "--num-microbatches", "2"],
        &["--tp", "2", "--pp", "2", "--num-microbatches", "4"],
        &["--dp", "4", "--zero", "2", "--clip-norm", "1"],
        &["--dp", "2", "--zero", "3", "--num-microbatches", "2"],
        &["--cp", "2"],
        &["--pp", "2", "--schedule", "zb-h1", "--num-microbatches", "4"],
        &["--dp", "2", "--recompute", "full", "--optimizer", "lamb"],
    ]);
    let given = ["plan", &model, "--cluster", "local:4", "--seq", "8", "--global-batch", "8", "-o", &file];
    let output = altiplano(&[&given[..], options].concat());
    if output.code != Some(0) {
        return None;
    }
    let plan = altiplano::load_plan(file.as_ref()).expect("a plan");
    let programs = altiplano::programs(&plan).expect("programs");
    Some((format!("{config} with {options:?}"), plan, programs))
}

/// Returns true if a bug changes a result of the changed body. Bugs of schedules, which the interpreter does not run, do
/// not count.
fn differs(mutant: &Mutant, programs: &Programs) -> bool {
    let (Place::Value { program, body, .. } | Place::Buffer { program, body, .. }) = mutant.place else { return false };
    let (old, new) = (&programs.programs[program], &mutant.programs.programs[program]);
    !equal(&results(old, &old.bodies[body]), &results(new, &new.bodies[body]))
}

/// The outcome of a campaign.
#[derive(Default)]
struct Campaign {
    plans: usize,
    /// Bugs that change a result, and those of them that the gap locates.
    bugs: usize,
    located: usize,
    /// Plans that are not proved without a bug.
    unproved: Vec<String>,
}

/// Plants random bugs until so many of them differ.
fn campaign(seed: u64, wanted: usize) -> Campaign {
    const OF_A_PLAN: usize = 40;
    let (mut draw, scratch) = (Draw(seed), Scratch::new());
    let mut done = Campaign::default();
    while done.bugs < wanted {
        let Some((name, plan, programs)) = drawn(&mut draw, &scratch) else { continue };
        if let Err(gap) = prove(&plan, &programs) {
            done.unproved.push(format!("{name}: {gap}"));
            continue;
        }
        done.plans += 1;
        let mut all = 0;
        mutants(&programs, 6, |_| all += 1);
        let kept = |draw: &mut Draw| draw.below(all) < OF_A_PLAN;
        mutants(&programs, 6, |mutant| {
            if done.bugs < wanted && kept(&mut draw) && differs(&mutant, &programs) {
                let Err(gap) = prove(&plan, &mutant.programs) else {
                    panic!("{name}: proved with {} in {:?}", mutant.what, mutant.place);
                };
                done.bugs += 1;
                match is_located(&mutant, &programs, &gap) {
                    true => done.located += 1,
                    false => println!("elsewhere: {} in {:?}: {gap}", mutant.what, mutant.place),
                }
            }
        });
    }
    done
}

#[test]
fn random_bugs_are_not_proved() {
    let done = campaign(1, 60);
    assert!(
        done.plans >= 2 && done.unproved.is_empty(),
        "{} plans are proved, and not {:#?}",
        done.plans,
        done.unproved
    );
}

/// The long run: `ALTIPLANO_BUGS=2000 ALTIPLANO_SEED=1 cargo test --release --test proofs campaign -- --ignored --nocapture`.
#[test]
#[ignore = "takes minutes; benches/results/proofs.md has its result"]
fn campaign_of_random_bugs() {
    let number = |name: &str, default: u64| std::env::var(name).ok().map_or(default, |n| n.parse().expect("a number"));
    let (seed, wanted) = (number("ALTIPLANO_SEED", 1), number("ALTIPLANO_BUGS", 2000) as usize);
    let Campaign { plans, bugs, located, unproved } = campaign(seed, wanted);
    println!("seed {seed}: {bugs} bugs that differ in {plans} plans, none proved, {located} located");
    assert!(unproved.is_empty(), "not proved without a bug: {unproved:#?}");
}
