//! A JSON merge patch (RFC 7396) over the settings file's own names, laid onto its text.
//!
//! `{"limits":{"timeout_secs":60}}` sets, `null` takes out: the default holds again. `provider` is
//! an object by name; `route`, `price`, `budget` and `dedup.rule` are whole lists.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};
use toml_edit::{InlineTable, Value};

use super::edit::{self, Step, Unchangeable};
use super::explained::EXPLANATIONS;

/// Why a patch cannot be laid onto the text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// The patch itself is wrong at this field.
    Patch { field: String, reason: String },
    /// The text is not TOML.
    Text,
    /// The text has a form that would be lost.
    Form,
}

impl From<Unchangeable> for Unfit {
    fn from(Unchangeable: Unchangeable) -> Unfit {
        Unfit::Form
    }
}

fn wrong(field: &str, reason: &str) -> Unfit {
    Unfit::Patch {
        field: field.to_owned(),
        reason: reason.to_owned(),
    }
}

/// The text with the patch in it. What the patch does not change keeps every byte.
///
/// Values are not checked here: what reads the settings does.
///
/// # Errors
/// [`Unfit`]; the patch is laid on as a whole or not at all.
pub(super) fn lay_on(text: &str, patch: &Json) -> Result<String, Unfit> {
    let mut expected: toml::Table = text.parse().map_err(|_| Unfit::Text)?;
    let patch = object("", patch)?;
    let mut edited = text.to_owned();
    for (name, given) in patch {
        edited = match (name.as_str(), given) {
            ("provider", Json::Null) => return Err(wrong(name, "must name the providers")),
            ("provider", given) => providers(edited, object(name, given)?)?,
            ("route" | "price" | "budget", given) => list(edited, &[name], given)?,
            (_, Json::Null) => table(edited, name, &all_of(&expected, name))?,
            (_, given) => table(edited, name, object(name, given)?)?,
        };
    }
    merge(&mut expected, patch)?;
    let found: toml::Table = edited.parse().map_err(|_| Unfit::Form)?;
    // What was written is read back: an edit that touched anything else must not reach the file.
    if plain(found) == plain(expected) {
        Ok(edited)
    } else {
        Err(Unfit::Form)
    }
}

/// Each field that differs between two texts, `provider.openai.concurrency`, in order.
pub(super) fn changes(before: &str, after: &str) -> Vec<String> {
    let fields = |text: &str| -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        if let Ok(all) = text.parse::<toml::Table>() {
            flatten("", &toml::Value::Table(all), &mut fields);
        }
        fields
    };
    let (before, after) = (fields(before), fields(after));
    let names: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let changed = names
        .into_iter()
        .filter(|name| before.get(*name) != after.get(*name));
    changed.cloned().collect()
}

fn flatten(path: &str, value: &toml::Value, fields: &mut BTreeMap<String, String>) {
    let below = |key: &str| match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    };
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                flatten(&below(key), value, fields);
            }
        }
        toml::Value::Array(list) if path == "provider" => {
            for provider in list {
                let name = provider.get("name").and_then(toml::Value::as_str);
                flatten(&below(name.unwrap_or_default()), provider, fields);
            }
        }
        value => {
            fields.insert(path.to_owned(), format!("{value:?}"));
        }
    }
}

fn object<'j>(field: &str, given: &'j Json) -> Result<&'j Map<String, Json>, Unfit> {
    given
        .as_object()
        .ok_or_else(|| wrong(field, "must be an object: {\"field\": value}"))
}

/// A patch that takes everything out of a section but its lists, which are not the section's own
/// lines.
fn all_of(settings: &toml::Table, section: &str) -> Map<String, Json> {
    let table = settings.get(section).and_then(toml::Value::as_table);
    let keys = table.into_iter().flat_map(toml::Table::keys);
    keys.map(|key| (key.clone(), Json::Null)).collect()
}

