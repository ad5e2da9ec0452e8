//! Planted mistakes are found within a thousand seeds, by a promise that each of them breaks.

use kvdepot_sim::{Mistake, Plan, Rule, run, shrink};

/// Number of seeds within which every mistake must be found.
const SEEDS_MAX: u64 = 1_000;

/// Number of seeds within which the promise that says most about a mistake must find it.
const SEEDS_OF_FIRST_RULE_MAX: u64 = 8_000;

/// Checks that seeds find a mistake by these promises, and one of them by the first.
fn finds(mistake: Mistake, rules: &[Rule]) {
    let mut found = (0..SEEDS_OF_FIRST_RULE_MAX).filter_map(|seed| {
        let fail = run(&Plan::new(seed), Some(mistake), false).fail?;
        println!("{mistake:?} is found by seed {seed}: {fail}");
        assert!(rules.contains(&fail.rule), "{mistake:?}, seed {seed}: {fail}");
        assert!(run(&Plan::new(seed), None, false).fail.is_none(), "seed {seed} fails without a mistake");
        Some((seed, fail.rule))
    });
    let first = found.next();
    assert!(
        first.is_some_and(|(seed, _)| seed < SEEDS_MAX),
        "{mistake:?} is found by {first:?} of {SEEDS_MAX} seeds"
    );
    let by_first_rule = first.into_iter().chain(found).any(|(_, rule)| rule == rules[0]);
    assert!(by_first_rule, "{mistake:?} is not found in {SEEDS_OF_FIRST_RULE_MAX} seeds by {:?}", rules[0]);
}

#[test]
fn a_block_sealed_before_its_last_shard() {
    finds(Mistake::SealedEarly, &[Rule::Owners, Rule::Bytes]);
}

#[test]
fn leases_kept_beyond_their_owner() {
    finds(Mistake::LeaseKept, &[Rule::Leaks, Rule::Progress]);
}

#[test]
fn slots_given_away_while_a_dead_client_s_copies_run() {
    finds(Mistake::NoQuarantine, &[Rule::Owners, Rule::Bytes, Rule::Forgetting]);
}

#[test]
fn an_epoch_lost_on_a_full_disk() {
    finds(Mistake::EpochLost, &[Rule::Stale]);
}

#[test]
fn a_removal_acknowledged_and_not_made() {
    finds(Mistake::RemovalNotSent, &[Rule::Stale]);
}

#[test]
fn a_failed_removal_that_counts_as_done() {
    finds(Mistake::FailedRemovalCounts, &[Rule::Stale]);
}

#[test]
fn a_removal_ended_by_the_end_of_another() {
    finds(Mistake::RemovalsMixed, &[Rule::Forgetting, Rule::Stale, Rule::Progress, Rule::Leaks]);
}

#[test]
fn a_tier_used_that_owes_too_many_removals() {
    finds(Mistake::ClosedTierUsed, &[Rule::Stale]);
}

#[test]
fn the_end_of_a_read_that_is_not_told() {
    finds(Mistake::MissSwallowed, &[Rule::Leaks, Rule::Progress]);
}

#[test]
fn claims_admitted_without_room() {
    finds(Mistake::RoomNotReserved, &[Rule::Claims]);
}

#[test]
fn a_removal_overtaken_by_the_write_before_it() {
    finds(Mistake::RemovalOvertaken, &[Rule::Stale]);
}

#[test]
fn an_arrival_leased_after_a_reset() {
    finds(Mistake::LeasedAfterReset, &[Rule::Stale]);
}

#[test]
fn a_displaced_slot_that_is_still_written() {
    // With assertions the machine itself detects that it begins such a write.
    finds(Mistake::DisplacedWritten, &[Rule::Leaks, Rule::Stale, Rule::Panic]);
}

#[test]
fn a_value_kept_beside_the_new_one() {
    finds(Mistake::ValueKept, &[Rule::Stale]);
}

#[test]
fn a_block_written_earlier_than_its_tier_s_placement_says() {
    finds(Mistake::PlacementIgnored, &[Rule::Placement, Rule::Presence]);
}

#[test]
fn blocks_of_low_priority_given_to_tiers() {
    finds(Mistake::LowPriorityWritten, &[Rule::Totals]);
}

#[test]
fn a_pool_taken_over_from_under_a_client_that_copies() {
    finds(Mistake::HoldersForgotten, &[Rule::Owners, Rule::Bytes, Rule::Presence]);
}

#[test]
fn a_block_of_an_earlier_epoch_taken_over() {
    finds(Mistake::EpochForgotten, &[Rule::Bytes, Rule::Stale, Rule::Placement]);
}

#[test]
fn a_half_written_block_taken_over() {
    finds(Mistake::FillingHandedOver, &[Rule::Bytes, Rule::Owners]);
}

#[test]
fn a_record_kept_in_the_ledger_when_its_block_is_gone() {
    finds(Mistake::RecordKept, &[Rule::Stale]);
}

#[test]
fn a_ledger_that_is_written_after_the_reply() {
    finds(Mistake::LedgerLate, &[Rule::Stale]);
}

#[test]
fn a_block_recovered_without_its_proof() {
    finds(Mistake::UnprovenTaken, &[Rule::Bytes]);
}

#[test]
fn a_recovered_pool_given_out_while_a_client_of_the_crash_copies() {
    finds(Mistake::RecoveredNotHeld, &[Rule::Owners, Rule::Bytes]);
}

