//! `traygate calls`: prints the record, as a table, CSV or JSON lines, and follows it.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::{FalseyValueParser, PossibleValuesParser, TypedValueParser as _};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{Span, Timestamp};
use serde::Serialize;
use serde_json::ser::Formatter;

use crate::clock::{Clock, WallTime};
use crate::policy::money::Nanodollars;
use crate::store::Outcome;
use crate::store::json::dollars_of;
use crate::store::queries::{CallFilter, CallRow, OPEN, OutcomeFilter, ReadError, Reader};
use crate::store::spend::{Account, UNPRICED};

/// How often `--follow` looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Rows fetched at once while following.
const FETCH: usize = 1000;
/// Bytes gathered before they are printed.
const PIECE: usize = 64 << 10;

/// Flags of `traygate calls`.
#[derive(clap::Args, Clone, Debug)]
pub struct CallsArgs {
    /// Only calls since then: 2h, 7d, 2026-11-30, "2026-11-30 14:00" or 2026-11-30T14:00:00Z.
    ///
    /// A date or a time without a zone is local.
    // Hyphens, so that `-2h` is told what to write instead.
    #[arg(
        long,
        env = "TRAYGATE_CALLS_SINCE",
        value_name = "WHEN",
        value_parser = parse_since,
        allow_hyphen_values = true
    )]
    pub since: Option<Since>,

    /// Only calls to this provider; * and ? stand for any characters.
    #[arg(long, env = "TRAYGATE_CALLS_PROVIDER", value_name = "NAME")]
    pub provider: Option<String>,

    /// Only calls of this tool; * and ? stand for any characters.
    #[arg(long, env = "TRAYGATE_CALLS_TOOL", value_name = "NAME")]
    pub tool: Option<String>,

    /// Only calls that ended so, or that are still open.
    #[arg(long, env = "TRAYGATE_CALLS_OUTCOME", value_parser = outcome_parser())]
    pub outcome: Option<OutcomeFilter>,

    /// How to print them.
    #[arg(
        long,
        env = "TRAYGATE_CALLS_FORMAT",
        value_enum,
        default_value = "table"
    )]
    pub format: Format,

    /// Go on printing calls as they end, until interrupted.
    #[arg(long, env = "TRAYGATE_CALLS_FOLLOW", value_parser = FalseyValueParser::new())]
    pub follow: bool,

    /// How many calls at most, the last ones; the newest is printed last [default: 50, or all with
    /// --since].
    #[arg(long, env = "TRAYGATE_CALLS_LIMIT", value_name = "N")]
    pub limit: Option<usize>,
}

/// How calls are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Aligned columns, local times; what went wrong on a line below.
    Table,
    /// All fields, with a header. Text that a spreadsheet would take for a formula gets a ' before it.
    Csv,
    /// All fields, one object a line.
    Json,
}

/// The beginning of the time asked for.
#[derive(Clone, Debug)]
pub enum Since {
    /// A moment.
    At(Timestamp),
    /// A local date and time.
    Local(DateTime),
    /// So long ago.
    Ago(Span),
}

pub(super) fn parse_since(text: &str) -> Result<Since, String> {
    if let Ok(moment) = text.parse() {
        return Ok(Since::At(moment));
    }
    if let Ok(local) = text.parse() {
        return Ok(Since::Local(local));
    }
    match text.parse::<Span>() {
        Ok(span) if !span.is_negative() => Ok(Since::Ago(span)),
        Ok(_) => Err("it looks back by itself: write 2h, without a sign".to_owned()),
        Err(_) => Err(
            "write a span (2h, 7d), a date (2026-11-30) or a time (2026-11-30T14:00:00Z)"
                .to_owned(),
        ),
    }
}

impl Since {
    pub(super) fn resolve(&self, now: Timestamp, zone: TimeZone) -> Result<WallTime, jiff::Error> {
        let begin = match self {
            Self::At(moment) => *moment,
            Self::Local(local) => local.to_zoned_datetime(zone)?.timestamp(),
            Self::Ago(span) => now.to_zoned_datetime(zone).checked_sub(*span)?.timestamp(),
        };
        Ok(WallTime(begin.as_microsecond()))
    }
}

