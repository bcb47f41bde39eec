//! The ways one model is named: with a date, a maker's prefix, a router's suffix.

use std::borrow::Cow;

/// Whether a name goes on with another version after the part of it that matched, the first
/// `matched` bytes: `gpt-5.9` is not `gpt-5`, nor is `claude-opus-4-9` `claude-opus-4`.
///
/// Dates and revisions are no version: `-20250929`, `-2024-08-06`, `-05-06`, `-09-2025`, `-001`,
/// `-v1`, and the `-v2:0` and `-v2@…` that clouds append. A size counts as one (`-8b`, `-32k`),
/// since it has a price of its own just as well.
pub(super) fn version_goes_on(name: &str, matched: usize) -> bool {
    // What follows the base model of a fine-tune is the owner's choice: `ft:gpt-4o:my-org-2::id`.
    let end = match name.strip_prefix("ft:").and_then(|base| base.find(':')) {
        Some(base) => ("ft:".len() + base).max(matched),
        None => name.len(),
    };
    let words = words(&name[..end]);
    words.iter().enumerate().any(|(index, word)| {
        word.end > matched
            && word.before != Some(':')
            && !is_cloud_revision(word)
            && !is_in_date(&words, index)
            && (is_version(word.text) || word.start < matched && is_longer_number(word.text))
    })
}

/// A run of letters and digits in a name.
struct Word<'a> {
    text: &'a str,
    start: usize,
    end: usize,
    before: Option<char>,
    after: Option<char>,
}

fn words(name: &str) -> Vec<Word<'_>> {
    name.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|text| !text.is_empty())
        .map(|text| {
            let start = text.as_ptr().addr() - name.as_ptr().addr();
            let end = start + text.len();
            Word {
                text,
                start,
                end,
                before: name[..start].chars().next_back(),
                after: name[end..].chars().next(),
            }
        })
        .collect()
}

/// One or two digits, with no more than two letters on either side: `9`, `v3`, `4o`, `70b`.
fn is_version(word: &str) -> bool {
    let core = word.trim_matches(|c: char| c.is_ascii_alphabetic());
    let letters = |part: &str| part.bytes().take_while(u8::is_ascii_alphabetic).count();
    let backwards: String = word.chars().rev().collect();
    matches!(core.len(), 1 | 2)
        && core.bytes().all(|byte| byte.is_ascii_digit())
        && letters(word) <= 2
        && letters(&backwards) <= 2
}

/// The rest of a number whose beginning matched. One that begins with a zero is a revision, one
/// of four digits or more a date.
fn is_longer_number(word: &str) -> bool {
    word.len() == 3 && word.bytes().all(|byte| byte.is_ascii_digit()) && !word.starts_with('0')
}

fn is_cloud_revision(word: &Word<'_>) -> bool {
    let numbered = word.text.strip_prefix('v').is_some_and(is_digits);
    word.text == "v1" || numbered && matches!(word.after, Some(':' | '@'))
}

/// Whether a word belongs to `2024-08-06`, `05-06` or `09-2025`.
fn is_in_date(words: &[Word<'_>], index: usize) -> bool {
    let text = |at: usize| words.get(at).map_or("", |word| word.text);
    let two = |first: usize| {
        let (first, second) = (text(first), text(first + 1));
        is_month(first) && (is_day(second) || is_year(second))
    };
    // The first of a pair, or the second, behind a year or not.
    two(index) || index.checked_sub(1).is_some_and(two)
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_year(text: &str) -> bool {
    text.len() == 4 && is_digits(text) && text.starts_with("20")
}

fn is_month(text: &str) -> bool {
    text.len() == 2 && matches!(text.parse(), Ok(1..=12_u8))
}

fn is_day(text: &str) -> bool {
    text.len() == 2 && matches!(text.parse(), Ok(1..=31_u8))
}

/// The date that a name ends with, before any `:suffix`: where it begins and ends, and its parts.
struct Date<'a> {
    start: usize,
    end: usize,
    parts: [&'a str; 3],
}

fn date(name: &str) -> Option<Date<'_>> {
    let end = name.find(':').unwrap_or(name.len());
    let tail = |length: usize| {
        let start = end.checked_sub(length)?;
        name.get(start..end).map(|tail| (start, tail))
    };
    fn read(start: usize, end: usize, parts: [&str; 3]) -> Option<Date<'_>> {
        is_date(parts).then_some(Date { start, end, parts })
    }
    let (start, compact) = tail("-20250929".len())?;
    if let Some(digits) = compact.strip_prefix(['-', '@'])
        && is_digits(digits)
    {
        return read(start, end, [&digits[..4], &digits[4..6], &digits[6..]]);
    }
    let (start, dashed) = tail("-2025-09-29".len())?;
    let mut parts = dashed.strip_prefix(['-', '@'])?.split('-');
    read(start, end, [parts.next()?, parts.next()?, parts.next()?])
}

fn is_date([year, month, day]: [&str; 3]) -> bool {
    is_year(year) && is_month(month) && is_day(day)
}