#[test]
fn a_forgotten_namespace_s_number_given_to_another() {
    finds(Mistake::HandleUsedAgain, &[Rule::Bytes]);
}

#[test]
fn a_namespace_forgotten_with_a_reset_that_no_tier_stored() {
    finds(Mistake::ForgottenUnstored, &[Rule::Forgetting, Rule::Stale]);
}

#[test]
fn blocks_given_to_tiers_before_all_have_answered_about_the_namespace() {
    finds(Mistake::ProvisionalWritten, &[Rule::Stale]);
}

#[test]
fn a_namespace_forgotten_while_a_block_of_it_is_written() {
    finds(Mistake::ForgottenWhileBusy, &[Rule::Forgetting]);
}

#[test]
fn a_past_epoch_forgotten_while_a_tier_is_busy_with_it() {
    finds(Mistake::SpaceForgottenEarly, &[Rule::Totals, Rule::Panic]);
}

#[test]
fn a_region_ignored_that_was_wished_and_had_room() {
    finds(Mistake::RegionIgnored, &[Rule::Regions]);
}

#[test]
fn a_write_beyond_a_tier_s_budget() {
    finds(Mistake::BudgetIgnored, &[Rule::Budget]);
}

#[test]
fn a_block_demoted_to_a_tier_above() {
    finds(Mistake::DemotedUpwards, &[Rule::Placement]);
}

#[test]
fn a_claim_that_goes_on_after_its_connection_s_end() {
    finds(Mistake::EndedClaimGoesOn, &[Rule::Leaks]);
}

#[test]
fn a_load_that_goes_on_after_its_connection_s_end() {
    finds(Mistake::EndedLoadGoesOn, &[Rule::Leaks]);
}

#[test]
fn a_block_that_leaves_before_all_who_wait_for_it_have_leased_it() {
    finds(Mistake::ArrivalNotPinned, &[Rule::Panic, Rule::Bytes, Rule::Owners]);
}

#[test]
fn a_block_leased_to_the_last_who_wait_for_it_after_a_reset() {
    finds(Mistake::ArrivalNotLookedAt, &[Rule::Stale, Rule::Panic]);
}

#[test]
fn slots_kept_for_a_client_that_ended_during_a_hand_over() {
    finds(Mistake::EndUnnoticed, &[Rule::Leaks, Rule::Progress]);
}

#[test]
fn a_budget_that_saves_up_more_than_an_hour_s_share() {
    finds(Mistake::BudgetSavedUp, &[Rule::Budget]);
}

#[test]
fn a_budget_that_gets_back_what_a_tier_stored() {
    finds(Mistake::ErrorsRefunded, &[Rule::Budget]);
}

#[test]
fn a_failing_run_shrinks_to_a_few_operations() {
    let mistake = Some(Mistake::RemovalOvertaken);
    let failing = (0..SEEDS_MAX).map(Plan::new).find_map(|plan| {
        let rule = run(&plan, mistake, false).fail?.rule;
        Some((plan, rule))
    });
    let Some((plan, rule)) = failing else { panic!("no seed fails") };
    let small = shrink::shrink(&plan, mistake, rule);
    assert!(small.ops.len() * 4 < plan.ops.len(), "{} operations of {}", small.ops.len(), plan.ops.len());
    assert_eq!(run(&small, mistake, false).fail.map(|fail| fail.rule), Some(rule));
}

#[test]
fn a_lease_in_a_tier_s_memory_that_is_never_ended() {
    finds(Mistake::LeaseNotEnded, &[Rule::Leaks]);
}

#[test]
fn a_lease_in_a_tier_s_memory_that_ends_under_its_reader() {
    finds(Mistake::LeaseEndedEarly, &[Rule::Owners, Rule::Leaks, Rule::Caps]);
}

#[test]
fn a_lease_in_a_tier_s_memory_for_a_reader_without_it() {
    finds(Mistake::LeasedToAnyReader, &[Rule::Bytes]);
}

#[test]
fn a_lease_of_a_block_that_its_tier_has_found_damaged() {
    finds(Mistake::DamagedShownAgain, &[Rule::Bytes]);
}

#[test]
fn leases_in_memory_that_a_tier_has_lost() {
    finds(Mistake::LossIgnored, &[Rule::Claims, Rule::Leaks]);
}

#[test]
fn leases_in_lost_memory_before_a_walk_has_got_there() {
    finds(Mistake::LossNoticedLate, &[Rule::Claims]);
}

#[test]
fn a_hit_of_blocks_that_were_lost_before_it_was_told() {
    finds(Mistake::LostHitCounts, &[Rule::Claims]);
}

#[test]
fn a_tier_of_whose_memory_too_much_is_leased() {
    finds(Mistake::LeasedShareIgnored, &[Rule::Caps]);
}

#[test]
fn the_slot_of_a_hung_write_used_again() {
    finds(Mistake::HungWriteLetGo, &[Rule::Owners, Rule::Panic]);
}

#[test]
fn the_slot_of_a_hung_read_used_again() {
    finds(Mistake::HungReadLetGo, &[Rule::Owners, Rule::Panic, Rule::Bytes]);
}

#[test]
fn the_slot_of_a_late_dump_used_again() {
    finds(Mistake::LateFillLetGo, &[Rule::Owners, Rule::Panic, Rule::Bytes]);
}

#[test]
fn a_read_that_goes_on_in_a_tier_that_its_claims_exclude() {
    finds(Mistake::ReadGoesOnAnywhere, &[Rule::Choices]);
}
