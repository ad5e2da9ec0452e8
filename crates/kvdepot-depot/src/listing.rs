//! Lists the namespaces that a depot knows, for operators' commands: what they cannot read from a tier's directories or media.

use kvdepot_core::machine::NamespaceHandle;
use serde_json::{Value, json};

use crate::session::Session;

/// Maximum number of namespaces in one answer (P7).
const NAMESPACES_PER_ANSWER: usize = 256;

impl Session {
    /// Returns the namespaces whose names begin with `prefix`, by their numbers, after the number `after`. Each has its complete
    /// description, from which a client can open it. `next` is the number after which the next answer begins, `null` if none is
    /// left.
    pub(crate) fn describe_namespaces(&self, prefix: &str, after: Option<NamespaceHandle>) -> Value {
        let runner = self.runner();
        let prefix = prefix.to_lowercase();
        let mut found: Vec<_> = runner
            .locator
            .directory
            .all()
            .into_iter()
            .filter(|opened| after.is_none_or(|after| opened.handle > after))
            .map(|opened| (opened.spec.root().to_string(), opened))
            .filter(|(name, _)| name.starts_with(&prefix))
            .collect();
        found.sort_unstable_by_key(|(_, opened)| opened.handle);
        let has_more = found.len() > NAMESPACES_PER_ANSWER;
        found.truncate(NAMESPACES_PER_ANSWER);
        let handles: Vec<NamespaceHandle> = found.iter().map(|(_, opened)| opened.handle).collect();
        let held = runner.look(|machine| machine.namespaces_hold(&handles));
        let entries = found.iter().zip(held).map(|((name, opened), (blocks, bytes))| {
            let described: Value = serde_json::from_str(opened.spec.canonical()).unwrap_or(Value::Null);
            json!({
                "namespace": name,
                "epoch": opened.epoch,
                "facts": described["facts"],
                "layout": described["layout"],
                "pool_blocks": blocks,
                "pool_bytes": bytes,
                "used_s": runner.locator.directory.tally(opened.handle).and_then(|tally| tally.used_s()),
            })
        });
        let entries: Vec<Value> = entries.collect();
        json!({"namespaces": entries, "next": has_more.then(|| handles.last())})
    }
}
