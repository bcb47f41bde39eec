//! Calls over time: a point for each minute, hour or day of a time zone.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ZonedDateTime};
use rusqlite::{Row, params_from_iter, types::Value};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use std::time::Duration;

use super::queries::{ReadError, Reader};
use super::rollup::{self, Ended, GroupFilter, Sums, Totals, quarter_begin};
use super::spend::Spend;
use super::{CallId, Outcome, json};
use crate::clock::WallTime;

/// The most points that are answered: a week of hours many times over, or five years of days.
pub const MAX_POINTS: usize = 2000;

/// How much time a point covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Reckoned from the rows, so only as far back as those are kept.
    Minute,
    /// From one full hour of the zone to the next.
    Hour,
    /// From one midnight of the zone to the next: 23 or 25 hours where its clocks change.
    Day,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct SeriesQuery {
    /// In the first point.
    pub from: WallTime,
    /// In the last point, or at its end. Of more than [`MAX_POINTS`] the latest are answered.
    pub to: WallTime,
    /// How much time a point covers.
    pub step: Step,
    /// Where hours and days begin.
    pub zone: TimeZone,
    /// Whose calls.
    pub filter: GroupFilter,
}

/// The calls of one minute, hour or day.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct SeriesPoint {
    /// When it begins: RFC 3339 in UTC.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    pub start: WallTime,
    /// What its calls add up to.
    #[serde(flatten)]
    pub totals: Totals,
}

impl Reader {
    /// Calls over time, oldest first, with a point also where there were none.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn series(&self, query: &SeriesQuery) -> Result<Vec<SeriesPoint>, ReadError> {
        let starts = starts(query);
        let (Some(&from), Some(&end)) = (starts.first(), starts.last()) else {
            return Ok(Vec::new());
        };
        let mut points = Points::new(&starts);
        match query.step {
            Step::Minute => self.visit_ended(from, end, &query.filter, |started, ended| {
                if let Some(sums) = points.at(started) {
                    sums.count(ended);
                }
            })?,
            Step::Hour | Step::Day => rollup::visit(
                &self.connection,
                from,
                end,
                &query.filter,
                "quarter",
                |row| match points.at(quarter_begin(row.get(0)?)) {
                    Some(sums) => sums.add_row(row, 1),
                    None => Ok(()),
                },
            )?,
        }
        Ok(points.into_series())
    }

    /// Hands over the calls that came in a time and have ended, in the order of their coming.
    fn visit_ended(
        &self,
        from: WallTime,
        to: WallTime,
        filter: &GroupFilter,
        mut each: impl FnMut(WallTime, &Ended),
    ) -> Result<(), ReadError> {
        let (conditions, mut values) = filter.conditions();
        // By id, which has an index and begins with the millisecond of coming.
        let ids = [from, to].map(|time| Value::from(CallId::first_at(time).to_string()));
        values.splice(0..0, ids);
        let mut select = self.connection.prepare(&format!(
            "SELECT started_us, dedup, outcome, upstream_call, first_token_us, duration_us
             FROM calls WHERE id >= ? AND id < ?{conditions} AND outcome IS NOT NULL ORDER BY id"
        ))?;
        let mut rows = select.query(params_from_iter(values))?;
        while let Some(row) = rows.next()? {
            let started = WallTime(row.get(0)?);
            if let Some(ended) = ended(row)? {
                each(started, &ended);
            }
        }
        Ok(())
    }
}

fn ended(row: &Row<'_>) -> rusqlite::Result<Option<Ended>> {
    let word = row.get_ref(2)?.as_str()?;
    let outcome = Outcome::ALL
        .into_iter()
        .find(|known| known.as_str() == word);
    let span = |column| -> rusqlite::Result<Option<Duration>> {
        let micros: Option<i64> = row.get(column)?;
        Ok(micros
            .and_then(|micros| u64::try_from(micros).ok())
            .map(Duration::from_micros))
    };
    Ok(match outcome {
        Some(outcome) => Some(Ended {
            dedup: row.get_ref(1)?.as_str()?.parse().ok(),
            outcome,
            went_upstream: row.get::<_, Option<bool>>(3)? == Some(true),
            first_token: span(4)?,
            duration: span(5)?,
            upstream_wait: None,
            spend: Spend::default(),
        }),
        None => None,
    })
}

