//! Totals of quarter-hours, written with the rows they sum up and kept when those go.
//!
//! A group is what was the same about its calls. Sums are exact; latencies are histograms. Times
//! are cut at quarter-hours in UTC, of which every local hour and day is made.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params, params_from_iter};
use serde::Serialize;
use tracing::warn;
use utoipa::ToSchema;

use super::queries::{ReadError, Reader, glob};
use super::spend::{ACCOUNT_COLUMNS, Account, Counted, QUARTERS_A_DAY, Reported, SPEND_LEN, Spend};
use super::writer::name;
use super::{CallEnd, CallStart, DedupLabel, Outcome, json};
use crate::clock::WallTime;
use crate::policy::latency_histogram::LatencyHistogram;

/// A quarter of an hour in microseconds.
const QUARTER: i64 = 900 * 1_000_000;

/// Groups of one quarter-hour, before what comes new counts as [`OTHER`]: models and tools are
/// named by clients.
const MAX_GROUPS: i64 = 250;

/// The model and tool of what found no group of its own.
pub const OTHER: &str = "other";

/// Which quarter-hour a call belongs to: the one in which it came.
pub(super) const fn quarter_of(started: WallTime) -> i64 {
    started.0.div_euclid(QUARTER)
}

/// When a quarter-hour begins.
pub(super) const fn quarter_begin(quarter: i64) -> WallTime {
    WallTime(quarter.saturating_mul(QUARTER))
}

/// What the calls of a row have in common, in the order of the table's key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Group<'a> {
    pub(super) quarter: i64,
    pub(super) provider: Cow<'a, str>,
    /// Empty where the call named none.
    pub(super) model: Cow<'a, str>,
    pub(super) tool: Cow<'a, str>,
    pub(super) billing: Cow<'a, str>,
    pub(super) streaming: bool,
}

/// Calls by their part in dedup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct DedupCounts {
    /// Went upstream, and others might share their answer.
    pub miss: u64,
    /// Shared the answer of a call in flight.
    pub joined: u64,
    /// Got a kept answer.
    pub cached: u64,
    /// Took no part.
    pub off: u64,
}

/// Calls by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct OutcomeCounts {
    /// The client got a whole answer.
    pub completed: u64,
    /// The provider could not be reached, or answered with an error.
    pub upstream_error: u64,
    /// One of our timeouts cut it.
    pub timeout: u64,
    /// The answer broke off, or carried an error event.
    pub broken_stream: u64,
    /// The client hung up first.
    pub client_left: u64,
    /// A person or the end of the program stopped it.
    pub stopped: u64,
    /// A guard said no.
    pub refused: u64,
    /// Open when the process died.
    pub interrupted: u64,
    /// A fault of Traygate's own.
    pub internal_error: u64,
}

impl DedupCounts {
    fn of(&mut self, label: DedupLabel) -> &mut u64 {
        match label {
            DedupLabel::Miss => &mut self.miss,
            DedupLabel::Joined => &mut self.joined,
            DedupLabel::Cached => &mut self.cached,
            DedupLabel::Off => &mut self.off,
        }
    }
}

impl OutcomeCounts {
    fn of(&mut self, outcome: Outcome) -> &mut u64 {
        match outcome {
            Outcome::Completed => &mut self.completed,
            Outcome::UpstreamError => &mut self.upstream_error,
            Outcome::Timeout => &mut self.timeout,
            Outcome::BrokenStream => &mut self.broken_stream,
            Outcome::ClientLeft => &mut self.client_left,
            Outcome::Stopped => &mut self.stopped,
            Outcome::Refused => &mut self.refused,
            Outcome::Interrupted => &mut self.interrupted,
            Outcome::InternalError => &mut self.internal_error,
        }
    }

    /// Calls that failed: in the provider, on the way or in Traygate. A refusal is a guard at its
    /// work, and a client that left is no failure.
    pub const fn errors(&self) -> u64 {
        self.upstream_error + self.timeout + self.broken_stream + self.internal_error
    }
}

/// Sums over calls that have ended, mergeable without loss.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) calls: u64,
    pub(super) upstream_calls: u64,
    pub(super) dedup: DedupCounts,
    pub(super) outcomes: OutcomeCounts,
    pub(super) spend: Spend,
    /// Of calls that had content.
    pub(super) first_token: LatencyHistogram,
    /// Of completed calls: how soon others were refused says nothing about waiting for answers.
    pub(super) duration: LatencyHistogram,
    /// Of upstream calls: [`Ended::upstream_wait`].
    pub(super) upstream_wait: LatencyHistogram,
}

/// What a call adds to the sums: of a [`CallEnd`], or of a row that is already written.
pub(super) struct Ended {
    pub(super) dedup: Option<DedupLabel>,
    pub(super) outcome: Outcome,
    pub(super) went_upstream: bool,
    pub(super) first_token: Option<Duration>,
    pub(super) duration: Option<Duration>,
    pub(super) upstream_wait: Option<Duration>,
    pub(super) spend: Spend,
}

impl Ended {
    fn of(end: &CallEnd, account: &Account) -> Self {
        let waits = Waits {
            sent: end.sent,
            head: end.head,
            ended: end.upstream_ended,
        };
        Self {
            dedup: Some(end.start.dedup),
            outcome: end.outcome,
            went_upstream: end.sent.is_some(),
            first_token: end.first_token,
            duration: Some(end.duration),
            upstream_wait: waits.measured(&end.start.route, end.start.streaming, end.outcome),
            spend: account.spend(end.start.billing.as_str()),
        }
    }
}