/// A name with its date written out, as price lists have it: `gpt-4o-20240806` becomes
/// `gpt-4o-2024-08-06`. `None` without a date.
pub(super) fn dashed(name: &str) -> Option<String> {
    let date = date(name)?;
    let (before, after) = (&name[..date.start], &name[date.end..]);
    Some(format!("{before}-{}{after}", date.parts.join("-")))
}

/// A name without its date. `None` without a date.
pub(super) fn undated(name: &str) -> Option<String> {
    let date = date(name)?;
    let rest = format!("{}{}", &name[..date.start], &name[date.end..]);
    (!rest.is_empty()).then_some(rest)
}

/// The suffixes by which OpenRouter chooses among a model's hosts or adds a search to it. Its
/// list has the model without them; <https://openrouter.ai/docs/guides/routing/model-variants>.
const ROUTING: &[&str] = &[":nitro", ":floor", ":exacto", ":online"];

/// A name without OpenRouter's routing suffixes.
pub(super) fn unrouted(name: &str) -> &str {
    let mut name = name;
    while let Some(rest) = ROUTING.iter().find_map(|suffix| name.strip_suffix(suffix)) {
        name = rest;
    }
    name
}

/// What a name may stand for in a price list, the most literal first.
pub(super) fn spellings(name: &str) -> impl Iterator<Item = Cow<'_, str>> {
    [
        Some(Cow::Borrowed(name)),
        dashed(name).map(Cow::Owned),
        undated(name).map(Cow::Owned),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_another_model() {
        for (matched, name) in [
            ("gpt-5", "gpt-5.9"),
            ("gpt-5", "gpt-50"),
            ("gpt-5", "gpt-500"),
            ("gpt-5", "gpt-5-1"),
            ("gpt-4", "gpt-4o"),
            ("gpt-4", "gpt-4-32k"),
            ("claude-opus-4", "claude-opus-4-9"),
            ("claude-opus-4", "claude-opus-4-9-20270101"),
            ("claude-haiku-4-5", "claude-haiku-4-5.1"),
            ("deepseek-chat", "deepseek-chat-v9"),
            ("gemini-1.5-flash", "gemini-1.5-flash-8b"),
            ("kimi-k2", "kimi-k2.5"),
            ("ft:gpt-4", "ft:gpt-4-5:my-org::id"),
        ] {
            assert!(
                version_goes_on(name, matched.len()),
                "{name} is not {matched}"
            );
        }
    }

    #[test]
    fn dates_and_revisions_are_no_version() {
        for (matched, name) in [
            ("gpt-5", "gpt-5"),
            ("gpt-5", "gpt-5-2025-08-07"),
            ("gpt-5", "gpt-5-latest"),
            ("claude-sonnet-4-2025", "claude-sonnet-4-20250514"),
            ("claude-sonnet-4-5", "claude-sonnet-4-5-20250929"),
            ("claude-sonnet-4-5", "claude-sonnet-4-5@20250929"),
            ("claude-sonnet-4-5", "claude-sonnet-4-5-20250929-v1:0"),
            ("claude-opus-4-6", "claude-opus-4-6-v1"),
            ("claude-3-5-sonnet", "claude-3-5-sonnet-v2@20241022"),
            (
                "claude-3-5-sonnet-20241022",
                "claude-3-5-sonnet-20241022-v2:0",
            ),
            ("gemini-2.5-pro", "gemini-2.5-pro-preview-05-06"),
            ("gemini-2.5-pro", "gemini-2.5-pro-preview-09-2025"),
            ("gemini-2.0-flash-0", "gemini-2.0-flash-001"),
            ("grok-4", "grok-4-0709"),
            ("ft:gpt-4o-2024-", "ft:gpt-4o-2024-08-06:my-org-2::abc123"),
            ("deepseek-r1", "deepseek-r1-0528"),
        ] {
            assert!(!version_goes_on(name, matched.len()), "{name} is {matched}");
        }
    }

    #[test]
    fn a_date_is_written_out_or_left_off() {
        assert_eq!(
            dashed("gpt-4o-20240806").as_deref(),
            Some("gpt-4o-2024-08-06")
        );
        assert_eq!(
            dashed("a/gpt-4o-20240806:free").as_deref(),
            Some("a/gpt-4o-2024-08-06:free")
        );
        assert_eq!(undated("gpt-4o-2024-08-06").as_deref(), Some("gpt-4o"));
        assert_eq!(
            undated("claude-sonnet-5@20260801").as_deref(),
            Some("claude-sonnet-5")
        );
        for name in [
            "gpt-4o",
            "grok-4-0709",
            "gpt-4o-20241399",
            "x-2025-02-99",
            "20250101",
            "",
            "-20250101",
            "ü-2025-01",
            "gpt-5-12345678",
        ] {
            assert_eq!(undated(name), None, "{name}");
        }
    }

    #[test]
    fn routing_suffixes_come_off() {
        assert_eq!(unrouted("openai/gpt-5:online:nitro"), "openai/gpt-5");
        assert_eq!(unrouted("openai/gpt-5:free"), "openai/gpt-5:free");
    }
}
