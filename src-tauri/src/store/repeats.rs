//! How many calls on record repeat an earlier one.

use std::collections::HashMap;

use rusqlite::types::Value;
use rusqlite::{OptionalExtension as _, Row, params_from_iter};
use serde::Serialize;
use utoipa::ToSchema;

use super::json;
use super::queries::{CallFilter, KeyPrefix, Query, ReadError, Reader};
use crate::clock::WallTime;
use crate::policy::repeats::{Apart, Key, Reckoning, Tally, Turn, WINDOWS};

/// Names of tools and models that are told apart; what comes later is counted as [`OTHER`]. They
/// come from clients, so nothing else bounds their number.
const MAX_NAMES: usize = 10_000;
/// The name of all that came after too many.
pub const OTHER: &str = "other";
/// The name where none is known.
pub const UNKNOWN: &str = "unknown";

/// Which calls are looked at. Both a repeat and the call that it repeats are among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepeatsQuery {
    /// Which calls.
    pub filter: CallFilter,
    /// How many of the most repeated keys are named.
    pub most: usize,
}

impl Default for RepeatsQuery {
    fn default() -> Self {
        Self {
            filter: CallFilter::default(),
            most: 20,
        }
    }
}

/// What share of calls repeat an earlier one.
///
/// A call repeats an earlier one that has the same key, within a window if the latest such call
/// came at most so long before it. Joined and cached calls are calls.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Repeats {
    /// When the first of the calls came; none if there are none, or none has a time.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub first: Option<WallTime>,
    /// When the last of them came.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last: Option<WallTime>,
    /// Calls that have no key and are not counted: those that cannot be repeated (lists of models,
    /// uploads) or were larger than is read.
    pub without_key: u64,
    /// All of them together.
    pub all: RepeatShare,
    /// Tool by tool, most calls first. Empty for a file, which names users.
    pub by_tool: Vec<NamedShare>,
    /// Model by model, most calls first.
    pub by_model: Vec<NamedShare>,
    /// The keys that came most often, most first.
    pub most_repeated: Vec<RepeatedKey>,
}

/// The share of some calls that repeat an earlier one.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct RepeatShare {
    /// The calls.
    pub calls: u64,
    /// By window: `5m`, `1h`, `24h` and `all`, in this order.
    pub windows: Vec<WindowShare>,
}

/// A [`RepeatShare`] with its name.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct NamedShare {
    /// The tool's or model's name; `unknown` without one, `other` for all that came after the
    /// first 10,000 names.
    pub name: String,
    /// Its share.
    #[serde(flatten)]
    pub share: RepeatShare,
}

/// What repeats an earlier call that came at most so long before.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct WindowShare {
    /// `5m`, `1h`, `24h` or `all`.
    pub window: &'static str,
    /// Calls that repeat an earlier one.
    pub repeats: u64,
    /// Their share of the calls whose time is known (for `all`, of all calls), 0 to 1.
    pub share: f64,
    /// Those of them whose latest earlier call came from the same tool; in a file of
    /// conversations, from the same user.
    pub same_caller: u64,
}

/// A key that several calls had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RepeatedKey {
    /// The first half of the request key, in hex: enough to ask for its calls by.
    pub key: String,
    /// How many calls had it.
    pub calls: u64,
    /// The tool of the latest; none in a file of conversations.
    pub tool: Option<String>,
    /// The model of the latest.
    pub model: Option<String>,
    /// When the first came.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub first: Option<WallTime>,
    /// When the latest came.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last: Option<WallTime>,
    /// How the request begins, where its body was kept.
    pub first_words: Option<String>,
}

/// Numbers for names, given out in the order in which they come; at most [`MAX_NAMES`].
#[derive(Debug)]
pub(crate) struct Names {
    numbers: HashMap<String, u32>,
    names: Vec<String>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            numbers: HashMap::new(),
            names: vec![OTHER.to_owned(), UNKNOWN.to_owned()],
        }
    }
}

