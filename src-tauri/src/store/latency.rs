//! How long providers were waited for, and what a timeout would have cut.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde::Serialize;
use utoipa::ToSchema;

use super::json;
use super::queries::{ReadError, Reader};
use super::rollup::{self, GroupFilter, Percentiles, Sums};
use crate::clock::WallTime;
use crate::policy::latency_histogram::LatencyHistogram;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct LatencyQuery {
    /// Calls that came at this time or later; cut at quarter-hours.
    pub from: WallTime,
    /// Calls that came before this time.
    pub to: WallTime,
    /// Timeouts that are thought of.
    pub timeouts: Vec<Duration>,
    /// Whose calls.
    pub filter: GroupFilter,
}

impl LatencyQuery {
    /// Asks for a whole day of a time zone.
    pub fn of_day(day: Date, zone: &TimeZone, timeouts: Vec<Duration>) -> Self {
        let midnight = |day: Date| {
            let midnight = day.to_zoned_datetime(zone.clone());
            let midnight = midnight.and_then(|midnight| midnight.start_of_day());
            // Only the first and the last day of time that can be told have none.
            midnight.map_or(WallTime::default(), |midnight| {
                WallTime(midnight.timestamp().as_microsecond())
            })
        };
        Self {
            from: midnight(day),
            to: midnight(day.saturating_add(jiff::Span::new().days(1))),
            timeouts,
            filter: GroupFilter::default(),
        }
    }

    /// Asks for the day before the one that it is at `now`.
    pub fn of_yesterday(now: WallTime, zone: &TimeZone, timeouts: Vec<Duration>) -> Self {
        let now = Timestamp::from_microsecond(now.0).unwrap_or(Timestamp::UNIX_EPOCH);
        let today = now.to_zoned_datetime(zone.clone()).date();
        let yesterday = today.saturating_sub(jiff::Span::new().days(1));
        Self::of_day(yesterday, zone, timeouts)
    }
}

/// How long upstreams were waited for in some time.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Latency {
    /// The time that was asked about begins here: RFC 3339 in UTC.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    pub from: WallTime,
    /// And ends before this.
    #[serde(serialize_with = "json::time")]
    #[schema(value_type = String, format = DateTime)]
    pub to: WallTime,
    /// All providers and models together.
    pub all: Waits,
    /// By provider and model, in the order of their names.
    pub models: Vec<ModelLatency>,
}

/// How long one model was waited for.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ModelLatency {
    /// The provider's name.
    pub provider: String,
    /// The model as clients spelled it; `null` for calls that named none.
    pub model: Option<String>,
    /// Its waits.
    #[serde(flatten)]
    pub waits: Waits,
}

/// Waits for streams and for whole answers, which have a timeout each.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Waits {
    /// To the beginning of a streamed answer: what `timeout_secs` limits.
    pub streamed: Wait,
    /// To the end of an answer in one piece: what `unstreamed_timeout_secs` limits.
    pub unstreamed: Wait,
}

/// How long upstream calls waited, from their sending. A wait that was given up (a timeout, a
/// client that left) counts as far as it went; calls that failed are not among them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Wait {
    /// Upstream calls that were measured.
    pub count: u64,
    /// `null` if there were none.
    pub percentiles: Option<Percentiles>,
    /// For each timeout that was asked about, in the order asked.
    pub cut: Vec<Cut>,
}

/// What a timeout would have done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct Cut {
    /// The timeout, in milliseconds.
    pub timeout_ms: f64,
    /// Upstream calls that waited longer, those within 6 % of it among them.
    pub calls: u64,
}

impl Reader {
    /// How long upstreams were waited for, and what timeouts would have cut.
    ///
    /// # Errors
    /// If SQLite cannot read.
    pub fn latency(&self, query: &LatencyQuery) -> Result<Latency, ReadError> {
        let mut all = Histograms::default();
        let mut models = BTreeMap::<(String, String), Histograms>::new();
        let keys = "provider, model, streaming";
        rollup::visit(
            &self.connection,
            query.from,
            query.to,
            &query.filter,
            keys,
            |row| {
                let mut sums = Sums::default();
                sums.add_row(row, 3)?;
                let streaming = row.get(2)?;
                all.of(streaming).merge(&sums.upstream_wait);
                models
                    .entry((row.get(0)?, row.get(1)?))
                    .or_default()
                    .of(streaming)
                    .merge(&sums.upstream_wait);
                Ok(())
            },
        )?;
        let models = models
            .into_iter()
            .filter(|(_, histograms)| histograms.count() > 0)
            .map(|((provider, model), histograms)| ModelLatency {
                provider,
                model: Some(model).filter(|model| !model.is_empty()),
                waits: histograms.waits(&query.timeouts),
            })
            .collect();
        Ok(Latency {
            from: query.from,
            to: query.to,
            all: all.waits(&query.timeouts),
            models,
        })
    }
}

#[derive(Debug, Default)]
struct Histograms {
    streamed: LatencyHistogram,
    unstreamed: LatencyHistogram,
}

impl Histograms {
    fn of(&mut self, streaming: bool) -> &mut LatencyHistogram {
        if streaming {
            &mut self.streamed
        } else {
            &mut self.unstreamed
        }
    }

