//! Models that a stack's options describe, as configs of Transformers, which the importer of such configs reads.

use super::StackProblem;
use super::configuration::ModelFacts;
use serde_json::{Map, Value, json};

/// The config of the model. `sequence` is the number of tokens of a sample.
///
/// # Errors
/// [`StackProblem::NoModel`] if nothing is said about a model, and [`StackProblem::Model`] if a size is missing.
pub fn config(facts: &ModelFacts, sequence: Option<u64>) -> Result<String, StackProblem> {
    if facts.hidden.is_none() && facts.heads.is_none() {
        return Err(StackProblem::NoModel);
    }
    let missing = StackProblem::Model;
    let layers = facts.layers.ok_or(missing("the number of layers (--num-layers)"))?;
    let hidden = facts.hidden.ok_or(missing("the size of hidden states (--hidden-size)"))?;
    let heads = facts.heads.ok_or(missing("the number of heads (--num-attention-heads)"))?;
    let vocabulary = facts.vocabulary.or(facts.assumed_vocabulary);
    let vocabulary = vocabulary.ok_or(missing("the size of the vocabulary (--vocab-size)"))?;
    let positions = facts.positions.or(sequence).unwrap_or(2048).max(sequence.unwrap_or(0));
    let kv_heads = facts.kv_heads.filter(|_| facts.grouped_queries).unwrap_or(heads);
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    set("num_hidden_layers", json!(layers));
    set("hidden_size", json!(hidden));
    set("num_attention_heads", json!(heads));
    set("vocab_size", json!(vocabulary));
    set("max_position_embeddings", json!(positions));
    set("tie_word_embeddings", json!(!facts.untied));
    // Perceptrons with a gate have two thirds of the width by default.
    let inner = facts.inner.unwrap_or(if facts.gated { hidden * 8 / 3 } else { hidden * 4 });
    set("intermediate_size", json!(inner));
    if let Some(size) = facts.head_size.filter(|_| !facts.latent) {
        set("head_dim", json!(size));
    }
    if !facts.latent {
        set("num_key_value_heads", json!(kv_heads));
    }
    let family = match facts.experts {
        _ if facts.latent => latent(facts, layers, &mut set)?,
        Some(experts) => mixture(facts, layers, experts, [hidden, heads, inner], &mut set),
        None => dense(facts, [hidden, heads, kv_heads], &mut set),
    };
    set("model_type", json!(family));
    if family == "gpt2" {
        return Ok(gpt2([layers.into(), hidden, heads, vocabulary, positions, inner], !facts.untied));
    }
    Ok(Value::Object(fields).to_string())
}

/// GPT-2 has names of its own for sizes.
fn gpt2([layers, hidden, heads, vocabulary, positions, inner]: [u64; 6], tied: bool) -> String {
    let config = json!({
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocabulary,
        "n_positions": positions, "n_inner": inner, "tie_word_embeddings": tied,
    });
    config.to_string()
}

/// A family without experts.
fn dense(facts: &ModelFacts, [hidden, heads, kv_heads]: [u64; 3], set: &mut impl FnMut(&str, Value)) -> &'static str {
    match () {
        () if facts.gated && facts.qk_norm => {
            if facts.head_size.is_none() {
                set("head_dim", json!(hidden / heads.max(1)));
            }
            "qwen3"
        }
        () if facts.gated && facts.qkv_bias => "qwen2",
        () if facts.gated => "llama",
        () if facts.squared_relu => "nemotron",
        // Learned positions, as GPT-2 has them.
        () if !facts.rotary && kv_heads == heads && facts.head_size.is_none() => "gpt2",
        () => {
            set("use_bias", json!(!facts.no_bias));
            "starcoder2"
        }
    }
}

/// A family with experts.
fn mixture(
    facts: &ModelFacts,
    layers: u32,
    experts: u64,
    [hidden, heads, inner]: [u64; 3],
    set: &mut impl FnMut(&str, Value),
) -> &'static str {
    let width = facts.expert_inner.unwrap_or(inner);
    let plain = dense_layers(facts, layers);
    set("num_experts_per_tok", json!(facts.experts_per_token.unwrap_or(2)));
    if facts.shared_inner.is_none() && !facts.qk_norm && plain.is_empty() {
        set("num_local_experts", json!(experts));
        set("intermediate_size", json!(width));
        return "mixtral";
    }
    set("num_experts", json!(experts));
    set("moe_intermediate_size", json!(width));
    set("mlp_only_layers", json!(plain));
    if let Some(shared) = facts.shared_inner {
        set("shared_expert_intermediate_size", json!(shared));
        return "qwen2_moe";
    }
    if facts.head_size.is_none() {
        set("head_dim", json!(hidden / heads.max(1)));
    }
    "qwen3_moe"
}