impl Names {
    /// Of two that came after too many nobody knows whether they are the same.
    const OTHER: u32 = Turn::NOBODY;
    const UNKNOWN: u32 = 1;

    pub(crate) fn number(&mut self, name: Option<&str>) -> u32 {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Self::UNKNOWN;
        };
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        if self.numbers.len() >= MAX_NAMES {
            return Self::OTHER;
        }
        let number = u32::try_from(self.names.len()).unwrap_or(Self::OTHER);
        self.names.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    fn name(&self, number: u32) -> &str {
        let place = usize::try_from(number).unwrap_or(usize::MAX);
        self.names.get(place).map_or(OTHER, String::as_str)
    }

    /// The name, if it is one and not the lack of one.
    fn known(&self, number: u32) -> Option<String> {
        (number != Self::UNKNOWN).then(|| self.name(number).to_owned())
    }

    /// A client may call itself `other` or `unknown`: its calls join those that are.
    fn shares(&self, tallies: HashMap<u32, Tally>) -> Vec<NamedShare> {
        let mut by_name: HashMap<&str, Tally> = HashMap::new();
        for (number, tally) in tallies {
            let sum = by_name.entry(self.name(number)).or_default();
            sum.calls += tally.calls;
            sum.timed += tally.timed;
            for (sum, repeated) in sum.repeats.iter_mut().zip(tally.repeats) {
                sum.calls += repeated.calls;
                sum.same_caller += repeated.same_caller;
            }
        }
        let mut shares: Vec<NamedShare> = by_name
            .into_iter()
            .map(|(name, tally)| NamedShare {
                name: name.to_owned(),
                share: RepeatShare::of(&tally),
            })
            .collect();
        shares.sort_by(|a, b| {
            let most_first = b.share.calls.cmp(&a.share.calls);
            most_first.then_with(|| a.name.cmp(&b.name))
        });
        shares
    }
}

impl RepeatShare {
    fn of(tally: &Tally) -> Self {
        let windows = WINDOWS.iter().zip(tally.repeats).map(|(window, repeated)| {
            let whole = if window.within.is_some() {
                tally.timed
            } else {
                tally.calls
            };
            WindowShare {
                window: window.name,
                repeats: repeated.calls,
                share: ratio(repeated.calls, whole),
                same_caller: repeated.same_caller,
            }
        });
        Self {
            calls: tally.calls,
            windows: windows.collect(),
        }
    }
}

/// Zero of nothing.
pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "a share needs no 53 bits")]
    let ratio = part as f64 / whole as f64;
    ratio
}

impl Repeats {
    /// Reckons over `turns`. `tools` are the names of callers, where callers are tools.
    pub(crate) fn reckon(
        turns: &mut [Turn],
        tools: Option<&Names>,
        models: &Names,
        most: usize,
    ) -> Self {
        let apart = match tools {
            Some(_) => Apart::ModelsAndCallers,
            None => Apart::Models,
        };
        let reckoning = Reckoning::of(turns, apart, most);
        let most_repeated = reckoning.most.iter().map(|most| RepeatedKey {
            key: most.key().to_string(),
            calls: most.calls,
            tool: tools.and_then(|tools| tools.known(most.last.caller)),
            model: models.known(most.last.model),
            first: most.first.at().map(WallTime),
            last: most.last.at().map(WallTime),
            first_words: None,
        });
        Self {
            first: reckoning.span.map(|(first, _)| WallTime(first)),
            last: reckoning.span.map(|(_, last)| WallTime(last)),
            without_key: 0,
            all: RepeatShare::of(&reckoning.all),
            most_repeated: most_repeated.collect(),
            by_tool: tools.map_or_else(Vec::new, |tools| tools.shares(reckoning.by_caller)),
            by_model: models.shares(reckoning.by_model),
        }
    }
}

/// Characters of a request that are shown.
const FIRST_WORDS: usize = 80;