/// Points in the life of an upstream call, since the client's call came.
pub(super) struct Waits {
    pub(super) sent: Option<Duration>,
    pub(super) head: Option<Duration>,
    pub(super) ended: Option<Duration>,
}

impl Waits {
    /// How long the upstream was waited for, as a timeout measures it: to the beginning of the
    /// answer of a stream or of an unknown route, to the end of any other. A wait that was given
    /// up counts as far as it went, since a shorter timeout would have cut that too; a call that
    /// failed says nothing about waiting.
    fn measured(&self, route: &str, streaming: bool, outcome: Outcome) -> Option<Duration> {
        if matches!(
            outcome,
            Outcome::UpstreamError | Outcome::Interrupted | Outcome::InternalError
        ) {
            return None;
        }
        // Only a route that nobody knows stands with its method: "POST /v1/files".
        let by_its_beginning = streaming || route.contains(' ');
        let until = if by_its_beginning {
            self.head.or(self.ended)
        } else {
            self.ended
        };
        Some(until?.saturating_sub(self.sent?))
    }
}

impl Sums {
    pub(super) fn count(&mut self, ended: &Ended) {
        self.calls += 1;
        self.upstream_calls += u64::from(ended.went_upstream);
        if let Some(label) = ended.dedup {
            *self.dedup.of(label) += 1;
        }
        *self.outcomes.of(ended.outcome) += 1;
        self.spend.add(ended.spend);
        if let Some(latency) = ended.first_token {
            self.first_token.record(latency);
        }
        if let Some(latency) = ended.duration
            && ended.outcome == Outcome::Completed
        {
            self.duration.record(latency);
        }
        if let Some(latency) = ended.upstream_wait {
            self.upstream_wait.record(latency);
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts_mut().into_iter().zip(other.counts()) {
            *count = count.saturating_add(more);
        }
        self.spend.add(other.spend);
        self.first_token.merge(&other.first_token);
        self.duration.merge(&other.duration);
        self.upstream_wait.merge(&other.upstream_wait);
    }

    /// In the order of [`COLUMNS`].
    fn counts_mut(&mut self) -> [&mut u64; COUNTS] {
        let Self {
            calls,
            upstream_calls,
            dedup,
            outcomes,
            ..
        } = self;
        [
            calls,
            upstream_calls,
            &mut dedup.miss,
            &mut dedup.joined,
            &mut dedup.cached,
            &mut dedup.off,
            &mut outcomes.completed,
            &mut outcomes.upstream_error,
            &mut outcomes.timeout,
            &mut outcomes.broken_stream,
            &mut outcomes.client_left,
            &mut outcomes.stopped,
            &mut outcomes.refused,
            &mut outcomes.interrupted,
            &mut outcomes.internal_error,
        ]
    }

    fn counts(&self) -> [u64; COUNTS] {
        let mut copy = Self {
            calls: self.calls,
            upstream_calls: self.upstream_calls,
            dedup: self.dedup,
            outcomes: self.outcomes,
            ..Self::default()
        };
        copy.counts_mut().map(|count| *count)
    }

    /// Adds a row of which [`COLUMNS`] begin at column `first`.
    pub(super) fn add_row(&mut self, row: &Row<'_>, first: usize) -> rusqlite::Result<()> {
        for (column, count) in self.counts_mut().into_iter().enumerate() {
            let more: i64 = row.get(first + column)?;
            *count = count.saturating_add(u64::try_from(more).unwrap_or(0));
        }
        self.spend.add_row(row, first + COUNTS)?;
        let histograms = [
            &mut self.first_token,
            &mut self.duration,
            &mut self.upstream_wait,
        ];
        for (histogram, column) in histograms.into_iter().zip(first + COUNTS + SPEND_LEN..) {
            let bytes = row.get_ref(column)?.as_blob()?;
            // Latencies that another hand spoiled cost neither the counts nor the next commit.
            if let Err(error) = histogram.merge_encoded(bytes) {
                warn!(%error, "latencies of a quarter-hour are lost");
            }
        }
        Ok(())
    }
}

/// Counts in a row, before its tokens and money and its histograms.
const COUNTS: usize = 15;

/// What [`Sums`] are made of.
const COLUMNS: &str = "calls, upstream_calls, miss, joined, cached, off, completed,
    upstream_error, timeout, broken_stream, client_left, stopped, refused, interrupted,
    internal_error, input_tokens, cached_input_tokens, cache_write_5m_tokens,
    cache_write_1h_tokens, output_tokens, reasoning_tokens, cost_nanos, list_nanos, plan_nanos,
    saved_nanos, unpriced, estimated, first_token, duration, upstream_wait";

/// Sums that are on their way into the database.
#[derive(Debug, Default)]
pub(super) struct Rollup<'a> {
    groups: HashMap<Group<'a>, Sums>,
}

impl<'a> Rollup<'a> {
    /// Counts a call that has ended.
    pub(super) fn count(&mut self, end: &'a CallEnd, account: &Account) {
        self.groups
            .entry(Group::of(&end.start))
            .or_default()
            .count(&Ended::of(end, account));
    }

    /// Adds the sums to those on record, in the transaction that writes their rows.
    pub(super) fn write(self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        let mut reported = Reported::default();
        for (group, sums) in &self.groups {
            reported.add(
                group.quarter,
                group.provider.as_ref().into(),
                group.model.as_ref().into(),
                group.tool.as_ref().into(),
                Counted {
                    calls: i64::try_from(sums.calls).unwrap_or(i64::MAX),
                    spend: sums.spend,
                },
            );
        }
        reported.write(transaction)?;
        self.write_groups(transaction)
    }