fn table(mut text: String, name: &str, patch: &Map<String, Json>) -> Result<String, Unfit> {
    let path = [Step::Key(name.to_owned())];
    for (key, given) in patch {
        let is_list = (name, key.as_str()) == ("dedup", "rule");
        text = match given {
            given if is_list => list(text, &[name, key], given)?,
            Json::Null if edit::has(&text, &path)? => edit::take_out(&text, &path, key)?,
            Json::Null => text,
            given => {
                if !edit::has(&text, &path)? {
                    text = edit::add_section(&text, name);
                }
                set(text, &path, key, given, &format!("{name}.{key}"))?
            }
        };
    }
    Ok(text)
}

fn providers(mut text: String, patch: &Map<String, Json>) -> Result<String, Unfit> {
    let list = [Step::Key("provider".to_owned())];
    for (name, given) in patch {
        let which = Step::Named(name.clone());
        let path = [list[0].clone(), which.clone()];
        let field = format!("provider.{name}");
        if given.is_null() {
            if edit::has(&text, &path)? {
                text = edit::remove(&text, &list, &which)?;
            }
            continue;
        }
        let given = object(&field, given)?;
        if let Some(other) = given.get("name")
            && other.as_str() != Some(name)
        {
            return Err(wrong(
                &format!("{field}.name"),
                "must be the same: to rename a provider, take it out and add one",
            ));
        }
        let mut keys: Vec<(&String, &Json)> = given.iter().collect();
        keys.sort_by_key(|(key, _)| EXPLANATIONS.provider_key_rank(key));
        if !edit::has(&text, &path)? {
            if keys.iter().all(|(_, given)| given.is_null()) && !keys.is_empty() {
                continue;
            }
            text = match edit::uncomment_provider(&text, name) {
                Some(text) => text,
                None => {
                    let named = ("name".to_owned(), Value::from(name.as_str()));
                    edit::add(&text, &["provider"], &[named])?
                }
            };
        }
        for (key, given) in keys.into_iter().filter(|(key, _)| *key != "name") {
            text = match given {
                Json::Null => edit::take_out(&text, &path, key)?,
                given => set(text, &path, key, given, &format!("{field}.{key}"))?,
            };
        }
    }
    Ok(text)
}

/// Sets one field; an object goes key by key into the table that is there, as `headers` may be.
fn set(
    mut text: String,
    path: &[Step],
    key: &str,
    given: &Json,
    field: &str,
) -> Result<String, Unfit> {
    let below = [path, &[Step::Key(key.to_owned())]].concat();
    let Json::Object(patch) = given else {
        return Ok(edit::set(&text, path, key, &value(field, given)?)?);
    };
    if !edit::is_table(&text, &below)? {
        return Ok(edit::set(&text, path, key, &value(field, given)?)?);
    }
    for (key, given) in patch {
        text = match given {
            Json::Null => edit::take_out(&text, &below, key)?,
            given => set(text, &below, key, given, &format!("{field}.{key}"))?,
        };
    }
    Ok(text)
}

/// Makes a list of tables what the patch says. What stands at its beginning and end already stays.
fn list(mut text: String, names: &[&str], given: &Json) -> Result<String, Unfit> {
    let field = names.join(".");
    let path: Vec<Step> = names
        .iter()
        .map(|name| Step::Key((*name).to_owned()))
        .collect();
    let entries: &[Json] = match given {
        Json::Null => &[],
        Json::Array(entries) => entries,
        _ => return Err(wrong(&field, "must be a list of objects, the whole of it")),
    };
    let mut wanted = Vec::new();
    for entry in entries {
        wanted.push(settings_of(&field, object(&field, entry)?)?);
    }
    let mut had = Vec::new();
    for entry in entries_of(&text, names)? {
        had.push(entry);
    }
    let same = |(old, new): &(&toml::Table, &Vec<(String, Value)>)| **old == as_table(new);
    let head = had.iter().zip(&wanted).take_while(same).count();
    let (old, new) = (&had[head..], &wanted[head..]);
    let tail = old
        .iter()
        .rev()
        .zip(new.iter().rev())
        .take_while(same)
        .count();
    let (old, new) = (&old[..old.len() - tail], &new[..new.len() - tail]);
    let both = old.len().min(new.len());
    for (at, (old, new)) in old.iter().zip(new).enumerate() {
        let which = [path.clone(), vec![Step::Nth(head + at)]].concat();
        for key in old
            .keys()
            .filter(|key| new.iter().all(|(new, _)| new != *key))
        {
            text = edit::take_out(&text, &which, key)?;
        }
        for (key, value) in new {
            if old.get(key) != as_table(new).get(key) {
                text = edit::set(&text, &which, key, value)?;
            }
        }
    }
    for at in (both..old.len()).rev() {
        text = edit::remove(&text, &path, &Step::Nth(head + at))?;
    }
    if new.len() > both {
        // The ones behind make room and come again: only the end of a list can be added to.
        for at in (0..tail).rev() {
            text = edit::remove(&text, &path, &Step::Nth(head + both + at))?;
        }
        for new in &wanted[head + both..] {
            text = edit::add(&text, names, new)?;
        }
    }
    Ok(text)
}

