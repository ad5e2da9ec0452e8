//! The tiers of this build. A new tier is a folder with a [`TierEntry`] and a line in [`TIERS`]: pipelines, the depot's
//! configuration, its placements, a user's keys and their documentation follow from that.

use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result, pipeline};
use serde_json::{Value, json};

pub use crate::entry::TierEntry;
use crate::settings::{MEMORY_OUTLIVES, nearest};
use crate::{GuardConfig, Guarded, Tier, dax, empty, fake, mooncake, object, posix, remote, slab};

/// All tiers, in the order of the documentation.
pub const TIERS: [&TierEntry; 8] = [
    &posix::ENTRY,
    &slab::ENTRY,
    &remote::ENTRY,
    &dax::ENTRY,
    &object::ENTRY,
    &mooncake::ENTRY,
    &fake::ENTRY,
    &empty::ENTRY,
];

/// Their names.
pub const NAMES: [&str; TIERS.len()] = {
    let mut names = [""; TIERS.len()];
    let mut index = 0;
    while index < TIERS.len() {
        names[index] = TIERS[index].name;
        index += 1;
    }
    names
};

/// Makes a tier by its name in a pipeline, from a JSON object of settings.
pub fn build(name: &str, config: &Value) -> Result<Arc<dyn Tier>> {
    (find(name)?.open)(config)
}

/// Makes a tier with circuit breakers (P2).
pub fn build_guarded(name: &str, config: &Value) -> Result<Arc<dyn Tier>> {
    let tier = build(name, config)?;
    if find(name)?.guards_itself {
        return Ok(tier);
    }
    Ok(Arc::new(Guarded::new(tier, GuardConfig::default())))
}

/// Returns a tier's settings for a depot whose pool's memory outlives the process (`pool_keep_s`), if the tier has a
/// setting for that.
pub fn for_kept_memory(name: &str, config: &Value) -> Value {
    let mut config = config.clone();
    let asks = find(name).is_ok_and(|entry| entry.settings.iter().any(|one| one.name == MEMORY_OUTLIVES));
    if let Some(settings) = config.as_object_mut().filter(|_| asks) {
        settings.insert(MEMORY_OUTLIVES.to_owned(), true.into());
    }
    config
}

fn find(name: &str) -> Result<&'static TierEntry> {
    TIERS.into_iter().find(|entry| entry.name == name).ok_or_else(|| {
        Error::new(ErrorKind::Config, "no such tier")
            .with("tier", name)
            .with("nearest", nearest(name, &NAMES))
            .with("known", NAMES.join(" "))
    })
}

/// Returns the tiers of this build and their settings as JSON, from which Python makes a user's keys and their
/// documentation.
pub fn table_json() -> String {
    table(&TIERS).to_string()
}