    fn count(&self) -> u64 {
        self.streamed.count() + self.unstreamed.count()
    }

    fn waits(&self, timeouts: &[Duration]) -> Waits {
        let wait = |histogram: &LatencyHistogram| Wait {
            count: histogram.count(),
            percentiles: Percentiles::of(histogram),
            cut: timeouts
                .iter()
                .map(|timeout| Cut {
                    timeout_ms: json::millis_of(*timeout),
                    calls: histogram.count_over(*timeout),
                })
                .collect(),
        };
        Waits {
            streamed: wait(&self.streamed),
            unstreamed: wait(&self.unstreamed),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tempfile::TempDir;

    use super::super::tests::{LONG, end, open, start};
    use super::super::{CallEnd, CallId, CallStart, Outcome};
    use super::*;

    /// 2026-09-21T14:13:20Z.
    const BEGIN: WallTime = WallTime(1_790_000_000_000_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn call(model: &str, streaming: bool) -> CallStart {
        CallStart {
            id: CallId::new(BEGIN),
            started: BEGIN,
            model: Some(Arc::from(model)),
            streaming,
            ..start()
        }
    }

    /// Sent after a second in the queue, answered after `head` and ended after `ended` more.
    fn waited(start: CallStart, outcome: Outcome, head: Option<u32>, ended: u32) -> CallEnd {
        CallEnd {
            outcome,
            sent: Some(SECOND),
            head: head.map(|head| SECOND * (1 + head)),
            upstream_ended: Some(SECOND * (1 + ended)),
            duration: SECOND * (2 + ended),
            ..end(start)
        }
    }

    fn ask(calls: Vec<CallEnd>, timeouts: &[u64]) -> Latency {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        for call in calls {
            store.finished(call);
        }
        assert!(store.flush(LONG));
        let utc = TimeZone::UTC;
        let day = LatencyQuery::of_yesterday(
            WallTime(BEGIN.0 + 86_400_000_000),
            &utc,
            timeouts.iter().copied().map(Duration::from_secs).collect(),
        );
        Reader::open(folder.path())
            .and_then(|reader| reader.latency(&day))
            .expect("latencies")
    }

    fn cut(wait: &Wait) -> Vec<u64> {
        wait.cut.iter().map(|cut| cut.calls).collect()
    }

    #[test]
    fn a_stream_waits_for_its_beginning_and_a_whole_answer_for_its_end() {
        let told = ask(
            vec![
                waited(call("a", true), Outcome::Completed, Some(10), 300),
                waited(call("a", false), Outcome::Completed, Some(10), 40),
                waited(call("b", false), Outcome::Completed, Some(1), 2),
            ],
            &[5, 20, 60],
        );
        assert_eq!((told.all.streamed.count, told.all.unstreamed.count), (1, 2));
        assert_eq!(cut(&told.all.streamed), [1, 0, 0]);
        assert_eq!(cut(&told.all.unstreamed), [1, 1, 0]);
        let models: Vec<_> = told
            .models
            .iter()
            .map(|model| model.model.as_deref())
            .collect();
        assert_eq!(models, [Some("a"), Some("b")]);
        let waits = &told.models[0].waits;
        let median = waits.streamed.percentiles.expect("percentiles").p50_ms;
        assert!(
            (median - 10_000.0).abs() < 310.0,
            "without the queue: {median}"
        );
        let of_b = &told.models[1].waits;
        assert_eq!(of_b.streamed.percentiles, None);
        assert_eq!(cut(&of_b.unstreamed), [0, 0, 0]);
    }

    #[test]
    fn what_was_given_up_counts_as_far_as_it_went() {
        let told = ask(
            vec![
                waited(call("a", true), Outcome::Timeout, None, 120),
                waited(call("a", true), Outcome::ClientLeft, None, 30),
                // These say nothing about how long an answer takes.
                waited(call("a", true), Outcome::UpstreamError, None, 90),
                CallEnd {
                    sent: None,
                    head: None,
                    upstream_ended: None,
                    ..waited(call("a", true), Outcome::Refused, None, 90)
                },
            ],
            &[10, 60, 119, 600],
        );
        assert_eq!(told.all.streamed.count, 2);
        assert_eq!(cut(&told.all.streamed), [2, 1, 1, 0]);
    }

    #[test]
    fn a_route_that_nobody_knows_is_measured_to_its_beginning() {
        let upload = CallStart {
            route: "POST /v1/files".into(),
            model: None,
            ..call("", false)
        };
        let told = ask(
            vec![waited(upload, Outcome::Completed, Some(2), 500)],
            &[60],
        );
        assert_eq!(cut(&told.all.unstreamed), [0]);
        assert_eq!(told.models[0].model, None);
    }

    #[test]
    fn a_day_is_that_of_the_zone() {
        let zone = TimeZone::get("Europe/Berlin").expect("a zone");
        let query = LatencyQuery::of_day(jiff::civil::date(2026, 10, 25), &zone, Vec::new());
        assert_eq!(query.to.0 - query.from.0, 25 * 3_600_000_000);
        let next = LatencyQuery::of_yesterday(query.to, &zone, Vec::new());
        assert_eq!((next.from, next.to), (query.from, query.to));
    }
}
