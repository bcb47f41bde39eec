//! What was spent, on what and by whom: from the sums, so also of calls whose rows have gone.

use std::collections::{BTreeMap, HashMap};

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};
use rusqlite::Row;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::json;
use super::queries::{ReadError, Reader};
use super::rollup::{quarter_begin, quarter_of};
use super::spend::{Counted, QUARTERS_A_DAY, SPEND_COLUMNS, Spend};
use crate::clock::WallTime;
use crate::policy::calendar::Window;
use crate::policy::money::Nanodollars;
use crate::settings::Period;

/// How a report is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum SpendBy {
    /// By the hours of the time zone.
    Hour,
    /// By its days.
    Day,
    /// By its months.
    Month,
    /// By provider.
    Provider,
    /// By model, as clients spelled it.
    Model,
    /// By tool.
    Tool,
}

impl SpendBy {
    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Month => "month",
            Self::Provider => "provider",
            Self::Model => "model",
            Self::Tool => "tool",
        }
    }

    const fn period(self) -> Option<Period> {
        match self {
            Self::Hour => Some(Period::Hour),
            Self::Day => Some(Period::Day),
            Self::Month => Some(Period::Month),
            Self::Provider | Self::Model | Self::Tool => None,
        }
    }
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct SpendQuery {
    /// How it is cut.
    pub by: SpendBy,
    /// Calls that came at this time or later; cut at quarter-hours, a begun one counts whole.
    pub from: WallTime,
    /// Calls that came before this time.
    pub to: WallTime,
    /// Where hours, days and months begin.
    pub zone: TimeZone,
}

impl SpendQuery {
    /// Where a report begins that was asked for without saying: a day back by hours, thirty days by
    /// days, twelve months by months and thirty days by anything else; at a full hour, a midnight
    /// or the first of a month.
    pub fn usual_begin(by: SpendBy, now: WallTime, zone: &TimeZone) -> WallTime {
        let (span, period) = match by {
            SpendBy::Hour => (23.hours(), Period::Hour),
            SpendBy::Month => (11.months(), Period::Month),
            SpendBy::Day | SpendBy::Provider | SpendBy::Model | SpendBy::Tool => {
                (29.days(), Period::Day)
            }
        };
        let begin = Timestamp::from_microsecond(now.0)
            .ok()
            .and_then(|now| now.to_zoned_datetime(zone.clone()).checked_sub(span).ok());
        let begin = begin.map_or(now, |begin| WallTime(begin.timestamp().as_microsecond()));
        Window::of(period, begin, zone).start
    }
}

/// What calls used and cost. Money stands twice: as whole nano-dollars (billionths, named
/// `…_nanos`), and as exact decimal text in dollars for people (`…_usd`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Spent {
    /// Calls that ended.
    pub calls: u64,
    /// Calls of these whose cost is not in the sums, since their model has no price.
    pub unpriced_calls: u64,
    /// Calls whose tokens are estimated, since their provider did not say them.
    pub estimated_calls: u64,
    /// Fresh input.
    pub input_tokens: u64,
    /// Input read from a provider's cache.
    pub cached_input_tokens: u64,
    /// Input written to a cache for five minutes.
    pub cache_write_5m_tokens: u64,
    /// Input written to a cache for an hour.
    pub cache_write_1h_tokens: u64,
    /// Output, reasoning included.
    pub output_tokens: u64,
    /// The part of the output that was reasoning.
    pub reasoning_tokens: u64,
    /// What they cost.
    pub cost_nanos: i64,
    /// The same in dollars: `0.000012`.
    pub cost_usd: String,
    /// What they are worth by the list, calls on a subscription among them.
    pub list_nanos: i64,
    /// The same in dollars.
    pub list_usd: String,
    /// The part of that which was on a subscription: neither cost nor savings.
    pub plan_nanos: i64,
    /// The same in dollars.
    pub plan_usd: String,
    /// What joined and kept answers would have cost.
    pub saved_nanos: i64,
    /// The same in dollars.
    pub saved_usd: String,
}

