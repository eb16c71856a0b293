//! What the planner chooses, and that its plans compute what the model computes.

mod groups;
mod layer_programs;
mod pins;
mod plans_compute_the_same;
mod random_graphs;
mod rings;
mod schemes;
mod sketches;
mod stage_programs;
mod support;