/// Latent attention, with experts: the family of DeepSeek-V3.
fn latent(facts: &ModelFacts, layers: u32, set: &mut impl FnMut(&str, Value)) -> Result<&'static str, StackProblem> {
    let experts =
        facts.experts.ok_or(StackProblem::Model("the number of experts (--num-experts) of latent attention"))?;
    let width = facts.expert_inner.ok_or(StackProblem::Model("the width of experts (--moe-ffn-hidden-size)"))?;
    set("q_lora_rank", facts.q_rank.map_or(Value::Null, Value::from));
    set("kv_lora_rank", json!(facts.kv_rank.unwrap_or(32)));
    set("qk_nope_head_dim", json!(facts.qk_head.unwrap_or(128)));
    set("qk_rope_head_dim", json!(facts.qk_rope_head.unwrap_or(64)));
    set("v_head_dim", json!(facts.v_head.unwrap_or(128)));
    set("n_routed_experts", json!(experts));
    set("num_experts_per_tok", json!(facts.experts_per_token.unwrap_or(2)));
    set("moe_intermediate_size", json!(width));
    set("n_shared_experts", json!(facts.shared_inner.unwrap_or(0) / width.max(1)));
    set("first_k_dense_replace", json!(dense_layers(facts, layers).len()));
    set("n_group", json!(1));
    set("topk_group", json!(1));
    Ok("deepseek_v3")
}

/// Layers without experts. A pattern that is shorter than the model repeats.
fn dense_layers(facts: &ModelFacts, layers: u32) -> Vec<u32> {
    let Some(pattern) = facts.expert_layers.as_ref().filter(|pattern| !pattern.is_empty()) else { return Vec::new() };
    (0..layers).filter(|&layer| !pattern[layer as usize % pattern.len()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(change: impl Fn(&mut ModelFacts)) -> ModelFacts {
        let (layers, hidden, heads, vocabulary) = (Some(4), Some(64), Some(4), Some(128));
        let mut facts = ModelFacts { layers, hidden, heads, vocabulary, ..ModelFacts::default() };
        change(&mut facts);
        facts
    }

    #[test]
    fn options_choose_a_family() {
        let table: [(&str, fn(&mut ModelFacts)); 8] = [
            ("gpt2", |_| ()),
            ("llama", |f| f.gated = true),
            ("qwen2", |f| (f.gated, f.qkv_bias) = (true, true)),
            ("qwen3", |f| (f.gated, f.qk_norm) = (true, true)),
            ("starcoder2", |f| f.rotary = true),
            ("mixtral", |f| (f.gated, f.experts) = (true, Some(4))),
            ("qwen3_moe", |f| (f.gated, f.experts, f.expert_layers) = (true, Some(4), Some(vec![false, true]))),
            ("deepseek_v3", |f| (f.latent, f.experts, f.expert_inner) = (true, Some(4), Some(32))),
        ];
        for (family, change) in table {
            let text = config(&facts(change), Some(32)).expect("a config");
            assert!(text.contains(&format!("\"model_type\":\"{family}\"")), "{family}: {text}");
            let options = altiplano_import::huggingface::ConfigOptions { sequence: Some(32), ..Default::default() };
            let imported = altiplano_import::huggingface::import(&text, &options).expect("a graph");
            let unread = imported.notes.iter().map(ToString::to_string).filter(|note| note.contains("not understood"));
            assert_eq!(unread.collect::<Vec<_>>(), Vec::<String>::new(), "{family}");
        }
    }

    #[test]
    fn missing_sizes_are_named() {
        let said =
            |change: fn(&mut ModelFacts)| config(&facts(change), None).expect_err("a size is missing").to_string();
        assert!(said(|f| f.vocabulary = None).contains("--vocab-size"));
        assert!(said(|f| f.layers = None).contains("--num-layers"));
        assert!(said(|f| (f.hidden, f.heads) = (None, None)).contains("--model"));
    }

    #[test]
    fn patterns_of_experts_repeat() {
        let dense = |pattern: &[bool]| dense_layers(&facts(|f| f.expert_layers = Some(pattern.to_vec())), 4);
        assert_eq!(dense(&[true, false]), [1, 3]);
        assert_eq!(dense(&[false, true, true, true]), [0]);
        assert_eq!(dense(&[]), Vec::<u32>::new());
    }
}
