//! The software that runs a plan, and the properties of it that affect the step time.

use crate::dtype::DType;
use crate::recompute::{Module, Modules};
use crate::types::TensorType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How the software that runs a plan reduces gradients, and which ops it fuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Execution {
    /// The bytes of gradients that are sent together. 0 sends each gradient alone. [`u64::MAX`], which is `null` in
    /// JSON, sends all at once.
    #[serde(serialize_with = "null_for_all", deserialize_with = "all_for_null")]
    pub bucket_bytes: u64,
    /// True if reductions start during the backward pass, and updated parameters are gathered while the next step
    /// begins.
    pub overlap: bool,
    /// True if products larger than their factors, such as attention scores, are recomputed in the backward pass and
    /// never written.
    pub fused_attention: bool,
    /// True if losses make no tensor as large as the logits or their gradient. False in plans that omit it.
    pub fused_loss: bool,
    /// The type in which half-precision gradients are summed over microbatches and devices.
    pub gradients: Option<DType>,
    /// The kernels of fused attention.
    #[serde(skip_serializing_if = "is_default")]
    pub attention: AttentionKernels,
    /// The parts of a layer that selective recomputation repeats.
    #[serde(alias = "recomputes_products", skip_serializing_if = "is_default")]
    pub recompute_modules: Modules,
    /// Scales of products, such as the gates of experts, were moved from results to factors, which the backward pass keeps anyway.
    #[serde(skip_serializing_if = "is_default")]
    pub scales_factors: bool,
    /// Parameters are gathered for a pass, and their gradients reduced, through one buffer that holds so many bytes; 0: each on its own.
    #[serde(skip_serializing_if = "is_default")]
    pub unit_bytes: u64,
    /// A forward pass runs beside the backward pass of another microbatch, so that one computes while the other communicates.
    #[serde(skip_serializing_if = "is_default")]
    pub pairs_passes: bool,
    /// Gathers of activations run in parts beside the products that read them, and reduce-scatters beside the products whose
    /// sums they are (Megatron-LM's `--tp-comm-overlap`, PyTorch's async tensor parallelism).
    #[serde(skip_serializing_if = "is_default")]
    pub overlaps_tensor_parallel: bool,
}

/// The kernels of fused attention that software has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionKernels {
    /// Those that were written for the generation of the device.
    #[default]
    Newest,
    /// FlashAttention-2 on every device (Dao 2023), which uses what Ampere has.
    #[serde(rename = "flash-2")]
    Flash2,
    /// cuDNN's, as XLA calls them, and none for attention that they lack ([`crate::attention`]).
    Cudnn,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn null_for_all<S: Serializer>(bytes: &u64, to: S) -> Result<S::Ok, S::Error> {
    Some(*bytes).filter(|&bytes| bytes < u64::MAX).serialize(to)
}

fn all_for_null<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(u64::MAX))
}

impl Default for Execution {
    fn default() -> Self {
        Execution {
            bucket_bytes: 100 << 20,
            overlap: false,
            fused_attention: false,
            fused_loss: false,
            gradients: None,
            attention: AttentionKernels::Newest,
            recompute_modules: Modules::default(),
            scales_factors: false,
            unit_bytes: 0,
            pairs_passes: false,
            overlaps_tensor_parallel: false,
        }
    }
}

impl Execution {
    /// True if selective recomputation recomputes anything that is kept otherwise.
    pub fn has_selective(&self) -> bool {
        !self.recomputed().is_empty()
    }

    /// The modules that selective recomputation repeats, and that are kept otherwise. Fused attention repeats its core
    /// anyway.
    pub fn recomputed(&self) -> Modules {
        match self.fused_attention {
            true => self.recompute_modules.without(Module::AttentionCore),
            false => self.recompute_modules,
        }
    }

    /// The type in which a parameter's gradient is summed. For half precision, it is f32 unless stated otherwise.
    pub fn accumulator(&self, ty: &TensorType) -> TensorType {
        ty.with_dtype(self.accumulator_dtype(ty.dtype))
    }

    /// The element type of [`Execution::accumulator`].
    pub fn accumulator_dtype(&self, parameter: DType) -> DType {
        match self.gradients {
            _ if !parameter.is_half() => parameter,
            dtype => dtype.unwrap_or(DType::F32),
        }
    }
}

/// The software that runs a plan. It determines which plans are possible, and how kernels, reductions and transfers
/// overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// This project's runtime: every plan of the search space.
    #[default]
    Altiplano,
    /// Megatron-LM: stages of any layers with the same degrees everywhere.
    Megatron,
    /// PyTorch FSDP: one stage of replicas that shard their storage.
    Fsdp,
    /// XLA's partitioner: one program for all devices, without a pipeline.
    Xla,
    /// torchtitan: PyTorch FSDP with tensor, context, pipeline and expert parallelism.
    Torchtitan,
    /// DeepSpeed: ZeRO with its tensor parallelism or its pipelines.
    Deepspeed,
}

impl Target {
    pub const ALL: [Target; 6] =
        [Target::Altiplano, Target::Megatron, Target::Fsdp, Target::Xla, Target::Torchtitan, Target::Deepspeed];

    pub fn name(self) -> &'static str {
        match self {
            Target::Altiplano => "altiplano",
            Target::Megatron => "megatron",
            Target::Fsdp => "fsdp",
            Target::Xla => "xla",
            Target::Torchtitan => "torchtitan",
            Target::Deepspeed => "deepspeed",
        }
    }

    /// True if PyTorch's FSDP stores parameters: it shards gradients wherever it shards optimizer state.
    pub fn is_fsdp(self) -> bool {
        matches!(self, Target::Fsdp | Target::Torchtitan)
    }

    pub(crate) fn is_ours(&self) -> bool {
        *self == Target::Altiplano
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_without_an_end_is_null() {
        for (bytes, text) in [(u64::MAX, "null"), (0, "0"), (1 << 20, "1048576")] {
            let execution = Execution { bucket_bytes: bytes, ..Execution::default() };
            let json = serde_json::to_string(&execution).expect("JSON");
            assert!(json.contains(&format!("\"bucket_bytes\":{text},")), "{json}");
            assert_eq!(serde_json::from_str::<Execution>(&json).expect("an execution"), execution);
        }
    }
}