fn table(tiers: &[&TierEntry]) -> Value {
    let row = |tier: &&TierEntry| {
        json!({
            "name": tier.name,
            "section": tier.key(),
            "for_users": tier.for_users,
            "settings": tier.settings,
        })
    };
    json!({ "tiers": tiers.iter().map(row).collect::<Vec<_>>(), "later": pipeline::LATER })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{ByMachine, Key, Kind, Preset, Rule, Setting};

    #[test]
    fn wrong_settings_name_the_nearest_known_one() {
        let error =
            build("Posix", &serde_json::json!({"directories": ["/tmp"], "io_dircet": true})).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("nearest=io_direct"), "{error}");
        let error = build("posix", &Value::Null).unwrap_err();
        assert!(error.to_string().contains("nearest=Posix"), "{error}");
        for config in [
            serde_json::json!({}),
            serde_json::json!({"directories": []}),
            serde_json::json!({"directories": ["/tmp"], "read_threads": 0}),
            serde_json::json!({"directories": ["/tmp"], "engine": "libaio"}),
            serde_json::json!({"directories": ["/tmp"], "capacity_bytes": -1}),
            serde_json::json!({"directories": ["/tmp"], "faults": "x"}),
        ] {
            assert_eq!(build("Posix", &config).unwrap_err().kind(), ErrorKind::Config, "{config}");
        }
        assert_eq!(build("Fake", &Value::Null).unwrap().name(), "fake");
        assert_eq!(build("Empty", &Value::Null).unwrap().name(), "empty");
    }

    fn settings() -> impl Iterator<Item = (&'static TierEntry, Setting)> {
        TIERS.into_iter().flat_map(|tier| tier.settings.iter().map(move |setting| (tier, *setting)))
    }

    fn keys() -> impl Iterator<Item = (&'static TierEntry, Key)> {
        settings().filter_map(|(tier, setting)| Some((tier, setting.key?)))
    }

    /// Returns the settings that a tier requires, and one more.
    fn with(tier: &str, name: &str, value: Value) -> Value {
        let mut all = match tier {
            "Posix" => json!({"directories": ["/proc/kvdepot-is-not-here"]}),
            "Slab" => json!({"path": "/proc/kvdepot-is-not-here"}),
            "Remote" => json!({"servers": ["127.0.0.1:1"]}),
            "Dax" => json!({"device_path": "/proc/kvdepot-is-not-here"}),
            "Object" => json!({"url": "s3://bucket", "endpoint": "http://127.0.0.1:1"}),
            _ => json!({}),
        };
        all[name] = value;
        all
    }

    #[test]
    fn a_tier_that_is_one_more_line_has_its_keys_in_the_table() {
        const SETTINGS: [Setting; 2] = [
            Setting {
                name: "shelves",
                kind: Kind::Whole { min: 1, max: 9 },
                key: Some(Key {
                    name: "attic_shelves",
                    meaning: "Shelves in the attic.",
                    unit: "shelves",
                    default: Preset::Whole(3),
                    ..Key::BLANK
                }),
            },
            Setting { name: "dust", kind: Kind::Bool, key: None },
        ];
        const ATTIC: TierEntry = TierEntry {
            name: "Attic",
            open: empty::ENTRY.open,
            guards_itself: false,
            settings: &SETTINGS,
            for_users: true,
        };
        let table = table(&[&ATTIC, &empty::ENTRY]);
        assert_eq!(table["tiers"].as_array().unwrap().len(), 2);
        let attic = &table["tiers"][0];
        assert_eq!((&attic["name"], &attic["section"]), (&json!("Attic"), &json!("attic")));
        assert_eq!(attic["settings"].as_array().unwrap().len(), 2);
        assert_eq!(attic["settings"][0]["kind"], json!({"is": "whole", "min": 1, "max": 9}));
        assert_eq!(attic["settings"][0]["key"]["name"], "attic_shelves");
        assert_eq!(attic["settings"][0]["key"]["default"], 3);
        assert_eq!(attic["settings"][1]["key"], Value::Null);
        assert_eq!(table["later"], json!(pipeline::LATER));
    }

    #[test]
    fn keys_are_described_and_differ() {
        let names: Vec<&str> = keys().map(|(_, key)| key.name).collect();
        assert!(names.len() > 15, "{names:?}");
        for (tier, key) in keys() {
            assert!(tier.for_users, "{} has keys, so it is for users", tier.name);
            assert_eq!(names.iter().filter(|name| **name == key.name).count(), 1, "{}", key.name);
            assert!(key.meaning.ends_with('.'), "{}", key.name);
            let by_itself = matches!(key.default, Preset::Nothing);
            assert_eq!(by_itself, !key.by_default.is_empty(), "{}", key.name);
            assert!(by_itself || key.by_machine.is_none(), "{}", key.name);
            assert!(key.only.is_empty() || !key.instead.is_empty(), "{}", key.name);
            let others: Vec<&str> = tier.settings.iter().filter_map(|one| Some(one.key?.name)).collect();
            if let Some(Rule::Needs { key: other, .. } | Rule::Not { key: other, .. }) = key.rule {
                assert!(others.contains(&other), "{} depends on {other}, which is no key", key.name);
            }
            if let Some(ByMachine::CacheDirectory { tell }) = key.by_machine {
                assert!(tier.settings.iter().any(|one| one.name == tell), "{}: {tell}", key.name);
            }
        }
    }

    #[test]
    fn defaults_of_keys_are_what_their_tiers_do_without_them() {
        for (tier, config) in [
            (
                "Posix",
                (|value| format!("{:?}", posix::PosixConfig::from_json(value).unwrap())) as fn(&Value) -> _,
            ),
            ("Slab", |value| format!("{:?}", slab::SlabConfig::from_json(value).unwrap())),
            ("Remote", |value| format!("{:?}", remote::RemoteConfig::from_json(value).unwrap())),
            ("Dax", |value| format!("{:?}", dax::DaxConfig::from_json(value).unwrap())),
            ("Object", |value| format!("{:?}", object::ObjectConfig::from_json(value).unwrap())),
            ("Mooncake", |value| format!("{:?}", mooncake::MooncakeConfig::from_json(value).unwrap())),
        ] {
            let mut compared = 0;
            for setting in find(tier).unwrap().settings {
                let Some(key) = setting.key else { continue };
                let default = serde_json::to_value(key.default).unwrap();
                if default.is_null() {
                    continue;
                }
                compared += 1;
                let mut without = with(tier, setting.name, default);
                let told = config(&without);
                without.as_object_mut().unwrap().remove(setting.name);
                assert_eq!(told, config(&without), "{}", key.name);
            }
            assert!(compared > 2, "{tier}");
        }
    }

    #[test]
    fn values_that_a_setting_is_not_declared_for_are_refused() {
        for (tier, setting) in settings() {
            let mut wrong = vec![json!({"a": 1}), json!([1])];
            match setting.kind {
                Kind::Bool => wrong.push(json!("auto")),
                Kind::Switch | Kind::Choice { .. } => wrong.push(json!("perhaps")),
                Kind::Whole { min, max } => {
                    wrong.push(json!(max + 1));
                    wrong.push(if min > 0 { json!(min - 1) } else { json!(-1) });
                    wrong.push(json!(0.5));
                }
                Kind::Bytes { max } => {
                    wrong.push(max.checked_add(1).map_or(json!(-1), |past| json!(past)));
                    wrong.push(json!("1"));
                }
                Kind::Text | Kind::Path => wrong.push(json!(5)),
                Kind::Url { .. } => wrong.extend([json!(5), json!("ftp://a"), json!("bucket")]),
                Kind::Paths { max } | Kind::Servers { max } => {
                    wrong.push(json!([]));
                    wrong.push(json!(vec!["/a"; max + 1]));
                    wrong.push(json!("/a"));
                }
            }
            for value in wrong {
                let settings = with(tier.name, setting.name, value);
                let error = build(tier.name, &settings).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{settings}");
                let text = error.to_string();
                assert!(text.contains(&format!("key={}", setting.name)), "{settings}: {text}");
                assert!(text.contains("a tier's setting must be"), "{settings}: {text}");
            }
        }
    }
}
