//! Decides which blocks of a medium are taken in when it is opened: those with an intact header, of a current epoch,
//! each key and each place once. Pure.

use hashbrown::HashSet;
use kvdepot_core::NamespaceId;

use super::layout::{Entry, Geometry, Header};
use super::slots::Slots;

/// The blocks found on a medium.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) slots: Slots,
    /// Headers that must be cleared before anything is written.
    pub(super) clear: Vec<u32>,
}

/// Sorts the headers that are not empty. Of two with the same key or the same place, the later one counts. `units_max`
/// bounds how much of the medium is used.
pub(super) fn recover(
    headers: impl IntoIterator<Item = (u32, Entry<Header>)>,
    current: &HashSet<NamespaceId>,
    geometry: &Geometry,
    units_max: u32,
) -> Recovered {
    let (mut good, mut clear) = (Vec::new(), Vec::new());
    for (unit, entry) in headers {
        match entry {
            Entry::Empty => {}
            Entry::Good(header) if current.contains(&header.key.namespace) => good.push((unit, header)),
            Entry::Good(_) | Entry::Bad => clear.push(unit),
        }
    }
    good.sort_by_key(|(_, header)| std::cmp::Reverse(header.generation));
    let mut slots = Slots::new(units_max);
    let mut kept = Vec::new();
    for (unit, header) in good {
        if slots.adopt(unit, geometry.units_of(u64::from(header.bytes)), header) {
            kept.push(header.key);
        } else {
            clear.push(unit);
        }
    }
    // The order of eviction begins with the order in which the blocks were written.
    kept.iter().rev().for_each(|key| slots.touch(key));
    Recovered { slots, clear }
}
