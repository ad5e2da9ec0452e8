//! Call failures that a test plans.

use std::collections::HashMap;

/// Makes `times` calls with one name fail after letting `after` pass.
struct Plan {
    after: u64,
    times: u64,
    code: i32,
}

/// Planned failures, by name of the call.
#[derive(Default)]
pub(crate) struct Faults {
    plans: HashMap<String, Plan>,
    calls: HashMap<String, u64>,
}

impl Faults {
    pub(crate) fn plan(&mut self, name: &str, after: u64, times: u64, code: i32) {
        self.plans.insert(name.to_owned(), Plan { after, times, code });
    }

    /// Counts a call. Returns the code with which it must fail, if it must.
    pub(crate) fn called(&mut self, name: &str) -> Option<i32> {
        *self.calls.entry(name.to_owned()).or_default() += 1;
        let plan = self.plans.get_mut(name)?;
        if plan.after > 0 {
            plan.after -= 1;
            return None;
        }
        plan.times = plan.times.checked_sub(1)?;
        Some(plan.code)
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }
}