    fn write_groups(self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        // In the order of the table: what is appended fills its pages, and the same calls leave
        // the same groups.
        let mut groups: Vec<_> = self.groups.into_iter().collect();
        groups.sort_unstable_by(|(group, _), (other, _)| group.cmp(other));
        for (group, sums) in groups {
            let (group, mut on_record) = on_record(transaction, group)?;
            on_record.add(&sums);
            save(transaction, &group, &on_record)?;
        }
        Ok(())
    }

    fn count_row(&mut self, row: &Row<'_>) -> rusqlite::Result<()> {
        let word = |column: &str| -> rusqlite::Result<Option<&str>> {
            Ok(row.get_ref(column)?.as_str_or_null()?)
        };
        let span = |column: &str| -> rusqlite::Result<Option<Duration>> {
            let micros: Option<i64> = row.get(column)?;
            Ok(micros.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0))))
        };
        let text = |column: &str| -> rusqlite::Result<Cow<'a, str>> {
            let text: Option<String> = row.get(column)?;
            Ok(text.unwrap_or_default().into())
        };
        let group = Group {
            quarter: quarter_of(WallTime(row.get("started_us")?)),
            provider: text("provider")?,
            model: text("model")?,
            tool: text("tool")?,
            billing: text("billing")?,
            streaming: row.get("streaming")?,
        };
        let outcome = word("outcome")?
            .and_then(|word| {
                Outcome::ALL
                    .into_iter()
                    .find(|known| known.as_str() == word)
            })
            .unwrap_or(Outcome::Interrupted);
        let went_upstream = row.get::<_, Option<bool>>("upstream_call")? == Some(true);
        // Rows of the first schema do not say when the request was sent and the answer began: the
        // nearest that they know.
        let waits = Waits {
            sent: span("queued_us")?.filter(|_| went_upstream),
            head: span("first_token_us")?,
            ended: span("duration_us")?,
        };
        let route = word("route")?.unwrap_or_default();
        let upstream_wait = waits.measured(route, group.streaming, outcome);
        let ended = Ended {
            dedup: word("dedup")?.and_then(|word| word.parse().ok()),
            outcome,
            went_upstream,
            first_token: span("first_token_us")?,
            duration: span("duration_us")?,
            upstream_wait,
            spend: Account::read(row, SUMMED_COLUMNS)?.spend(&group.billing),
        };
        self.groups.entry(group).or_default().count(&ended);
        Ok(())
    }
}

impl<'a> Group<'a> {
    fn of(start: &'a CallStart) -> Self {
        Self {
            quarter: quarter_of(start.started),
            provider: name(&start.provider).into(),
            model: start.model.as_deref().map(name).unwrap_or_default().into(),
            tool: name(&start.tool).into(),
            billing: start.billing.as_str().into(),
            streaming: start.streaming,
        }
    }
}

/// Columns that [`sum_up`] reads before those of an [`Account`].
const SUMMED_COLUMNS: usize = 13;

/// Rows that are in no sum.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unsummed {
    /// All that have ended.
    Ended,
    /// Those that are still open; they count as interrupted.
    Open,
}

/// Sums up rows that were written without: those of a database from before there were sums, and
/// the open ones that an earlier process left, just before they are marked as interrupted.
pub(super) fn sum_up(transaction: &Transaction<'_>, which: Unsummed) -> rusqlite::Result<()> {
    /// More than those of some quarter-hours, since rows come in the order of their times.
    const HELD: usize = 2048;
    let mut select = transaction.prepare(&format!(
        "SELECT started_us, provider, route, model, tool, billing, streaming, dedup, outcome,
           upstream_call, first_token_us, queued_us, duration_us, {ACCOUNT_COLUMNS}
         FROM calls WHERE {}",
        match which {
            Unsummed::Ended => "outcome IS NOT NULL ORDER BY id",
            // These are few and have an index.
            Unsummed::Open => "outcome IS NULL",
        }
    ))?;
    let mut rows = select.query([])?;
    let mut rollup = Rollup::default();
    while let Some(row) = rows.next()? {
        rollup.count_row(row)?;
        if rollup.groups.len() >= HELD {
            std::mem::take(&mut rollup).write(transaction)?;
        }
    }
    rollup.write(transaction)
}

/// Takes back from the sums a call that was counted as interrupted and has ended after all: its
/// log was replaced under it, say. `account` is what its row says.
pub(super) fn take_back_interrupted(
    transaction: &Transaction<'_>,
    start: &CallStart,
    account: &Account,
) -> rusqlite::Result<()> {
    let spend = Spend::default().since(account.spend(start.billing.as_str()));
    let change = Counted { calls: -1, spend };
    amend(transaction, Group::of(start), change, |sums| {
        for count in [
            &mut sums.calls,
            &mut sums.outcomes.interrupted,
            sums.dedup.of(start.dedup),
        ] {
            *count = count.saturating_sub(1);
        }
    })
}

/// Changes the sums of calls that have been counted; `counts` does so with their counts.
pub(super) fn amend(
    transaction: &Transaction<'_>,
    group: Group<'_>,
    change: Counted,
    counts: impl FnOnce(&mut Sums),
) -> rusqlite::Result<()> {
    let mut reported = Reported::default();
    let [provider, model, tool] =
        [&group.provider, &group.model, &group.tool].map(|name| Cow::from(name.as_ref()));
    reported.add(group.quarter, provider, model, tool, change);
    reported.write(transaction)?;
    let (group, mut sums) = where_counted(transaction, group)?;
    counts(&mut sums);
    sums.spend.add(change.spend);
    save(transaction, &group, &sums)
}

