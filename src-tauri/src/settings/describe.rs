//! The settings in force, told to the faces: each with its value, default, unit, range, meaning
//! and where it comes from.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};

use super::explained::EXPLANATIONS;
use super::section::{Kind, Known};
use super::{Flag, KeySource, Overrides, ProviderKind, ProviderSettings, Settings, file, patch};

/// The sections of the file that are plain tables, in its order.
const SECTIONS: [&str; 7] = [
    "server", "limits", "dedup", "breaker", "log", "spend", "notify",
];

/// The lists that stand at the top of the file.
const LISTS: [&str; 3] = ["route", "price", "budget"];

impl Settings {
    /// The fields of the file in which it differs from the one that `other` was read from.
    pub(crate) fn differences(&self, other: &Settings) -> Vec<String> {
        patch::changes(&other.source.text, &self.source.text)
    }

    /// As JSON: `file`, then `settings` by section and key, then `providers` in their order, each
    /// with its `settings`.
    ///
    /// A setting has `value`, `default`, `from` (`default`, `file`, `flag`, `environment`; at a
    /// provider also `inherited`, from `[limits]` or `[breaker]`), `locked_by` (the flag or
    /// variable that wins over the file, or null), `about`, `takes`, and where it has them `unit`,
    /// `range` and `choices`. Of `headers` only the names are shown,
    /// as a list.
    pub(crate) fn describe(&self, path: Option<&Path>) -> Json {
        let describing = Describing {
            // The text has been read once already.
            file: self.source.text.parse().unwrap_or_default(),
            known: file::known(),
            overrides: &self.source.overrides,
        };
        let mut sections = Map::new();
        for section in SECTIONS {
            sections.insert(section.to_owned(), describing.section(section));
        }
        for list in LISTS {
            sections.insert(list.to_owned(), describing.list(list, list));
        }
        json!({
            "file": path.map(|path| path.display().to_string()),
            "settings": sections,
            "providers": self
                .providers
                .iter()
                .map(|provider| describing.provider(provider))
                .collect::<Vec<_>>(),
        })
    }
}

struct Describing<'s> {
    file: toml::Table,
    known: Known,
    overrides: &'s Overrides,
}

