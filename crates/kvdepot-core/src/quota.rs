//! Quotas: bytes are reserved before they are written, so a cap holds at every moment (P5).

/// The account of a pool or a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    max_bytes: Option<u64>,
    used_bytes: u64,
    reserved_bytes: u64,
}

impl Ledger {
    /// Makes an empty account. Without a maximum every reservation succeeds.
    pub const fn new(max_bytes: Option<u64>) -> Self {
        Self { max_bytes, used_bytes: 0, reserved_bytes: 0 }
    }

    /// Returns the cap.
    pub const fn max_bytes(&self) -> Option<u64> {
        self.max_bytes
    }

    /// Returns the number of written bytes.
    pub const fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Returns the number of bytes that writes in flight may still take.
    pub const fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// Reserves bytes for a write. Returns false, and changes nothing, if they do not fit.
    #[must_use]
    pub fn try_reserve(&mut self, bytes: u64) -> bool {
        if self.shortfall(bytes) > 0 {
            return false;
        }
        let Some(reserved_bytes) = self.reserved_bytes.checked_add(bytes) else { return false };
        self.reserved_bytes = reserved_bytes;
        true
    }

    /// Returns the number of bytes that must be released before `bytes` can be reserved.
    pub fn shortfall(&self, bytes: u64) -> u64 {
        let Some(max_bytes) = self.max_bytes else { return 0 };
        let wanted = u128::from(self.used_bytes) + u128::from(self.reserved_bytes) + u128::from(bytes);
        u64::try_from(wanted.saturating_sub(u128::from(max_bytes))).unwrap_or(u64::MAX)
    }

    /// Completes a reserved write: its bytes are now used.
    pub fn commit(&mut self, bytes: u64) {
        self.cancel(bytes);
        self.used_bytes += bytes;
    }

    /// Cancels a reserved write that did not happen.
    pub fn cancel(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.reserved_bytes, "more is settled than was reserved");
        self.reserved_bytes = self.reserved_bytes.saturating_sub(bytes);
    }

    /// Releases used bytes.
    pub fn release(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used_bytes, "more is released than was used");
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
    }

    /// Counts bytes that a tier held when it was opened. They may exceed the cap if it was lowered; then nothing can be
    /// reserved until enough is released.
    pub fn adopt(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_and_used_share_one_cap() {
        let mut ledger = Ledger::new(Some(100));
        assert!(ledger.try_reserve(60));
        assert!(!ledger.try_reserve(41));
        assert_eq!(ledger.shortfall(41), 1);
        ledger.commit(60);
        assert!(ledger.try_reserve(40) && !ledger.try_reserve(1));
        ledger.cancel(40);
        ledger.release(60);
        assert_eq!((ledger.used_bytes(), ledger.reserved_bytes()), (0, 0));
    }

    #[test]
    fn extremes_do_not_wrap() {
        let mut ledger = Ledger::new(Some(u64::MAX));
        assert!(ledger.try_reserve(u64::MAX));
        assert_eq!(ledger.shortfall(u64::MAX), u64::MAX);
        let mut endless = Ledger::new(None);
        assert!(endless.try_reserve(u64::MAX) && !endless.try_reserve(1));
        assert_eq!(endless.shortfall(u64::MAX), 0);
    }

    #[test]
    fn a_lowered_cap_is_reached_by_releasing() {
        let mut ledger = Ledger::new(Some(10));
        ledger.adopt(25);
        assert_eq!(ledger.shortfall(5), 20);
        ledger.release(20);
        assert!(ledger.try_reserve(5));
    }
}