/// Sums by their place in time.
struct Points<'a> {
    /// Where each begins, and where the last one ends.
    starts: &'a [WallTime],
    sums: Vec<Sums>,
    /// The one that was asked for last: the next is mostly the same.
    last: usize,
}

impl<'a> Points<'a> {
    fn new(starts: &'a [WallTime]) -> Self {
        Self {
            starts,
            sums: vec![Sums::default(); starts.len().saturating_sub(1)],
            last: 0,
        }
    }

    fn at(&mut self, time: WallTime) -> Option<&mut Sums> {
        let covers = |index: usize| {
            let ends = self.starts.get(index + 1);
            self.starts[index] <= time && ends.is_some_and(|end| time < *end)
        };
        if !covers(self.last) {
            let after = self.starts.partition_point(|start| *start <= time);
            self.last = after.checked_sub(1).filter(|index| covers(*index))?;
        }
        self.sums.get_mut(self.last)
    }

    fn into_series(self) -> Vec<SeriesPoint> {
        let points = self.starts.iter().zip(&self.sums);
        points
            .map(|(start, sums)| SeriesPoint {
                start: *start,
                totals: Totals::from(sums),
            })
            .collect()
    }
}

/// Where each point begins, and where the last one ends: one more than there are points.
fn starts(query: &SeriesQuery) -> Vec<WallTime> {
    let at = |time: WallTime| Timestamp::from_microsecond(time.0).ok();
    let (Some(from), Some(to)) = (at(query.from), at(query.to)) else {
        return Vec::new();
    };
    if to <= from {
        return Vec::new();
    }
    // The latest, if they are too many: no step is longer than this.
    let (step, longest) = match query.step {
        Step::Minute => (SignedDuration::from_mins(1), SignedDuration::from_mins(1)),
        Step::Hour => (SignedDuration::from_hours(1), SignedDuration::from_hours(1)),
        Step::Day => (
            SignedDuration::from_hours(24),
            SignedDuration::from_hours(25),
        ),
    };
    let span = longest * i32::try_from(MAX_POINTS).unwrap_or(i32::MAX);
    let from = to.checked_sub(span).map_or(from, |least| least.max(from));

    let mut start = begin_of_step(from, query);
    let mut starts = vec![wall(start)];
    while start < to {
        let next = next_step(start, step, query);
        // The end of time that can be told.
        let Some(next) = next.filter(|next| *next > start) else {
            break;
        };
        start = next;
        starts.push(wall(start));
    }
    let surplus = starts.len().saturating_sub(MAX_POINTS + 1);
    starts.drain(..surplus);
    starts
}

fn wall(time: Timestamp) -> WallTime {
    WallTime(time.as_microsecond())
}

fn begin_of_step(time: Timestamp, query: &SeriesQuery) -> Timestamp {
    match query.step {
        Step::Minute => floor(time, SignedDuration::from_mins(1), SignedDuration::ZERO),
        Step::Hour => {
            let offset = query.zone.to_offset(time).seconds();
            floor(
                time,
                SignedDuration::from_hours(1),
                SignedDuration::from_secs(offset.into()),
            )
        }
        Step::Day => zoned(time, query)
            .start_of_day()
            .map_or(time, |day| day.timestamp()),
    }
}

fn next_step(start: Timestamp, step: SignedDuration, query: &SeriesQuery) -> Option<Timestamp> {
    match query.step {
        Step::Minute => start.checked_add(step).ok(),
        Step::Hour => {
            let next = start.checked_add(step).ok()?;
            // Where clocks change by half an hour, full hours move.
            Some(begin_of_step(next, query))
                .filter(|full| *full > start)
                .or(Some(next))
        }
        Step::Day => {
            let tomorrow = zoned(start, query).date().tomorrow().ok()?;
            let midnight = tomorrow.to_zoned_datetime(query.zone.clone()).ok()?;
            Some(midnight.start_of_day().ok()?.timestamp())
        }
    }
}

fn zoned(time: Timestamp, query: &SeriesQuery) -> ZonedDateTime {
    time.to_zoned_datetime(query.zone.clone())
}

