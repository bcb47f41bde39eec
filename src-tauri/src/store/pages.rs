//! Pages of calls, newest first, of bounded cost however large the record and rare the match.

use std::fmt;
use std::str::FromStr;

use rusqlite::{OptionalExtension as _, params, params_from_iter};
use serde::Serialize;
use utoipa::ToSchema;

use super::CallId;
use super::json;
use super::queries::{CallFilter, CallRow, Query, ReadError, Reader, call_row};
use crate::clock::WallTime;

/// Rows looked at for one page. Measured with a million rows on two cores: half a microsecond each,
/// so that a page which finds nothing takes some 16 ms.
const LOOKED_AT: usize = 1 << 15;
/// Rows looked at in the first step; each further one takes four times as many, so that a common
/// match costs little and a rare one few steps.
const FIRST_STEP: usize = 1 << 10;
/// Behind every id.
const PAST_ALL: &str = "~";

/// Which calls to show, how many, and from where on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallsQuery {
    /// Which calls.
    pub filter: CallFilter,
    /// How many at most; at least one.
    pub limit: usize,
    /// Where the page before this one ended: its [`CallsPage::next`].
    pub after: Option<Cursor>,
}

impl Default for CallsQuery {
    fn default() -> Self {
        Self {
            filter: CallFilter::default(),
            limit: 100,
            after: None,
        }
    }
}

/// Calls, newest first, open ones among them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct CallsPage {
    /// The calls. Fewer than asked for does not mean that there are no more: see `next`.
    pub calls: Vec<CallRow>,
    /// Ask with this for the page that follows; none if this page reaches the end.
    ///
    /// A page looks at 32,768 rows at most. Where matches are rarer than the limit in so many it
    /// is short, empty perhaps, and still has a `next`.
    pub next: Option<Cursor>,
    /// Calls that came before this time have not been looked at; none if all have.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub looked_back_to: Option<WallTime>,
}

/// A place in the order of calls. Opaque to whoever carries it, and valid for ever: rows that come
/// or go move no page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(value_type = String)]
pub struct Cursor(
    /// The id of the last call before this place.
    String,
);

/// Not a cursor of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no cursor that a page of calls has given out")]
pub struct BadCursor;

impl FromStr for Cursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let of_ours = !text.is_empty()
            && text.len() <= 64
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        of_ours.then(|| Self(text.to_owned())).ok_or(BadCursor)
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Reader {
    /// A page of the calls that match, newest first by the time at which they came.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn calls(&self, query: &CallsQuery) -> Result<CallsPage, ReadError> {
        // One more than asked for tells whether there are more.
        let wanted = query.limit.max(1).saturating_add(1);
        let place = query.after.as_ref().map_or(PAST_ALL, |cursor| &cursor.0);
        let (mut calls, unlooked) = if query.filter.is_selective() {
            self.search(&query.filter, place, wanted)?
        } else {
            (self.newest(&query.filter, place, wanted)?, None)
        };
        let more = calls.len() == wanted;
        if more {
            calls.pop();
        }
        let next = if more {
            calls.last().map(|call| call.id.clone())
        } else {
            unlooked
        };
        Ok(CallsPage {
            calls,
            looked_back_to: next.as_deref().and_then(came_at),
            next: next.map(Cursor),
        })
    }

    /// The call with this id, open or ended.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn call(&self, id: CallId) -> Result<Option<CallRow>, ReadError> {
        let mut query = Query::new(&CallFilter::default());
        query.require("id = ?", id.to_string().into());
        let (sql, values) = query.select("id", 1);
        let mut statement = self.connection.prepare_cached(&sql)?;
        let row = statement.query_row(params_from_iter(values), call_row);
        Ok(row.optional()?)
    }

    /// The newest matches before `place`, straight from an index.
    fn newest(
        &self,
        filter: &CallFilter,
        place: &str,
        wanted: usize,
    ) -> Result<Vec<CallRow>, ReadError> {
        let mut query = Query::new(filter);
        query.require("id < ?", place.to_owned().into());
        self.rows(query, "id DESC", wanted)
    }

    /// The newest matches before `place` among [`LOOKED_AT`] rows; and the id from which on,
    /// backwards, no row has been looked at.
    fn search(
        &self,
        filter: &CallFilter,
        place: &str,
        wanted: usize,
    ) -> Result<(Vec<CallRow>, Option<String>), ReadError> {
        // All steps see the same rows.
        let _moment = self.connection.unchecked_transaction()?;
        let (first, past) = filter.ids();
        let mut place = past
            .filter(|past| **past < *place)
            .unwrap_or_else(|| place.to_owned());
        let first = first.unwrap_or_default();
        let mut calls = Vec::new();
        let (mut step, mut left) = (FIRST_STEP, LOOKED_AT);
        while calls.len() < wanted {
            // Found on the index alone, which is some ten times as quick as the rows.
            let mut edge = self.connection.prepare_cached(
                "SELECT id FROM calls WHERE id < ?1 AND id >= ?2
                 ORDER BY id DESC LIMIT 1 OFFSET ?3",
            )?;
            let edge: Option<String> = edge
                .query_row(params![place, first, count(step - 1)], |row| row.get(0))
                .optional()?;
            let mut query = Query::new(filter);
            query.require("id < ?", place.into());
            query.require("id >= ?", edge.as_ref().unwrap_or(&first).clone().into());
            calls.extend(self.rows(query, "id DESC", wanted - calls.len())?);
            let Some(edge) = edge else {
                return Ok((calls, None));
            };
            left -= step;
            if left == 0 {
                return Ok((calls, Some(edge)));
            }
            place = edge;
            step = (step * 4).min(left);
        }
        Ok((calls, Some(place)))
    }
}

