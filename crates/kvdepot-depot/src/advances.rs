//! Advances of epochs that this depot makes itself, so that it doesn't take them for another depot's.

use std::collections::HashMap;

use kvdepot_core::machine::NamespaceHandle;
use parking_lot::Mutex;

/// Namespaces remembered beyond those that are being advanced.
const REMEMBERED_MAX: usize = 4096;

/// The namespaces that this depot advances, or has advanced lately.
#[derive(Debug, Default)]
pub(crate) struct Advances(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Counts beginnings and ends.
    clock: u64,
    own: HashMap<NamespaceHandle, Own>,
}

#[derive(Debug, Default)]
struct Own {
    under_way: u32,
    /// When one last began or ended.
    last: u64,
}

/// Advances that this depot makes; they end when this is dropped.
#[derive(Debug)]
pub(crate) struct Advance<'a> {
    advances: &'a Advances,
    namespaces: Vec<NamespaceHandle>,
}

/// A moment, to compare with a later one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark(u64);

impl Advances {
    /// Notes that advances begin.
    pub(crate) fn begin(&self, namespaces: &[NamespaceHandle]) -> Advance<'_> {
        let mut state = self.0.lock();
        if state.own.len() > REMEMBERED_MAX {
            state.own.retain(|_, own| own.under_way > 0);
        }
        state.clock += 1;
        let now = state.clock;
        for namespace in namespaces {
            let own = state.own.entry(*namespace).or_default();
            (own.under_way, own.last) = (own.under_way + 1, now);
        }
        Advance { advances: self, namespaces: namespaces.to_vec() }
    }

    /// Marks this moment. What the caller reads afterwards is compared with it.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.0.lock().clock)
    }

    /// Returns whether an advance of a namespace was under way at the mark, or has begun since.
    pub(crate) fn any_since(&self, mark: Mark, namespace: NamespaceHandle) -> bool {
        self.0.lock().own.get(&namespace).is_some_and(|own| own.under_way > 0 || own.last > mark.0)
    }
}

impl Drop for Advance<'_> {
    fn drop(&mut self) {
        let mut state = self.advances.0.lock();
        state.clock += 1;
        let now = state.clock;
        for namespace in &self.namespaces {
            if let Some(own) = state.own.get_mut(namespace) {
                (own.under_way, own.last) = (own.under_way.saturating_sub(1), now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advances_under_way_or_later_are_noticed_and_earlier_ones_are_not() {
        let [one, other] = [1, 2];
        let advances = Advances::default();
        let quiet = advances.mark();
        assert!(!advances.any_since(quiet, one));
        let first = advances.begin(&[one]);
        let during = advances.mark();
        assert!(advances.any_since(quiet, one) && advances.any_since(during, one));
        assert!(!advances.any_since(quiet, other), "it is about another namespace");
        drop(first);
        assert!(advances.any_since(quiet, one) && advances.any_since(during, one));
        let after = advances.mark();
        assert!(!advances.any_since(after, one));
        drop(advances.begin(&[one]));
        assert!(advances.any_since(after, one));
    }

    #[test]
    fn what_is_remembered_has_a_limit() {
        let advances = Advances::default();
        let kept = advances.begin(&[0]);
        for number in 1..3 * REMEMBERED_MAX as u64 {
            drop(advances.begin(&[number]));
            assert!(advances.0.lock().own.len() <= REMEMBERED_MAX + 1);
        }
        assert!(advances.any_since(advances.mark(), 0));
        drop(kept);
    }
}
