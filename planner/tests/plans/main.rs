//! The planner's choices, and checks that its plans compute the same as the model.

mod deduped_programs;
mod groups;
mod layer_programs;
mod pins;
mod plans_compute_the_same;
mod random_graphs;
mod rings;
mod schemes;
mod stage_programs;
mod support;