/// How the last message of the user begins, or the prompt or input; `None` of a body that is no
/// such JSON, or not whole.
fn first_words(request: &[u8]) -> Option<String> {
    let request: serde_json::Value = serde_json::from_slice(request).ok()?;
    let text = |content: &serde_json::Value| -> Option<String> {
        let parts = || {
            content
                .as_array()?
                .iter()
                .find_map(|part| part["text"].as_str())
        };
        content.as_str().or_else(parts).map(str::to_owned)
    };
    let said = ["messages", "input"].iter().find_map(|name| {
        let messages = request[name].as_array()?;
        let mut last_first = messages.iter().rev();
        let message = last_first.find(|message| message["role"] == "user")?;
        text(&message["content"])
    });
    let plain = || {
        ["prompt", "input"]
            .iter()
            .find_map(|name| text(&request[name]))
    };
    let text = said.or_else(plain)?;
    let mut words = String::new();
    for word in text.split_whitespace() {
        if !words.is_empty() {
            words.push(' ');
        }
        words.push_str(word);
        if words.chars().count() > FIRST_WORDS {
            words = words.chars().take(FIRST_WORDS - 1).collect();
            words.push('…');
            break;
        }
    }
    Some(words)
}

impl Reader {
    /// What share of the calls repeat an earlier one, for each of [`WINDOWS`].
    ///
    /// Reads every row of the time asked for, a third of a second a million; holds 32 bytes for each
    /// and at most 20,000 names.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn repeats(&self, query: &RepeatsQuery) -> Result<Repeats, ReadError> {
        let mut turns = Vec::new();
        let (mut tools, mut models) = (Names::default(), Names::default());
        let mut without_key = 0;
        self.visit_keys(&query.filter, |row| {
            let key = row.get_ref(0)?.as_blob_or_null()?.and_then(Key::of_hash);
            let Some(key) = key else {
                without_key += 1;
                return Ok(());
            };
            let tool = tools.number(Some(row.get_ref(2)?.as_str()?));
            let model = models.number(row.get_ref(3)?.as_str_or_null()?);
            turns.push(Turn::new(key, Some(row.get(1)?), tool, model));
            Ok(())
        })?;
        let mut repeats = Repeats::reckon(&mut turns, Some(&tools), &models, query.most);
        repeats.without_key = without_key;
        for repeated in &mut repeats.most_repeated {
            repeated.first_words = self.first_words(&repeated.key)?;
        }
        Ok(repeats)
    }

    /// How the last request with this key begins, if its body was kept.
    fn first_words(&self, key: &str) -> Result<Option<String>, ReadError> {
        let Some((first, last)) = key.parse::<KeyPrefix>().ok().map(|key| key.range()) else {
            return Ok(None);
        };
        let id: Option<String> = self
            .connection
            .prepare_cached(
                "SELECT id FROM bodies WHERE request_key BETWEEN ?1 AND ?2
                 ORDER BY request_key DESC, id DESC LIMIT 1",
            )?
            .query_row([first, last], |row| row.get(0))
            .optional()?;
        let Some(id) = id.and_then(|id| id.parse().ok()) else {
            return Ok(None);
        };
        let body = self.body(id)?;
        Ok(body.and_then(|body| first_words(&body.request)))
    }

    /// Key, time, tool and model of every call that matches, in the order of their ends.
    fn visit_keys(
        &self,
        filter: &CallFilter,
        mut visit: impl FnMut(&Row<'_>) -> rusqlite::Result<()>,
    ) -> Result<(), ReadError> {
        let (sql, values): (String, Vec<Value>) =
            Query::new(filter).select_only("request_key, started_us, tool, model");
        let mut statement = self.connection.prepare(&sql)?;
        let mut rows = statement.query(params_from_iter(values))?;
        while let Some(row) = rows.next()? {
            visit(row)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use bytes::Bytes;
    use tempfile::TempDir;

    use super::super::bodies::Body;
    use super::super::{Billing, CallEnd, CallId, CallStart, DedupLabel, Outcome, Store};
    use super::*;
    use crate::clock::Clock;

    const BEGIN: i64 = 1_790_000_000_000_000;

    fn call(second: i64, key: Option<u8>, tool: &str, dedup: DedupLabel) -> CallEnd {
        let started = WallTime(BEGIN + second * 1_000_000);
        let start = CallStart {
            id: CallId::new(started),
            started,
            provider: Arc::from("demo"),
            route: "chat/completions".into(),
            model: (second < 4000).then(|| Arc::from("demo")),
            tool: Arc::from(tool),
            billing: Billing::Free,
            streaming: false,
            dedup,
            key: key.map(|key| [key; 32]),
            reserved: None,
        };
        CallEnd {
            start,
            status: Some(200),
            outcome: Outcome::Completed,
            first_token: None,
            queued: Duration::ZERO,
            duration: Duration::from_millis(3),
            sent: None,
            head: None,
            upstream_ended: None,
            usage: None,
            money: crate::store::Money::default(),
            error: None,
        }
    }

    #[test]
    fn the_record_says_what_repeats() {
        let folder = TempDir::new().expect("a folder");
        let store = Store::open(folder.path(), Clock::Boot).expect("a store");
        let calls = [
            call(0, Some(1), "aider", DedupLabel::Miss),
            call(60, Some(1), "aider", DedupLabel::Cached),
            call(90, Some(2), "aider", DedupLabel::Miss),
            call(90, Some(2), "eval", DedupLabel::Joined),
            call(100, None, "aider", DedupLabel::Off),
            call(5000, Some(1), "eval", DedupLabel::Miss),
        ];
        let kept = calls[0].start.clone();
        // Not in the order in which they came.
        for n in [5, 3, 0, 1, 4, 2] {
            store.finished(calls[n].clone());
        }
        store.body(Body {
            id: kept.id,
            started: kept.started,
            key: kept.key,
            request: Bytes::from_static(
                br#"{"messages":[{"role":"user","content":[{"type":"text","text":"Say\n hi"}]},{"role":"assistant","content":"no"}]}"#,
            ),
            request_cut: false,
            response: Vec::new(),
            response_cut: false,
        });
        assert!(store.flush(Duration::from_secs(20)));
        store.close();
        let reader = Reader::open(folder.path()).expect("a record");
        let mut repeats = reader.repeats(&RepeatsQuery::default()).expect("figures");
        let counts = |share: &RepeatShare| {
            let windows = share.windows.iter();
            let counts = windows.map(|window| (window.repeats, window.same_caller));
            (share.calls, counts.collect::<Vec<_>>())
        };
        let named = |shares: &[NamedShare]| -> Vec<_> {
            let named = shares.iter();
            named
                .map(|named| (named.name.clone(), counts(&named.share)))
                .collect()
        };
        assert_eq!(
            counts(&repeats.all),
            (5, vec![(2, 1), (2, 1), (3, 1), (3, 1)])
        );
        assert_eq!(repeats.without_key, 1);
        let names = |shares: &[NamedShare]| -> Vec<(String, u64)> {
            let named = named(shares).into_iter();
            named.map(|(name, (calls, _))| (name, calls)).collect()
        };
        let expected =
            |names: [(&str, u64); 2]| names.map(|(name, calls)| (name.to_owned(), calls));
        assert_eq!(
            names(&repeats.by_tool),
            expected([("aider", 3), ("eval", 2)])
        );
        assert_eq!(
            names(&repeats.by_model),
            expected([("demo", 4), (UNKNOWN, 1)])
        );
        assert_eq!(
            named(&repeats.by_model)[1].1,
            (1, vec![(0, 0), (0, 0), (1, 0), (1, 0)])
        );
        repeats.most_repeated.truncate(1);
        repeats.by_tool.clear();
        repeats.by_model.truncate(1);
        let json = serde_json::to_string_pretty(&repeats).expect("plain data");
        insta::assert_snapshot!(json, @r#"
        {
          "first": "2026-09-21T14:13:20.000000Z",
          "last": "2026-09-21T15:36:40.000000Z",
          "without_key": 1,
          "all": {
            "calls": 5,
            "windows": [
              {
                "window": "5m",
                "repeats": 2,
                "share": 0.4,
                "same_caller": 1
              },
              {
                "window": "1h",
                "repeats": 2,
                "share": 0.4,
                "same_caller": 1
              },
              {
                "window": "24h",
                "repeats": 3,
                "share": 0.6,
                "same_caller": 1
              },
              {
                "window": "all",
                "repeats": 3,
                "share": 0.6,
                "same_caller": 1
              }
            ]
          },
          "by_tool": [],
          "by_model": [
            {
              "name": "demo",
              "calls": 4,
              "windows": [
                {
                  "window": "5m",
                  "repeats": 2,
                  "share": 0.5,
                  "same_caller": 1
                },
                {
                  "window": "1h",
                  "repeats": 2,
                  "share": 0.5,
                  "same_caller": 1
                },
                {
                  "window": "24h",
                  "repeats": 2,
                  "share": 0.5,
                  "same_caller": 1
                },
                {
                  "window": "all",
                  "repeats": 2,
                  "share": 0.5,
                  "same_caller": 1
                }
              ]
            }
          ],
          "most_repeated": [
            {
              "key": "01010101010101010101010101010101",
              "calls": 3,
              "tool": "eval",
              "model": null,
              "first": "2026-09-21T14:13:20.000000Z",
              "last": "2026-09-21T15:36:40.000000Z",
              "first_words": "Say hi"
            }
          ]
        }
        "#);

        let narrow = |filter| {
            let query = RepeatsQuery { filter, most: 1 };
            let repeats = reader.repeats(&query).expect("figures");
            let all = repeats.all.windows[3].repeats;
            (repeats.all.calls, all, repeats.most_repeated.len())
        };
        let aider = CallFilter {
            tool: Some("ai*".to_owned()),
            ..CallFilter::default()
        };
        assert_eq!(narrow(aider), (3, 1, 1));
        let late = CallFilter {
            since: Some(WallTime(BEGIN + 70_000_000)),
            ..CallFilter::default()
        };
        assert_eq!(
            narrow(late),
            (3, 1, 1),
            "the first of them repeats nothing among them"
        );
        let model = CallFilter {
            model: Some("demo".to_owned()),
            ..CallFilter::default()
        };
        assert_eq!(narrow(model), (4, 2, 1));
    }

    #[test]
    fn first_words_are_those_of_the_user() {
        let table = [
            (
                r#"{"messages":[{"role":"system","content":"Be"},{"role":"user","content":" Why\n so? "}]}"#,
                Some("Why so?"),
            ),
            (r#"{"prompt":"once upon"}"#, Some("once upon")),
            (r#"{"input":"embed me"}"#, Some("embed me")),
            (
                r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"do"}]}]}"#,
                Some("do"),
            ),
            (r#"{"messages":[]}"#, None),
            (r#"{"messages":[{"role":"user","con"#, None),
        ];
        for (request, words) in table {
            assert_eq!(
                first_words(request.as_bytes()).as_deref(),
                words,
                "{request}"
            );
        }
        let long = format!(r#"{{"prompt":"{}"}}"#, "ü ".repeat(500));
        assert_eq!(
            first_words(long.as_bytes()).map(|words| words.chars().count()),
            Some(80)
        );
    }

    #[test]
    fn names_are_bounded() {
        let mut names = Names::default();
        for n in 0..MAX_NAMES + 5 {
            names.number(Some(&format!("tool-{n}")));
        }
        assert_eq!(names.names.len(), MAX_NAMES + 2);
        assert_eq!(names.number(Some("yet another")), Turn::NOBODY);
        assert_ne!(names.number(Some("tool-7")), Turn::NOBODY);
        assert_eq!(names.number(None), names.number(Some("")));
    }
}