/// The group in which calls of this one have been counted: itself or [`OTHER`], in its
/// quarter-hour, or in the first of its day since they were put together.
fn where_counted<'a>(
    transaction: &Transaction<'_>,
    group: Group<'a>,
) -> rusqlite::Result<(Group<'a>, Sums)> {
    let first_of_day = group.quarter.div_euclid(QUARTERS_A_DAY) * QUARTERS_A_DAY;
    let mut quarters = vec![group.quarter];
    if first_of_day != group.quarter {
        quarters.push(first_of_day);
    }
    for quarter in quarters {
        for is_other in [false, true] {
            let mut place = Group {
                quarter,
                ..group.clone()
            };
            if is_other {
                place.model = OTHER.into();
                place.tool = OTHER.into();
            }
            if let Some(sums) = load(transaction, &place)? {
                return Ok((place, sums));
            }
        }
    }
    on_record(transaction, group)
}

/// Puts the sums of all quarter-hours from `first` until before `end` together into that of
/// `first`.
pub(super) fn put_together(
    transaction: &Transaction<'_>,
    first: i64,
    end: i64,
) -> rusqlite::Result<()> {
    let mut rollup = Rollup::default();
    {
        let mut select = transaction.prepare_cached(&format!(
            "SELECT provider, model, tool, billing, streaming, {COLUMNS} FROM rollups
             WHERE quarter >= ?1 AND quarter < ?2"
        ))?;
        let mut rows = select.query([first, end])?;
        while let Some(row) = rows.next()? {
            let text = |column| row.get::<_, String>(column).map(Cow::from);
            let group = Group {
                quarter: first,
                provider: text(0)?,
                model: text(1)?,
                tool: text(2)?,
                billing: text(3)?,
                streaming: row.get(4)?,
            };
            rollup.groups.entry(group).or_default().add_row(row, 5)?;
        }
    }
    transaction
        .prepare_cached("DELETE FROM rollups WHERE quarter >= ?1 AND quarter < ?2")?
        .execute([first, end])?;
    rollup.write_groups(transaction)
}

/// The sums of a group so far; those of [`OTHER`] where it is new and its quarter-hour is full.
fn on_record<'a>(
    transaction: &Transaction<'_>,
    group: Group<'a>,
) -> rusqlite::Result<(Group<'a>, Sums)> {
    if let Some(sums) = load(transaction, &group)? {
        return Ok((group, sums));
    }
    let groups: i64 = transaction
        .prepare_cached("SELECT count(*) FROM rollups WHERE quarter = ?1")?
        .query_row([group.quarter], |row| row.get(0))?;
    if groups < MAX_GROUPS {
        return Ok((group, Sums::default()));
    }
    let group = Group {
        model: OTHER.into(),
        tool: OTHER.into(),
        ..group
    };
    let sums = load(transaction, &group)?.unwrap_or_default();
    Ok((group, sums))
}

fn load(transaction: &Transaction<'_>, group: &Group<'_>) -> rusqlite::Result<Option<Sums>> {
    let mut select = transaction.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM rollups WHERE quarter = ?1 AND provider = ?2 AND model = ?3
           AND tool = ?4 AND billing = ?5 AND streaming = ?6"
    ))?;
    select
        .query_row(
            params![
                group.quarter,
                group.provider,
                group.model,
                group.tool,
                group.billing,
                group.streaming
            ],
            |row| {
                let mut sums = Sums::default();
                sums.add_row(row, 0).map(|()| sums)
            },
        )
        .optional()
}

fn save(transaction: &Transaction<'_>, group: &Group<'_>, sums: &Sums) -> rusqlite::Result<()> {
    let mut save = transaction.prepare_cached(&format!(
        "INSERT OR REPLACE INTO rollups
           (quarter, provider, model, tool, billing, streaming, {COLUMNS})
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
           ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    ))?;
    save.raw_bind_parameter(1, group.quarter)?;
    save.raw_bind_parameter(2, &group.provider)?;
    save.raw_bind_parameter(3, &group.model)?;
    save.raw_bind_parameter(4, &group.tool)?;
    save.raw_bind_parameter(5, &group.billing)?;
    save.raw_bind_parameter(6, group.streaming)?;
    for (count, column) in sums.counts().into_iter().zip(7..) {
        save.raw_bind_parameter(column, i64::try_from(count).unwrap_or(i64::MAX))?;
    }
    for (value, column) in sums.spend.values().into_iter().zip(7 + COUNTS..) {
        save.raw_bind_parameter(column, value)?;
    }
    let histograms = [&sums.first_token, &sums.duration, &sums.upstream_wait];
    for (histogram, column) in histograms.into_iter().zip(7 + COUNTS + SPEND_LEN..) {
        save.raw_bind_parameter(column, histogram.encode())?;
    }
    save.raw_execute().map(drop)
}

/// Which groups are asked for; what is `None` does not narrow. In each `*` and `?` stand for any
/// characters, or one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupFilter {
    /// The provider's name.
    pub provider: Option<String>,
    /// The model as clients spelled it; empty for calls that named none.
    pub model: Option<String>,
    /// The tool's name.
    pub tool: Option<String>,
}

impl GroupFilter {
    /// SQL that narrows, and its values: for `rollups`, and for `calls` where the model may be
    /// NULL.
    pub(super) fn conditions(&self) -> (String, Vec<Value>) {
        let parts = [
            ("provider", &self.provider),
            ("coalesce(model, '')", &self.model),
            ("tool", &self.tool),
        ];
        let mut sql = String::new();
        let mut values = Vec::new();
        for (column, pattern) in parts {
            if let Some(pattern) = pattern {
                sql.push_str(" AND ");
                sql.push_str(column);
                sql.push_str(" GLOB ?");
                values.push(Value::from(glob(pattern)));
            }
        }
        (sql, values)
    }
}

