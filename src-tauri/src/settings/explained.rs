//! What `default.toml` says of each setting: the one source of explanations and shown defaults.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::DEFAULT_FILE;

/// A setting as the default file shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Explained {
    /// The comment above it, without its line breaks. Empty for the keys of a shipped provider.
    pub about: String,
    /// Its default as TOML, `7337`.
    pub default: String,
}

/// What the default file says.
#[derive(Debug, Default)]
pub(super) struct Explanations {
    /// By `server.port`; the keys of a shipped provider by `provider.openai.key`.
    fields: BTreeMap<String, Explained>,
    /// The section's heading by its name.
    headings: BTreeMap<String, String>,
    /// The keys of a `[[provider]]` in the order in which they are explained.
    provider_keys: Vec<(String, String)>,
}

/// The default file, read once.
pub(super) static EXPLANATIONS: LazyLock<Explanations> =
    LazyLock::new(|| Explanations::read(DEFAULT_FILE));

impl Explanations {
    /// `section` is `server`, or `provider.openai` for what is shipped.
    pub(super) fn field(&self, section: &str, key: &str) -> Option<&Explained> {
        self.fields.get(&format!("{section}.{key}"))
    }

    /// What stands above the section, `Where Traygate listens`.
    pub(super) fn heading(&self, section: &str) -> Option<&str> {
        self.headings.get(section).map(String::as_str)
    }

    /// What a key of any `[[provider]]` means.
    pub(super) fn provider_key(&self, key: &str) -> Option<&str> {
        let mut keys = self.provider_keys.iter();
        keys.find(|(name, _)| name == key)
            .map(|(_, about)| about.as_str())
    }

    /// Where a key stands among those of a `[[provider]]`; those that are not named come last.
    pub(super) fn provider_key_rank(&self, key: &str) -> usize {
        let mut keys = self.provider_keys.iter();
        keys.position(|(name, _)| name == key)
            .unwrap_or(self.provider_keys.len())
    }

    fn read(text: &str) -> Explanations {
        let mut read = Explanations::default();
        let (mut section, mut heading, mut about) = (String::new(), String::new(), Vec::new());
        for line in text.lines() {
            if let Some(title) = line.strip_prefix("# ── ") {
                heading = title.trim_end_matches(['─', ' ']).to_owned();
                if heading == "Providers" {
                    section = "provider".to_owned();
                    read.headings.insert(section.clone(), heading.clone());
                }
            } else if let Some(name) = header(line) {
                section = name.to_owned();
                read.headings.insert(section.clone(), heading.clone());
                about.clear();
            } else if line == "#[[provider]]" {
                section = "provider".to_owned();
            } else if let Some((key, default)) = commented(line) {
                if section == "provider" && key == "name" {
                    section = format!("provider.{}", default.trim_matches('"'));
                }
                let explained = Explained {
                    about: std::mem::take(&mut about).join(" "),
                    default: default.to_owned(),
                };
                read.fields.insert(format!("{section}.{key}"), explained);
            } else if let Some(words) = line.strip_prefix("#   ") {
                if section == "provider" && !words.starts_with("[[") {
                    read.note_provider_key(words);
                }
            } else if let Some(words) = line.strip_prefix("# ") {
                about.push(words.trim());
            } else {
                about.clear();
            }
        }
        read
    }

    /// A line of the table above the shipped providers: `key    what it means`, or the rest of
    /// the line before.
    fn note_provider_key(&mut self, words: &str) {
        match words.split_once(' ') {
            Some(("", rest)) => {
                if let Some((_, about)) = self.provider_keys.last_mut() {
                    about.push(' ');
                    about.push_str(rest.trim());
                }
            }
            // `key = value` is an example.
            Some((_, rest)) if rest.starts_with('=') => {}
            Some((key, rest)) => self
                .provider_keys
                .push((key.to_owned(), rest.trim().to_owned())),
            None => {}
        }
    }
}

/// `server` of `[server]`.
fn header(line: &str) -> Option<&str> {
    line.strip_prefix('[')?.strip_suffix(']')
}

/// Key and value of a setting that is commented out: `#port = 7337`. Prose has a space after `#`.
pub(super) fn commented(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.strip_prefix('#')?.split_once('=')?;
    let key = key.trim_end();
    let plain = |c: char| c.is_ascii_lowercase() || c == '_';
    (!key.is_empty() && key.chars().all(plain)).then_some((key, value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_the_default_file_has_its_words() {
        let port = EXPLANATIONS.field("server", "port").expect("port");
        assert_eq!(port.default, "7337");
        assert_eq!(
            port.about,
            "The port, 0 to 65535, on every address. 0 takes any free one."
        );
        assert_eq!(
            EXPLANATIONS.heading("limits"),
            Some("How much each provider is asked at once, and how long it may take")
        );
        let base_url = EXPLANATIONS.field("provider.lm-studio", "base_url");
        assert_eq!(
            base_url.expect("shipped").default,
            "\"http://localhost:1234\""
        );
        assert_eq!(
            EXPLANATIONS.provider_key("auth_header"),
            Some("the header for the key, if not the usual one: \"api-key\" for Azure")
        );
        let key = EXPLANATIONS.provider_key("key").expect("key");
        assert!(key.contains("\"env:NAME\": as auto"), "{key}");
        for (field, explained) in &EXPLANATIONS.fields {
            let shipped = field.starts_with("provider.");
            assert!(shipped || !explained.about.is_empty(), "{field}");
        }
    }
}
