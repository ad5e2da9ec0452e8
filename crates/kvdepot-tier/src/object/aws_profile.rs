//! Access keys from a file in the format of `~/.aws/credentials`. They are never printed: no type here has `Debug`.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use kvdepot_core::{Error, ErrorKind, Result};

use super::config::ObjectConfig;

/// Maximum size of the file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Credentials that requests are signed with.
pub(super) struct AccessKeys {
    pub(super) id: String,
    pub(super) secret: String,
    /// Session token of temporary keys.
    pub(super) token: Option<String>,
}

/// Returns the keys from the configured file, or from the usual one if it has any and the environment has none.
pub(super) fn find(config: &ObjectConfig) -> Result<Option<AccessKeys>> {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let profile = config.profile.clone().or_else(|| env("AWS_PROFILE"));
    let is_asked_for = config.credentials_file.is_some() || config.profile.is_some();
    if !is_asked_for && env("AWS_ACCESS_KEY_ID").is_some() {
        return Ok(None);
    }
    let usual = || Some(PathBuf::from(env("HOME")?).join(".aws/credentials"));
    let file = config.credentials_file.clone();
    let file = file.or_else(|| env("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from)).or_else(usual);
    let profile = profile.unwrap_or_else(|| "default".to_owned());
    let none = |what: &str| {
        let file = file.as_ref().map_or_else(String::new, |file| file.display().to_string());
        Error::new(ErrorKind::Config, what.to_owned())
            .with("tier", "Object")
            .with("path", file)
            .with("profile", &profile)
    };
    let text = match file.as_deref().map(read) {
        Some(Ok(text)) => text,
        Some(Err(error)) if is_asked_for => {
            return Err(none("cannot read the file with access keys").with_source(error));
        }
        _ => return Ok(None),
    };
    match parse(&text, &profile) {
        None if is_asked_for => Err(none(
            "the file with access keys has no aws_access_key_id and aws_secret_access_key in this section",
        )),
        keys => Ok(keys),
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// Returns the keys of a section.
fn parse(text: &str, profile: &str) -> Option<AccessKeys> {
    let (mut id, mut secret, mut token) = (None, None, None);
    let mut is_here = false;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            is_here = section.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| is_here) {
            let value = Some(value.trim().to_owned());
            match name.trim() {
                "aws_access_key_id" => id = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(AccessKeys { id: id?, secret: secret?, token })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=B=\n\n[other]\n\
                        aws_access_key_id=C\naws_secret_access_key = D\naws_session_token = E\n[half]\naws_access_key_id=F\n";

    #[test]
    fn a_section_has_its_own_keys() {
        let all = |profile| parse(FILE, profile).map(|keys| (keys.id, keys.secret, keys.token));
        assert_eq!(all("default"), Some(("A".into(), "B=".into(), None)));
        assert_eq!(all("other"), Some(("C".into(), "D".into(), Some("E".into()))));
        assert_eq!(all("half"), None);
        assert_eq!(all("none"), None);
    }

    #[test]
    fn what_was_asked_for_and_is_not_there_is_an_error_without_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = ObjectConfig::new("s3://b").unwrap();
        config.credentials_file = Some(dir.path().join("keys"));
        let kind = |config: &ObjectConfig| find(config).map(|_| ()).unwrap_err();
        assert!(kind(&config).to_string().contains("cannot read the file"));
        fs::write(dir.path().join("keys"), FILE).unwrap();
        config.profile = Some("half".into());
        let error = kind(&config).to_string();
        assert!(error.contains("profile=half") && !error.contains("=F"), "{error}");
        config.profile = Some("other".into());
        assert_eq!(find(&config).ok().flatten().unwrap().id, "C");
    }
}
