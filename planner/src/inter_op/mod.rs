pub mod compose;
pub mod dynamic;
pub mod search;
pub mod submesh;