impl From<Counted> for Spent {
    fn from(sums: Counted) -> Self {
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        let Spend {
            input,
            cached_input,
            cache_write_5m,
            cache_write_1h,
            output,
            reasoning,
            cost,
            list,
            plan,
            saved,
            unpriced,
            estimated,
        } = sums.spend;
        Self {
            calls: count(sums.calls),
            unpriced_calls: count(unpriced),
            estimated_calls: count(estimated),
            input_tokens: count(input),
            cached_input_tokens: count(cached_input),
            cache_write_5m_tokens: count(cache_write_5m),
            cache_write_1h_tokens: count(cache_write_1h),
            output_tokens: count(output),
            reasoning_tokens: count(reasoning),
            cost_nanos: cost,
            cost_usd: json::dollars_of(cost),
            list_nanos: list,
            list_usd: json::dollars_of(list),
            plan_nanos: plan,
            plan_usd: json::dollars_of(plan),
            saved_nanos: saved,
            saved_usd: json::dollars_of(saved),
        }
    }
}

/// One line of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct SpendRow {
    /// The hour (`2026-11-30 14:00+01:00`), day (`2026-11-30`) or month (`2026-11`) in the time
    /// zone, or the name; empty for calls that named no model.
    pub label: String,
    /// When the hour, day or month begins: RFC 3339 in UTC; `null` for names. The first one may be
    /// asked for from a later time.
    #[serde(serialize_with = "json::time_if_any")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub start: Option<WallTime>,
    /// What its calls used and cost.
    #[serde(flatten)]
    pub spent: Spent,
}

/// What was spent in some time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct SpendReport {
    /// How it is cut.
    pub by: SpendBy,
    /// The time that was asked about begins here: RFC 3339 in UTC.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    pub from: WallTime,
    /// And ends before this.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    pub to: WallTime,
    /// The time zone in which hours, days and months begin, where it has a name.
    pub zone: Option<String>,
    /// All of it.
    pub total: Spent,
    /// Times in their order, those without calls left out; names by what they cost, the dearest
    /// first.
    pub rows: Vec<SpendRow>,
}

/// What calls of one provider, model and tool cost in a quarter of an hour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpentInQuarter {
    /// When it begins.
    pub at: WallTime,
    /// The provider's name.
    pub provider: String,
    /// The model; empty where calls named none, `other` where there were too many.
    pub model: String,
    /// The tool, `other` likewise.
    pub tool: String,
    /// What they cost.
    pub cost: Nanodollars,
}

/// What the calls of one tool cost in an hour of UTC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpentInHour {
    /// When it begins.
    pub at: WallTime,
    /// The tool, `other` where there were too many.
    pub tool: String,
    /// What they cost.
    pub cost: Nanodollars,
}

