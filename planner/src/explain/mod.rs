//! Answers to questions about a plan: where its time goes, which plans it was compared with, and what a change would cost.

pub mod account;
pub mod alternatives;
pub mod layouts;
pub mod neighbours;
