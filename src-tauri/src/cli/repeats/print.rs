//! Prints what was reckoned: as a table, CSV or JSON.

use std::fmt::Write as _;

use jiff::tz::TimeZone;
use serde::Serialize;

use super::Format;
use super::conversations::Found;
use crate::cli::calls::{HarmlessJson, cut, moment, spreadsheet_safe};
use crate::clock::WallTime;
use crate::policy::repeats::WINDOWS;
use crate::store::repeats::{NamedShare, RepeatShare, RepeatedKey, Repeats, WindowShare, ratio};

/// Tools and models that the table has room for.
const NAMED: usize = 15;

/// Of the record: callers are tools.
pub(super) fn of_record(repeats: &Repeats, format: Format, zone: &TimeZone) -> String {
    match format {
        Format::Table => {
            let mut text = Table::new(repeats, zone, "calls", "tool").text;
            if repeats.without_key > 0 {
                let _ = writeln!(
                    text,
                    "\n{} more calls cannot be repeats (lists of models, uploads and the like).",
                    repeats.without_key
                );
            }
            text
        }
        Format::Csv => csv(repeats),
        Format::Json => json(repeats),
    }
}

/// Of a file: callers are users.
pub(super) fn of_file(found: &Found, format: Format, zone: &TimeZone) -> String {
    match format {
        Format::Table => {
            let mut text = Table::new(&found.repeats, zone, "turns", "user").text;
            let _ = write!(text, "\n{} rows were read", found.rows);
            if found.unread > 0 {
                let _ = write!(text, ", {} could not be", found.unread);
            }
            text.push_str(".\n");
            for unread in &found.first_unread {
                let reason = cut(&unread.reason, 100);
                let _ = writeln!(text, "  row {}: {reason}", unread.row);
            }
            text
        }
        Format::Csv => csv(&found.repeats),
        Format::Json => json(found),
    }
}

struct Table<'a> {
    text: String,
    zone: &'a TimeZone,
}

impl<'a> Table<'a> {
    fn new(repeats: &Repeats, zone: &'a TimeZone, calls: &str, caller: &str) -> Self {
        let mut table = Self {
            text: String::new(),
            zone,
        };
        table.head(repeats, calls);
        table.share(&format!("all {calls}"), &repeats.all);
        let same = |window: &WindowShare| ratio(window.same_caller, window.repeats);
        let same = repeats.all.windows.iter().map(same);
        table.line(&format!("of them of the same {caller}"), "", same);
        for (title, shares) in [
            ("by tool", &repeats.by_tool),
            ("by model", &repeats.by_model),
        ] {
            table.shares(title, shares);
        }
        table.most(&repeats.most_repeated);
        table
    }

    fn head(&mut self, repeats: &Repeats, calls: &str) {
        let _ = write!(self.text, "{} {calls}", repeats.all.calls);
        if let (Some(first), Some(last)) = (repeats.first, repeats.last) {
            let [first, last] = [self.time(first), self.time(last)];
            let _ = write!(self.text, " from {first} to {last}");
        }
        self.text.push_str(
            ". Shares that repeat an earlier one,\nwhich came at most so long before:\n\n",
        );
        let titles = WINDOWS.map(|window| match window.name {
            "all" => "ALL TIME".to_owned(),
            name => name.to_uppercase(),
        });
        self.columns("", &calls.to_uppercase(), titles);
    }

    fn share(&mut self, name: &str, share: &RepeatShare) {
        let shares = share.windows.iter().map(|window| window.share);
        self.line(name, &share.calls.to_string(), shares);
    }

    fn line(&mut self, name: &str, calls: &str, shares: impl Iterator<Item = f64>) {
        self.columns(name, calls, shares.map(percent));
    }

    fn columns(&mut self, name: &str, calls: &str, cells: impl IntoIterator<Item = String>) {
        let name = cut(name, 32);
        let _ = write!(self.text, "{name:<32}  {calls:>10}");
        for cell in cells {
            let _ = write!(self.text, "  {cell:>8}");
        }
        self.text.truncate(self.text.trim_end().len());
        self.text.push('\n');
    }