/// Three latencies of many. Percentiles are true to within 3 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct Percentiles {
    /// Half of them took no longer, in milliseconds.
    pub p50_ms: f64,
    /// Nineteen of twenty took no longer.
    pub p95_ms: f64,
    /// Ninety-nine of a hundred took no longer.
    pub p99_ms: f64,
}

impl Percentiles {
    /// `None` if nothing was counted.
    pub(super) fn of(histogram: &LatencyHistogram) -> Option<Self> {
        let at = |share| histogram.percentile(share).map(json::millis_of);
        Some(Self {
            p50_ms: at(0.50)?,
            p95_ms: at(0.95)?,
            p99_ms: at(0.99)?,
        })
    }
}

/// What calls of some time add up to. Counts calls that have ended, by the time they came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Totals {
    /// All of them.
    pub calls: u64,
    /// Those that caused an upstream request.
    pub upstream_calls: u64,
    /// Those that failed: `upstream_error`, `timeout`, `broken_stream` and `internal_error`.
    pub errors: u64,
    /// By their part in dedup.
    pub dedup: DedupCounts,
    /// By what became of them.
    pub outcomes: OutcomeCounts,
    /// From a call's coming to its first content, of calls that had any.
    pub first_token: Option<Percentiles>,
    /// From a call's coming to its last byte, of completed calls.
    pub duration: Option<Percentiles>,
}

impl From<&Sums> for Totals {
    fn from(sums: &Sums) -> Self {
        Self {
            calls: sums.calls,
            upstream_calls: sums.upstream_calls,
            errors: sums.outcomes.errors(),
            dedup: sums.dedup,
            outcomes: sums.outcomes,
            first_token: Percentiles::of(&sums.first_token),
            duration: Percentiles::of(&sums.duration),
        }
    }
}

impl Reader {
    /// What the calls add up to that came from `from` until before `to`, also those whose rows
    /// have gone. Cut at quarter-hours: a begun one counts whole.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn totals(
        &self,
        from: WallTime,
        to: WallTime,
        filter: &GroupFilter,
    ) -> Result<Totals, ReadError> {
        let mut sums = Sums::default();
        visit(&self.connection, from, to, filter, "quarter", |row| {
            sums.add_row(row, 1)
        })?;
        Ok(Totals::from(&sums))
    }
}

