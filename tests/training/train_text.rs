//! Runs the example that learns text for a few steps and checks that it learns.

#[allow(dead_code)]
#[path = "../../examples/train_text.rs"]
mod example;

use example::{Asked, learn};

#[test]
fn text_is_learnt() {
    let mut said = Vec::new();
    let asked = Asked { steps: 120, workers: 2, seed: 3, characters: 8, measure_noise: false };
    let learnt = learn(&asked, &mut |line| said.push(line)).expect("it trains");
    // An untrained model gives each of 128 characters the same probability.
    assert!((learnt.first_loss - 128f64.ln()).abs() < 0.2, "{}", learnt.first_loss);
    assert!(learnt.last_loss < learnt.unigram_entropy, "{} {}", learnt.last_loss, learnt.unigram_entropy);
    assert!((learnt.held_out_loss - learnt.last_loss).abs() < 0.8, "{said:?}");
    assert_eq!((said.len(), learnt.written.len()), (5, 11), "{said:?}");
}