    fn shares(&mut self, title: &str, shares: &[NamedShare]) {
        if shares.is_empty() {
            return;
        }
        let _ = writeln!(self.text, "\n{}", title.to_uppercase());
        for named in shares.iter().take(NAMED) {
            self.share(&named.name, &named.share);
        }
        if let Some(more) = shares.len().checked_sub(NAMED).filter(|more| *more > 0) {
            let _ = writeln!(self.text, "… and {more} more: --format csv has them all");
        }
    }

    fn most(&mut self, most: &[RepeatedKey]) {
        if most.is_empty() {
            return;
        }
        self.text.push_str("\nMOST REPEATED\n");
        for key in most {
            let [first, last] = [key.first, key.last]
                .map(|time| time.map_or_else(|| "-".to_owned(), |time| self.time(time)));
            let names = [&key.tool, &key.model].into_iter().flatten();
            let names = names.map(|name| cut(name, 24)).collect::<Vec<_>>();
            let _ = writeln!(
                self.text,
                "{:>8} ×  {}  {first} … {last}  {}",
                key.calls,
                &key.key[..16],
                names.join(", ")
            );
            self.text.truncate(self.text.trim_end().len());
            self.text.push('\n');
            if let Some(words) = &key.first_words {
                let _ = writeln!(self.text, "            > {}", cut(words, 100));
            }
        }
    }

    fn time(&self, time: WallTime) -> String {
        let time = moment(time).to_zoned_datetime(self.zone.clone());
        time.strftime("%Y-%m-%d %H:%M").to_string()
    }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// The lines of the CSV. `scope` is `all`, `tool`, `model` or `key`.
#[derive(Default, Serialize)]
struct Line<'a> {
    scope: &'a str,
    name: &'a str,
    window: &'a str,
    calls: u64,
    repeats: u64,
    share: f64,
    same_caller: Option<u64>,
    tool: Option<&'a str>,
    model: Option<&'a str>,
    first: Option<String>,
    last: Option<String>,
}

fn csv(repeats: &Repeats) -> String {
    let mut writer = csv::Writer::from_writer(Vec::new());
    // Into memory: nothing here can fail.
    let mut write = |line: Line<'_>| writer.serialize(line).expect("a line is plain data");
    let mut shares = |scope, name: &str, share: &RepeatShare| {
        for window in &share.windows {
            write(Line {
                scope,
                name: &spreadsheet_safe(name),
                window: window.window,
                calls: share.calls,
                repeats: window.repeats,
                share: window.share,
                same_caller: Some(window.same_caller),
                ..Line::default()
            });
        }
    };
    shares("all", "", &repeats.all);
    for (scope, named) in [("tool", &repeats.by_tool), ("model", &repeats.by_model)] {
        for named in named {
            shares(scope, &named.name, &named.share);
        }
    }
    for key in &repeats.most_repeated {
        let [tool, model] =
            [&key.tool, &key.model].map(|name| name.as_deref().map(spreadsheet_safe));
        let [first, last] = [key.first, key.last].map(|time| Some(moment(time?).to_string()));
        write(Line {
            scope: "key",
            name: &key.key,
            window: "all",
            calls: key.calls,
            repeats: key.calls - 1,
            share: ratio(key.calls - 1, key.calls),
            same_caller: None,
            tool: tool.as_deref(),
            model: model.as_deref(),
            first,
            last,
        });
    }
    let bytes = writer.into_inner().expect("a Vec takes all");
    String::from_utf8(bytes).expect("fields are UTF-8")
}

fn json(value: &impl Serialize) -> String {
    let mut line = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut line, HarmlessJson);
    // Strings and numbers into memory: nothing here can fail.
    value.serialize(&mut serializer).expect("it is plain data");
    line.push(b'\n');
    String::from_utf8(line).expect("JSON is UTF-8")
}
