//! Short names of events, for statistics of slow steps.

use super::event::{Event, Job, Request};

impl Event {
    /// Returns its name, in a word or two.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Request { request, .. } => request.name(),
            Self::Expire { .. } => "expire",
            Self::OwnerEnded { .. } => "owner_ended",
            Self::ReadEnded { .. } => "read_ended",
            Self::LeaseEnded { .. } => "lease_ended",
            Self::WriteEnded { .. } => "write_ended",
            Self::Removed { .. } => "removed",
            Self::Located { .. } => "located",
            Self::Probed { .. } => "probed",
            Self::TierForgot { .. } => "tier_forgot",
            Self::TierCooling { .. } => "tier_cooling",
            Self::Continue(job) => job.name(),
            Self::Populated { .. } => "populated",
            Self::InPlace { .. } => "in_place",
            Self::WentDown { .. } => "went_down",
            Self::CameBack { .. } => "came_back",
            Self::LostMemory { .. } => "lost_memory",
            Self::Ending => "ending",
            Self::Freeze => "freeze",
            Self::Thaw => "thaw",
            Self::Adopt { .. } => "adopt",
            Self::Tick => "tick",
        }
    }
}

impl Job {
    const fn name(self) -> &'static str {
        match self {
            Self::Claim(_) => "claim",
            Self::Load(_) => "load",
            Self::Sweep => "sweep",
            Self::DoomLent => "doom_lent",
            Self::EndOwner(_) => "end_owner",
            Self::EndClaims(_) => "end_claims",
            Self::EndLoads(_) => "end_loads",
            Self::Arrival(_) => "arrival",
            Self::Emit => "emit",
            Self::Miss { .. } => "miss",
            Self::ReadHeldBack { .. } => "read_held_back",
        }
    }
}

impl Request {
    const fn name(&self) -> &'static str {
        match self {
            Self::OpenNamespace { .. } => "open_namespace",
            Self::OpenProvisionally { .. } => "open_provisionally",
            Self::UseNamespace { .. } => "use_namespace",
            Self::CloseNamespace { .. } => "close_namespace",
            Self::EnterEpoch { .. } => "enter_epoch",
            Self::BeginAdvance { .. } => "begin_advance",
            Self::EndAdvance { .. } => "end_advance",
            Self::FollowEpoch { .. } => "follow_epoch",
            Self::Near { .. } => "near",
            Self::ReadsInPlace { .. } => "reads_in_place",
            Self::Reserve { .. } => "reserve",
            Self::Commit { .. } => "commit",
            Self::Publish { .. } => "publish",
            Self::Release { .. } => "release",
            Self::Load { .. } => "begin_load",
            Self::LeaseNow { .. } => "lease_now",
            Self::Inspect { .. } => "inspect",
            Self::SetChecksum { .. } => "set_checksum",
            Self::Prefetch { .. } => "prefetch",
            Self::Remove { .. } => "remove",
            Self::ClaimOpen { .. } => "claim_open",
            Self::ClaimPoll { .. } => "claim_poll",
            Self::ClaimDecline { .. } => "claim_decline",
            Self::ClaimTimes { .. } => "claim_times",
            Self::ClaimRelease { .. } => "claim_release",
            Self::EndClaims => "end_claims",
            Self::EvictTo { .. } => "evict_to",
            Self::Drain { .. } => "drain",
            Self::Keys { .. } => "keys",
        }
    }
}