fn outcome_parser() -> impl clap::builder::TypedValueParser<Value = OutcomeFilter> {
    PossibleValuesParser::new(
        Outcome::ALL
            .iter()
            .map(|outcome| outcome.as_str())
            .chain([OPEN]),
    )
    .map(|word| {
        Outcome::ALL
            .into_iter()
            .find(|outcome| outcome.as_str() == word)
            .map_or(OutcomeFilter::Open, OutcomeFilter::Ended)
    })
}

/// Prints the calls that `args` asks for to `out`. A reader that goes away ends it quietly.
///
/// # Errors
/// If there is no record yet, or it cannot be read or printed.
pub fn run(args: &CallsArgs, data_dir: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let zone = TimeZone::system();
    let now = moment(Clock::default().wall());
    let since = args
        .since
        .as_ref()
        .map(|since| since.resolve(now, zone.clone()))
        .transpose()
        .context("--since reaches past the calendar")?;
    let filter = CallFilter {
        since,
        provider: args.provider.clone(),
        tool: args.tool.clone(),
        outcome: args.outcome,
        ..CallFilter::default()
    };
    // A cut nobody asked for would falsify an export of last week.
    let limit = match (args.limit, since) {
        (Some(limit), _) => limit,
        (None, Some(_)) => usize::MAX,
        (None, None) => 50,
    };
    let printer = Printer {
        format: args.format,
        zone,
    };
    let reader = open(data_dir)?;
    let mut page = Page::new(out, printer.header());
    let seq = reader.visit_last(&filter, limit, |row| page.add(&printer.row(&row)))?;
    drop(reader);
    if page.rows == 0 && args.format == Format::Table && !args.follow {
        page.text =
            "No calls on record match (a call is on record a moment after its end).\n".to_owned();
    }
    page.print();
    let mut follower = Follower { filter, seq };
    while args.follow && page.end.is_none() {
        std::thread::sleep(LOOK_EVERY);
        for row in follower.next(data_dir)? {
            if page.add(&printer.row(&row)).is_break() {
                break;
            }
        }
        page.print();
    }
    match page.end {
        // `traygate calls | head` is no error.
        Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Gathers rows and prints them in pieces, until printing fails.
struct Page<'out> {
    out: &'out mut dyn Write,
    text: String,
    rows: usize,
    end: Option<io::Error>,
}

impl<'out> Page<'out> {
    fn new(out: &'out mut dyn Write, text: String) -> Self {
        Self {
            out,
            text,
            rows: 0,
            end: None,
        }
    }

    fn add(&mut self, row: &str) -> ControlFlow<()> {
        self.text.push_str(row);
        self.rows += 1;
        if self.text.len() >= PIECE {
            self.print();
        }
        match self.end {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    fn print(&mut self) {
        if self.end.is_none() && !self.text.is_empty() {
            let printed = self.out.write_all(self.text.as_bytes());
            self.end = printed.and_then(|()| self.out.flush()).err();
        }
        self.text.clear();
    }
}

pub(super) fn open(data_dir: &Path) -> anyhow::Result<Reader> {
    Reader::open(data_dir).map_err(|error| match error {
        ReadError::Missing { .. } => anyhow::Error::new(error)
            .context("nothing to show: start `traygate serve` and send a call through it"),
        error => error.into(),
    })
}

/// Reads on from the last end it has seen.
struct Follower {
    filter: CallFilter,
    seq: i64,
}

impl Follower {
    /// What has ended since. Opens the file anew: it may have been set aside for a fresh one,
    /// and is a moment absent then.
    fn next(&mut self, data_dir: &Path) -> Result<Vec<CallRow>, ReadError> {
        let reader = match Reader::open(data_dir) {
            Err(ReadError::Missing { .. }) => return Ok(Vec::new()),
            reader => reader?,
        };
        if reader.last_seq()? < self.seq {
            self.seq = 0;
        }
        let mut rows: Vec<CallRow> = Vec::new();
        loop {
            let page = reader.ended_after(self.seq, &self.filter, FETCH)?;
            let Some(last) = page.last() else {
                return Ok(rows);
            };
            self.seq = last.seq;
            rows.extend(page);
        }
    }
}

struct Printer {
    format: Format,
    zone: TimeZone,
}

impl Printer {
    fn header(&self) -> String {
        match self.format {
            Format::Table => line([
                "TIME", "PROVIDER", "MODEL", "TOOL", "DEDUP", "CODE", "OUTCOME", "FIRST", "TOOK",
                "COST",
            ]),
            Format::Csv => FIELDS.join(",") + "\n",
            Format::Json => String::new(),
        }
    }

    fn row(&self, row: &CallRow) -> String {
        match self.format {
            Format::Table => self.table_row(row),
            Format::Csv => csv_row(row),
            Format::Json => json_row(row),
        }
    }

    fn table_row(&self, row: &CallRow) -> String {
        let time = moment(row.started)
            .to_zoned_datetime(self.zone.clone())
            .strftime("%Y-%m-%d %H:%M:%S")
            .to_string();
        let status = row.status.map(|status| status.to_string());
        let span = |span: Option<Duration>| span.map_or_else(|| "-".to_owned(), human);
        let mut text = line([
            &time,
            &row.provider,
            row.model.as_deref().unwrap_or("-"),
            &row.tool,
            &row.dedup,
            status.as_deref().unwrap_or("-"),
            row.outcome.as_deref().unwrap_or(OPEN),
            &span(row.first_token),
            &span(row.duration),
            &cost(&row.account),
        ]);
        if let Some(error) = &row.error {
            text.push_str("  > ");
            text.push_str(&cut(error, TABLE_WIDTH - 4));
            text.push('\n');
        }
        text
    }
}

/// Widths of the table's columns; with two spaces between them they make 120. The same for every
/// page, so that a followed log stays aligned. Times and costs are aligned to the right.
const WIDTHS: [usize; 10] = [19, 10, 20, 10, 6, 4, 14, 6, 6, 7];
const TABLE_WIDTH: usize = 120;

fn line(cells: [&str; 10]) -> String {
    let mut line = String::with_capacity(TABLE_WIDTH + 1);
    for (column, (cell, width)) in cells.into_iter().zip(WIDTHS).enumerate() {
        let cell = cut(cell, width);
        if column > 0 {
            line.push_str("  ");
        }
        if column >= 7 {
            line.push_str(&format!("{cell:>width$}"));
        } else {
            line.push_str(&format!("{cell:<width$}"));
        }
    }
    line.truncate(line.trim_end().len());
    line.push('\n');
    line
}

/// Harmless, and at most `width` characters.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return harmless(text);
    }
    let mut cut: String = harmless(text).chars().take(width - 1).collect();
    cut.push('…');
    cut
}

/// `840 ms`, `12.3 s`, `75 min`, `30 h`: six characters until a thousand hours have passed.
fn human(span: Duration) -> String {
    let millis = span.as_millis();
    match millis {
        0..10 => format!("{}.{} ms", millis, span.subsec_micros() / 100 % 10),
        10..1000 => format!("{millis} ms"),
        1000..100_000 => format!("{}.{} s", millis / 1000, millis / 100 % 10),
        100_000..6_000_000 => format!("{} min", millis / 60_000),
        _ => format!("{} h", millis / 3_600_000),
    }
}

/// What a call cost; `?` where its model has no price, `-` where nothing is known.
fn cost(account: &Account) -> String {
    match account.cost_nanos {
        Some(nanos) => dollars(nanos),
        None if account.pricing.as_deref() == Some(UNPRICED) => "?".to_owned(),
        None => "-".to_owned(),
    }
}

/// `$0`, `$0.0123`, `$12.30`: seven characters below a million dollars.
pub(super) fn dollars(nanos: i64) -> String {
    let decimals = match nanos {
        0 => return "$0".to_owned(),
        // Not nothing, though it would be rounded to that.
        1..=50_000 => return "<$.0001".to_owned(),
        50_001..9_999_950_000 => 4,
        9_999_950_000..999_995_000_000 => 2,
        // A million dollars, or a correction downwards.
        _ => 0,
    };
    format!("{:.decimals$}", Nanodollars(nanos))
}

/// Characters that steer a terminal, hide, or turn the direction of text: a model's or tool's name
/// comes from anywhere.
fn steers(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{061C}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}'
            | '\u{2060}'..='\u{206F}' | '\u{FEFF}' | '\u{E0000}'..='\u{E007F}')
}