fn settings_of(field: &str, entry: &Map<String, Json>) -> Result<Vec<(String, Value)>, Unfit> {
    let given = entry.iter().filter(|(_, given)| !given.is_null());
    given
        .map(|(key, given)| Ok((key.clone(), value(&format!("{field}.{key}"), given)?)))
        .collect()
}

/// The list as it is, empty where there is none.
fn entries_of(text: &str, names: &[&str]) -> Result<Vec<toml::Table>, Unfit> {
    let all: toml::Table = text.parse().map_err(|_| Unfit::Form)?;
    let mut value = Some(&toml::Value::Table(all));
    let mut found = None;
    for name in names {
        found = value.and_then(|value| value.get(name)).cloned();
        value = found.as_ref();
    }
    match found {
        None => Ok(Vec::new()),
        Some(toml::Value::Array(entries)) => entries
            .into_iter()
            .map(|entry| match entry {
                toml::Value::Table(table) => Ok(table),
                _ => Err(Unfit::Form),
            })
            .collect(),
        Some(_) => Err(Unfit::Form),
    }
}

fn as_table(settings: &[(String, Value)]) -> toml::Table {
    let plain = settings
        .iter()
        .filter_map(|(key, value)| Some((key.clone(), plain_value(value)?)));
    plain.collect()
}

fn plain_value(value: &Value) -> Option<toml::Value> {
    let assignment: toml::Table = format!("x = {value}").parse().ok()?;
    assignment.into_iter().next().map(|(_, value)| value)
}

/// A JSON value as TOML has it.
fn value(field: &str, given: &Json) -> Result<Value, Unfit> {
    Ok(match given {
        Json::Null => return Err(wrong(field, "must not have null in a list")),
        Json::Bool(given) => Value::from(*given),
        Json::String(given) => Value::from(given.as_str()),
        Json::Number(given) => {
            // JSON has one kind of number: 8.0 is as whole as 8.
            let whole = |number: f64| number.fract() == 0.0 && number.abs() < 9.0e15;
            let written = match given.as_f64() {
                Some(number) if !given.is_i64() && whole(number) => format!("{number:.0}"),
                // Never with an exponent, which amounts of money must not have.
                Some(number) if !given.is_i64() && number.abs() < 9.0e15 => format!("{number}"),
                _ => given.to_string(),
            };
            written
                .parse()
                .map_err(|_| wrong(field, "must be a number of a size that settings have"))?
        }
        Json::Array(given) => {
            let given = given.iter().map(|given| value(field, given));
            Value::Array(given.collect::<Result<_, _>>()?)
        }
        Json::Object(given) => {
            let mut table = InlineTable::new();
            for (key, given) in given.iter().filter(|(_, given)| !given.is_null()) {
                table.insert(key, value(&format!("{field}.{key}"), given)?);
            }
            Value::InlineTable(table)
        }
    })
}

