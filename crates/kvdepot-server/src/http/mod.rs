//! HTTP for operators: the answers of every depot, and the door of depots without a wire door.

pub(crate) mod browser;
pub(crate) mod page;
pub(crate) mod pages;
mod series;
mod status_door;
pub(crate) mod visitors;

pub use status_door::{StatusDoor, socket_of};
