//! `traygate spend`: what was spent, on what and by whom, as a table, CSV or JSON.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context as _;
use jiff::tz::TimeZone;
use serde::Serialize as _;

use super::calls::{
    self, Format, HarmlessJson, Since, cut, dollars, moment, parse_since, spreadsheet_safe,
};
use crate::clock::{Clock, WallTime};
use crate::store::spend_report::{SpendBy, SpendQuery, SpendReport, Spent};

/// Flags of `traygate spend`.
#[derive(clap::Args, Clone, Debug)]
pub struct SpendArgs {
    /// How it is cut.
    #[arg(long, env = "TRAYGATE_SPEND_BY", value_enum, default_value = "day")]
    pub by: SpendBy,

    /// Only calls since then: 2h, 7d, 2026-11-30, "2026-11-30 14:00" or 2026-11-30T14:00:00Z
    /// [default: 24 hours, 30 days or 12 months].
    ///
    /// A date or a time without a zone is local. Cut at quarter-hours.
    // Hyphens, so that `-2h` is told what to write instead.
    #[arg(
        long,
        env = "TRAYGATE_SPEND_SINCE",
        value_name = "WHEN",
        value_parser = parse_since,
        allow_hyphen_values = true
    )]
    pub since: Option<Since>,

    /// How to print it.
    #[arg(
        long,
        env = "TRAYGATE_SPEND_FORMAT",
        value_enum,
        default_value = "table"
    )]
    pub format: Format,
}

