//! Reads a TOML table key by key; whatever is wrong knows its line.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::rc::Rc;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{Fault, closest};
use super::{Nanodollars, Pattern};

type Entry<'t> = (Range<usize>, Spanned<DeValue<'t>>);

/// What a setting takes, as its reader asked for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Kind {
    /// `true or false`, `whole number`, `number`, `dollars`, `text`, `list`, `table`.
    pub takes: &'static str,
    /// `seconds`, `days`, `megabytes`; empty where it has none.
    pub unit: &'static str,
    pub range: Option<(f64, f64)>,
    /// The words of which it takes one.
    pub choices: Vec<&'static str>,
}

/// Every setting that was asked for, by its section (`server`, `dedup.rule`) and key.
pub(super) type Known = BTreeMap<(String, &'static str), Kind>;

/// One table of the file. Every key it may have is asked for by name; [`Section::finish`]
/// refuses what nobody asked for.
pub(super) struct Section<'t> {
    /// How a person would point at this table: `[server]`, `provider "x"`. Empty at the top.
    place: String,
    /// The same for programs: `server`, `dedup.rule`. Empty at the top.
    path: String,
    /// All sections of a file share it.
    known: Rc<RefCell<Known>>,
    /// Where the table begins; `None` where the file does not have it.
    at: Option<Range<usize>>,
    /// What has not been asked for yet.
    rest: BTreeMap<String, Entry<'t>>,
    /// What has been, with its place if the file has it.
    asked: BTreeMap<&'static str, Option<Range<usize>>>,
}

impl<'t> Section<'t> {
    /// The whole file.
    pub(super) fn root(text: &'t str) -> Result<Section<'t>, Fault> {
        let table = DeTable::parse(text).map_err(|error| {
            // The message alone: the error's own Display would print the line, key and all.
            let end = text.len()..text.len();
            Fault::new(
                Some(error.span().unwrap_or(end)),
                "",
                format!("this is not TOML: {}", error.message()),
            )
        })?;
        let at = table.span();
        let known = Rc::default();
        let table = table.into_inner();
        Ok(Self::new(
            String::new(),
            String::new(),
            known,
            Some(at),
            table,
        ))
    }

    /// What has been asked for so far, in this section and all others of its file.
    pub(super) fn known(&self) -> Rc<RefCell<Known>> {
        self.known.clone()
    }

    fn within(
        &self,
        place: String,
        key: &str,
        at: Option<Range<usize>>,
        table: DeTable<'t>,
    ) -> Self {
        let path = match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        };
        Self::new(place, path, self.known.clone(), at, table)
    }

    fn new(
        place: String,
        path: String,
        known: Rc<RefCell<Known>>,
        at: Option<Range<usize>>,
        table: DeTable<'t>,
    ) -> Self {
        let rest = table
            .into_iter()
            .map(|(key, value)| (key.get_ref().to_string(), (key.span(), value)))
            .collect();
        Self {
            place,
            path,
            known,
            at,
            rest,
            asked: BTreeMap::new(),
        }
    }

    /// From here on errors point at this table in these words.
    pub(super) fn call_it(&mut self, place: String) {
        self.place = place;
    }

    /// Something is wrong with a key that was read.
    pub(super) fn fault(&self, key: &str, reason: impl Into<String>) -> Fault {
        let at = self.asked.get(key).cloned().flatten();
        Fault::new(at.or(self.at.clone()), self.field(key), reason)
    }

    /// Whether the file has a key that was read.
    pub(super) fn has(&self, key: &str) -> bool {
        self.asked.get(key).is_some_and(Option::is_some)
    }

    fn field(&self, key: &str) -> String {
        if self.place.is_empty() {
            format!("`{key}`")
        } else {
            format!("{} {key}", self.place)
        }
    }

    fn note(&self, key: &'static str, kind: Kind) {
        let mut known = self.known.borrow_mut();
        known.insert((self.path.clone(), key), kind);
    }

    fn takes(&self, key: &'static str, takes: &'static str) {
        let kind = Kind {
            takes,
            ..Kind::default()
        };
        self.note(key, kind);
    }

