//! The tenants of a simulated fleet: each sends the whole trace with blocks of its own, and has its own epochs.

use foldhash::fast::FixedState;
use hashbrown::HashSet;

use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::key::next_epoch;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Who sends the trace.
pub(super) struct Tenants<'a> {
    trace: &'a Trace,
    epochs: Vec<u32>,
}

impl<'a> Tenants<'a> {
    /// This many tenants that share no prompt.
    pub(super) fn new(trace: &'a Trace, count: usize) -> Self {
        Self { trace, epochs: vec![0; count] }
    }

    /// Returns what is added to the trace's blocks: another number for each tenant and epoch, 0 for the first ones.
    const fn offset(tenant: usize, epoch: u32) -> u64 {
        (tenant as u64).wrapping_mul(GOLDEN) ^ (epoch as u64).wrapping_mul(GOLDEN.rotate_left(31))
    }

    /// Returns the number of a tenant's block in its present epoch.
    pub(super) fn number(&self, tenant: usize, block: u64) -> u64 {
        block.wrapping_add(Self::offset(tenant, self.epochs[tenant]))
    }

    /// Begins a tenant's next epoch. Returns which blocks belong to the past one.
    ///
    /// # Errors
    /// `Config`: there is no such tenant. `Unsupported`: it has no more epochs.
    pub(super) fn reset(&mut self, tenant: usize) -> Result<impl Fn(u64) -> bool + use<>> {
        let tenants = self.epochs.len();
        let epoch = self.epochs.get_mut(tenant).ok_or_else(|| {
            Error::new(ErrorKind::Config, "the fleet has no such tenant; its first one is 0")
                .with("tenant", tenant)
                .with("tenants", tenants)
        })?;
        let past = Self::offset(tenant, *epoch);
        *epoch = next_epoch(*epoch, 0)?;
        let requests = self.trace.requests().iter();
        let named: HashSet<u64, FixedState> =
            requests.flat_map(|request| self.trace.blocks(request)).copied().collect();
        Ok(move |block: u64| named.contains(&block.wrapping_sub(past)))
    }
}
