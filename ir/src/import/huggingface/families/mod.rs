//! Families of decoders: the mapping of each config to the description in [`super::decoder`]. Omitted fields have the
//! defaults of Transformers.

pub mod command;
pub mod experts;
pub mod gemma;
pub mod glm;
pub mod gpt;
pub mod hybrid;
pub mod llama;
pub mod mamba;