/// Line ends and tabs become spaces, other steering characters `\u{FFFD}`, one for one.
fn harmless(text: &str) -> String {
    text.chars()
        .map(|character| match character {
            '\n' | '\r' | '\t' => ' ',
            character if steers(character) => char::REPLACEMENT_CHARACTER,
            character => character,
        })
        .collect()
}

/// The fields of CSV and JSON, in their order. Other people's scripts rely on the names.
#[derive(Serialize)]
struct Fields<'row> {
    id: &'row str,
    started: String,
    provider: &'row str,
    route: &'row str,
    model: Option<&'row str>,
    tool: &'row str,
    billing: &'row str,
    streaming: bool,
    dedup: &'row str,
    status: Option<u16>,
    outcome: &'row str,
    upstream_call: Option<bool>,
    first_token_us: Option<u64>,
    queued_us: Option<u64>,
    duration_us: Option<u64>,
    request_key: Option<String>,
    error: Option<&'row str>,
    input_tokens: Option<u64>,
    cached_input_tokens: Option<u64>,
    cache_write_5m_tokens: Option<u64>,
    cache_write_1h_tokens: Option<u64>,
    output_tokens: Option<u64>,
    reasoning_tokens: Option<u64>,
    usage_basis: Option<&'row str>,
    cost_nanos: Option<i64>,
    cost_usd: Option<String>,
    list_nanos: Option<i64>,
    list_usd: Option<String>,
    saved_nanos: Option<i64>,
    saved_usd: Option<String>,
    pricing: Option<&'row str>,
    service_tier: Option<&'row str>,
}

