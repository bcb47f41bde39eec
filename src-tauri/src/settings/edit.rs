//! Changes single settings in the text of a file; every other byte stays.
//!
//! Works on the text and asks `toml_edit` only where things stand: what it prints anew would lose
//! how a person has set it. A setting that stands commented out is changed where it stands.

use std::collections::VecDeque;
use std::ops::Range;

use toml_edit::{
    Array, ArrayOfTables, Document, DocumentMut, Item, RawString, Table, TableLike, Value,
};

use super::explained::{EXPLANATIONS, commented};

/// One step from the file's top towards a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// `limits`, `rule`.
    Key(String),
    /// The one of a list whose `name` is this.
    Named(String),
    /// The one of a list in this place.
    Nth(usize),
}

/// What the text cannot be changed to without leaving a person's form of it behind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unchangeable;

type Edited = Result<String, Unchangeable>;
type Parsed<'t> = Document<&'t str>;

/// A table or a list, wherever it stands.
enum Found<'d> {
    Table(&'d dyn TableLike),
    /// One that has a header, or dotted keys where `is_dotted`.
    Standard(&'d Table),
    Value(&'d Item),
    List(&'d ArrayOfTables),
}

fn parse(text: &str) -> Result<Parsed<'_>, Unchangeable> {
    Document::parse(text).map_err(|_| Unchangeable)
}

fn find<'d>(document: &'d Parsed<'_>, path: &[Step]) -> Option<Found<'d>> {
    let mut found = Found::Standard(document.as_table());
    for step in path {
        found = match (found, step) {
            (Found::Table(table), Step::Key(key)) => of_item(table.get(key)?),
            (Found::Standard(table), Step::Key(key)) => of_item(table.get(key)?),
            (Found::List(list), Step::Named(name)) => {
                let mut tables = list.iter();
                Found::Standard(tables.find(|table| is_named(*table, name))?)
            }
            (Found::List(list), Step::Nth(at)) => Found::Standard(list.get(*at)?),
            (Found::Value(item), Step::Named(name)) => {
                let mut tables = item.as_array()?.iter().filter_map(Value::as_inline_table);
                Found::Table(tables.find(|table| is_named(*table, name))?)
            }
            (Found::Value(item), Step::Nth(at)) => {
                Found::Table(item.as_array()?.get(*at)?.as_inline_table()?)
            }
            _ => return None,
        };
    }
    Some(found)
}

fn of_item(item: &Item) -> Found<'_> {
    match item {
        Item::Table(table) => Found::Standard(table),
        Item::ArrayOfTables(list) => Found::List(list),
        Item::Value(Value::InlineTable(table)) => Found::Table(table),
        _ => Found::Value(item),
    }
}

fn is_named(table: &dyn TableLike, name: &str) -> bool {
    table.get("name").and_then(Item::as_str) == Some(name)
}

/// The same place in a document that can be changed, for what stands on one line with others.
fn table_mut<'d>(table: &'d mut dyn TableLike, path: &[Step]) -> Option<&'d mut dyn TableLike> {
    match path {
        [] => Some(table),
        [Step::Key(key), rest @ ..] => below_mut(table.get_mut(key)?, rest),
        _ => None,
    }
}

fn below_mut<'d>(item: &'d mut Item, path: &[Step]) -> Option<&'d mut dyn TableLike> {
    let place = |step: &Step, names: Vec<bool>| match step {
        Step::Nth(at) => Some(*at),
        Step::Named(_) => names.into_iter().position(|is_it| is_it),
        Step::Key(_) => None,
    };
    match (item, path) {
        (item, [] | [Step::Key(_), ..]) => table_mut(item.as_table_like_mut()?, path),
        (Item::ArrayOfTables(list), [step, rest @ ..]) => {
            let names = list.iter().map(|table| is_it(table, step)).collect();
            table_mut(list.get_mut(place(step, names)?)?, rest)
        }
        (Item::Value(Value::Array(list)), [step, rest @ ..]) => {
            let names = list.iter().map(|value| is_inline(value, step)).collect();
            let table = list.get_mut(place(step, names)?)?;
            table_mut(table.as_inline_table_mut()?, rest)
        }
        _ => None,
    }
}

