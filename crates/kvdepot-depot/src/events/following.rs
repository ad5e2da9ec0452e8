//! Recording on behalf of a session that follows.

use std::fmt;
use std::sync::Arc;

use crate::runner::Runner;

/// What a session follows. Recording for it stops when the session ends.
#[derive(Default)]
pub(crate) struct Following {
    runner: Option<Arc<Runner>>,
}

impl Following {
    pub(super) fn begin(&mut self, runner: &Arc<Runner>) {
        if self.runner.is_none() {
            runner.locator.events.begin();
            self.runner = Some(Arc::clone(runner));
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.runner.iter().for_each(|runner| runner.locator.events.end());
    }
}

impl fmt::Debug for Following {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Following({})", self.runner.is_some())
    }
}