/// RFC 7396 over the parsed file: what the edited text must read as.
fn merge(settings: &mut toml::Table, patch: &Map<String, Json>) -> Result<(), Unfit> {
    for (key, given) in patch {
        match (key.as_str(), given) {
            ("provider", Json::Object(given)) => {
                let providers = settings
                    .entry(key)
                    .or_insert(toml::Value::Array(Vec::new()));
                merge_providers(providers, given)?;
            }
            (_, Json::Null) => {
                settings.remove(key);
            }
            (_, Json::Object(given)) => {
                let below = settings
                    .entry(key)
                    .or_insert(toml::Value::Table(toml::Table::new()));
                if !below.is_table() {
                    *below = toml::Value::Table(toml::Table::new());
                }
                if let toml::Value::Table(below) = below {
                    merge(below, given)?;
                }
            }
            (_, given) => {
                let given = plain_value(&value(key, &without_nulls(given))?).ok_or(Unfit::Form)?;
                settings.insert(key.clone(), given);
            }
        }
    }
    Ok(())
}

fn merge_providers(list: &mut toml::Value, patch: &Map<String, Json>) -> Result<(), Unfit> {
    let toml::Value::Array(list) = list else {
        return Err(Unfit::Form);
    };
    for (name, given) in patch {
        let is_it = |entry: &toml::Value| {
            entry.get("name").and_then(toml::Value::as_str) == Some(name.as_str())
        };
        let place = list.iter().position(is_it);
        match (place, given) {
            (Some(place), Json::Null) => {
                list.remove(place);
            }
            (None, Json::Null) => {}
            (Some(place), given) => {
                if let toml::Value::Table(table) = &mut list[place] {
                    merge(table, object(name, given)?)?;
                }
            }
            (None, given) => {
                let mut table = toml::Table::new();
                let given = object(name, given)?;
                merge(&mut table, given)?;
                if !table.is_empty() || given.is_empty() {
                    table.insert("name".to_owned(), toml::Value::String(name.clone()));
                    list.push(toml::Value::Table(table));
                }
            }
        }
    }
    Ok(())
}

/// Entries of a list in which a setting is `null` do not have it.
fn without_nulls(given: &Json) -> Json {
    match given {
        Json::Array(given) => given.iter().map(without_nulls).collect(),
        Json::Object(given) => {
            let given = given.iter().filter(|(_, given)| !given.is_null());
            Json::Object(
                given
                    .map(|(key, given)| (key.clone(), without_nulls(given)))
                    .collect(),
            )
        }
        given => given.clone(),
    }
}

fn forget_empty(table: &mut toml::Table, list: &str) {
    let entries = table.get(list).and_then(toml::Value::as_array);
    if entries.is_some_and(Vec::is_empty) {
        table.remove(list);
    }
}

/// For comparison: without empty tables and lists, which say nothing, and with the providers in
/// the order of their names, since new ones may have their place between others.
fn plain(mut settings: toml::Table) -> String {
    fn prune(table: &mut toml::Table) {
        for (_, value) in table.iter_mut() {
            match value {
                toml::Value::Table(below) => prune(below),
                toml::Value::Array(list) => list
                    .iter_mut()
                    .filter_map(toml::Value::as_table_mut)
                    .for_each(prune),
                _ => {}
            }
        }
        table.retain(|_, value| match value {
            toml::Value::Table(below) => !below.is_empty(),
            _ => true,
        });
    }
    prune(&mut settings);
    for list in ["provider", "route", "price", "budget"] {
        forget_empty(&mut settings, list);
    }
    if let Some(toml::Value::Table(dedup)) = settings.get_mut("dedup") {
        forget_empty(dedup, "rule");
        if dedup.is_empty() {
            settings.remove("dedup");
        }
    }
    if let Some(toml::Value::Array(providers)) = settings.get_mut("provider") {
        let name = |entry: &toml::Value| {
            let name = entry.get("name").and_then(toml::Value::as_str);
            name.unwrap_or_default().to_owned()
        };
        providers.sort_by_key(name);
    }
    // Its `Debug` tells 1 and 1.0 apart, and `nan` equals itself.
    format!("{settings:?}")
}

#[cfg(test)]
mod tests;