fn is_it(table: &dyn TableLike, step: &Step) -> bool {
    matches!(step, Step::Named(name) if is_named(table, name))
}

fn is_inline(value: &Value, step: &Step) -> bool {
    value
        .as_inline_table()
        .is_some_and(|table| is_it(table, step))
}

/// The list at `path`, where it is a value.
fn array_mut<'d>(document: &'d mut DocumentMut, path: &[Step]) -> Option<&'d mut Array> {
    let (last, above) = path.split_last()?;
    let Step::Key(key) = last else { return None };
    table_mut(document.as_table_mut(), above)?
        .get_mut(key)?
        .as_array_mut()
}

/// The line that `at` is in, without its end.
fn line_of(text: &str, at: usize) -> Range<usize> {
    let start = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let end = text[at..].find('\n').map_or(text.len(), |end| at + end);
    let end = if text[start..end].ends_with('\r') {
        end - 1
    } else {
        end
    };
    start..end
}

/// Where the next line begins.
fn after_line(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |end| at + end + 1)
}

fn newline(text: &str) -> &'static str {
    if text.contains("\r\n") { "\r\n" } else { "\n" }
}

fn splice(text: &str, range: Range<usize>, with: &str) -> String {
    [&text[..range.start], with, &text[range.end..]].concat()
}

/// A table's header; one that is only there because of what is below it, or written with dotted
/// keys, has none.
fn header_of(table: &Table) -> Option<Range<usize>> {
    table
        .span()
        .filter(|_| !table.is_implicit() && !table.is_dotted())
}

/// Where the tables with a header begin, in order.
fn headers(document: &Parsed<'_>) -> Vec<usize> {
    fn walk(table: &Table, found: &mut Vec<usize>) {
        found.extend(header_of(table).map(|header| header.start));
        for (_, item) in table.iter() {
            match item {
                Item::Table(table) => walk(table, found),
                Item::ArrayOfTables(list) => list.iter().for_each(|table| walk(table, found)),
                Item::None | Item::Value(_) => {}
            }
        }
    }
    let mut found = Vec::new();
    for (_, item) in document.as_table().iter() {
        match item {
            Item::Table(table) => walk(table, &mut found),
            Item::ArrayOfTables(list) => list.iter().for_each(|table| walk(table, &mut found)),
            Item::None | Item::Value(_) => {}
        }
    }
    found.sort_unstable();
    found
}

/// Where the last of a table's own settings ends, or its header.
fn end_of(table: &Table) -> Option<usize> {
    let header = header_of(table);
    let own = table.iter().filter_map(|(_, item)| match item {
        Item::Value(value) => value.span().map(|span| span.end),
        Item::Table(table) if table.is_dotted() => end_of(table),
        _ => None,
    });
    own.max().or(header.map(|span| span.end))
}

/// Where a table's own settings and all that belongs to it end.
fn whole_end_of(table: &Table) -> Option<usize> {
    let below = table.iter().filter_map(|(_, item)| match item {
        Item::Table(table) => whole_end_of(table),
        Item::ArrayOfTables(list) => list.iter().filter_map(whole_end_of).max(),
        _ => None,
    });
    below.chain(end_of(table)).max()
}

/// The lines that may hold settings of this table that are commented out.
fn region(text: &str, document: &Parsed<'_>, header: &Range<usize>) -> Range<usize> {
    let start = after_line(text, header.end);
    let next = headers(document).into_iter().find(|at| *at > header.start);
    let end = next.unwrap_or(text.len());
    // Another table that is commented out as a whole has settings of its own.
    let other = lines(text, start..end).find(|line| text[line.clone()].starts_with("#["));
    start..other.map_or(end, |line| line.start)
}

/// Each line within, without its end.
fn lines(text: &str, within: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = within.start;
    std::iter::from_fn(move || {
        (at < within.end).then(|| {
            let line = line_of(text, at);
            at = after_line(text, at);
            line
        })
    })
}

