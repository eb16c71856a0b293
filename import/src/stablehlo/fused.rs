//! Lowers attention that a program leaves to a backend kernel. The call names the kernel, and the graph gets
//! the function.
//!
//! Parameters other than operands are in a kernel's configuration. For cuDNN it gives the scale and the mask.
//! For TPUs it is a binary program: attention is taken to be causal if that program compares positions, and the
//! scale to be the customary one.

use super::convert::{Converter, Note};
use super::lower::Lowered;
use super::report::Reject;
use super::syntax::{Attribute, Operation};
use altiplano_ir::array as a;
use altiplano_ir::graph::ValueId;

/// Extra results besides the attention are read by a kernel's backward pass. The graph has a backward pass of
/// its own.
const TRAINED: Reject =
    Reject::Unsupported("with what its own backward pass reads; lower the loss alone, not its gradient");

impl Converter<'_, '_> {
    /// Lowers attention whose queries, keys, values and result are `[batch, heads, positions, features]`.
    pub(crate) fn flash_attention(&mut self, operation: &Operation<'_>, operands: &[ValueId]) -> Lowered {
        let kernel = operation.attribute("kernel_name").and_then(Attribute::as_word).unwrap_or_default();
        if !kernel.contains("flash_attention") {
            return Err(Reject::Unsupported(""));
        }
        let (q, k, v, bias) = match *operands {
            [q, k, v] => (q, k, v, None),
            [q, k, v, bias] if self.graph.ty(bias).rank() == 4 => (q, k, v, Some(bias)),
            _ => return Err(Reject::Unsupported("with segments")),
        };
        if operation.result_types.len() != 1 {
            return Err(TRAINED);
        }
        let config = operation.attribute("backend_config").and_then(Attribute::as_word).unwrap_or_default();
        let causal = field(config, "body").and_then(decoded).is_some_and(|body| contains(&body, b"tpu.iota"));
        self.note(Note::KernelScale { kernel: kernel.to_owned(), causal });
        let how = a::Attention { scale: None, causal, mask: bias };
        Ok(vec![self.arrays(|g| a::attention(g, q, k, v, &how))?])
    }

    /// Lowers attention on `[batch, positions, heads, features]`, or on heads before positions. The result has
    /// heads before positions.
    pub(crate) fn cudnn_attention(&mut self, operation: &Operation<'_>, operands: &[ValueId]) -> Lowered {
        let target = operation.attribute("call_target_name").and_then(Attribute::as_word).unwrap_or_default();
        if target.ends_with("Backward") {
            return Err(TRAINED);
        }
        let config = operation.attribute("backend_config").and_then(Attribute::as_word).unwrap_or_default();
        let scale = field(config, "fmha_scale").and_then(|text| text.parse::<f64>().ok());
        let mask = field(config, "mask_type").unwrap_or("NO_MASK");
        let causal = match mask {
            "NO_MASK" => false,
            "CAUSAL" => true,
            _ => return Err(Reject::Unsupported("with padding")),
        };
        let window = field(config, "sliding_window_length").and_then(|text| text.parse::<i64>().ok());
        if target.contains("Dropout") || window.is_some_and(|window| window > 0) || target.contains("F8") {
            return Err(Reject::Unsupported("with dropout, windows or eight bits"));
        }
        let biased = target.contains("Bias");
        let (q, k, v, bias) = match *operands {
            [q, k, v] => (q, k, v, None),
            [q, k, v, bias] if biased => (q, k, v, Some(bias)),
            _ => return Err(Reject::Unsupported("with operands of another kind")),
        };
        // The product of queries and keys has dimension 0 and the heads as batch dimensions.
        let heads = field(config, "lhs_batch_dimensions").and_then(|list| list.split(',').nth(1));
        let heads = heads.and_then(|text| text.trim_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().ok());
        let positions_first = heads.unwrap_or(2) == 2;
        let how = a::Attention { scale, causal, mask: bias };
        let y = self.arrays(|g| {
            let turned = |g: &mut _, x| if positions_first { a::swap_dims(g, x, 1, 2) } else { Ok(x) };
            let (q, k, v) = (turned(g, q)?, turned(g, k)?, turned(g, v)?);
            a::attention(g, q, k, v, &how)
        })?;
        let mut results = vec![y];
        // No op reads the statistics and the scratch memory.
        for _ in 1..operation.result_types.len() {
            results.push(self.opaque(&[]));
        }
        Ok(results)
    }
}

/// The text of a JSON field: the part between quotes, or up to the next comma or brace.
fn field<'c>(config: &'c str, name: &str) -> Option<&'c str> {
    let (_, rest) = config.split_once(&format!("\"{name}\""))?;
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    match rest.chars().next()? {
        '"' => rest[1..].split('"').next(),
        '[' => rest[1..].split(']').next(),
        _ => rest.split([',', '}']).next().map(str::trim),
    }
}

/// Decodes base 64.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(u32::from(c - b'A')),
        b'a'..=b'z' => Some(u32::from(c - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(c - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = group.iter().try_fold(0u32, |bits, &c| Some(bits << 6 | digit(c)?))? << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|part| part == word)
}