/// Prints the report that `args` asks for to `out`. A reader that goes away ends it quietly.
///
/// # Errors
/// If there is no record yet, or it cannot be read or printed.
pub fn run(args: &SpendArgs, data_dir: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let zone = TimeZone::system();
    let now = Clock::default().wall();
    let from = match &args.since {
        Some(since) => since
            .resolve(moment(now), zone.clone())
            .context("--since reaches past the calendar")?,
        None => SpendQuery::usual_begin(args.by, now, &zone),
    };
    let report = calls::open(data_dir)?.spend(&SpendQuery {
        by: args.by,
        from,
        to: WallTime(now.0.saturating_add(1)),
        zone,
    })?;
    let text = match args.format {
        Format::Table => table(&report),
        Format::Csv => csv(&report),
        Format::Json => json(&report),
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `traygate spend | head` is no error.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Widths of the columns; with two spaces between them they make 103. All but the first are
/// aligned to the right.
const WIDTHS: [usize; 8] = [26, 9, 9, 9, 9, 9, 9, 9];

fn table(report: &SpendReport) -> String {
    if report.rows.is_empty() {
        return "No calls on record in that time.\n".to_owned();
    }
    let by = report.by.as_str().to_uppercase();
    let mut text = line([
        &by, "CALLS", "INPUT", "CACHED", "OUTPUT", "COST", "SAVED", "UNPRICED",
    ]);
    for row in &report.rows {
        let label = if row.label.is_empty() {
            "-"
        } else {
            &row.label
        };
        text.push_str(&spent_line(label, &row.spent));
    }
    text.push_str(&spent_line("TOTAL", &report.total));
    if report.total.plan_nanos != 0 {
        let plan = dollars(report.total.plan_nanos);
        text.push_str(&format!(
            "On subscriptions, neither cost nor savings: {plan} by the list.\n"
        ));
    }
    if report.total.unpriced_calls > 0 {
        text.push_str(
            "The cost of unpriced calls is not in these sums: set a [[price]] for their models, see `traygate spend --by model`.\n",
        );
    }
    text
}

fn spent_line(label: &str, spent: &Spent) -> String {
    let fresh = spent
        .input_tokens
        .saturating_add(spent.cache_write_5m_tokens)
        .saturating_add(spent.cache_write_1h_tokens);
    let unpriced = match spent.unpriced_calls {
        0 => "-".to_owned(),
        calls => calls.to_string(),
    };
    line([
        label,
        &spent.calls.to_string(),
        &short(fresh),
        &short(spent.cached_input_tokens),
        &short(spent.output_tokens),
        &dollars(spent.cost_nanos),
        &dollars(spent.saved_nanos),
        &unpriced,
    ])
}

fn line(cells: [&str; 8]) -> String {
    let mut line = String::new();
    for (column, (cell, width)) in cells.into_iter().zip(WIDTHS).enumerate() {
        if column == 0 {
            line.push_str(&format!("{:<width$}", cut(cell, width)));
        } else {
            line.push_str(&format!("  {cell:>width$}"));
        }
    }
    line.push('\n');
    line
}

/// `950`, `12.3k`, `4.56M`: a count of tokens in few characters, cut, not rounded.
fn short(count: u64) -> String {
    match count {
        0..1000 => count.to_string(),
        1000..1_000_000 => format!("{}.{}k", count / 1000, count / 100 % 10),
        _ => format!("{}.{:02}M", count / 1_000_000, count / 10_000 % 100),
    }
}

/// The columns after the label and its beginning, which are the fields of [`Spent`].
const FIELDS: [&str; 17] = [
    "calls",
    "unpriced_calls",
    "estimated_calls",
    "input_tokens",
    "cached_input_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cost_nanos",
    "cost_usd",
    "list_nanos",
    "list_usd",
    "plan_nanos",
    "plan_usd",
    "saved_nanos",
    "saved_usd",
];

fn csv(report: &SpendReport) -> String {
    let mut writer = csv::WriterBuilder::new()
        .has_headers(false)
        .from_writer(Vec::new());
    // Into memory: nothing here can fail.
    let header = [report.by.as_str(), "start"].into_iter().chain(FIELDS);
    writer.write_record(header).expect("a row is plain data");
    for row in &report.rows {
        let start = row.start.map(crate::store::json::text_of);
        writer
            .serialize((
                spreadsheet_safe(&row.label),
                start.unwrap_or_default(),
                &row.spent,
            ))
            .expect("a row is plain data");
    }
    let bytes = writer.into_inner().expect("a Vec takes all");
    String::from_utf8(bytes).expect("fields are UTF-8")
}

fn json(report: &SpendReport) -> String {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, HarmlessJson);
    // Strings and numbers into memory: nothing here can fail.
    report
        .serialize(&mut serializer)
        .expect("a report is plain data");
    text.push(b'\n');
    String::from_utf8(text).expect("JSON is UTF-8")
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};
    use tempfile::TempDir;

    use super::*;
    use crate::store::spend_report::SpendRow;

    fn spent(cost_nanos: i64) -> Spent {
        Spent {
            calls: 12,
            unpriced_calls: 1,
            input_tokens: 1_234_567,
            cached_input_tokens: 45_678,
            cache_write_5m_tokens: 3,
            output_tokens: 999,
            cost_nanos,
            cost_usd: crate::store::json::dollars_of(cost_nanos),
            plan_nanos: 7_000_000_000,
            saved_nanos: 12_000,
            ..Spent::default()
        }
    }

    fn report() -> SpendReport {
        SpendReport {
            by: SpendBy::Tool,
            from: WallTime(0),
            to: WallTime(1),
            zone: Some("UTC".to_owned()),
            total: spent(1_840_000_000),
            rows: vec![
                SpendRow {
                    label: "=cmd|'x'\u{9b}31m".to_owned(),
                    start: None,
                    spent: spent(1_840_000_000),
                },
                SpendRow {
                    label: "a tool of such a name that it has to be cut".to_owned(),
                    start: Some(WallTime(0)),
                    spent: spent(0),
                },
            ],
        }
    }

    #[test]
    fn the_table_has_sums_and_says_what_is_not_in_them() {
        insta::assert_snapshot!(table(&report()), @"
        TOOL                            CALLS      INPUT     CACHED     OUTPUT       COST      SAVED   UNPRICED
        =cmd|'x'�31m                       12      1.23M      45.6k        999    $1.8400    <$.0001          1
        a tool of such a name tha…         12      1.23M      45.6k        999         $0    <$.0001          1
        TOTAL                              12      1.23M      45.6k        999    $1.8400    <$.0001          1
        On subscriptions, neither cost nor savings: $7.0000 by the list.
        The cost of unpriced calls is not in these sums: set a [[price]] for their models, see `traygate spend --by model`.
        ");
        let empty = SpendReport {
            rows: Vec::new(),
            ..report()
        };
        assert_eq!(table(&empty), "No calls on record in that time.\n");
    }

    #[test]
    fn csv_has_a_column_for_each_field() {
        let text = csv(&report());
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let header = reader.headers().expect("a header").clone();
        assert_eq!(header.iter().take(2).collect::<Vec<_>>(), ["tool", "start"]);
        let fields: Vec<String> = header.iter().skip(2).map(str::to_owned).collect();
        let object = serde_json::to_value(Spent::default()).expect("JSON");
        let object = object.as_object().expect("an object");
        assert_eq!(object.len(), FIELDS.len());
        assert!(fields.iter().all(|field| object.contains_key(field)));
        let rows: Vec<csv::StringRecord> =
            reader.records().collect::<Result<_, _>>().expect("rows");
        assert_eq!(&rows[0][0], "'=cmd|'x'\u{fffd}31m");
        let back: Spent = rows[0]
            .iter()
            .skip(2)
            .collect::<csv::StringRecord>()
            .deserialize(None)
            .expect("what was written");
        assert_eq!(back, report().rows[0].spent);
    }

    #[test]
    fn json_cannot_steer_a_terminal() {
        let text = json(&report());
        assert!(
            !text.trim_end().contains(|c: char| c.is_control()),
            "{text}"
        );
        let told: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(told["total"]["cost_nanos"], 1_840_000_000_i64);
        assert_eq!(told["total"]["cost_usd"], "1.84");
    }

    #[test]
    fn without_a_record_it_says_how_to_begin_one() {
        let command = SpendArgs::augment_args(clap::Command::new("spend").no_binary_name(true));
        let matches = command.try_get_matches_from(["--by", "month"]);
        let args = matches.and_then(|matches| SpendArgs::from_arg_matches(&matches));
        let args = args.expect("flags");
        assert_eq!(args.by, SpendBy::Month);
        let folder = TempDir::new().expect("a folder");
        let error = run(&args, folder.path(), &mut Vec::new()).expect_err("no record");
        assert!(format!("{error:#}").contains("traygate serve"), "{error:#}");
    }

    #[test]
    fn counts_stay_short() {
        let shown = [0, 999, 1000, 12_399, 999_999, 1_000_000, 12_349_999].map(short);
        assert_eq!(
            shown,
            ["0", "999", "1.0k", "12.3k", "999.9k", "1.00M", "12.34M"]
        );
    }
}
