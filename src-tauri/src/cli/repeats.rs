//! `traygate repeats`: what share of calls repeat an earlier one, from the record or any log of
//! conversations.

mod conversations;
mod message;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod print;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use jiff::tz::TimeZone;

use super::calls::{Since, moment, open, parse_since};
use crate::clock::Clock;
use crate::store::queries::CallFilter;
use crate::store::repeats::RepeatsQuery;

/// Flags of `traygate repeats`.
#[derive(clap::Args, Clone, Debug)]
pub struct RepeatsArgs {
    /// Only calls since then: 2h, 7d, 2026-11-30 or 2026-11-30T14:00:00Z.
    // Hyphens, so that `-2h` is told what to write instead.
    #[arg(
        long,
        env = "TRAYGATE_REPEATS_SINCE",
        value_name = "WHEN",
        value_parser = parse_since,
        allow_hyphen_values = true
    )]
    pub since: Option<Since>,

    /// Only calls of this tool; * and ? stand for any characters.
    #[arg(long, env = "TRAYGATE_REPEATS_TOOL", value_name = "NAME")]
    pub tool: Option<String>,

    /// Only calls of this model; * and ? stand for any characters.
    #[arg(long, env = "TRAYGATE_REPEATS_MODEL", value_name = "NAME")]
    pub model: Option<String>,

    /// How to print it.
    #[arg(
        long,
        env = "TRAYGATE_REPEATS_FORMAT",
        value_enum,
        default_value = "table"
    )]
    pub format: Format,

    /// How many of the most repeated to name.
    #[arg(
        long,
        env = "TRAYGATE_REPEATS_MOST",
        value_name = "N",
        default_value_t = 20
    )]
    pub most: usize,

    /// Answer from this log of conversations instead; - reads the standard input.
    ///
    /// JSON Lines, plain, gzip or zstd, or Parquet if it was built in: one conversation, turn or
    /// message a row, under the usual names: messages, conversation or conversations with role and
    /// content (or from and value), or one role and content with a conversation_id, or a prompt;
    /// timestamp, time, created or created_at as RFC 3339 (UTC without a zone) or Unix time in
    /// seconds, ms, µs or ns; user, user_id or hashed_ip; model.
    ///
    /// A conversation with n messages of the user is n turns, and each turn is a call. The key of
    /// a turn is the hash of the whole conversation so far: the role and content of every message
    /// up to and including that one. Model and settings are not in it, nor tool calls. A turn's
    /// time is its own, else its answer's, else its row's; turns without one count for all time
    /// only. The rows may be in any order: turns are sorted by time at the end (the messages of
    /// one conversation, a row each, must be in theirs).
    ///
    /// Needs 32 bytes of memory a turn, and 60 a conversation where each message has a row. Rows
    /// that cannot be read are counted and named.
    #[arg(
        long,
        env = "TRAYGATE_REPEATS_FROM",
        value_name = "FILE",
        conflicts_with_all = ["since", "tool", "model"]
    )]
    pub from: Option<PathBuf>,

    /// What a row with several messages is.
    #[arg(
        long,
        env = "TRAYGATE_REPEATS_EACH_ROW",
        value_enum,
        default_value = "conversation"
    )]
    pub each_row: EachRow,
}

/// How it is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Aligned columns, local times.
    Table,
    /// A line for each share and each key.
    Csv,
    /// One object.
    Json,
}

/// What a row with several messages is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EachRow {
    /// A whole conversation: every message of the user in it is a turn.
    Conversation,
    /// One call, with all the messages that were sent: only the last message of the user is a turn.
    Turn,
}

/// Answers `args` on `out`. A reader that goes away ends it quietly.
///
/// # Errors
/// If there is no record or file, it cannot be read, or no row of it can.
pub fn run(args: &RepeatsArgs, data_dir: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let zone = TimeZone::system();
    let text = if let Some(file) = &args.from {
        let found = conversations::read(file, args.each_row, args.most)?;
        print::of_file(&found, args.format, &zone)
    } else {
        let since = args
            .since
            .as_ref()
            .map(|since| since.resolve(moment(Clock::default().wall()), zone.clone()))
            .transpose()
            .context("--since reaches past the calendar")?;
        let query = RepeatsQuery {
            filter: CallFilter {
                since,
                tool: args.tool.clone(),
                model: args.model.clone(),
                ..CallFilter::default()
            },
            most: args.most,
        };
        let repeats = open(data_dir)?.repeats(&query)?;
        print::of_record(&repeats, args.format, &zone)
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `traygate repeats | head` is no error.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
