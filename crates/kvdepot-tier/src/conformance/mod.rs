//! The promises of every tier, as code. Run them on a new tier, from any crate.
//!
//! Each check panics with a description of what it expected. The checks wait only for answers and deadlines, and never
//! sleep.

mod basics;
mod batches;
mod cooling;
mod leases;
mod persistent;
mod scripted;
mod shapes;
mod tools;

use std::sync::Arc;

use crate::Tier;
pub use scripted::{Script, ScriptedTier};
pub use tools::{Bench, Waiting, listen, spec, until};

/// Runs all checks for a tier that keeps its blocks. `make` returns a fresh, empty tier each time, with space for at
/// least 64 MiB.
pub fn check(make: &dyn Fn() -> Arc<dyn Tier>) {
    basics::write_then_read(make());
    basics::what_is_not_there_is_not_found(make());
    basics::removed_is_gone(make());
    basics::a_second_write_is_already_there(make());
    basics::writers_of_one_key_agree(make());
    basics::a_deadline_in_the_past_is_a_timeout(make());
    basics::a_small_slot_is_refused(make());
    basics::namespaces_do_not_see_each_other(make());
    basics::an_epoch_hides_what_was(make());
    basics::an_epoch_only_grows(make());
    batches::each_block_of_a_batch_ends_as_it_would_alone(make());
    batches::readers_of_one_key_all_get_it(make());
    batches::empty_batches_do_nothing(make());
    batches::a_batch_after_its_deadline_is_a_timeout_for_each(make());
    batches::removed_means_not_found_and_free_to_write(make());
    batches::many_namespaces_open_and_advance_at_once(make());
    batches::openings_and_resets_of_one_namespace_may_overlap(make());
    batches::an_advance_hides_what_was_before_it_is_done(make());
    basics::closed_and_opened_again_all_is_there(make());
    shapes::blocks_of_every_size(make());
    shapes::slots_of_several_runs(make());
    shapes::many_shards(make());
    shapes::many_blocks_at_once(make());
    shapes::whole_or_absent_while_written(make());
}

/// Runs the checks for a tier whose blocks can be leased in its memory. `make` returns a fresh, empty tier each time,
/// with space for 1 to 4 MiB.
pub fn check_leases(make: &dyn Fn() -> Arc<dyn Tier>) {
    leases::a_lease_shows_the_block(make());
    leases::what_cannot_be_leased_ends_like_a_read(make());
    leases::a_leased_block_stays_as_it_is(make());
    leases::a_place_is_free_after_its_last_lease(make());
}

/// Runs the checks for a tier whose blocks outlive it and whose place has one owner at a time. `make` opens the same
/// place each time, which is empty at first.
pub fn check_persistent_alone(make: &dyn Fn() -> Arc<dyn Tier>) {
    persistent::reopening_finds_all(make);
    persistent::an_epoch_survives(make);
    persistent::a_removal_survives(make);
}

/// Runs the checks for a tier whose blocks outlive it and whose place several nodes may use. `make` opens the same
/// place each time, which is empty at first.
pub fn check_persistent(make: &dyn Fn() -> Arc<dyn Tier>) {
    check_persistent_alone(make);
    persistent::a_laggard_follows(make);
}

/// Runs the checks for a tier that evicts blocks and can say which ones it will evict next. `make` returns a fresh, empty
/// tier with space for so many blocks of [`Bench::new`], or a few more or less.
pub fn check_cooling(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    cooling::what_is_evicted_was_reported_while_it_was_there(make);
    cooling::a_read_for_demotion_does_not_keep_a_block(make);
    cooling::nobody_who_does_not_ask_is_told(make);
}

/// Runs the checks for a tier with a cap (P5). `make` returns a fresh, empty tier with this cap in bytes.
pub fn check_capped(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    persistent::the_cap_holds(make);
    persistent::the_coldest_goes_first(make);
    persistent::a_block_larger_than_the_cap_is_refused_as_configuration(make);
}