    fn take(&mut self, key: &'static str) -> Option<DeValue<'t>> {
        match self.rest.remove(key) {
            Some((_, value)) => {
                self.asked.insert(key, Some(value.span()));
                Some(value.into_inner())
            }
            None => {
                self.asked.entry(key).or_insert(None);
                None
            }
        }
    }

    pub(super) fn boolean(&mut self, key: &'static str) -> Result<Option<bool>, Fault> {
        self.takes(key, "true or false");
        match self.take(key) {
            None => Ok(None),
            Some(DeValue::Boolean(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(key, "true or false", &other)),
        }
    }

    /// A whole number within `range`.
    pub(super) fn whole(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, Fault> {
        self.note(
            key,
            Kind {
                takes: "whole number",
                range: Some(((*range.start()).into(), (*range.end()).into())),
                ..Kind::default()
            },
        );
        let value = match self.take(key) {
            None => return Ok(None),
            Some(DeValue::Integer(value)) => value,
            Some(other) => return Err(self.wrong_type(key, "a whole number", &other)),
        };
        match u32::from_str_radix(value.as_str(), value.radix()) {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(self.fault(
                key,
                format!("must be {} to {}, is {value}", range.start(), range.end()),
            )),
        }
    }

    /// A number, whole or not, within `range`. `unit` follows the range in the error.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
        unit: &'static str,
    ) -> Result<Option<f64>, Fault> {
        self.note(
            key,
            Kind {
                takes: "number",
                unit: unit.trim_start(),
                range: Some((*range.start(), *range.end())),
                ..Kind::default()
            },
        );
        let (number, written) = match self.take(key) {
            None => return Ok(None),
            Some(DeValue::Integer(value)) => {
                let number = i64::from_str_radix(value.as_str(), value.radix());
                // Past 2^53 it is out of every range here, exact or not.
                (
                    number.map_or(f64::NAN, |number| number as f64),
                    value.to_string(),
                )
            }
            Some(DeValue::Float(value)) => (
                value.as_str().parse().unwrap_or(f64::NAN),
                value.to_string(),
            ),
            Some(other) => return Err(self.wrong_type(key, "a number", &other)),
        };
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (least, most) = range.into_inner();
        Err(self.fault(
            key,
            format!("must be {least} to {most}{unit}, is {written}"),
        ))
    }

    /// Seconds, fractions allowed.
    pub(super) fn seconds(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<Duration>, Fault> {
        Ok(self
            .number(key, range, " seconds")?
            .map(Duration::from_secs_f64))
    }

    /// Days, fractions allowed.
    pub(super) fn days(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<Duration>, Fault> {
        Ok(self
            .number(key, range, " days")?
            .map(|days| Duration::from_secs_f64(days * 86_400.0)))
    }

    /// Megabytes of 1,048,576 bytes, fractions allowed; the answer is bytes.
    pub(super) fn megabytes(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<u64>, Fault> {
        Ok(self
            .number(key, range, " megabytes")?
            .map(|megabytes| (megabytes * 1_048_576.0).round() as u64))
    }

    /// Dollars, read digit by digit: 0.1 has no exact float.
    pub(super) fn dollars(&mut self, key: &'static str) -> Result<Option<Nanodollars>, Fault> {
        self.takes(key, "dollars");
        let written = match self.take(key) {
            None => return Ok(None),
            Some(DeValue::Integer(value)) if value.radix() == 10 => value.to_string(),
            Some(DeValue::Float(value)) => value.to_string(),
            Some(other) => return Err(self.wrong_type(key, "an amount in dollars", &other)),
        };
        match Nanodollars::from_decimal(&written) {
            Some(amount) => Ok(Some(amount)),
            None => Err(self.fault(
                key,
                format!(
                    "must be dollars, 0 to 1000000 with at most nine decimals and no exponent, is {written}"
                ),
            )),
        }
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<String>, Fault> {
        self.takes(key, "text");
        match self.take(key) {
            None => Ok(None),
            Some(DeValue::String(value)) => Ok(Some(value.into_owned())),
            Some(other) => Err(self.wrong_type(key, "text in quotes", &other)),
        }
    }

    /// A text that `read` turns into what it means, or says what it must be.
    pub(super) fn parsed<T, R: Into<String>>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&str) -> Result<T, R>,
    ) -> Result<Option<T>, Fault> {
        match self.text(key)? {
            None => Ok(None),
            Some(text) => match read(&text) {
                Ok(value) => Ok(Some(value)),
                Err(reason) => Err(self.fault(key, reason)),
            },
        }
    }

    /// As [`Section::parsed`], for each of a list.
    pub(super) fn parsed_each<T, R: Into<String>>(
        &mut self,
        key: &'static str,
        read: impl Fn(&str) -> Result<T, R>,
    ) -> Result<Option<Vec<T>>, Fault> {
        let Some(texts) = self.texts(key)? else {
            return Ok(None);
        };
        let values: Result<Vec<T>, R> = texts.iter().map(|text| read(text)).collect();
        values.map(Some).map_err(|reason| self.fault(key, reason))
    }

    /// A list of texts; a single one counts as a list of one.
    pub(super) fn texts(&mut self, key: &'static str) -> Result<Option<Vec<String>>, Fault> {
        const WANTED: &str = "a list of texts in quotes";
        self.takes(key, "list");
        match self.take(key) {
            None => Ok(None),
            Some(DeValue::String(value)) => Ok(Some(vec![value.into_owned()])),
            Some(DeValue::Array(values)) => values
                .into_iter()
                .map(|value| match value.into_inner() {
                    DeValue::String(value) => Ok(value.into_owned()),
                    other => Err(self.wrong_type(key, WANTED, &other)),
                })
                .collect::<Result<Vec<_>, _>>()
                .map(Some),
            Some(other) => Err(self.wrong_type(key, WANTED, &other)),
        }
    }

    /// A table of texts: `{ name = "value" }`.
    pub(super) fn pairs(
        &mut self,
        key: &'static str,
    ) -> Result<Option<Vec<(String, String)>>, Fault> {
        const WANTED: &str = "a table of texts, { name = \"value\" }";
        self.takes(key, "table");
        match self.take(key) {
            None => Ok(None),
            Some(DeValue::Table(table)) => table
                .into_iter()
                .map(|(name, value)| match value.into_inner() {
                    DeValue::String(value) => {
                        Ok((name.into_inner().into_owned(), value.into_owned()))
                    }
                    other => Err(self.wrong_type(key, WANTED, &other)),
                })
                .collect::<Result<Vec<_>, _>>()
                .map(Some),
            Some(other) => Err(self.wrong_type(key, WANTED, &other)),
        }
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&'static str, T)],
    ) -> Result<Option<T>, Fault> {
        let word = self.text(key)?;
        let kind = Kind {
            takes: "text",
            choices: choices.iter().map(|(name, _)| *name).collect(),
            ..Kind::default()
        };
        self.note(key, kind);
        let Some(word) = word else {
            return Ok(None);
        };
        if let Some((_, choice)) = choices.iter().find(|(name, _)| *name == word) {
            return Ok(Some(*choice));
        }
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let fault = self.fault(key, format!("must be one of {}", names.join(", ")));
        Err(match closest(&word, &names) {
            Some(meant) => fault.help(format!("Did you mean \"{meant}\"?")),
            None => fault,
        })
    }

    /// A pattern with `*` and `?`.
    pub(super) fn pattern(&mut self, key: &'static str) -> Result<Option<Pattern>, Fault> {
        self.parsed(key, pattern)
    }

    /// The table `[key]`; an empty one where the file has none.
    pub(super) fn table(&mut self, key: &'static str) -> Result<Section<'t>, Fault> {
        let place = format!("[{key}]");
        match self.take(key) {
            None => Ok(self.within(place, key, None, DeTable::new())),
            Some(DeValue::Table(table)) => {
                Ok(self.within(place, key, self.asked[key].clone(), table))
            }
            Some(other) => Err(self
                .wrong_type(key, "a section", &other)
                .help(format!("Write `[{key}]` on a line of its own."))),
        }
    }

    /// Every `[[key]]`, in the order of the file. `path` is the name a header gives it.
    pub(super) fn tables(
        &mut self,
        key: &'static str,
        path: &str,
    ) -> Result<Vec<Section<'t>>, Fault> {
        let help = format!("Write `[[{path}]]` on a line of its own before each.");
        let array = match self.take(key) {
            None => return Ok(Vec::new()),
            Some(DeValue::Array(array)) => array,
            Some(other) => {
                return Err(self
                    .wrong_type(key, "a list of sections", &other)
                    .help(help));
            }
        };
        array
            .into_iter()
            .map(|entry| {
                let at = entry.span();
                match entry.into_inner() {
                    DeValue::Table(table) => {
                        Ok(self.within(format!("[[{path}]]"), key, Some(at), table))
                    }
                    other => Err(self
                        .wrong_type(key, "a list of sections", &other)
                        .help(help.clone())),
                }
            })
            .collect()
    }

    /// Refuses the keys that nobody asked for, with the one that was probably meant.
    pub(super) fn finish(&self) -> Result<(), Fault> {
        let Some((unknown, (at, _))) = self
            .rest
            .iter()
            .min_by_key(|(_, (key_span, _))| key_span.start)
        else {
            return Ok(());
        };
        let known: Vec<&str> = self.asked.keys().copied().collect();
        let name = if looks_like_a_key(unknown) {
            "a field here" // a pasted key may stand where a name belongs
        } else {
            unknown
        };
        let fault = Fault::new(Some(at.clone()), self.field(name), "is not a known setting");
        Err(if let Some(meant) = closest(unknown, &known) {
            fault.help(format!("Did you mean `{meant}`?"))
        } else if ["key", "token", "secret", "password"]
            .iter()
            .any(|word| unknown.to_lowercase().contains(word))
        {
            fault.help(
                "Keys are never kept in this file: `traygate key set PROVIDER` puts one into the \
                 system's keyring, and `key = \"env:NAME\"` takes it from the environment.",
            )
        } else {
            fault.help(format!("Known here: {}.", known.join(", ")))
        })
    }

    /// The type is named, the value is not: it may be a key.
    fn wrong_type(&self, key: &str, wanted: &str, found: &DeValue<'_>) -> Fault {
        let found = match found {
            DeValue::String(_) => "text",
            DeValue::Integer(_) => "a whole number",
            DeValue::Float(_) => "a number",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a section",
        };
        self.fault(key, format!("must be {wanted}, is {found}"))
    }
}

/// An empty pattern would match only a missing name, which nobody means.
pub(super) fn pattern(text: &str) -> Result<Pattern, &'static str> {
    if text.trim().is_empty() {
        return Err("must not be empty; `*` matches everything");
    }
    Ok(Pattern::new(text.trim()))
}

/// Names of settings are short words; a credential is long or has an issuer's beginning.
fn looks_like_a_key(name: &str) -> bool {
    name.len() > 32 || name.starts_with("sk-") || name.starts_with("sk_")
}