impl Describing<'_> {
    fn section(&self, name: &str) -> Json {
        let given = self.file.get(name).and_then(toml::Value::as_table);
        let mut fields = Map::new();
        for ((_, key), kind) in self.known.iter().filter(|((at, _), _)| at == name) {
            let Some(explained) = EXPLANATIONS.field(name, key) else {
                continue;
            };
            let default = from_toml(&explained.default);
            let given = given.and_then(|given| given.get(*key)).map(json_of);
            let field = format!("{name}.{key}");
            let winner = self.overrides.winner(&field);
            let value = winner
                .map(|flag| self.given_by(flag))
                .or_else(|| given.clone())
                .unwrap_or_else(|| default.clone());
            let from = match given {
                Some(_) => "file",
                None => "default",
            };
            let about = &explained.about;
            let told = self.field(&field, value, default, from, about, kind);
            fields.insert((*key).to_owned(), told);
        }
        if name == "dedup" {
            fields.insert("rule".to_owned(), self.list("dedup.rule", "rule"));
        }
        json!({ "title": EXPLANATIONS.heading(name), "settings": fields })
    }

    /// A whole list: its entries as the file has them, and what an entry takes.
    fn list(&self, path: &str, key: &str) -> Json {
        let table = match path.split_once('.') {
            Some((section, _)) => self.file.get(section).and_then(toml::Value::as_table),
            None => Some(&self.file),
        };
        let given = table.and_then(|table| table.get(key)).map(json_of);
        let entries = self.known.iter().filter(|((at, _), _)| at == path);
        let entries: Map<String, Json> = entries
            .map(|((_, key), kind)| ((*key).to_owned(), Json::Object(about_kind(kind))))
            .collect();
        json!({
            "from": if given.is_some() { "file" } else { "default" },
            "value": given.unwrap_or(json!([])),
            "default": [],
            "locked_by": null,
            "takes": "list of entries",
            "entry": entries,
        })
    }

    fn provider(&self, provider: &ProviderSettings) -> Json {
        let name = &*provider.name;
        let lists = self.file.get("provider").and_then(toml::Value::as_array);
        let given = lists
            .into_iter()
            .flatten()
            .find(|entry| entry.get("name").and_then(toml::Value::as_str) == Some(name));
        let values = values_of(provider);
        let fallback = self.fallback(provider).map(|without| values_of(&without));
        let mut fields = Map::new();
        for ((_, key), kind) in self.known.iter().filter(|((at, _), _)| at == "provider") {
            if *key == "name" {
                continue;
            }
            let value = values.get(*key).cloned().unwrap_or_default();
            let default = fallback.as_ref().and_then(|values| values.get(*key));
            let default = default.cloned().unwrap_or_default();
            let field = format!("provider.{name}.{key}");
            let is_given = given.is_some_and(|given| given.get(*key).is_some());
            let from = match is_given {
                true => "file",
                false => self.inherited(provider, key),
            };
            let general = ["limits", "breaker"]
                .iter()
                .find_map(|section| EXPLANATIONS.field(section, key));
            let about = match general {
                Some(explained) => &explained.about,
                None => EXPLANATIONS.provider_key(key).unwrap_or_default(),
            };
            // Their values may be credentials.
            let names_only = "Only the names are shown here: a patch gives names and values.";
            let about = match *key {
                "headers" => &format!("{about}. {names_only}"),
                _ => about,
            };
            let told = self.field(&field, value, default, from, about, kind);
            fields.insert((*key).to_owned(), told);
        }
        json!({
            "name": name,
            "shipped": provider.shipped,
            "in_file": given.is_some(),
            "settings": fields,
        })
    }

    /// Where a setting that the provider's own section does not have comes from.
    fn inherited(&self, provider: &ProviderSettings, key: &str) -> &'static str {
        if provider.local && file::GivenLimits::LOCAL_KEYS.contains(&key) {
            return "default";
        }
        let sections = ["limits", "breaker"];
        let is_there = sections.iter().any(|section| {
            let section = self.file.get(*section);
            section.is_some_and(|section| section.get(key).is_some())
        });
        if is_there { "inherited" } else { "default" }
    }

    /// The provider if its own section said no more than it must.
    fn fallback(&self, provider: &ProviderSettings) -> Option<ProviderSettings> {
        let mut file = toml::Table::new();
        for section in ["limits", "breaker"] {
            file.extend(
                self.file
                    .get(section)
                    .map(|given| (section.to_owned(), given.clone())),
            );
        }
        if !provider.shipped {
            let mut own = toml::Table::new();
            own.insert("name".to_owned(), (*provider.name).into());
            own.insert("kind".to_owned(), kind_word(provider.kind).into());
            if provider.kind != ProviderKind::Demo {
                own.insert("base_url".to_owned(), provider.base_url.as_str().into());
            }
            own.insert("local".to_owned(), provider.local.into());
            file.insert("provider".to_owned(), vec![own].into());
        }
        let text = toml::to_string(&file).ok()?;
        let settings = Settings::parse(&text, &Overrides::default()).ok()?;
        let found = settings.provider(&provider.name).cloned();
        // The local ones of the shipped start from other limits, also where the file made one of
        // them remote, or a remote one local.
        found.filter(|found| found.local == provider.local || provider.shipped)
    }

    fn field(
        &self,
        field: &str,
        value: Json,
        default: Json,
        from: &str,
        about: &str,
        kind: &Kind,
    ) -> Json {
        let from = match self.overrides.winner(field) {
            Some(flag) if self.overrides.from_variables.contains(&flag) => "environment",
            Some(_) => "flag",
            None => from,
        };
        let mut told = about_kind(kind);
        told.insert("value".to_owned(), value);
        told.insert("default".to_owned(), default);
        told.insert("from".to_owned(), from.into());
        told.insert("locked_by".to_owned(), self.overrides.locks(field).into());
        told.insert("about".to_owned(), about.into());
        Json::Object(told)
    }

    /// What a flag says, in the words of the file.
    fn given_by(&self, flag: Flag) -> Json {
        let seconds = |span: Option<Duration>| span.map(seconds).unwrap_or_default();
        match flag {
            Flag::Host => json!(self.overrides.host),
            Flag::Port => json!(self.overrides.port),
            Flag::Timeout => seconds(self.overrides.timeout),
            Flag::Concurrency => json!(self.overrides.concurrency),
            Flag::DedupSecs => seconds(self.overrides.dedup_window),
        }
    }
}