/// Hands the roll-up rows of a time to `each`, in its order: the columns `keys`, then those that
/// [`Sums::add_row`] reads.
pub(super) fn visit(
    connection: &Connection,
    from: WallTime,
    to: WallTime,
    filter: &GroupFilter,
    keys: &str,
    mut each: impl FnMut(&Row<'_>) -> rusqlite::Result<()>,
) -> Result<(), ReadError> {
    let (conditions, mut values) = filter.conditions();
    let last = quarter_of(WallTime(to.0.saturating_sub(1)));
    values.insert(0, Value::from(last));
    values.insert(0, Value::from(quarter_of(from)));
    let mut select = connection.prepare(&format!(
        "SELECT {keys}, {COLUMNS} FROM rollups
         WHERE quarter BETWEEN ? AND ?{conditions} ORDER BY quarter"
    ))?;
    let mut rows = select.query(params_from_iter(values))?;
    while let Some(row) = rows.next()? {
        each(row)?;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::super::spend::SPEND_COLUMNS;
    use super::super::tests::{LONG, database, end, open, start};
    use super::super::{Billing, CallId, DATABASE_FILE, Money, migrate};
    use super::*;
    use crate::policy::money::Nanodollars;
    use crate::policy::usage::{Basis, Usage};

    /// 2026-09-21T14:15:00Z, where a quarter-hour begins.
    const BEGIN: i64 = 1_790_000_100_000_000;
    const MINUTE: i64 = 60_000_000;
    const ALL_TIME: (WallTime, WallTime) = (WallTime(0), WallTime(i64::MAX));

    fn call(at: i64, tool: &str) -> CallStart {
        CallStart {
            id: CallId::new(WallTime(at)),
            started: WallTime(at),
            tool: Arc::from(tool),
            ..start()
        }
    }

    fn totals(folder: &Path) -> Totals {
        Reader::open(folder)
            .and_then(|reader| reader.totals(ALL_TIME.0, ALL_TIME.1, &GroupFilter::default()))
            .expect("totals")
    }

    fn number(folder: &Path, sql: &str) -> i64 {
        Connection::open(database(folder))
            .and_then(|database| database.query_row(sql, [], |row| row.get(0)))
            .expect("a number")
    }

    /// Every count of every group, from the rows and from the sums; where groups have become
    /// [`OTHER`], `by_name` is false and they are not told apart.
    #[track_caller]
    fn check_against_rows(folder: &Path, by_name: bool) {
        let names = if by_name {
            "coalesce(model, ''), tool"
        } else {
            "'', ''"
        };
        let of_rows = format!(
            "SELECT started_us / 900000000, provider, {names}, billing, streaming, count(*),
               sum(coalesce(upstream_call, 0)),
               sum(dedup = 'miss'), sum(dedup = 'joined'), sum(dedup = 'cached'),
               sum(dedup = 'off'), sum(outcome = 'completed'), sum(outcome = 'upstream_error'),
               sum(outcome = 'timeout'), sum(outcome = 'broken_stream'),
               sum(outcome = 'client_left'), sum(outcome = 'stopped'), sum(outcome = 'refused'),
               sum(outcome = 'interrupted'), sum(outcome = 'internal_error')
             FROM calls WHERE outcome IS NOT NULL GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6"
        );
        let names = if by_name { "model, tool" } else { "'', ''" };
        let counts: Vec<String> = COLUMNS
            .split(',')
            .take(COUNTS)
            .map(|column| format!("sum({column})"))
            .collect();
        let of_sums = format!(
            "SELECT quarter, provider, {names}, billing, streaming, {}
             FROM rollups GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6",
            counts.join(", ")
        );
        let connection = Connection::open(database(folder)).expect("a database");
        let rows = |sql: &str| -> Vec<Vec<Value>> {
            let mut select = connection.prepare(sql).expect("a query");
            let columns = 6 + COUNTS;
            select
                .query_map([], |row| {
                    (0..columns).map(|column| row.get(column)).collect()
                })
                .and_then(Iterator::collect)
                .expect("rows")
        };
        assert_eq!(rows(&of_sums), rows(&of_rows));
    }

    /// Tokens and money of all rows that have ended, in the order of [`SPEND_COLUMNS`].
    const SPEND_OF_ROWS: &str = "sum(coalesce(input_tokens, 0)),
        sum(coalesce(cached_input_tokens, 0)), sum(coalesce(cache_write_5m_tokens, 0)),
        sum(coalesce(cache_write_1h_tokens, 0)), sum(coalesce(output_tokens, 0)),
        sum(coalesce(reasoning_tokens, 0)), sum(coalesce(cost_nanos, 0)),
        sum(coalesce(list_nanos, 0)), sum(iif(billing = 'plan', coalesce(list_nanos, 0), 0)),
        sum(coalesce(saved_nanos, 0)), sum(coalesce(pricing = 'unpriced', 0) AND cost_nanos IS NULL),
        sum(coalesce(usage_basis = 'estimated', 0))";

    /// Tokens and money of every group, quarter-hour and day, from the rows and from the sums.
    #[track_caller]
    pub(in crate::store) fn check_spend_against_rows(folder: &Path) {
        let connection = Connection::open(database(folder)).expect("a database");
        let rows = |keys: &str, of: &str| -> Vec<Vec<Value>> {
            let places: Vec<String> = (1..=keys.split(", ").count())
                .map(|n| n.to_string())
                .collect();
            let places = places.join(", ");
            let sql = format!("SELECT {keys}, {of} GROUP BY {places} ORDER BY {places}");
            let mut select = connection.prepare(&sql).expect("a query");
            let columns = select.column_count();
            select
                .query_map([], |row| {
                    (0..columns).map(|column| row.get(column)).collect()
                })
                .and_then(Iterator::collect)
                .expect("rows")
        };
        let of_rows = |keys: &str| {
            let of = format!(
                "count(*), {SPEND_OF_ROWS}
                 FROM (SELECT *, coalesce(model, '') AS model_or_none FROM calls)
                 WHERE outcome IS NOT NULL"
            );
            rows(keys, &of)
        };
        let of_sums = |keys: &str, table: &str| {
            let sums: Vec<String> = SPEND_COLUMNS
                .split(',')
                .map(|column| format!("sum({column})"))
                .collect();
            rows(
                keys,
                &format!("sum(calls), {} FROM {table}", sums.join(", ")),
            )
        };
        let by_name = "provider, model, tool";
        assert_eq!(
            of_sums(&format!("quarter, {by_name}, billing"), "rollups"),
            of_rows("started_us / 900000000, provider, model_or_none, tool, billing")
        );
        assert_eq!(
            of_sums("quarter", "spend_by_quarter"),
            of_rows("started_us / 900000000")
        );
        assert_eq!(
            of_sums(&format!("day, {by_name}"), "spend_by_day"),
            of_rows("started_us / 86400000000, provider, model_or_none, tool")
        );
    }

    /// What a call may have used and cost.
    pub(in crate::store) fn any_account() -> impl Strategy<Value = (Option<Usage>, Money)> {
        let tokens = || prop::option::of(0..200_000_u64);
        let tokens = (tokens(), tokens(), tokens(), tokens(), tokens(), tokens());
        let basis = prop::sample::select(vec![Basis::Reported, Basis::Doubtful, Basis::Estimated]);
        let usage = (tokens, basis).prop_map(|(tokens, basis)| Usage {
            input: tokens.0,
            cached_input: tokens.1,
            cache_write_5m: tokens.2,
            cache_write_1h: tokens.3,
            output: tokens.4,
            reasoning: tokens.5,
            basis,
            ..Usage::default()
        });
        let amount = || prop::option::of((0..5_000_000_000_i64).prop_map(Nanodollars));
        let money =
            (amount(), amount(), amount(), 0..4_u8).prop_map(|(cost, list, saved, kind)| Money {
                cost: cost.filter(|_| kind != 3),
                list,
                saved,
                unpriced: kind >= 2,
                reported: kind == 1,
                tier: None,
            });
        (prop::option::of(usage), money)
    }

    fn any_end() -> impl Strategy<Value = CallEnd> {
        let names = (0..3_usize, 0..3_usize, 0..3_usize);
        let flags = (any::<bool>(), any::<bool>(), 0..4_usize, 0..9_usize);
        // Two hours, back and forth: what a clock that is set does.
        (
            names,
            flags,
            0..120 * MINUTE,
            0..2_000_000_u64,
            any_account(),
        )
            .prop_map(
                |(
                    (provider, model, tool),
                    (streaming, upstream, label, outcome),
                    at,
                    micros,
                    (usage, money),
                )| {
                    let span = Duration::from_micros(micros);
                    let labels = ["miss", "joined", "cached", "off"];
                    CallEnd {
                        start: CallStart {
                            provider: Arc::from(["openai", "anthropic", "ollama"][provider]),
                            model: [None, Some("m"), Some("n")][model].map(Arc::from),
                            billing: [Billing::Metered, Billing::Plan][usize::from(streaming)],
                            streaming,
                            dedup: labels[label].parse().expect("a label"),
                            ..call(BEGIN + at, ["aider", "codex", "curl"][tool])
                        },
                        outcome: Outcome::ALL[outcome],
                        sent: upstream.then_some(Duration::from_micros(5)),
                        head: upstream.then_some(span / 2),
                        upstream_ended: upstream.then_some(span),
                        first_token: upstream.then_some(span / 2),
                        duration: span,
                        usage,
                        money,
                        ..end(start())
                    }
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn sums_are_those_of_the_rows(
            batches in prop::collection::vec(prop::collection::vec(any_end(), 1..40), 1..4),
        ) {
            let folder = TempDir::new().expect("a folder");
            let store = open(folder.path());
            for batch in &batches {
                for end in batch {
                    store.finished(end.clone());
                }
                prop_assert!(store.flush(LONG));
            }
            check_against_rows(folder.path(), true);
            check_spend_against_rows(folder.path());
            let calls = batches.concat();
            let told = totals(folder.path());
            prop_assert_eq!(told.calls, calls.len() as u64);
            let mut whole = Sums::default();
            for end in &calls {
                whole.count(&Ended::of(end, &Account::of(end)));
            }
            prop_assert_eq!(told, Totals::from(&whole), "latencies too");
        }
    }

    #[test]
    fn a_call_counts_once_it_has_ended_and_where_it_came() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let long = call(BEGIN + 15 * MINUTE - 1, "aider");
        store.opened(long.clone());
        assert!(store.flush(LONG));
        assert_eq!(totals(folder.path()).calls, 0);
        store.finished(end(call(BEGIN + 15 * MINUTE, "aider")));
        store.finished(end(long));
        assert!(store.flush(LONG));
        check_against_rows(folder.path(), true);
        assert_eq!(number(folder.path(), "SELECT count(*) FROM rollups"), 2);

        let reader = Reader::open(folder.path()).expect("a record");
        let before = |to| {
            let filter = GroupFilter::default();
            let totals = reader.totals(WallTime(BEGIN), WallTime(to), &filter);
            totals.expect("totals").calls
        };
        assert_eq!(before(BEGIN), 0);
        assert_eq!(before(BEGIN + 1), 1, "a begun quarter-hour counts whole");
        assert_eq!(before(BEGIN + 15 * MINUTE), 1);
        assert_eq!(before(BEGIN + 15 * MINUTE + 1), 2);
    }

    #[test]
    fn totals_are_of_whom_one_asks_for() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        for (provider, model, tool) in [
            ("openai", Some("gpt-5"), "aider"),
            ("openai", Some("gpt-5-mini"), "codex"),
            ("ollama", None, "[aider]"),
        ] {
            store.finished(end(CallStart {
                provider: Arc::from(provider),
                model: model.map(Arc::from),
                ..call(BEGIN, tool)
            }));
        }
        assert!(store.flush(LONG));
        let reader = Reader::open(folder.path()).expect("a record");
        let count = |provider: Option<&str>, model: Option<&str>, tool: Option<&str>| {
            let filter = GroupFilter {
                provider: provider.map(str::to_owned),
                model: model.map(str::to_owned),
                tool: tool.map(str::to_owned),
            };
            let totals = reader.totals(ALL_TIME.0, ALL_TIME.1, &filter);
            totals.expect("totals").calls
        };
        assert_eq!(count(None, None, None), 3);
        assert_eq!(count(Some("openai"), None, None), 2);
        assert_eq!(count(None, Some("gpt-5*"), None), 2);
        assert_eq!(count(None, Some(""), None), 1, "none was named");
        assert_eq!(count(Some("o*"), None, Some("[aider]")), 1);
        assert_eq!(count(Some("openai"), Some("gpt-5"), Some("codex")), 0);
    }

    #[test]
    fn names_without_end_make_no_groups_without_end() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let calls = usize::try_from(MAX_GROUPS).expect("a number") + 50;
        for round in 0..2 {
            for n in 0..calls {
                store.finished(end(call(BEGIN + round, &format!("tool-{n}"))));
            }
            // Of another provider too.
            store.finished(end(CallStart {
                provider: Arc::from("ollama"),
                ..call(BEGIN, "late")
            }));
            assert!(store.flush(LONG));
        }
        check_against_rows(folder.path(), false);
        let groups = number(folder.path(), "SELECT count(*) FROM rollups");
        assert!((MAX_GROUPS..=MAX_GROUPS + 2).contains(&groups), "{groups}");
        let others = number(
            folder.path(),
            "SELECT sum(calls) FROM rollups WHERE tool = 'other' AND model = 'other'",
        );
        assert!(others >= 100, "{others}");
        // The next quarter-hour has room again.
        store.finished(end(call(BEGIN + 15 * MINUTE, "late")));
        assert!(store.flush(LONG));
        let late = "SELECT sum(calls) FROM rollups WHERE tool = 'late' AND provider = 'openai'";
        assert_eq!(number(folder.path(), late), 1);
    }

    #[test]
    fn what_an_earlier_process_left_open_counts_as_interrupted() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let open_call = call(BEGIN, "aider");
        store.opened(open_call.clone());
        store.opened(call(BEGIN, "codex"));
        store.finished(end(call(BEGIN, "aider")));
        assert!(store.flush(LONG));
        // What a budget holds is known later.
        store.opened(CallStart {
            reserved: Some(Nanodollars(1_500)),
            ..open_call
        });
        store.close();
        for _ in 0..2 {
            open(folder.path()).close();
            check_against_rows(folder.path(), true);
            check_spend_against_rows(folder.path());
            assert_eq!(
                number(folder.path(), "SELECT sum(cost_nanos) FROM rollups"),
                1_500
            );
            let reserved = "SELECT cost_nanos FROM calls WHERE pricing = 'reserved'";
            assert_eq!(number(folder.path(), reserved), 1_500);
            let totals = totals(folder.path());
            assert_eq!((totals.calls, totals.outcomes.interrupted), (3, 2));
            assert_eq!(totals.upstream_calls, 1);
        }
    }

    #[test]
    fn a_copy_put_back_under_a_running_store_counts_nothing_twice() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let long = CallStart {
            reserved: Some(Nanodollars(70)),
            ..call(BEGIN, "aider")
        };
        let money = |cost| Money {
            cost: Some(Nanodollars(cost)),
            ..Money::default()
        };
        let done = CallEnd {
            money: money(5),
            ..end(call(BEGIN, "aider"))
        };
        store.opened(long.clone());
        store.finished(done.clone());
        assert!(store.flush(LONG));
        let copy = folder.path().join("copy.db");
        Connection::open(database(folder.path()))
            .and_then(|database| {
                database.execute("VACUUM INTO ?1", [copy.to_string_lossy().as_ref()])
            })
            .expect("a copy");
        fs::remove_file(folder.path().join(format!("{DATABASE_FILE}-wal"))).expect("it gone");
        fs::rename(&copy, database(folder.path())).expect("it put back");
        // Opened anew, the log has the open call as interrupted.
        store.finished(end(call(BEGIN, "codex")));
        assert!(store.flush(LONG));
        assert_eq!(totals(folder.path()).outcomes.interrupted, 1);

        check_spend_against_rows(folder.path());

        store.finished(CallEnd {
            money: money(30),
            ..end(long)
        });
        // As a commit that took place and was reported as failed hands it in again.
        store.finished(done);
        assert!(store.flush(LONG));
        check_against_rows(folder.path(), true);
        check_spend_against_rows(folder.path());
        assert_eq!(
            number(folder.path(), "SELECT sum(cost_nanos) FROM rollups"),
            35
        );
        let totals = totals(folder.path());
        assert_eq!((totals.calls, totals.outcomes.interrupted), (3, 0));
    }

    #[test]
    fn a_log_from_before_there_were_sums_is_summed_up_once() {
        let folder = TempDir::new().expect("a folder");
        let old = Connection::open(database(folder.path())).expect("a database");
        old.execute_batch(include_str!("../../migrations/0001_calls.sql"))
            .expect("the first schema");
        old.pragma_update(None, "user_version", 1)
            .expect("a version");
        old.pragma_update(None, "application_id", migrate::APPLICATION_ID)
            .expect("an id");
        old.execute_batch("BEGIN").expect("a transaction");
        for n in 0..5000_i64 {
            let at = BEGIN + n * 7_000_000;
            old.execute(
                "INSERT INTO calls (id, started_us, provider, route, model, tool, billing,
                   streaming, dedup, outcome, upstream_call, first_token_us, queued_us, duration_us)
                 VALUES (?1, ?2, 'openai', 'chat/completions', ?3, ?4, 'metered', ?5, 'miss', ?6,
                   ?7, 400000, 100000, 900000)",
                params![
                    CallId::new(WallTime(at)).to_string(),
                    at,
                    Some("gpt-5").filter(|_| n % 3 > 0),
                    format!("tool-{}", n % 5),
                    n % 2,
                    // The last one is still open.
                    Some("completed").filter(|_| n < 4999),
                    Some(1).filter(|_| n < 4999),
                ],
            )
            .expect("a row");
        }
        old.execute_batch("COMMIT").expect("a commit");
        drop(old);
        for _ in 0..2 {
            let store = open(folder.path());
            assert!(store.health().recording, "{:?}", store.health());
            check_against_rows(folder.path(), true);
            check_spend_against_rows(folder.path());
            store.close();
        }
        let told = totals(folder.path());
        assert_eq!((told.calls, told.upstream_calls), (5000, 4999));
        let median = told.first_token.expect("latencies").p50_ms;
        assert!((median - 400.0).abs() < 12.0, "{median}");
        let copies = fs::read_dir(folder.path())
            .expect("a folder")
            .filter(|entry| {
                let name = entry.as_ref().expect("an entry").file_name();
                name.to_string_lossy().contains("before-update")
            });
        assert_eq!(copies.count(), 1);
    }

    #[test]
    fn quarter_hours_put_together_add_up_to_the_same() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let day = BEGIN.div_euclid(96 * QUARTER) * 96 * QUARTER;
        for n in 0..200 {
            store.finished(end(call(
                day + n * 7 * MINUTE,
                ["aider", "codex"][n as usize % 2],
            )));
        }
        assert!(store.flush(LONG));
        store.close();
        let before = totals(folder.path());
        let mut connection = Connection::open(database(folder.path())).expect("a database");
        let transaction = connection.transaction().expect("a transaction");
        let first = quarter_of(WallTime(day));
        put_together(&transaction, first, first + 96).expect("sums");
        transaction.commit().expect("a commit");
        assert_eq!(totals(folder.path()), before);
        assert_eq!(number(folder.path(), "SELECT count(*) FROM rollups"), 2);
        let calls = |table: &str| number(folder.path(), &format!("SELECT sum(calls) FROM {table}"));
        assert_eq!(calls("spend_by_day"), 200, "counted once");
        assert_eq!(calls("spend_by_quarter"), 200);
    }
}