impl Reader {
    /// A report of what was spent.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn spend(&self, query: &SpendQuery) -> Result<SpendReport, ReadError> {
        // Both tables of one moment.
        let _moment = self.connection.unchecked_transaction()?;
        let rows = match query.by.period() {
            Some(period) => self.by_period(query, period)?,
            None => self.by_name(query)?,
        };
        let mut total = Counted::default();
        for (_, sums) in &rows {
            total.add(*sums);
        }
        let rows = rows.into_iter().map(|((label, start), sums)| SpendRow {
            label,
            start,
            spent: sums.into(),
        });
        Ok(SpendReport {
            by: query.by,
            from: query.from,
            to: query.to,
            zone: query.zone.iana_name().map(str::to_owned),
            total: total.into(),
            rows: rows.collect(),
        })
    }

    /// What calls that came at `since` or later cost, by provider, model, tool and quarter of an
    /// hour, of which one may stand in several lines: what a ledger of budgets is restored from.
    /// Interrupted calls are in it with what was
    /// held for them; open ones are not, since their reservations are the ledger's own.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn spent_since(&self, since: WallTime) -> Result<Vec<SpentInQuarter>, ReadError> {
        let mut select = self.connection.prepare_cached(
            "SELECT quarter, provider, model, tool, cost_nanos FROM rollups
             WHERE quarter >= ?1 AND cost_nanos <> 0 ORDER BY quarter, provider, model, tool",
        )?;
        let rows = select.query_map([quarter_of(since)], |row| {
            Ok(SpentInQuarter {
                at: quarter_begin(row.get(0)?),
                provider: row.get(1)?,
                model: row.get(2)?,
                tool: row.get(3)?,
                cost: Nanodollars(row.get(4)?),
            })
        })?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// The same by tool and hour of UTC: what the watch for runaways is restored from.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn spent_by_tool_since(&self, since: WallTime) -> Result<Vec<SpentInHour>, ReadError> {
        let mut select = self.connection.prepare_cached(
            "SELECT quarter / 4 * 4, tool, cost_nanos FROM rollups
             WHERE quarter >= ?1 AND cost_nanos <> 0",
        )?;
        // Added here: SQL refuses a sum that does not fit.
        let mut sums = BTreeMap::<(i64, String), Nanodollars>::new();
        let mut rows = select.query([quarter_of(since)])?;
        while let Some(row) = rows.next()? {
            let sum = sums.entry((row.get(0)?, row.get(1)?)).or_default();
            *sum = sum.saturating_add(Nanodollars(row.get(2)?));
        }
        let sums = sums.into_iter().map(|((quarter, tool), cost)| SpentInHour {
            at: quarter_begin(quarter),
            tool,
            cost,
        });
        Ok(sums.collect())
    }

    fn by_period(&self, query: &SpendQuery, period: Period) -> Result<Rows, ReadError> {
        let mut windows = BTreeMap::<i64, Counted>::new();
        let mut window: Option<Window> = None;
        let mut select = self.connection.prepare_cached(&format!(
            "SELECT quarter, calls, {SPEND_COLUMNS} FROM spend_by_quarter
             WHERE quarter >= ?1 AND quarter < ?2 ORDER BY quarter"
        ))?;
        let (first, end) = quarters(query);
        let mut rows = select.query([first, end])?;
        while let Some(row) = rows.next()? {
            let at = quarter_begin(row.get(0)?);
            let window = match window {
                Some(window) if window.contains(at) => window,
                _ => *window.insert(Window::of(period, at, &query.zone)),
            };
            windows.entry(window.start.0).or_default().add_row(row, 1)?;
        }
        let label = |start: WallTime| {
            let format = match period {
                Period::Hour => "%F %H:%M%:z",
                Period::Day => "%F",
                Period::Month => "%Y-%m",
            };
            let start = Timestamp::from_microsecond(start.0).unwrap_or(Timestamp::MIN);
            let start = start.to_zoned_datetime(query.zone.clone());
            start.strftime(format).to_string()
        };
        let windows = windows.into_iter().map(|(start, sums)| {
            let start = WallTime(start);
            ((label(start), Some(start)), sums)
        });
        Ok(windows.collect())
    }

    fn by_name(&self, query: &SpendQuery) -> Result<Rows, ReadError> {
        let column = query.by.as_str();
        let mut names = HashMap::<String, Counted>::new();
        let mut add = |row: &Row<'_>| -> rusqlite::Result<()> {
            let name = row.get_ref(0)?.as_str()?;
            let sums = match names.get_mut(name) {
                Some(sums) => sums,
                None => names.entry(name.to_owned()).or_default(),
            };
            sums.add_row(row, 1)
        };
        let (first, end) = quarters(query);
        // Whole days of UTC from their own table; what is left at both ends by quarter-hours.
        let day = |quarter: i64| quarter.div_euclid(QUARTERS_A_DAY);
        let first_day = day(first.saturating_add(QUARTERS_A_DAY - 1));
        let end_day = day(end).max(first_day);
        let whole = [first_day, end_day].map(|day| day.saturating_mul(QUARTERS_A_DAY));
        let days = format!(
            "SELECT {column}, calls, {SPEND_COLUMNS} FROM spend_by_day WHERE day >= ?1 AND day < ?2"
        );
        let ends = format!(
            "SELECT {column}, calls, {SPEND_COLUMNS} FROM rollups
             WHERE quarter >= ?1 AND quarter < ?2"
        );
        for (sql, first, end) in [
            (&days, first_day, end_day),
            (&ends, first, whole[0].min(end)),
            (&ends, whole[1].max(first), end),
        ] {
            if first < end {
                let mut select = self.connection.prepare_cached(sql)?;
                let mut rows = select.query([first, end])?;
                while let Some(row) = rows.next()? {
                    add(row)?;
                }
            }
        }
        let mut names: Vec<(String, Counted)> = names.into_iter().collect();
        names.sort_unstable_by(|(name, sums), (other_name, other)| {
            let worth = |sums: &Counted| (sums.spend.cost, sums.spend.list, sums.calls);
            worth(other).cmp(&worth(sums)).then(name.cmp(other_name))
        });
        let names = names.into_iter().map(|(name, sums)| ((name, None), sums));
        Ok(names.collect())
    }
}

