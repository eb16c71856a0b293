//! Families of decoders: the mapping of each config to the description in [`super::decoder`]. Omitted fields have the
//! defaults of Transformers.

pub(crate) mod command;
pub(crate) mod experts;
pub(crate) mod gemma;
pub(crate) mod glm;
pub(crate) mod gpt;
pub(crate) mod hybrid;
pub(crate) mod llama;
pub(crate) mod mamba;