const FIELDS: [&str; 32] = [
    "id",
    "started",
    "provider",
    "route",
    "model",
    "tool",
    "billing",
    "streaming",
    "dedup",
    "status",
    "outcome",
    "upstream_call",
    "first_token_us",
    "queued_us",
    "duration_us",
    "request_key",
    "error",
    "input_tokens",
    "cached_input_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "output_tokens",
    "reasoning_tokens",
    "usage_basis",
    "cost_nanos",
    "cost_usd",
    "list_nanos",
    "list_usd",
    "saved_nanos",
    "saved_usd",
    "pricing",
    "service_tier",
];

impl<'row> Fields<'row> {
    fn of(row: &'row CallRow) -> Self {
        let micros = |span: Option<Duration>| {
            span.map(|span| u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
        };
        let account = &row.account;
        Self {
            id: &row.id,
            started: moment(row.started).to_string(),
            provider: &row.provider,
            route: &row.route,
            model: row.model.as_deref(),
            tool: &row.tool,
            billing: &row.billing,
            streaming: row.streaming,
            dedup: &row.dedup,
            status: row.status,
            outcome: row.outcome.as_deref().unwrap_or(OPEN),
            upstream_call: row.upstream_call,
            first_token_us: micros(row.first_token),
            queued_us: micros(row.queued),
            duration_us: micros(row.duration),
            request_key: row.request_key.as_deref().map(hex),
            error: row.error.as_deref(),
            input_tokens: account.input_tokens,
            cached_input_tokens: account.cached_input_tokens,
            cache_write_5m_tokens: account.cache_write_5m_tokens,
            cache_write_1h_tokens: account.cache_write_1h_tokens,
            output_tokens: account.output_tokens,
            reasoning_tokens: account.reasoning_tokens,
            usage_basis: account.usage_basis.as_deref(),
            cost_nanos: account.cost_nanos,
            cost_usd: account.cost_nanos.map(dollars_of),
            list_nanos: account.list_nanos,
            list_usd: account.list_nanos.map(dollars_of),
            saved_nanos: account.saved_nanos,
            saved_usd: account.saved_nanos.map(dollars_of),
            pricing: account.pricing.as_deref(),
            service_tier: account.service_tier.as_deref(),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn json_row(row: &CallRow) -> String {
    let mut line = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut line, HarmlessJson);
    // Strings and numbers into memory: nothing here can fail, and a row left out would lie.
    Fields::of(row)
        .serialize(&mut serializer)
        .expect("a row is plain data");
    line.push(b'\n');
    String::from_utf8(line).expect("JSON is UTF-8")
}

/// JSON's own escapes leave DEL, C1 and direction marks as they are; a terminal would obey them.
pub(super) struct HarmlessJson;

impl Formatter for HarmlessJson {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some((before, steering)) = rest
            .char_indices()
            .find(|(_, character)| steers(*character))
        {
            writer.write_all(&rest.as_bytes()[..before])?;
            for unit in steering.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = &rest[before + steering.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
}

fn csv_row(row: &CallRow) -> String {
    let fields = Fields::of(row);
    let [route, tool] = [fields.route, fields.tool].map(spreadsheet_safe);
    let [model, error] = [fields.model, fields.error].map(|text| text.map(spreadsheet_safe));
    let mut writer = csv::WriterBuilder::new()
        .has_headers(false)
        .from_writer(Vec::new());
    // Into memory: nothing here can fail.
    writer
        .serialize(Fields {
            route: &route,
            tool: &tool,
            model: model.as_deref(),
            error: error.as_deref(),
            ..fields
        })
        .expect("a row is plain data");
    let bytes = writer.into_inner().expect("a Vec takes all");
    String::from_utf8(bytes).expect("fields are UTF-8")
}

/// What a client wrote must not become a formula on the machine of whoever opens the export.
pub(super) fn spreadsheet_safe(text: &str) -> String {
    let text = harmless(text);
    if text.starts_with(['=', '+', '-', '@']) {
        format!("'{text}")
    } else {
        text
    }
}

pub(super) fn moment(wall: WallTime) -> Timestamp {
    Timestamp::from_microsecond(wall.0).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use clap::{Args as _, FromArgMatches as _};
    use tempfile::TempDir;

    use super::*;
    use crate::store::{Billing, CallEnd, CallId, CallStart, DedupLabel, Store};

    /// Far longer than a commit takes.
    const LONG: Duration = Duration::from_secs(20);

    fn args(words: &[&str]) -> Result<CallsArgs, clap::Error> {
        let command = CallsArgs::augment_args(clap::Command::new("calls").no_binary_name(true));
        CallsArgs::from_arg_matches(&command.try_get_matches_from(words)?)
    }

    fn row() -> CallRow {
        CallRow {
            seq: 1,
            id: "01M2XZ3K5T9V7QG4W8R6YBN0CD".to_owned(),
            started: WallTime(1_796_047_402_123_456),
            provider: "openai".to_owned(),
            route: "chat/completions".to_owned(),
            model: Some("gpt-5-mini".to_owned()),
            tool: "aider".to_owned(),
            billing: "metered".to_owned(),
            streaming: true,
            dedup: "miss".to_owned(),
            request_key: Some(vec![0xAB; 2]),
            outcome: Some("completed".to_owned()),
            status: Some(200),
            upstream_call: Some(true),
            first_token: Some(Duration::from_millis(412)),
            queued: Some(Duration::from_micros(15)),
            sent: Some(Duration::from_micros(300)),
            head: Some(Duration::from_millis(400)),
            upstream_ended: Some(Duration::from_millis(12_344)),
            duration: Some(Duration::from_millis(12_345)),
            error: None,
            account: Account {
                input_tokens: Some(1200),
                cached_input_tokens: Some(1024),
                output_tokens: Some(480),
                reasoning_tokens: Some(256),
                usage_basis: Some("reported".into()),
                cost_nanos: Some(1_285_600),
                list_nanos: Some(1_285_600),
                ..Account::default()
            },
            reserved_nanos: None,
        }
    }

    fn hostile() -> CallRow {
        CallRow {
            model: Some("=cmd|'x'\u{9b}31m".to_owned()),
            tool: "\u{1b}]0;x\u{7}\u{202e}evil\n".to_owned(),
            error: Some("line one\r\nline two \u{7f} \u{1b}[2J ünï\u{e0041}".to_owned()),
            ..row()
        }
    }

    fn printed(format: Format, rows: &[CallRow]) -> String {
        let printer = Printer {
            format,
            zone: TimeZone::UTC,
        };
        rows.iter()
            .fold(printer.header(), |text, row| text + &printer.row(row))
    }

    fn ended(store: &Store, tool: &str) -> CallStart {
        let now = Clock::Boot.wall();
        let call = CallStart {
            id: CallId::new(now),
            started: now,
            provider: Arc::from("demo"),
            route: "messages".into(),
            model: None,
            tool: Arc::from(tool),
            billing: Billing::Free,
            streaming: false,
            dedup: DedupLabel::Off,
            key: None,
            reserved: None,
        };
        finish(store, call.clone());
        call
    }

    fn finish(store: &Store, start: CallStart) {
        store.finished(CallEnd {
            start,
            status: Some(200),
            outcome: Outcome::Completed,
            first_token: None,
            queued: Duration::ZERO,
            duration: Duration::from_millis(3),
            sent: Some(Duration::from_millis(1)),
            head: Some(Duration::from_millis(2)),
            upstream_ended: Some(Duration::from_millis(3)),
            usage: None,
            money: crate::store::Money::default(),
            error: None,
        });
        assert!(store.flush(LONG));
    }

    #[test]
    fn the_table_stays_within_120_columns() {
        let failed = CallRow {
            provider: "a-provider-with-a-long-name".to_owned(),
            model: Some("anthropic/claude-sonnet-4.5-20250929".to_owned()),
            tool: "an-editor-of-long-name".to_owned(),
            outcome: Some("upstream_error".to_owned()),
            status: Some(502),
            first_token: None,
            error: Some("cannot connect: ".to_owned() + &"very ".repeat(40) + "refused"),
            ..row()
        };
        let open = CallRow {
            model: None,
            outcome: None,
            status: None,
            upstream_call: None,
            first_token: None,
            queued: None,
            duration: None,
            account: Account::default(),
            ..row()
        };
        let table = printed(Format::Table, &[row(), failed, open]);
        for line in table.lines() {
            assert!(line.chars().count() <= TABLE_WIDTH, "{line}");
        }
        insta::assert_snapshot!(table, @"
        TIME                 PROVIDER    MODEL                 TOOL        DEDUP   CODE  OUTCOME          FIRST    TOOK     COST
        2026-11-30 14:03:22  openai      gpt-5-mini            aider       miss    200   completed       412 ms  12.3 s  $0.0013
        2026-11-30 14:03:22  a-provide…  anthropic/claude-so…  an-editor…  miss    502   upstream_error       -  12.3 s  $0.0013
          > cannot connect: very very very very very very very very very very very very very very very very very very very very…
        2026-11-30 14:03:22  openai      -                     aider       miss    -     open                 -       -        -
        ");
    }

    #[test]
    fn json_has_one_object_a_line_with_the_fields_of_the_csv() {
        insta::assert_snapshot!(printed(Format::Json, &[row()]), @r#"{"id":"01M2XZ3K5T9V7QG4W8R6YBN0CD","started":"2026-11-30T14:03:22.123456Z","provider":"openai","route":"chat/completions","model":"gpt-5-mini","tool":"aider","billing":"metered","streaming":true,"dedup":"miss","status":200,"outcome":"completed","upstream_call":true,"first_token_us":412000,"queued_us":15,"duration_us":12345000,"request_key":"abab","error":null,"input_tokens":1200,"cached_input_tokens":1024,"cache_write_5m_tokens":null,"cache_write_1h_tokens":null,"output_tokens":480,"reasoning_tokens":256,"usage_basis":"reported","cost_nanos":1285600,"cost_usd":"0.0012856","list_nanos":1285600,"list_usd":"0.0012856","saved_nanos":null,"saved_usd":null,"pricing":null,"service_tier":null}"#);
        insta::assert_snapshot!(printed(Format::Csv, &[row()]), @"
        id,started,provider,route,model,tool,billing,streaming,dedup,status,outcome,upstream_call,first_token_us,queued_us,duration_us,request_key,error,input_tokens,cached_input_tokens,cache_write_5m_tokens,cache_write_1h_tokens,output_tokens,reasoning_tokens,usage_basis,cost_nanos,cost_usd,list_nanos,list_usd,saved_nanos,saved_usd,pricing,service_tier
        01M2XZ3K5T9V7QG4W8R6YBN0CD,2026-11-30T14:03:22.123456Z,openai,chat/completions,gpt-5-mini,aider,metered,true,miss,200,completed,true,412000,15,12345000,abab,,1200,1024,,,480,256,reported,1285600,0.0012856,1285600,0.0012856,,,,
        ");
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&printed(Format::Json, &[row()])).expect("an object");
        let names: BTreeSet<&str> = object.keys().map(String::as_str).collect();
        assert_eq!(names, BTreeSet::from(FIELDS));
    }

    #[test]
    fn dollars_stay_short_and_are_never_rounded_to_nothing() {
        for (nanos, shown) in [
            (0, "$0"),
            (1, "<$.0001"),
            (50_000, "<$.0001"),
            (50_001, "$0.0001"),
            (1_285_600, "$0.0013"),
            (9_999_949_999, "$9.9999"),
            (9_999_950_000, "$10.00"),
            (999_994_999_999, "$999.99"),
            (999_995_000_000, "$1000"),
        ] {
            assert_eq!(dollars(nanos), shown, "{nanos}");
        }
        let unpriced = Account {
            pricing: Some(UNPRICED.into()),
            ..Account::default()
        };
        assert_eq!(cost(&unpriced), "?");
        assert_eq!(cost(&Account::default()), "-");
    }

    #[test]
    fn what_clients_wrote_cannot_steer_a_terminal() {
        for format in [Format::Table, Format::Csv, Format::Json] {
            let text = printed(format, &[hostile()]);
            let steering = text.chars().find(|c| *c != '\n' && steers(*c));
            assert_eq!(steering, None, "{format:?}: {text:?}");
            let lines = if format == Format::Json { 1 } else { 2 };
            let error_line = usize::from(format == Format::Table);
            assert_eq!(text.lines().count(), lines + error_line, "{text}");
        }
    }

    #[test]
    fn json_keeps_what_clients_wrote() {
        let text = printed(Format::Json, &[hostile()]);
        let object: serde_json::Value = serde_json::from_str(&text).expect("an object");
        assert_eq!(object["tool"].as_str(), Some(hostile().tool.as_str()));
        assert_eq!(object["error"].as_str(), hostile().error.as_deref());
    }

    #[test]
    fn a_csv_cell_is_no_formula() {
        let text = printed(Format::Csv, &[hostile()]);
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let record = reader.records().next().expect("a row").expect("fields");
        assert!(record[4].starts_with("'=cmd"), "{record:?}");
    }

    #[test]
    fn spans_are_short() {
        let table = [
            (0, "0.0 ms"),
            (1_250, "1.2 ms"),
            (9_999, "9.9 ms"),
            (10_000, "10 ms"),
            (999_999, "999 ms"),
            (1_000_000, "1.0 s"),
            (99_999_999, "99.9 s"),
            (100_000_000, "1 min"),
            (5_999_000_000, "99 min"),
            (6_000_000_000, "1 h"),
            (3_600_000_000_000, "1000 h"),
        ];
        for (micros, text) in table {
            assert_eq!(human(Duration::from_micros(micros)), text);
        }
    }

    #[test]
    fn since_reads_spans_dates_and_times() {
        let zone = TimeZone::get("Europe/Berlin").unwrap_or(TimeZone::UTC);
        let now: Timestamp = "2026-11-30T12:00:00Z".parse().expect("a time");
        let local = |text: &str| {
            let local: DateTime = text.parse().expect("a time");
            let zoned = local.to_zoned_datetime(zone.clone()).expect("a time");
            zoned.timestamp().to_string()
        };
        let table = [
            ("2h", "2026-11-30T10:00:00Z".to_owned()),
            ("7d", "2026-11-23T12:00:00Z".to_owned()),
            ("1d 12h", "2026-11-29T00:00:00Z".to_owned()),
            ("2026-11-30", local("2026-11-30T00:00:00")),
            ("2026-11-30 09:30", local("2026-11-30T09:30:00")),
            (
                "2026-11-30T10:00:00+02:00",
                "2026-11-30T08:00:00Z".to_owned(),
            ),
        ];
        for (text, expected) in table {
            let since = parse_since(text).expect(text);
            let begin = since.resolve(now, zone.clone()).expect(text);
            assert_eq!(moment(begin).to_string(), expected, "{text}");
        }
        for text in ["", "yesterday-ish", "-2h", "2", "2026-13-01"] {
            assert!(args(&["--since", text]).is_err(), "{text:?}");
        }
        let endless = parse_since("19000 years").expect("a span");
        assert!(endless.resolve(now, TimeZone::UTC).is_err());
    }

    #[test]
    fn flags_are_read() {
        let read =
            args(&["--outcome", "client_left", "--format", "json", "--follow"]).expect("flags");
        assert_eq!(
            read.outcome,
            Some(OutcomeFilter::Ended(Outcome::ClientLeft))
        );
        assert_eq!((read.format, read.follow), (Format::Json, true));
        let open = args(&["--outcome", "open"]).expect("flags");
        assert_eq!(open.outcome, Some(OutcomeFilter::Open));
        let unknown = args(&["--outcome", "lost"]).expect_err("no such outcome");
        assert!(
            unknown.to_string().contains("broken_stream"),
            "it names those there are"
        );
    }

    #[test]
    fn without_a_record_it_says_how_to_begin_one() {
        let folder = TempDir::new().expect("a folder");
        let mut out = Vec::new();
        let error =
            run(&args(&[]).expect("flags"), folder.path(), &mut out).expect_err("no record");
        assert!(format!("{error:#}").contains("traygate serve"), "{error:#}");
        assert!(out.is_empty());
    }

    #[test]
    fn the_last_calls_are_printed_newest_last_and_after_the_end_too() {
        let folder = TempDir::new().expect("a folder");
        let store = Store::open(folder.path(), Clock::Boot).expect("a store");
        for tool in ["first", "second", "third"] {
            ended(&store, tool);
            // Ids order by the millisecond.
            let now = Clock::Boot.wall().unix_millis();
            while Clock::Boot.wall().unix_millis() == now {}
        }
        let tools = |words: &[&str]| {
            let mut out = Vec::new();
            run(&args(words).expect("flags"), folder.path(), &mut out).expect("rows");
            let text = String::from_utf8(out).expect("text");
            text.lines()
                .map(|line| {
                    let row: serde_json::Value = serde_json::from_str(line).expect("an object");
                    row["tool"].as_str().expect("a tool").to_owned()
                })
                .collect::<Vec<_>>()
        };
        let json = ["--format", "json", "--limit", "2"];
        assert_eq!(tools(&json), ["second", "third"], "while it runs");
        store.close();
        assert_eq!(tools(&json), ["second", "third"], "after its end");
        assert_eq!(tools(&["--format", "json", "--tool", "f*"]), ["first"]);

        let mut out = Vec::new();
        run(
            &args(&["--tool", "none"]).expect("flags"),
            folder.path(),
            &mut out,
        )
        .expect("a sentence");
        assert_eq!(
            out,
            b"No calls on record match (a call is on record a moment after its end).\n"
        );
    }

    #[test]
    fn following_sees_each_end_once_and_survives_a_fresh_file() {
        let folder = TempDir::new().expect("a folder");
        let store = Store::open(folder.path(), Clock::Boot).expect("a store");
        let long = CallStart {
            tool: Arc::from("long"),
            id: CallId::new(WallTime(1)),
            ..ended(&store, "before")
        };
        store.opened(long.clone());
        assert!(store.flush(LONG));
        let seq = open(folder.path())
            .expect("a record")
            .visit_last(&CallFilter::default(), 1, |_| ControlFlow::Continue(()))
            .expect("rows");
        let mut follower = Follower {
            filter: CallFilter::default(),
            seq,
        };
        let mut next = || -> Vec<String> {
            let rows = follower.next(folder.path()).expect("rows");
            rows.into_iter().map(|row| row.tool).collect()
        };
        assert!(next().is_empty());
        ended(&store, "short");
        finish(&store, long);
        assert_eq!(next(), ["short", "long"]);
        assert!(next().is_empty());

        store.close();
        std::fs::remove_file(folder.path().join(crate::store::DATABASE_FILE)).expect("it gone");
        assert!(next().is_empty(), "no file for a moment");
        let store = Store::open(folder.path(), Clock::Boot).expect("a store");
        ended(&store, "afresh");
        assert_eq!(next(), ["afresh"]);
    }

    #[test]
    fn a_reader_that_goes_away_ends_it_quietly() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let folder = TempDir::new().expect("a folder");
        let store = Store::open(folder.path(), Clock::Boot).expect("a store");
        ended(&store, "any");
        let flags = args(&["--follow"]).expect("flags");
        run(&flags, folder.path(), &mut Gone).expect("a quiet end");
    }
}