/// Lines by label and, of times, beginning.
type Rows = Vec<((String, Option<WallTime>), Counted)>;

/// The first quarter-hour asked for, and the first past it.
fn quarters(query: &SpendQuery) -> (i64, i64) {
    let last = quarter_of(WallTime(query.to.0.saturating_sub(1)));
    (quarter_of(query.from), last + 1)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use rusqlite::Connection;
    use tempfile::TempDir;

    use super::super::rollup::tests::any_account;
    use super::super::tests::{LONG, database, end, open, start};
    use super::super::{Billing, CallEnd, CallId, CallStart, Money};
    use super::*;

    const BYS: [SpendBy; 6] = [
        SpendBy::Hour,
        SpendBy::Day,
        SpendBy::Month,
        SpendBy::Provider,
        SpendBy::Model,
        SpendBy::Tool,
    ];
    const QUARTER: i64 = 900_000_000;

    fn at(text: &str) -> WallTime {
        let time: Timestamp = text.parse().expect("a time");
        WallTime(time.as_microsecond())
    }

    fn zone(name: &str) -> TimeZone {
        TimeZone::get(name).expect("a time zone")
    }

    fn call(started: WallTime, tool: &str, cost: i64) -> CallEnd {
        CallEnd {
            money: Money {
                cost: Some(Nanodollars(cost)),
                list: Some(Nanodollars(cost)),
                ..Money::default()
            },
            ..end(CallStart {
                id: CallId::new(started),
                started,
                tool: Arc::from(tool),
                ..start()
            })
        }
    }

    /// Calls of five weeks around the change of Berlin's clocks in autumn.
    fn any_call() -> impl Strategy<Value = CallEnd> {
        let names = (0..3_usize, 0..3_usize, 0..3_usize, 0..3_usize);
        let first = at("2026-10-01T00:00:00Z").0;
        let time = first..first + 35 * 86_400_000_000;
        (names, time, any_account()).prop_map(
            |((provider, model, tool, billing), started, (usage, money))| {
                let started = WallTime(started);
                CallEnd {
                    usage,
                    money,
                    ..end(CallStart {
                        id: CallId::new(started),
                        started,
                        provider: Arc::from(["openai", "anthropic", "ollama"][provider]),
                        model: [None, Some("m"), Some("n")][model].map(Arc::from),
                        tool: Arc::from(["aider", "codex", "curl"][tool]),
                        billing: [Billing::Metered, Billing::Plan, Billing::Free][billing],
                        ..start()
                    })
                }
            },
        )
    }

    /// A call's line, by the clock on the wall.
    fn label(end: &CallEnd, query: &SpendQuery) -> String {
        let started = Timestamp::from_microsecond(end.start.started.0).expect("a time");
        let local = started.to_zoned_datetime(query.zone.clone());
        match query.by {
            SpendBy::Hour => {
                // An hour of Lord Howe's that begins with a change of half an hour keeps its offset.
                let offset = local.strftime("%:z").to_string();
                format!("{} {:02}:00{offset}", local.date(), local.hour())
            }
            SpendBy::Day => local.date().to_string(),
            SpendBy::Month => local.strftime("%Y-%m").to_string(),
            SpendBy::Provider => end.start.provider.to_string(),
            SpendBy::Model => end.start.model.as_deref().unwrap_or("").to_owned(),
            SpendBy::Tool => end.start.tool.to_string(),
        }
    }

    /// The report, from the calls themselves.
    fn recomputed(calls: &[CallEnd], query: &SpendQuery) -> BTreeMap<String, Spent> {
        let mut lines = BTreeMap::<String, Spent>::new();
        let first = query.from.0.div_euclid(QUARTER) * QUARTER;
        let end = (query.to.0 - 1).div_euclid(QUARTER) * QUARTER + QUARTER;
        for call in calls {
            if !(first..end).contains(&call.start.started.0) {
                continue;
            }
            let line = lines.entry(label(call, query)).or_default();
            let usage = call.usage.unwrap_or_default();
            let money = call.money;
            let nanos = |amount: Option<Nanodollars>| amount.map_or(0, |amount| amount.0);
            line.calls += 1;
            line.unpriced_calls += u64::from(money.unpriced && money.cost.is_none());
            let is_estimated = usage.basis == crate::policy::usage::Basis::Estimated;
            line.estimated_calls += u64::from(is_estimated);
            line.input_tokens += usage.input.unwrap_or(0);
            line.cached_input_tokens += usage.cached_input.unwrap_or(0);
            line.cache_write_5m_tokens += usage.cache_write_5m.unwrap_or(0);
            line.cache_write_1h_tokens += usage.cache_write_1h.unwrap_or(0);
            line.output_tokens += usage.output.unwrap_or(0);
            line.reasoning_tokens += usage.reasoning.unwrap_or(0);
            line.cost_nanos += nanos(money.cost);
            line.list_nanos += nanos(money.list);
            if call.start.billing == Billing::Plan {
                line.plan_nanos += nanos(money.list);
            }
            line.saved_nanos += nanos(money.saved);
        }
        for line in lines.values_mut() {
            line.cost_usd = json::dollars_of(line.cost_nanos);
            line.list_usd = json::dollars_of(line.list_nanos);
            line.plan_usd = json::dollars_of(line.plan_nanos);
            line.saved_usd = json::dollars_of(line.saved_nanos);
        }
        lines
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn a_report_is_what_the_calls_add_up_to_also_when_they_have_gone(
            calls in prop::collection::vec(any_call(), 1..150),
            from in 0..35 * 96_i64,
            quarters in 1..20 * 96_i64,
            name in prop::sample::select(vec![
                "UTC", "Europe/Berlin", "Asia/Kathmandu", "America/St_Johns", "Africa/Cairo",
            ]),
            unaligned in 0..QUARTER,
        ) {
            let folder = TempDir::new().expect("a folder");
            let store = open(folder.path());
            for call in &calls {
                store.finished(call.clone());
            }
            prop_assert!(store.flush(LONG));
            let from = at("2026-10-01T00:00:00Z").0 + from * QUARTER + unaligned;
            let report = |by| {
                let query = SpendQuery {
                    by,
                    from: WallTime(from),
                    to: WallTime(from + quarters * QUARTER),
                    zone: zone(name),
                };
                let report = Reader::open(folder.path()).and_then(|reader| reader.spend(&query));
                (query, report.expect("a report"))
            };
            for by in BYS {
                let (query, report) = report(by);
                let lines: BTreeMap<String, Spent> = report
                    .rows
                    .iter()
                    .map(|row| (row.label.clone(), row.spent.clone()))
                    .collect();
                prop_assert_eq!(lines.len(), report.rows.len(), "each line once");
                prop_assert_eq!(lines, recomputed(&calls, &query));
                let cost: i64 = report.rows.iter().map(|row| row.spent.cost_nanos).sum();
                prop_assert_eq!(report.total.cost_nanos, cost);
            }
            let before = BYS.map(|by| report(by).1);
            Connection::open(database(folder.path()))
                .and_then(|database| database.execute("DELETE FROM calls", []))
                .expect("rows gone");
            prop_assert_eq!(BYS.map(|by| report(by).1), before);
        }
    }

    #[test]
    fn times_are_in_order_and_names_by_what_they_cost() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        // 01:30 twice that night, before and after the clocks went back; and the next day.
        for (time, tool, cost) in [
            ("2026-10-25T00:30:00Z", "aider", 5),
            ("2026-10-25T01:30:00Z", "codex", 12_000),
            ("2026-10-26T12:00:00Z", "aider", 1),
        ] {
            store.finished(call(at(time), tool, cost));
        }
        assert!(store.flush(LONG));
        let reader = Reader::open(folder.path()).expect("a record");
        let lines = |by| -> Vec<(String, i64)> {
            let report = reader.spend(&SpendQuery {
                by,
                from: at("2026-10-24T22:00:00Z"),
                to: at("2026-10-31T00:00:00Z"),
                zone: zone("Europe/Berlin"),
            });
            let rows = report.expect("a report").rows.into_iter();
            rows.map(|row| (row.label, row.spent.cost_nanos)).collect()
        };
        let owned = |lines: &[(&str, i64)]| -> Vec<(String, i64)> {
            let lines = lines.iter();
            lines
                .map(|(label, cost)| ((*label).to_owned(), *cost))
                .collect()
        };
        assert_eq!(
            lines(SpendBy::Hour),
            owned(&[
                ("2026-10-25 02:00+02:00", 5),
                ("2026-10-25 02:00+01:00", 12_000),
                ("2026-10-26 13:00+01:00", 1),
            ])
        );
        assert_eq!(
            lines(SpendBy::Day),
            owned(&[("2026-10-25", 12_005), ("2026-10-26", 1)])
        );
        assert_eq!(lines(SpendBy::Month), owned(&[("2026-10", 12_006)]));
        assert_eq!(
            lines(SpendBy::Tool),
            owned(&[("codex", 12_000), ("aider", 6)])
        );
    }

    #[test]
    fn it_begins_at_a_full_hour_a_midnight_or_the_first() {
        let now = at("2026-11-15T14:20:00Z");
        let begin = |by| {
            let begin = SpendQuery::usual_begin(by, now, &zone("Europe/Berlin"));
            json::text_of(begin)
        };
        assert_eq!(begin(SpendBy::Hour), "2026-11-14T15:00:00.000000Z");
        assert_eq!(begin(SpendBy::Day), "2026-10-16T22:00:00.000000Z");
        assert_eq!(begin(SpendBy::Month), "2025-11-30T23:00:00.000000Z");
        assert_eq!(begin(SpendBy::Tool), begin(SpendBy::Day));
    }

    #[test]
    fn a_ledger_is_told_what_was_spent_when_and_by_whom() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let begin = at("2026-11-15T14:00:00Z");
        let later = |minutes: i64| WallTime(begin.0 + minutes * 60_000_000);
        store.finished(call(later(-1), "aider", 1_000_000));
        store.finished(call(later(1), "aider", 10));
        store.finished(call(later(2), "aider", 20));
        store.finished(call(later(50), "aider", 300));
        store.finished(call(later(51), "codex", 4_000));
        store.finished(call(later(70), "codex", 50_000));
        store.finished(call(later(71), "free", 0));
        let left_open = call(later(72), "curl", 0).start;
        store.opened(CallStart {
            reserved: Some(Nanodollars(600_000)),
            ..left_open
        });
        store.close();
        open(folder.path()).close();
        let reader = Reader::open(folder.path()).expect("a record");
        let quarters = reader.spent_since(begin).expect("sums");
        assert!(
            quarters
                .iter()
                .all(|sum| sum.provider == "openai" && sum.model == "gpt-5-mini")
        );
        let quarters: Vec<_> = quarters
            .into_iter()
            .map(|sum| ((sum.at.0 - begin.0) / 60_000_000, sum.tool, sum.cost.0))
            .collect();
        let told = |lines: &[(i64, &str, i64)]| -> Vec<(i64, String, i64)> {
            let lines = lines.iter();
            lines
                .map(|(at, tool, cost)| (*at, (*tool).to_owned(), *cost))
                .collect()
        };
        assert_eq!(
            quarters,
            told(&[
                (0, "aider", 30),
                (45, "aider", 300),
                (45, "codex", 4_000),
                (60, "codex", 50_000),
                (60, "curl", 600_000),
            ])
        );
        let hours = reader.spent_by_tool_since(begin).expect("sums").into_iter();
        let hours: Vec<_> = hours
            .map(|sum| ((sum.at.0 - begin.0) / 60_000_000, sum.tool, sum.cost.0))
            .collect();
        assert_eq!(
            hours,
            told(&[
                (0, "aider", 330),
                (0, "codex", 4_000),
                (60, "codex", 50_000),
                (60, "curl", 600_000),
            ])
        );
    }

    #[test]
    fn sums_stay_in_their_range() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        for _ in 0..3 {
            store.finished(CallEnd {
                usage: Some(crate::policy::usage::Usage {
                    input: Some(u64::MAX),
                    ..Default::default()
                }),
                ..call(at("2026-11-15T14:00:00Z"), "aider", i64::MAX)
            });
            assert!(store.flush(LONG));
        }
        let reader = Reader::open(folder.path()).expect("a record");
        for by in BYS {
            let report = reader.spend(&SpendQuery {
                by,
                from: WallTime(0),
                to: WallTime(i64::MAX),
                zone: zone("UTC"),
            });
            let total = report.expect("a report").total;
            assert_eq!(total.cost_nanos, i64::MAX);
            assert_eq!(total.input_tokens, 3_000_000_000_000);
        }
    }
}
