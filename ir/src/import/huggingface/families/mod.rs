//! Families of decoders: how each maps its config onto the description in [`super::decoder`]. What a config does not state is what
//! Transformers takes.

pub mod command;
pub mod experts;
pub mod gemma;
pub mod glm;
pub mod gpt;
pub mod hybrid;
pub mod llama;