fn count(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

/// When the call with this id came, to the millisecond, if it is an id of ours.
fn came_at(id: &str) -> Option<WallTime> {
    let id: CallId = id.parse().ok()?;
    let millis = i64::try_from(id.0.timestamp_ms()).ok()?;
    Some(WallTime(millis.saturating_mul(1000)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use rusqlite::Connection;
    use tempfile::TempDir;

    use super::super::queries::OutcomeFilter;
    use super::super::{DATABASE_FILE, DedupLabel, Outcome, Store};
    use super::*;
    use crate::clock::Clock;

    /// 2026-09-21T14:13:20Z.
    const BEGIN: i64 = 1_790_000_000_000_000;

    /// An id of the given microsecond, the `n`th within it.
    fn id(at: i64, n: u64) -> String {
        let millis = u64::try_from(at / 1000).expect("a time after 1970");
        CallId(ulid::Ulid::from_parts(millis, u128::from(n))).to_string()
    }

    /// `rows` calls, one a second. Of each ten thousand one is rare in every respect; the last
    /// three are open.
    fn record(rows: i64) -> TempDir {
        let folder = TempDir::new().expect("a folder");
        Store::open(folder.path(), Clock::Boot)
            .expect("a store")
            .close();
        let mut database = Connection::open(folder.path().join(DATABASE_FILE)).expect("a database");
        let transaction = database.transaction().expect("a transaction");
        {
            let mut insert = transaction
                .prepare(
                    "INSERT INTO calls (id, started_us, provider, route, model, tool, billing,
                       streaming, dedup, request_key, outcome, status, upstream_call,
                       first_token_us, queued_us, sent_us, head_us, upstream_ended_us, duration_us, error)
                     VALUES (?1, ?2, ?3, 'chat/completions', ?4, ?5, 'metered', 1, ?6, ?7, ?8,
                       200, 1, 412000, 15, 300, 400000, 12344000, 12345000, ?9)",
                )
                .expect("a statement");
            for n in 0..rows {
                let rare = n % 10_000 == 5_000;
                let at = BEGIN + n * 1_000_000;
                let mut key = [0xAA_u8; 32];
                key[..8].copy_from_slice(&(n / 2).to_be_bytes());
                key.rotate_left(4);
                let word = |usual: &'static str, other: &'static str| {
                    if rare { other } else { usual }
                };
                let outcome = (n < rows - 3).then(|| word("completed", "timeout"));
                insert
                    .execute(params![
                        id(at, u64::try_from(n).expect("a count")),
                        at,
                        word("openai", "anthropic"),
                        word("gpt-5-mini", "claude-sonnet-4.5"),
                        word("aider", "eval-7"),
                        word("miss", "joined"),
                        key,
                        outcome,
                        rare.then_some("no answer within 100 % of 120 s: limits.timeout_secs"),
                    ])
                    .expect("a row");
            }
        }
        transaction.commit().expect("rows");
        folder
    }

    fn reader(folder: &TempDir) -> Reader {
        Reader::open(folder.path()).expect("a record")
    }

    fn each_filter() -> Vec<(&'static str, CallFilter)> {
        let filter = CallFilter::default;
        let text = |text: &str| Some(text.to_owned());
        vec![
            (
                "provider",
                CallFilter {
                    provider: text("anthropic"),
                    ..filter()
                },
            ),
            (
                "model",
                CallFilter {
                    model: text("claude-*"),
                    ..filter()
                },
            ),
            (
                "tool",
                CallFilter {
                    tool: text("eval-?"),
                    ..filter()
                },
            ),
            (
                "outcome",
                CallFilter {
                    outcome: Some(OutcomeFilter::Ended(Outcome::Timeout)),
                    ..filter()
                },
            ),
            (
                "dedup",
                CallFilter {
                    dedup: Some(DedupLabel::Joined),
                    ..filter()
                },
            ),
            (
                "error",
                CallFilter {
                    error: text("LIMITS.timeout_SECS"),
                    ..filter()
                },
            ),
        ]
    }

    /// All pages one after another; and the longest that one took.
    fn pages(reader: &Reader, query: &CallsQuery) -> (Vec<CallsPage>, Duration) {
        let mut query = query.clone();
        let (mut pages, mut longest) = (Vec::new(), Duration::ZERO);
        loop {
            let begin = Clock::Boot.now();
            let page = reader.calls(&query).expect("a page");
            longest = longest.max(Clock::Boot.now() - begin);
            query.after = page.next.clone();
            pages.push(page);
            if query.after.is_none() {
                return (pages, longest);
            }
        }
    }

    #[test]
    fn pages_join_without_a_gap_or_a_call_twice() {
        let folder = record(25);
        let reader = reader(&folder);
        let query = |limit| CallsQuery {
            limit,
            ..CallsQuery::default()
        };
        let (whole, _) = pages(&reader, &query(100));
        assert_eq!((whole.len(), whole[0].calls.len()), (1, 25));
        assert_eq!(whole[0].looked_back_to, None);
        assert!(whole[0].calls.is_sorted_by(|a, b| a.started > b.started));
        let open = whole[0].calls.iter().filter(|call| call.outcome.is_none());
        assert_eq!(open.count(), 3);
        for limit in [0, 1, 7, 24, 25, 26] {
            let (pages, _) = pages(&reader, &query(limit));
            let sizes: Vec<usize> = pages.iter().map(|page| page.calls.len()).collect();
            assert!(
                sizes.iter().all(|size| (1..=limit.max(1)).contains(size)),
                "{sizes:?}"
            );
            let joined: Vec<_> = pages.into_iter().flat_map(|page| page.calls).collect();
            assert_eq!(joined, whole[0].calls, "{limit}");
        }
    }

    #[test]
    fn a_call_is_found_by_its_id() {
        let folder = record(5);
        let reader = reader(&folder);
        let last = reader.calls(&CallsQuery::default()).expect("a page").calls[0].clone();
        let id: CallId = last.id.parse().expect("an id");
        assert_eq!(reader.call(id).expect("a row"), Some(last));
        let other = CallId::new(WallTime(BEGIN));
        assert_eq!(reader.call(other).expect("no row"), None);
    }

    #[test]
    fn each_filter_finds_its_calls_and_no_others() {
        let folder = record(30_000);
        let reader = reader(&folder);
        for (name, filter) in each_filter() {
            let query = CallsQuery {
                filter,
                limit: 2,
                after: None,
            };
            let (pages, _) = pages(&reader, &query);
            let found: Vec<i64> = pages
                .iter()
                .flat_map(|page| &page.calls)
                .map(|call| (call.started.0 - BEGIN) / 1_000_000)
                .collect();
            assert_eq!(found, [25_000, 15_000, 5_000], "{name}");
            assert_eq!(pages[0].calls.len(), 2, "{name}");
        }
        let second = |n: i64| Some(WallTime(BEGIN + n * 1_000_000));
        let within = CallFilter {
            since: second(3),
            until: second(5),
            ..CallFilter::default()
        };
        let open = CallFilter {
            outcome: Some(OutcomeFilter::Open),
            ..CallFilter::default()
        };
        let none = CallFilter {
            error: Some("100 _ of".to_owned()),
            ..CallFilter::default()
        };
        let both = CallFilter {
            since: second(15_001),
            ..each_filter()[2].1.clone()
        };
        for (filter, expected) in [(within, 2), (open, 3), (none, 0), (both, 1)] {
            let query = CallsQuery {
                filter,
                ..CallsQuery::default()
            };
            let page = reader.calls(&query).expect("a page");
            assert_eq!((page.calls.len(), page.next), (expected, None), "{query:?}");
        }
        // A key as a list shows it, whole or in part, finds its two calls.
        let one = &reader.calls(&CallsQuery::default()).expect("a page").calls[50];
        let key = json::hex_of(one.request_key.as_deref().expect("a key"));
        for digits in [16, 32, 64] {
            let filter = CallFilter {
                key: key[..digits].parse().ok(),
                ..CallFilter::default()
            };
            let query = CallsQuery {
                filter,
                ..CallsQuery::default()
            };
            assert_eq!(
                reader.calls(&query).expect("a page").calls.len(),
                2,
                "{digits}"
            );
        }
    }

    #[test]
    fn a_rare_match_is_sought_in_bounded_steps() {
        let rows = i64::try_from(LOOKED_AT).expect("a count") * 2 + 10;
        let folder = record(rows);
        let reader = reader(&folder);
        let filter = CallFilter {
            tool: Some("nobody".to_owned()),
            ..CallFilter::default()
        };
        let (pages, _) = pages(
            &reader,
            &CallsQuery {
                filter,
                ..CallsQuery::default()
            },
        );
        assert_eq!(pages.len(), 3);
        assert!(pages.iter().all(|page| page.calls.is_empty()));
        let back_to: Vec<_> = pages.iter().map(|page| page.looked_back_to).collect();
        let second = |n: i64| Some(WallTime(BEGIN + n * 1_000_000));
        let step = i64::try_from(LOOKED_AT).expect("a count");
        assert_eq!(
            back_to,
            [second(rows - step), second(rows - 2 * step), None]
        );
    }

    #[test]
    fn calls_that_come_meanwhile_move_no_page() {
        let folder = record(6);
        let reader = reader(&folder);
        let query = CallsQuery {
            limit: 3,
            ..CallsQuery::default()
        };
        let first = reader.calls(&query).expect("a page");
        let before: Vec<_> = first.calls.iter().map(|call| call.id.clone()).collect();
        Connection::open(folder.path().join(DATABASE_FILE))
            .and_then(|database| {
                // An open call ends and takes the last `seq`, and the oldest goes.
                database.execute_batch(
                    "UPDATE calls SET seq = 100, outcome = 'completed' WHERE seq = 4;
                     DELETE FROM calls WHERE seq = 1",
                )
            })
            .expect("changes");
        let second = reader
            .calls(&CallsQuery {
                after: first.next,
                ..query
            })
            .expect("a page");
        assert_eq!(second.calls.len(), 2);
        assert!(second.calls.iter().all(|call| !before.contains(&call.id)));
        assert_eq!(second.next, None);
    }

    #[test]
    fn a_cursor_comes_back_as_it_went_and_nothing_else_passes_for_one() {
        let cursor = Cursor(id(BEGIN, 1));
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for text in ["", "01M2 ", "' OR 1", "ü", &"A".repeat(65)] {
            assert_eq!(text.parse::<Cursor>(), Err(BadCursor), "{text:?}");
        }
    }

    #[test]
    fn a_page_reads_well_as_json() {
        let folder = record(5);
        let query = CallsQuery {
            limit: 1,
            after: Some(Cursor(id(BEGIN + 2_000_000, 0))),
            ..CallsQuery::default()
        };
        let page = reader(&folder).calls(&query).expect("a page");
        let json = serde_json::to_string_pretty(&page).expect("plain data");
        insta::assert_snapshot!(json, @r#"
        {
          "calls": [
            {
              "id": "01M3250VZ80000000000000001",
              "started": "2026-09-21T14:13:21.000000Z",
              "provider": "openai",
              "route": "chat/completions",
              "model": "gpt-5-mini",
              "tool": "aider",
              "billing": "metered",
              "streaming": true,
              "dedup": "miss",
              "request_key": "00000000aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa00000000",
              "outcome": "completed",
              "status": 200,
              "upstream_call": true,
              "first_token_ms": 412.0,
              "queued_ms": 0.015,
              "sent_ms": 0.3,
              "head_ms": 400.0,
              "upstream_ended_ms": 12344.0,
              "duration_ms": 12345.0,
              "error": null,
              "input_tokens": null,
              "cached_input_tokens": null,
              "cache_write_5m_tokens": null,
              "cache_write_1h_tokens": null,
              "output_tokens": null,
              "reasoning_tokens": null,
              "usage_basis": null,
              "cost_nanos": null,
              "list_nanos": null,
              "saved_nanos": null,
              "pricing": null,
              "service_tier": null,
              "reserved_nanos": null
            }
          ],
          "next": "01M3250VZ80000000000000001",
          "looked_back_to": "2026-09-21T14:13:21.000000Z"
        }
        "#);
    }

    #[test]
    fn pages_of_any_size_are_the_list_cut_up() {
        let folder = record(60);
        let reader = reader(&folder);
        proptest!(|(limit in 1..40_usize, tool in "[ae]*", cut in 0..60_i64)| {
            let filter = CallFilter {
                tool: Some(format!("{tool}*")),
                since: Some(WallTime(BEGIN + cut * 1_000_000)),
                ..CallFilter::default()
            };
            let all = CallsQuery { filter, limit: 1000, after: None };
            let whole = reader.calls(&all).expect("a page").calls;
            let (pages, _) = pages(&reader, &CallsQuery { limit, ..all });
            let joined: Vec<_> = pages.into_iter().flat_map(|page| page.calls).collect();
            prop_assert_eq!(joined, whole);
        });
    }

    /// Costs are printed, not asserted:
    /// `cargo test --release -- --ignored --nocapture a_million_rows`.
    #[test]
    #[ignore = "a measurement, for a quiet machine and a release build"]
    fn a_million_rows() {
        let folder = record(1_000_000);
        let reader = reader(&folder);
        let key = CallFilter {
            key: "00000000".parse().ok(),
            ..CallFilter::default()
        };
        let open = CallFilter {
            outcome: Some(OutcomeFilter::Open),
            ..CallFilter::default()
        };
        let none = CallFilter {
            tool: Some("nobody".to_owned()),
            ..CallFilter::default()
        };
        let middle = CallFilter {
            until: Some(WallTime(BEGIN + 500_000_000_000)),
            ..CallFilter::default()
        };
        let filters = [
            ("none", CallFilter::default()),
            ("key", key),
            ("open", open),
            ("no match", none),
            ("until", middle),
        ];
        for (name, filter) in filters.into_iter().chain(each_filter()) {
            let first = CallsQuery {
                filter,
                ..CallsQuery::default()
            };
            let begin = Clock::Boot.now();
            let page = reader.calls(&first).expect("a page");
            let took = Clock::Boot.now() - begin;
            let mut last = (took, 0);
            if name != "none" && name != "until" {
                let (pages, longest) = pages(&reader, &first);
                last = (longest, pages.len());
            }
            println!(
                "{name}: {} calls in {took:?}; the slowest of all {} pages {:?}",
                page.calls.len(),
                last.1,
                last.0
            );
        }
        let begin = Clock::Boot.now();
        let repeats = reader
            .repeats(&super::super::repeats::RepeatsQuery::default())
            .expect("repeats");
        println!(
            "repeats of {} calls in {:?}",
            repeats.all.calls,
            Clock::Boot.now() - begin
        );
    }
}
