//! Plans that run, against one device and against what frameworks computed.

#[path = "../common/mod.rs"]
mod common;

mod checkpoints;
mod equivalence;
mod faults;
mod loss_scale;
mod optimizers;
mod outputs;
mod serving;
mod train_text;
mod training;