fn about_kind(kind: &Kind) -> Map<String, Json> {
    let mut told = Map::new();
    told.insert("takes".to_owned(), kind.takes.into());
    if !kind.unit.is_empty() {
        told.insert("unit".to_owned(), kind.unit.into());
    }
    if let Some((least, most)) = kind.range {
        told.insert("range".to_owned(), json!([number(least), number(most)]));
    }
    if !kind.choices.is_empty() {
        told.insert("choices".to_owned(), json!(kind.choices));
    }
    told
}

/// What holds for a provider, in the words of the file.
fn values_of(provider: &ProviderSettings) -> Map<String, Json> {
    let (limits, breaker) = (&provider.limits, &provider.breaker);
    let names: BTreeSet<&str> = provider
        .headers
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    let base_url = match provider.kind {
        ProviderKind::Demo => Json::Null,
        _ => provider.base_url.as_str().into(),
    };
    let told = json!({
        "kind": kind_word(provider.kind),
        "base_url": base_url,
        "key": match &provider.key {
            KeySource::Auto => "auto".to_owned(),
            KeySource::Keyring => "keyring".to_owned(),
            KeySource::Pass => "pass".to_owned(),
            KeySource::None => "none".to_owned(),
            KeySource::Env(name) => format!("env:{name}"),
        },
        "default": provider.default,
        "local": provider.local,
        "auth_header": provider.auth_header.as_ref().map(http::HeaderName::as_str),
        // Their values may be credentials.
        "headers": names,
        "ca_file": provider.ca_file,
        "ask_usage": provider.ask_usage,
        "concurrency": limits.concurrency,
        "queue": limits.queue,
        "queue_secs": seconds(limits.queue_wait),
        "connect_secs": seconds(limits.connect),
        "timeout_secs": seconds(limits.first_byte),
        "unstreamed_timeout_secs": seconds(limits.unstreamed),
        "idle_secs": seconds(limits.idle),
        "failures": breaker.failures,
        "failure_rate": number(breaker.failure_rate),
        "probes": breaker.probes,
        "open_secs": seconds(breaker.open),
        "recovery_check_secs": seconds(breaker.recovery_check),
    });
    match told {
        Json::Object(told) => told,
        _ => Map::new(),
    }
}

fn kind_word(kind: ProviderKind) -> &'static str {
    let mut words = file::KINDS.iter();
    words
        .find(|(_, known)| *known == kind)
        .map_or("", |(word, _)| word)
}

fn seconds(span: Duration) -> Json {
    number(span.as_secs_f64())
}

/// Whole numbers without a point.
fn number(number: f64) -> Json {
    if number.fract() == 0.0 && number.abs() < 9.0e15 {
        Json::from(number as i64)
    } else {
        Json::from(number)
    }
}

fn from_toml(text: &str) -> Json {
    let assignment: toml::Table = format!("x = {text}").parse().unwrap_or_default();
    assignment.get("x").map(json_of).unwrap_or_default()
}

fn json_of(value: &toml::Value) -> Json {
    match value {
        toml::Value::Float(value) => number(*value),
        toml::Value::Array(list) => list.iter().map(json_of).collect(),
        toml::Value::Table(table) => {
            let fields = table
                .iter()
                .map(|(key, value)| (key.clone(), json_of(value)));
            Json::Object(fields.collect())
        }
        value => serde_json::to_value(value).unwrap_or_default(),
    }
}