/// The name by which the default file knows this table.
fn explained_as(path: &[Step]) -> Option<String> {
    match path {
        [Step::Key(section)] => Some(section.clone()),
        [Step::Key(list), Step::Named(name)] if list == "provider" => {
            Some(format!("provider.{name}"))
        }
        _ => None,
    }
}

/// Whether there is a table or list at `path`.
///
/// # Errors
/// The text is not TOML.
pub(super) fn has(text: &str, path: &[Step]) -> Result<bool, Unchangeable> {
    let document = parse(text)?;
    Ok(match find(&document, path) {
        // Only there because of what is below it: it has no place of its own.
        Some(Found::Standard(table)) => header_of(table).is_some() || table.is_dotted(),
        found => found.is_some(),
    })
}

/// Whether a table is at `path`, in whatever form.
///
/// # Errors
/// The text is not TOML.
pub(super) fn is_table(text: &str, path: &[Step]) -> Result<bool, Unchangeable> {
    let document = parse(text)?;
    let found = find(&document, path);
    Ok(matches!(found, Some(Found::Table(_) | Found::Standard(_))))
}

/// Gives a setting this value.
///
/// # Errors
/// There is no table at `path`, or not one that can be changed.
pub(super) fn set(text: &str, path: &[Step], key: &str, value: &Value) -> Edited {
    let document = parse(text)?;
    let found = find(&document, path).ok_or(Unchangeable)?;
    let old = match &found {
        Found::Standard(table) => table.get(key),
        Found::Table(table) => table.get(key),
        Found::Value(_) | Found::List(_) => return Err(Unchangeable),
    };
    match (old, found) {
        (Some(Item::Value(old)), _) => replace(text, old, value),
        (Some(Item::Table(_) | Item::ArrayOfTables(_)), _) => Err(Unchangeable),
        (_, Found::Standard(table)) if header_of(table).is_some() => {
            insert(text, &document, table, path, key, value)
        }
        _ => {
            let mut document: DocumentMut = text.parse().map_err(|_| Unchangeable)?;
            let table = table_mut(document.as_table_mut(), path).ok_or(Unchangeable)?;
            table.insert(key, Item::Value(value.clone()));
            Ok(document.to_string())
        }
    }
}

/// Puts one value where another was.
fn replace(text: &str, old: &Value, value: &Value) -> Edited {
    let span = old.span().ok_or(Unchangeable)?;
    let written = &text[span.clone()];
    if let (Value::Array(_), Value::Array(new)) = (old, value)
        && written.contains('#')
        && let Some(merged) = merged(written, new)
    {
        return Ok(splice(text, span, &merged));
    }
    Ok(splice(text, span, value.to_string().trim()))
}

