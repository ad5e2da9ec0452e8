//! HTTP for operators: the answers of every depot, and the door of depots without a wire door.

pub(crate) mod answer;
pub(crate) mod browser;
mod metrics;
mod page;
pub(crate) mod pages;
mod questions;
mod series;
mod status_door;
pub(crate) mod token;
pub(crate) mod visitors;

pub use status_door::{StatusDoor, socket_of};
