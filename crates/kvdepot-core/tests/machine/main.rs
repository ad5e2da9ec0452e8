//! The state machine of the depot.

mod lab;

mod ages;
mod choice;
mod claim_times;
mod demotion;
mod growth;
mod hung_reads;
mod hung_writes;
mod in_place;
mod late_fills;
mod limits;
mod misses;
mod model;
mod namespaces;
mod orders;
mod placement;
mod priorities;
mod regions;
mod removals;