/// A list over several lines with comments: what stays keeps its place and its comments, and the
/// comments of what goes stay too.
fn merged(old: &str, new: &Array) -> Option<String> {
    let assignment: DocumentMut = format!("x = {old}").parse().ok()?;
    let old = assignment.get("x")?.as_array()?;
    let bare = |value: &Value| value.clone().decorated("", "").to_string();
    let text_of = |raw: Option<&RawString>| -> String {
        raw.and_then(RawString::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let mut merged = Array::new();
    let mut comments = String::new();
    let push_new = |merged: &mut Array, comments: &mut String, value: &Value| {
        let prefix = std::mem::take(comments).trim_end_matches('\n').to_owned() + "\n    ";
        merged.push_formatted(value.clone().decorated(&prefix, ""));
    };
    let mut wanted: VecDeque<&Value> = new.iter().collect();
    for value in old.iter() {
        let decor = value.decor();
        let (prefix, suffix) = (text_of(decor.prefix()), text_of(decor.suffix()));
        let place = wanted.iter().position(|new| bare(new) == bare(value));
        if let Some(place) = place {
            for new in wanted.drain(..place) {
                push_new(&mut merged, &mut comments, new);
            }
            wanted.pop_front();
            let prefix = std::mem::take(&mut comments) + &prefix;
            merged.push_formatted(value.clone().decorated(&prefix, &suffix));
        } else {
            for part in [prefix, suffix].iter().filter(|part| part.contains('#')) {
                comments.push_str(part.trim_end());
                comments.push('\n');
            }
        }
    }
    for new in wanted {
        push_new(&mut merged, &mut comments, new);
    }
    comments.push_str(&text_of(Some(old.trailing())));
    merged.set_trailing(comments);
    merged.set_trailing_comma(!merged.is_empty());
    Some(merged.to_string().trim().to_owned())
}

/// A setting that the table does not have yet: where it stands commented out, else at its end.
fn insert(
    text: &str,
    document: &Parsed<'_>,
    table: &Table,
    path: &[Step],
    key: &str,
    value: &Value,
) -> Edited {
    let header = header_of(table).ok_or(Unchangeable)?;
    let line = format!(
        "{} = {}",
        toml_edit::Key::new(key),
        value.to_string().trim()
    );
    let place = lines(text, region(text, document, &header)).find_map(|place| {
        let (name, old) = commented(&text[place.clone()])?;
        // A comment after the value stays.
        let assignment = format!("x = {old}");
        let parsed = Document::parse(assignment.as_str()).ok()?;
        let end = parsed.get("x")?.span()?.end;
        (name == key).then(|| (place, assignment[end..].trim_end().to_owned()))
    });
    if let Some((place, rest)) = place {
        let edited = splice(text, place.clone(), &(line.clone() + &rest));
        // A line within a text of several lines looks like a comment and is none.
        let has_it = |text: &str| {
            let document = parse(text).ok()?;
            let Found::Standard(table) = find(&document, path)? else {
                return None;
            };
            Some(table.get(key)?.span()?.start > place.start)
        };
        if has_it(&edited) == Some(true) {
            return Ok(edited);
        }
    }
    let last = line_of(text, end_of(table).ok_or(Unchangeable)?);
    Ok(splice(
        text,
        last.end..last.end,
        &format!("{}{line}", newline(text)),
    ))
}

/// Takes a setting out. One that the default file shows is commented out, with its default; the
/// comments around any other stay.
///
/// # Errors
/// As [`set`].
pub(super) fn take_out(text: &str, path: &[Step], key: &str) -> Edited {
    let document = parse(text)?;
    match find(&document, path).ok_or(Unchangeable)? {
        Found::Standard(table) => match table.get(key) {
            None => Ok(text.to_owned()),
            Some(Item::Value(value)) => {
                let key_span = table.key(key).and_then(toml_edit::Key::span);
                let (Some(key_span), Some(span)) = (key_span, value.span()) else {
                    return Err(Unchangeable);
                };
                let shown = explained_as(path)
                    .and_then(|section| EXPLANATIONS.field(&section, key))
                    .map(|shown| format!("#{key} = {}", shown.default));
                let shown = shown.filter(|shown| {
                    let header = header_of(table);
                    let own = header.map(|header| region(text, &document, &header));
                    own.is_some_and(|own| lines(text, own).all(|line| text[line] != **shown))
                });
                Ok(comment_out(text, key_span.start, span.end, shown))
            }
            Some(_) => take_out_table(text, &[path, &[Step::Key(key.to_owned())]].concat()),
        },
        Found::Table(table) if table.get(key).is_none() => Ok(text.to_owned()),
        Found::Table(_) => {
            let mut document: DocumentMut = text.parse().map_err(|_| Unchangeable)?;
            table_mut(document.as_table_mut(), path)
                .ok_or(Unchangeable)?
                .remove(key);
            Ok(document.to_string())
        }
        Found::Value(_) | Found::List(_) => Err(Unchangeable),
    }
}

/// Every setting of a table. Its header stays: an empty table says nothing.
fn take_out_table(text: &str, path: &[Step]) -> Edited {
    let document = parse(text)?;
    let keys: Vec<String> = match find(&document, path) {
        Some(Found::Standard(table)) => table.iter().map(|(key, _)| key.to_owned()).collect(),
        _ => return Err(Unchangeable),
    };
    keys.iter()
        .try_fold(text.to_owned(), |text, key| take_out(&text, path, key))
}

/// Takes the lines of a setting away, or leaves `instead`; a comment after it stays.
fn comment_out(text: &str, key: usize, end: usize, instead: Option<String>) -> String {
    let start = line_of(text, key).start;
    let value = &text[start..end];
    let last = line_of(text, end);
    let rest = text[end..last.end].trim();
    if value.contains('\n') && value.contains('#') {
        // The comments within it would go with it.
        let commented: Vec<String> = value.lines().map(|line| format!("#{line}")).collect();
        return splice(text, start..end, &commented.join(newline(text)));
    }
    match (instead, rest) {
        (Some(instead), "") => splice(text, start..last.end, &instead),
        (Some(instead), rest) => splice(text, start..last.end, &format!("{instead} {rest}")),
        (None, "") => splice(text, start..after_line(text, end), ""),
        (None, rest) => splice(text, start..last.end, rest),
    }
}

/// Takes one of a list of tables away with all its settings; comments stay. A shipped provider is
/// commented out, as the default file has it.
///
/// # Errors
/// As [`set`].
pub(super) fn remove(text: &str, list: &[Step], which: &Step) -> Edited {
    let path = [list, std::slice::from_ref(which)].concat();
    let document = parse(text)?;
    if !matches!(find(&document, list), Some(Found::List(_))) {
        let mut document: DocumentMut = text.parse().map_err(|_| Unchangeable)?;
        let array = array_mut(&mut document, list).ok_or(Unchangeable)?;
        let place = match which {
            Step::Nth(at) => Some(*at),
            which => array.iter().position(|value| is_inline(value, which)),
        };
        array.remove(place.ok_or(Unchangeable)?);
        return Ok(document.to_string());
    }
    let Some(Found::Standard(table)) = find(&document, &path) else {
        return Err(Unchangeable);
    };
    let mut keys: Vec<String> = table.iter().map(|(key, _)| key.to_owned()).collect();
    // Its name last: the others are found by it.
    keys.sort_by_key(|key| key == "name");
    let header = header_of(table).ok_or(Unchangeable)?;
    let is_shipped =
        explained_as(&path).is_some_and(|section| EXPLANATIONS.field(&section, "name").is_some());
    let mut text = text.to_owned();
    for key in keys.iter().filter(|key| *key != "name") {
        let document = parse(&text)?;
        let Some(Found::Standard(table)) = find(&document, &path) else {
            return Err(Unchangeable);
        };
        let sub_header = match table.get(key) {
            Some(Item::Table(sub)) => header_of(sub),
            _ => None,
        };
        let emptied = take_out(&text, &path, key)?;
        // What belongs to it begins after its header, which stays where it was.
        text = match sub_header {
            Some(sub) => comment_out(&emptied, sub.start, sub.end, None),
            None => emptied,
        };
    }
    let document = parse(&text)?;
    let Some(Found::Standard(table)) = find(&document, &path) else {
        return Err(Unchangeable);
    };
    if let Some(name) = table.get("name").and_then(Item::span) {
        let line = line_of(&text, name.start);
        text = match is_shipped {
            true => splice(&text, line.start..line.start, "#"),
            false => comment_out(&text, line.start, name.end, None),
        };
    }
    if is_shipped {
        return Ok(splice(&text, header.start..header.start, "#"));
    }
    let text = comment_out(&text, header.start, header.end, None);
    // The empty line that set it apart goes with it.
    let start = line_of(&text, header.start).start;
    let blank = |line: Range<usize>| text[line].trim().is_empty();
    let above = (start > 0).then(|| line_of(&text, start - 1));
    if let Some(above) = above.filter(|line| blank(line.clone()))
        && (start >= text.len() || blank(line_of(&text, start)))
    {
        return Ok(splice(&text, above.start..start, ""));
    }
    Ok(text)
}

/// Adds a section without settings.
pub(super) fn add_section(text: &str, name: &str) -> String {
    at_end(text, &format!("[{name}]"))
}

/// Adds one to a list of tables, after its other ones, or where the file shows how one is written.
/// `lines` are its settings.
///
/// # Errors
/// The list is written in another form.
pub(super) fn add(text: &str, list: &[&str], settings: &[(String, Value)]) -> Edited {
    let newline = newline(text);
    let name = list.join(".");
    let header = format!("[[{name}]]");
    let mut block = header.clone();
    for (key, value) in settings {
        block.push_str(newline);
        block.push_str(&format!(
            "{} = {}",
            toml_edit::Key::new(key.as_str()),
            value.to_string().trim()
        ));
    }
    let document = parse(text)?;
    let path: Vec<Step> = list
        .iter()
        .map(|key| Step::Key((*key).to_owned()))
        .collect();
    let others = match find(&document, &path) {
        None => None,
        Some(Found::List(others)) => Some(others),
        Some(Found::Value(_)) => return add_inline(text, &path, settings),
        Some(Found::Table(_) | Found::Standard(_)) => return Err(Unchangeable),
    };
    let last = others.and_then(|others| others.iter().filter_map(whole_end_of).max());
    let whole = || lines(text, 0..text.len());
    let place = match last {
        Some(last) => Some(line_of(text, last).end),
        // The last one that is commented out, else the example.
        None => [format!("#{header}"), format!("#   {header}")]
            .iter()
            .find_map(|shown| whole().filter(|line| text[line.clone()] == **shown).last())
            .map(|line| line.end),
    };
    let place = place.map(|end| {
        let belongs = |line: &Range<usize>| {
            let line = &text[line.clone()];
            commented(line).is_some() || line.starts_with("#   ")
        };
        let below = lines(text, after_line(text, end)..text.len());
        below
            .take_while(belongs)
            .last()
            .map_or(end, |line| line.end)
    });
    if let Some(place) = place {
        let edited = splice(text, place..place, &format!("{newline}{newline}{block}"));
        if changes_nothing_else(text, &edited, &name) {
            return Ok(edited);
        }
    }
    Ok(at_end(text, &block))
}

fn add_inline(text: &str, path: &[Step], settings: &[(String, Value)]) -> Edited {
    let mut document: DocumentMut = text.parse().map_err(|_| Unchangeable)?;
    let array = array_mut(&mut document, path).ok_or(Unchangeable)?;
    let table = settings
        .iter()
        .map(|(key, value)| (key.as_str(), value.clone()));
    array.push(Value::InlineTable(table.collect()));
    Ok(document.to_string())
}

/// Makes a shipped provider that stands commented out a live one without settings but its name.
pub(super) fn uncomment_provider(text: &str, name: &str) -> Option<String> {
    let name = format!("#name = \"{name}\"");
    let mut all = lines(text, 0..text.len());
    let mut header = None;
    let place = all.find_map(|line| {
        let above = header.replace(line.clone());
        let above = above.filter(|above: &Range<usize>| text[above.clone()] == *"#[[provider]]");
        above
            .filter(|_| text[line.clone()] == name)
            .map(|above| (above, line))
    });
    let (header, line) = place?;
    let edited = splice(text, line.start..line.start + 1, "");
    let edited = splice(&edited, header.start..header.start + 1, "");
    changes_nothing_else(text, &edited, "provider").then_some(edited)
}

fn at_end(text: &str, block: &str) -> String {
    let newline = newline(text);
    let apart = match text {
        "" => "",
        text if text.ends_with('\n') => newline,
        _ => &[newline, newline].concat(),
    };
    [text, apart, block, newline].concat()
}

/// Whether all but the list `name` reads as before: settings that stood below a new header would
/// belong to it.
fn changes_nothing_else(before: &str, after: &str, name: &str) -> bool {
    let without = |text: &str| {
        let mut all: toml::Table = text.parse().ok()?;
        let list = match name.split_once('.') {
            Some((above, list)) => all.get_mut(above)?.as_table_mut()?.remove(list),
            None => all.remove(name),
        };
        if let Some((above, _)) = name.split_once('.')
            && all.get(above)?.as_table()?.is_empty()
        {
            all.remove(above);
        }
        Some((all, list))
    };
    let length = |list: Option<toml::Value>| {
        list.and_then(|list| list.as_array().map(Vec::len))
            .unwrap_or(0)
    };
    let (Some((before, old)), Some((after, new))) = (
        without(before).or_else(|| Some((before.parse().ok()?, None))),
        without(after),
    ) else {
        return false;
    };
    format!("{before:?}") == format!("{after:?}") && length(new) == length(old) + 1
}
