//! Who hears what a tier reports as lost.

use kvdepot_core::BlockKey;
use kvdepot_tier::TierEvents;
use parking_lot::Mutex;

#[derive(Default)]
pub(crate) struct Heard(pub(crate) Mutex<Vec<BlockKey>>);

impl TierEvents for Heard {
    fn evicted(&self, _keys: &[BlockKey]) {}

    fn lost(&self, keys: &[BlockKey]) {
        self.0.lock().extend(keys);
    }

    fn went_down(&self) {}

    fn came_back(&self) {}

    fn lost_memory(&self) {}
}