/// The last whole `step` of a clock that is `ahead` of UTC.
fn floor(time: Timestamp, step: SignedDuration, ahead: SignedDuration) -> Timestamp {
    let micros = |span: SignedDuration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    let local = time.as_microsecond() + micros(ahead);
    let floored = local - local.rem_euclid(micros(step)) - micros(ahead);
    Timestamp::from_microsecond(floored).unwrap_or(time)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::super::latency::LatencyQuery;
    use super::super::pages::CallsQuery;
    use super::super::spend_report::{SpendBy, SpendQuery};
    use super::super::tests::{CLOCK, LONG, end, open, start};
    use super::super::{CallEnd, CallStart, DATABASE_FILE, DedupLabel, Money};
    use super::*;
    use crate::policy::money::Nanodollars;
    use crate::policy::usage::Usage;

    fn at(text: &str) -> WallTime {
        wall(text.parse().expect("a time"))
    }

    fn zone(name: &str) -> TimeZone {
        TimeZone::get(name).expect("a time zone")
    }

    fn query(from: &str, to: &str, step: Step, name: &str) -> SeriesQuery {
        SeriesQuery {
            from: at(from),
            to: at(to),
            step,
            zone: zone(name),
            filter: GroupFilter::default(),
        }
    }

    /// When points begin, and the last one ends, as that zone's clocks say.
    fn local(query: &SeriesQuery) -> Vec<String> {
        let local = |time: WallTime| {
            let time = Timestamp::from_microsecond(time.0).expect("a time");
            let local = time.to_zoned_datetime(query.zone.clone());
            local.strftime("%d. %H:%M").to_string()
        };
        starts(query).into_iter().map(local).collect()
    }

    fn hours(starts: &[WallTime]) -> Vec<i64> {
        let spans = starts.windows(2).map(|pair| pair[1].0 - pair[0].0);
        spans.map(|span| span / 3_600_000_000).collect()
    }

    #[test]
    fn days_have_the_hours_that_they_have() {
        let spring = query(
            "2026-03-28T12:00:00Z",
            "2026-03-30T12:00:00Z",
            Step::Day,
            "Europe/Berlin",
        );
        assert_eq!(
            local(&spring),
            ["28. 00:00", "29. 00:00", "30. 00:00", "31. 00:00"]
        );
        assert_eq!(hours(&starts(&spring)), [24, 23, 24]);
        let autumn = query(
            "2026-10-24T22:00:00Z",
            "2026-10-25T22:59:59Z",
            Step::Day,
            "Europe/Berlin",
        );
        assert_eq!(local(&autumn), ["25. 00:00", "26. 00:00"]);
        assert_eq!(hours(&starts(&autumn)), [25]);
    }

    #[test]
    fn a_day_without_a_midnight_begins_when_it_does() {
        let cairo = query(
            "2026-04-23T12:00:00Z",
            "2026-04-24T12:00:00Z",
            Step::Day,
            "Africa/Cairo",
        );
        assert_eq!(local(&cairo), ["23. 00:00", "24. 01:00", "25. 00:00"]);
    }

    #[test]
    fn hours_are_the_zones_own() {
        let nepal = query(
            "2026-05-01T00:00:00Z",
            "2026-05-01T02:15:00Z",
            Step::Hour,
            "Asia/Kathmandu",
        );
        assert_eq!(
            local(&nepal),
            ["01. 05:00", "01. 06:00", "01. 07:00", "01. 08:00"]
        );
        let twice = query(
            "2026-10-24T23:30:00Z",
            "2026-10-25T01:30:00Z",
            Step::Hour,
            "Europe/Berlin",
        );
        assert_eq!(
            local(&twice),
            ["25. 01:00", "25. 02:00", "25. 02:00", "25. 03:00"]
        );
    }

    #[test]
    fn too_many_points_are_the_latest() {
        let long = query(
            "1970-01-01T00:00:00Z",
            "2026-11-30T00:00:00Z",
            Step::Day,
            "UTC",
        );
        let starts = starts(&long);
        assert_eq!(starts.len(), MAX_POINTS + 1);
        assert_eq!(starts.last(), Some(&long.to));
        let backwards = SeriesQuery {
            to: long.from,
            from: long.to,
            ..long
        };
        assert!(super::starts(&backwards).is_empty());
    }

    #[test]
    fn the_ends_of_time_are_no_trouble() {
        for step in [Step::Minute, Step::Hour, Step::Day] {
            for (from, to) in [
                (i64::MIN, i64::MAX),
                (Timestamp::MIN.as_microsecond(), 0),
                (0, Timestamp::MAX.as_microsecond()),
                (
                    Timestamp::MIN.as_microsecond(),
                    Timestamp::MIN.as_microsecond() + 1,
                ),
            ] {
                let query = SeriesQuery {
                    from: WallTime(from),
                    to: WallTime(to),
                    step,
                    zone: zone("Pacific/Apia"),
                    filter: GroupFilter::default(),
                };
                assert!(starts(&query).len() <= MAX_POINTS + 1);
            }
        }
    }

    proptest! {
        #[test]
        fn steps_cover_the_time_without_gap_or_overlap(
            // 2020 to 2030.
            from in 1_577_836_800_i64..1_893_456_000,
            minutes in 1_i64..100_000,
            step in prop::sample::select(vec![Step::Minute, Step::Hour, Step::Day]),
            name in prop::sample::select(vec![
                "UTC", "Europe/Berlin", "America/St_Johns", "Asia/Kathmandu", "Australia/Lord_Howe",
                "Africa/Cairo", "America/Santiago", "Pacific/Chatham", "Antarctica/Troll",
            ]),
        ) {
            let query = SeriesQuery {
                from: WallTime(from * 1_000_000),
                to: WallTime((from + minutes * 60) * 1_000_000),
                step,
                zone: zone(name),
                filter: GroupFilter::default(),
            };
            let starts = starts(&query);
            prop_assert!(starts.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(starts.len() > MAX_POINTS || starts[0] <= query.from);
            prop_assert!(*starts.last().expect("an end") >= query.to);
            prop_assert!(starts[starts.len() - 2] < query.to);
            // Quarter-hours are never torn, so that a roll-up is in one point.
            prop_assert!(step == Step::Minute || starts.iter().all(|at| at.0 % 900_000_000 == 0));
        }
    }

    #[test]
    fn minutes_hours_days_and_totals_agree() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let begin = at("2026-10-24T20:00:00Z");
        for n in 0..400_i64 {
            let started = WallTime(begin.0 + n * 211_000_003);
            store.finished(CallEnd {
                outcome: Outcome::ALL[n as usize % 9],
                sent: (n % 2 == 0).then_some(Duration::ZERO),
                duration: Duration::from_millis(n as u64),
                ..end(CallStart {
                    id: CallId::new(started),
                    started,
                    tool: Arc::from(["aider", "codex"][n as usize % 2]),
                    dedup: ["miss", "joined", "cached", "off"][n as usize % 4]
                        .parse()
                        .expect("a label"),
                    ..start()
                })
            });
        }
        store.opened(CallStart {
            id: CallId::new(begin),
            started: begin,
            ..start()
        });
        assert!(store.flush(LONG));
        let reader = Reader::open(folder.path()).expect("a record");
        for tool in [None, Some("aider".to_owned())] {
            let filter = GroupFilter {
                tool,
                ..GroupFilter::default()
            };
            let query = |step| SeriesQuery {
                filter: filter.clone(),
                ..query(
                    "2026-10-24T20:00:00Z",
                    "2026-10-26T00:00:00Z",
                    step,
                    "Europe/Berlin",
                )
            };
            let counts = |step| {
                let series = reader.series(&query(step)).expect("a series");
                let mut sums = Sums::default();
                for point in &series {
                    let totals = &point.totals;
                    assert_eq!(totals.errors, totals.outcomes.errors());
                    sums.add(&Sums {
                        calls: totals.calls,
                        upstream_calls: totals.upstream_calls,
                        dedup: totals.dedup,
                        outcomes: totals.outcomes,
                        ..Sums::default()
                    });
                }
                let latencies = series
                    .iter()
                    .filter(|point| point.totals.duration.is_some());
                assert!(latencies.count() >= 2);
                sums
            };
            let minutes = counts(Step::Minute);
            assert_eq!(minutes, counts(Step::Hour));
            assert_eq!(minutes, counts(Step::Day));
            let totals = reader.totals(begin, at("2026-10-26T00:00:00Z"), &filter);
            assert_eq!(totals.expect("totals").calls, minutes.calls);
            assert_eq!(minutes.calls, if filter.tool.is_some() { 200 } else { 400 });
        }
    }

    /// A hundred days of ten thousand calls, as three providers, a dozen models and five tools make
    /// them. Figures are printed, not asserted:
    /// `cargo test --release -- --ignored --nocapture a_million_rows`.
    #[test]
    #[ignore = "a measurement, for a quiet machine and a release build; takes 500 MB of disk"]
    fn a_million_rows() {
        const DAYS: i64 = 100;
        const CALLS_A_DAY: i64 = 10_000;
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let first = at("2026-08-01T00:00:00Z");
        let day = 86_400_000_000;
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut below = move |limit: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % limit
        };
        let began = CLOCK.now();
        for n in 0..DAYS * CALLS_A_DAY {
            // Sixteen hours of each day.
            let within = n % CALLS_A_DAY * (day / CALLS_A_DAY * 2 / 3);
            let started = WallTime(first.0 + n / CALLS_A_DAY * day + within);
            let (provider, tool) = (below(3), below(5));
            let model = provider * 4 + below(4);
            let streaming = tool > 0;
            let wait = Duration::from_micros(200_000 + below(1500) * below(1500));
            let whole = wait + Duration::from_micros(1_000_000 + below(3000) * below(5000));
            let is_cached = below(50) == 0;
            let mut key = [0; 32];
            key[..8].copy_from_slice(&below(u64::MAX).to_le_bytes());
            key[8..16].copy_from_slice(&below(u64::MAX).to_le_bytes());
            store.finished(CallEnd {
                outcome: match below(100) {
                    0 => Outcome::UpstreamError,
                    1 => Outcome::ClientLeft,
                    _ => Outcome::Completed,
                },
                first_token: Some(wait),
                sent: (!is_cached).then_some(Duration::from_micros(60 + below(100))),
                head: (!is_cached).then_some(wait),
                upstream_ended: (!is_cached).then_some(whole),
                duration: whole,
                usage: (!is_cached).then(|| Usage {
                    input: Some(below(20_000)),
                    cached_input: Some(below(50_000)),
                    output: Some(below(4_000)),
                    reasoning: Some(below(1_000)),
                    ..Usage::default()
                }),
                money: {
                    let worth = Nanodollars(1_000_000 + below(100_000_000) as i64);
                    Money {
                        cost: Some(if is_cached { Nanodollars::ZERO } else { worth }),
                        list: (!is_cached).then_some(worth),
                        saved: is_cached.then_some(worth),
                        ..Money::default()
                    }
                },
                ..end(CallStart {
                    id: CallId::new(started),
                    started,
                    provider: ["anthropic", "openai", "ollama"][provider as usize].into(),
                    model: Some(format!("a-model-of-some-length-{model}").into()),
                    tool: ["curl", "aider", "claude-code", "codex", "open-webui"][tool as usize]
                        .into(),
                    streaming,
                    dedup: if is_cached {
                        DedupLabel::Cached
                    } else {
                        DedupLabel::Miss
                    },
                    key: Some(key),
                    ..start()
                })
            });
            if n % 20_000 == 0 {
                assert!(store.flush(LONG));
            }
        }
        assert!(store.flush(LONG));
        println!("written in {:?}", CLOCK.now() - began);
        store.close();

        let connection =
            rusqlite::Connection::open(folder.path().join(DATABASE_FILE)).expect("a database");
        let sizes = "SELECT name, sum(pgsize), sum(ncell) FROM dbstat WHERE pagetype <> 'internal'
                     GROUP BY name ORDER BY 2 DESC";
        let mut sizes = connection.prepare(sizes).expect("sizes");
        let mut sizes = sizes.query([]).expect("sizes");
        while let Some(row) = sizes.next().expect("a size") {
            let get = |column| row.get::<_, i64>(column).expect("a number");
            let name: String = row.get(0).expect("a name");
            println!(
                "{name}: {} bytes, {} cells, {} a cell",
                get(1),
                get(2),
                get(1) / get(2).max(1)
            );
        }

        let reader = Reader::open(folder.path()).expect("a record");
        let zone = TimeZone::get("Europe/Berlin").expect("a zone");
        let end = WallTime(first.0 + DAYS * day);
        let days = |count: i64| WallTime(end.0 - count * day);
        let all = GroupFilter::default;
        let measure = |what: &str, ask: &dyn Fn() -> u64| {
            // The second time its pages are in the cache, as they are of a page that is looked at.
            for time in ["first", "again"] {
                let began = CLOCK.now();
                let told = ask();
                println!("{what}, {time}: {:?} ({told} calls)", CLOCK.now() - began);
            }
        };
        let series = |count, step, filter: GroupFilter| {
            let query = SeriesQuery {
                from: days(count),
                to: end,
                step,
                zone: zone.clone(),
                filter,
            };
            let series = reader.series(&query).expect("a series");
            series.iter().map(|point| point.totals.calls).sum()
        };
        measure("a day's totals", &|| {
            reader.totals(days(1), end, &all()).expect("totals").calls
        });
        measure("all totals", &|| {
            reader.totals(first, end, &all()).expect("totals").calls
        });
        measure("a day by hours", &|| series(1, Step::Hour, all()));
        measure("a day by hours, of a tool", &|| {
            let tool = Some("aider".to_owned());
            series(1, Step::Hour, GroupFilter { tool, ..all() })
        });
        measure("an hour by minutes", &|| {
            let query = SeriesQuery {
                from: WallTime(end.0 - day / 3 - 3_600_000_000),
                to: WallTime(end.0 - day / 3),
                step: Step::Minute,
                zone: zone.clone(),
                filter: all(),
            };
            let series = reader.series(&query).expect("a series");
            series.iter().map(|point| point.totals.calls).sum()
        });
        measure("a day by minutes", &|| series(1, Step::Minute, all()));
        measure("90 days by days", &|| series(90, Step::Day, all()));
        measure("yesterday's latency, 8 timeouts", &|| {
            let timeouts = [5, 10, 20, 30, 60, 120, 300, 600].map(Duration::from_secs);
            let query = LatencyQuery::of_yesterday(end, &zone, timeouts.to_vec());
            let told = reader.latency(&query).expect("latencies");
            told.all.streamed.count + told.all.unstreamed.count
        });
        for by in [
            SpendBy::Hour,
            SpendBy::Day,
            SpendBy::Month,
            SpendBy::Provider,
            SpendBy::Model,
            SpendBy::Tool,
        ] {
            measure(&format!("all spend by {by:?}"), &|| {
                let query = SpendQuery {
                    by,
                    from: first,
                    to: WallTime(end.0 - day / 3),
                    zone: zone.clone(),
                };
                reader.spend(&query).expect("a report").total.calls
            });
        }
        measure("32 days for the ledger", &|| {
            reader.spent_since(days(32)).expect("sums").len() as u64
        });
        measure("90 days for the watch for runaways", &|| {
            reader.spent_by_tool_since(days(90)).expect("sums").len() as u64
        });
        measure("a page of calls", &|| {
            let page = reader.calls(&CallsQuery::default()).expect("a page");
            page.calls.len() as u64
        });
    }

    #[test]
    fn a_point_reads_well_as_json() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let started = at("2026-11-30T14:03:22.5Z");
        store.finished(end(CallStart {
            id: CallId::new(started),
            started,
            ..start()
        }));
        assert!(store.flush(LONG));
        let series = Reader::open(folder.path())
            .and_then(|reader| {
                reader.series(&query(
                    "2026-11-30T14:00:00Z",
                    "2026-11-30T15:00:00Z",
                    Step::Hour,
                    "UTC",
                ))
            })
            .expect("a series");
        insta::assert_snapshot!(
            serde_json::to_string_pretty(&series).expect("JSON"),
            @r#"
        [
          {
            "start": "2026-11-30T14:00:00.000000Z",
            "calls": 1,
            "upstream_calls": 1,
            "errors": 0,
            "dedup": {
              "miss": 1,
              "joined": 0,
              "cached": 0,
              "off": 0
            },
            "outcomes": {
              "completed": 1,
              "upstream_error": 0,
              "timeout": 0,
              "broken_stream": 0,
              "client_left": 0,
              "stopped": 0,
              "refused": 0,
              "interrupted": 0,
              "internal_error": 0
            },
            "first_token": {
              "p50_ms": 120.796,
              "p95_ms": 120.796,
              "p99_ms": 120.796
            },
            "duration": {
              "p50_ms": 1473.831,
              "p95_ms": 1473.831,
              "p99_ms": 1473.831
            }
          }
        ]
        "#
        );
    }
}
