//! Streams a log of conversations and reckons its repeats.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufRead, BufReader, IsTerminal as _, Read, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::EachRow;
use super::message::{Message, Row, USER};
use crate::clock::{Clock, Moment};
use crate::policy::repeats::{Conversation, Turn};
use crate::store::repeats::{Names, Repeats};

/// A longer row is passed over: it would have to be held whole.
const MAX_ROW: usize = 64 << 20;
/// Rows that could not be read are counted; so many are named.
const NAMED: usize = 10;

/// What a log of conversations says.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    /// Rows that were read.
    pub(super) rows: u64,
    /// Rows that could not be.
    pub(super) unread: u64,
    /// The first of those.
    pub(super) first_unread: Vec<Unread>,
    #[serde(flatten)]
    pub(super) repeats: Repeats,
}

/// A row that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Unread {
    /// Its number, from 1: in JSON Lines its line.
    pub(super) row: u64,
    /// Why.
    pub(super) reason: String,
}

/// Reads the whole of `file`; `-` is the standard input.
pub(super) fn read(file: &Path, each_row: EachRow, most: usize) -> anyhow::Result<Found> {
    let mut turns = Turns::new(each_row);
    if file == Path::new("-") {
        let progress = Progress::new(Arc::default(), None);
        from_lines(io::stdin().lock(), &mut turns, progress)?;
    } else {
        let what = || format!("{} cannot be read", file.display());
        let mut opened = File::open(file).with_context(what)?;
        let size = opened.metadata().with_context(what)?.len();
        let mut magic = [0; 4];
        let known = opened.read(&mut magic).with_context(what)?;
        if &magic[..known] == b"PAR1" {
            from_parquet(opened, &mut turns).with_context(what)?;
        } else {
            let seen = Arc::<AtomicU64>::default();
            let input = Seen {
                // What was read already, and the rest.
                input: io::Cursor::new(magic).take(known as u64).chain(opened),
                bytes: Arc::clone(&seen),
            };
            from_lines(input, &mut turns, Progress::new(seen, Some(size))).with_context(what)?;
        }
    }
    turns.found(most)
}

/// JSON Lines, plain or compressed: told by how they begin.
fn from_lines(input: impl Read, turns: &mut Turns, progress: Progress) -> anyhow::Result<()> {
    let mut input = BufReader::with_capacity(256 << 10, input);
    match *input.fill_buf()? {
        [0x1F, 0x8B, ..] => {
            let plain = flate2::bufread::MultiGzDecoder::new(input);
            plain_lines(BufReader::with_capacity(256 << 10, plain), turns, progress)
        }
        [0x28, 0xB5, 0x2F, 0xFD, ..] => {
            let plain = zstd::stream::read::Decoder::with_buffer(input)?;
            plain_lines(BufReader::with_capacity(256 << 10, plain), turns, progress)
        }
        [b'P', b'A', b'R', b'1', ..] => {
            bail!("Parquet cannot be read from a pipe: its table of contents is at its end")
        }
        _ => plain_lines(input, turns, progress),
    }
}

fn plain_lines(
    mut input: impl BufRead,
    turns: &mut Turns,
    mut progress: Progress,
) -> anyhow::Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let limit = u64::try_from(MAX_ROW).unwrap_or(u64::MAX) + 1;
        if input.by_ref().take(limit).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if line.len() > MAX_ROW && line.last() != Some(&b'\n') {
            skip_line(&mut input)?;
            turns.unread(number, format!("it is longer than {} MB", MAX_ROW >> 20));
        } else {
            let text = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&line);
            if !text.trim_ascii().is_empty() {
                turns.read(number, serde_json::from_slice(text));
            }
        }
        progress.tell(turns);
    }
    progress.end();
    Ok(())
}

fn skip_line(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let piece = input.fill_buf()?;
        let (skipped, over) = match memchr::memchr(b'\n', piece) {
            Some(at) => (at + 1, true),
            None => (piece.len(), piece.is_empty()),
        };
        input.consume(skipped);
        if over {
            return Ok(());
        }
    }
}

#[cfg(feature = "parquet")]
fn from_parquet(file: File, turns: &mut Turns) -> anyhow::Result<()> {
    let mut progress = Progress::new(Arc::default(), None);
    super::parquet_rows::visit(file, |number, row| {
        turns.read(number, row);
        progress.tell(turns);
    })?;
    progress.end();
    Ok(())
}

#[cfg(not(feature = "parquet"))]
fn from_parquet(_: File, _: &mut Turns) -> anyhow::Result<()> {
    bail!(
        "it is a Parquet file, and this traygate was built without the feature `parquet`: \
         build it with `cargo build --release --features parquet`, or turn the file into JSON Lines"
    )
}

/// Turns as they come out of rows.
pub(super) struct Turns {
    each_row: EachRow,
    turns: Vec<Turn>,
    models: Names,
    /// Conversations whose messages have a row each, by the hash of their id.
    conversations: HashMap<[u64; 2], Conversation>,
    hashers: [RandomState; 2],
    rows: u64,
    unread: u64,
    first_unread: Vec<Unread>,
}

impl Turns {
    pub(super) fn new(each_row: EachRow) -> Self {
        Self {
            each_row,
            turns: Vec::new(),
            models: Names::default(),
            conversations: HashMap::new(),
            hashers: [RandomState::new(), RandomState::new()],
            rows: 0,
            unread: 0,
            first_unread: Vec::new(),
        }
    }

    /// Takes a row, or notes why there is none.
    pub(super) fn read<E: std::fmt::Display>(&mut self, number: u64, row: Result<Row<'_>, E>) {
        let taken = row
            .map_err(|error| error.to_string())
            .and_then(|row| self.take(&row).map_err(str::to_owned));
        match taken {
            Ok(()) => self.rows += 1,
            Err(reason) => self.unread(number, reason),
        }
    }

    fn unread(&mut self, row: u64, reason: String) {
        self.unread += 1;
        if self.first_unread.len() < NAMED {
            self.first_unread.push(Unread { row, reason });
        }
    }

    fn take(&mut self, row: &Row<'_>) -> Result<(), &'static str> {
        let model = self.models.number(row.model.as_deref());
        let messages = match &row.messages {
            Some(messages) => messages.as_slice(),
            None => return self.take_message(row, model),
        };
        // Before anything is counted: half a row would be worse than none.
        if messages.iter().any(|message| message.role().is_none()) {
            return Err("a message has no role");
        }
        let last = messages.iter().rposition(is_users);
        let mut conversation = Conversation::default();
        for (place, message) in messages.iter().enumerate() {
            let content = message.content.as_deref().unwrap_or_default();
            conversation.say(message.role().unwrap_or_default(), content);
            let counts = is_users(message)
                && (self.each_row == EachRow::Conversation || Some(place) == last);
            if counts {
                // The answer is what has a time in some logs.
                let answer = messages.get(place + 1).filter(|next| !is_users(next));
                let at = message.at.or_else(|| answer?.at).or(row.own.at);
                let user = message.user.or(row.own.user);
                self.turns
                    .push(Turn::new(conversation.key(), at, caller(user), model));
            }
        }
        Ok(())
    }

    /// A row that is a message itself.
    fn take_message(&mut self, row: &Row<'_>, model: u32) -> Result<(), &'static str> {
        let (role, content) = match (row.own.role(), &row.own.content, &row.prompt) {
            (Some(role), Some(content), _) | (Some(role), None, Some(content)) => (role, content),
            (None, _, Some(prompt)) => (USER, prompt),
            _ => return Err("it has neither messages, nor role and content, nor a prompt"),
        };
        let mut alone = Conversation::default();
        let conversation = match &row.id {
            Some(id) => {
                let id = [0, 1].map(|n: usize| self.hashers[n].hash_one(&**id));
                self.conversations.entry(id).or_default()
            }
            None => &mut alone,
        };
        conversation.say(role, content);
        if role == USER {
            let key = conversation.key();
            self.turns
                .push(Turn::new(key, row.own.at, caller(row.own.user), model));
        }
        Ok(())
    }

    /// What they say together.
    ///
    /// # Errors
    /// If there were rows and none could be read.
    pub(super) fn found(mut self, most: usize) -> anyhow::Result<Found> {
        if self.rows == 0 && self.unread > 0 {
            let mut reasons = String::new();
            for unread in self.first_unread.iter().take(3) {
                // Into memory: it cannot fail.
                let _ = write!(reasons, "\n  row {}: {}", unread.row, unread.reason);
            }
            bail!(
                "no row of it can be read. It must have one JSON object a line; of a single JSON \
                 list, `jq -c '.[]' FILE | traygate repeats --from -` makes that.{reasons}"
            );
        }
        // The map's memory is free for the sort and the answer.
        self.conversations = HashMap::new();
        Ok(Found {
            rows: self.rows,
            unread: self.unread,
            first_unread: self.first_unread,
            repeats: Repeats::reckon(&mut self.turns, None, &self.models, most),
        })
    }
}

fn is_users(message: &Message<'_>) -> bool {
    message.role() == Some(USER)
}

fn caller(user: Option<super::message::User>) -> u32 {
    user.map_or(Turn::NOBODY, |user| user.0)
}

/// A reader that counts what goes through it, compressed or not.
struct Seen<R> {
    input: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Seen<R> {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(piece)?;
        self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Says on the standard error how far it has come: on a terminal in one line that it rewrites,
/// else now and then in a line of its own.
struct Progress {
    bytes: Arc<AtomicU64>,
    size: Option<u64>,
    terminal: bool,
    begin: Moment,
    next: Moment,
    /// The clock is asked once in so many rows.
    rows: u32,
    told: bool,
}

impl Progress {
    const ROWS: u32 = 256;

    fn new(bytes: Arc<AtomicU64>, size: Option<u64>) -> Self {
        let terminal = io::stderr().is_terminal();
        let begin = Clock::Boot.now();
        Self {
            bytes,
            size,
            terminal,
            begin,
            next: begin + Self::pause(terminal),
            rows: 0,
            told: false,
        }
    }

    fn pause(terminal: bool) -> Duration {
        if terminal {
            Duration::from_millis(250)
        } else {
            Duration::from_secs(5)
        }
    }

    fn tell(&mut self, turns: &Turns) {
        self.rows += 1;
        if self.rows < Self::ROWS {
            return;
        }
        self.rows = 0;
        let now = Clock::Boot.now();
        if now < self.next {
            return;
        }
        self.next = now + Self::pause(self.terminal);
        self.told = true;
        let seen = self.bytes.load(Ordering::Relaxed);
        let percent = match self.size {
            Some(size) if size > 0 => format!("{} %, ", seen.min(size) * 100 / size),
            _ => String::new(),
        };
        let text = format!(
            "traygate: {percent}{} rows, {} turns in {} s",
            turns.rows + turns.unread,
            turns.turns.len(),
            (now - self.begin).as_secs(),
        );
        // Nobody listens: no reason to stop.
        let _ = if self.terminal {
            write!(io::stderr(), "\r{text}\x1b[K")
        } else {
            writeln!(io::stderr(), "{text}")
        };
    }

    fn end(&self) {
        if self.terminal && self.told {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::policy::repeats::{Apart, Reckoning};

    fn found_in(text: &[u8], each_row: EachRow) -> anyhow::Result<Found> {
        let mut turns = Turns::new(each_row);
        from_lines(text, &mut turns, Progress::new(Arc::default(), None))?;
        turns.found(5)
    }

    fn found(text: &str) -> Found {
        found_in(text.as_bytes(), EachRow::Conversation).expect(text)
    }

    /// Turns, and the repeats within each window.
    fn counts(found: &Found) -> (u64, Vec<u64>) {
        let all = &found.repeats.all;
        let repeats = all.windows.iter().map(|window| window.repeats);
        (all.calls, repeats.collect())
    }

    fn same(found: &Found) -> u64 {
        found.repeats.all.windows[3].same_caller
    }

    /// As the public sets have them; two conversations that begin alike and go different ways.
    const WILDCHAT: &str = r#"{"conversation_hash":"a1","model":"gpt-4","timestamp":"2023-04-09T00:05:00","conversation":[{"content":"hi","country":"US","hashed_ip":"ip1","role":"user","timestamp":null,"turn_identifier":1},{"content":"hello","role":"assistant","timestamp":"2023-04-09T00:02:53"},{"content":"more","hashed_ip":"ip1","role":"user"},{"content":"well","role":"assistant","timestamp":"2023-04-09T00:05:00"}],"turn":2,"hashed_ip":"ip1","openai_moderation":[{"flagged":false}]}
{"conversation_hash":"b2","model":"gpt-4","timestamp":"2023-04-09T00:20:00","conversation":[{"content":"hi","hashed_ip":"ip1","role":"user","timestamp":null},{"content":"hey","role":"assistant","timestamp":"2023-04-09T00:07:53"},{"content":"more","hashed_ip":"ip2","role":"user"},{"content":"no","role":"assistant","timestamp":"2023-04-09T00:20:00"}],"turn":2,"hashed_ip":"ip1"}
"#;
    const LMSYS: &str = r#"{"conversation_id":"x","model":"vicuna-13b","conversation":[{"content":"hi","role":"user"},{"content":"Hello!","role":"assistant"}],"turn":1,"language":"English","redacted":false}
{"conversation_id":"y","model":"koala-13b","conversation":[{"content":"hi","role":"user"},{"content":"Yo","role":"assistant"}],"turn":1}
"#;

    #[test]
    fn a_conversation_is_as_many_turns_as_the_user_spoke() {
        let wildchat = found(WILDCHAT);
        // The second "more" follows another answer: no repeat. The second "hi" came exactly five
        // minutes after the first, by the times of their answers.
        assert_eq!(counts(&wildchat), (4, vec![1, 1, 1, 1]));
        assert_eq!(same(&wildchat), 1);
        let model = &wildchat.repeats.by_model[0];
        assert_eq!((model.name.as_str(), model.share.calls), ("gpt-4", 4));
        let most = &wildchat.repeats.most_repeated;
        assert_eq!(
            (most.len(), most[0].calls, most[0].tool.as_deref()),
            (1, 2, None)
        );
    }

    #[test]
    fn without_times_all_time_is_the_only_window() {
        let lmsys = found(LMSYS);
        assert_eq!(counts(&lmsys), (2, vec![0, 0, 0, 1]));
        assert_eq!(
            (lmsys.repeats.first, same(&lmsys)),
            (None, 0),
            "nobody is nobody's twin"
        );
    }

    #[test]
    fn all_shapes_of_one_conversation_are_one() {
        let shapes = [
            r#"{"messages":[{"role":"user","content":"hi"}]}"#,
            r#"{"conversations":[{"from":"human","value":"hi"},{"from":"gpt","value":"hello"}]}"#,
            r#"[{"role":"user","content":"hi"}]"#,
            r#"{"role":"user","content":"hi","conversation_id":"1"}"#,
            r#"{"conversation":"a name","prompt":"hi"}"#,
            r#"{"messages":null,"text":"hi","user":7}"#,
        ];
        let found = found(&shapes.join("\r\n"));
        assert_eq!(counts(&found), (6, vec![0, 0, 0, 5]));
        assert_eq!((found.rows, found.unread), (6, 0));
    }

    #[test]
    fn messages_that_have_a_row_each_are_put_together_by_their_id() {
        let row = |id: &str, role: &str, content: &str| {
            json!({"chat_id": id, "role": role, "content": content}).to_string()
        };
        let rows = [
            row("a", "user", "hi"),
            row("b", "user", "hi"),
            row("a", "assistant", "hello"),
            row("b", "assistant", "hello"),
            row("a", "user", "more"),
            row("b", "user", "more"),
            row("c", "user", "more"),
        ];
        assert_eq!(counts(&found(&rows.join("\n"))), (5, vec![0, 0, 0, 2]));
    }

    #[test]
    fn a_row_may_be_a_call_with_all_its_messages() {
        let rows = r#"{"messages":[{"role":"user","content":"hi"}]}
{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yo"},{"role":"user","content":"more"}]}
{"messages":[{"role":"user","content":"hi"}]}
"#;
        let turns = found_in(rows.as_bytes(), EachRow::Turn).expect("rows");
        assert_eq!(counts(&turns), (3, vec![0, 0, 0, 1]));
        assert_eq!(
            counts(&found(rows)),
            (4, vec![0, 0, 0, 2]),
            "as conversations"
        );
    }

    #[test]
    fn rows_that_cannot_be_read_are_counted_and_named() {
        let mut text = b"\xEF\xBB\xBF{\"prompt\":\"hi\"}\n\nnonsense\n{\"prompt\":\"hi\",\"time\":\"soon\"}\n{\"prompt\":\"\xFF\"}\n{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"content\":\"x\"}]}\n{}\n[1]\n".to_vec();
        text.extend(std::iter::repeat_n(b'x', MAX_ROW + 5));
        text.extend(b"\n{\"prompt\":\"hi\"}");
        let found = found_in(&text, EachRow::Conversation).expect("rows");
        assert_eq!((found.rows, found.unread), (2, 7));
        assert_eq!(
            counts(&found).0,
            2,
            "of a row that is no good nothing counts"
        );
        let named: Vec<u64> = found.first_unread.iter().map(|unread| unread.row).collect();
        assert_eq!(named, [3, 4, 5, 6, 7, 8, 9]);
        let reasons: Vec<&str> = found
            .first_unread
            .iter()
            .map(|u| u.reason.as_str())
            .collect();
        for (reason, part) in reasons.iter().zip([
            "expected",
            "neither RFC 3339",
            "unicode",
            "no role",
            "prompt",
            "message",
            "64 MB",
        ]) {
            assert!(reason.contains(part), "{reason}");
        }
        let many = found_in(&b"?\n".repeat(50), EachRow::Conversation).expect_err("no row");
        assert!(many.to_string().contains("JSON object a line"), "{many}");
        let nothing = found_in(b"", EachRow::Conversation).expect("an empty log");
        assert_eq!(nothing.repeats.all.calls, 0);
    }

    #[test]
    fn compressed_logs_are_read_as_they_are() {
        use flate2::{Compression, write::GzEncoder};
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(WILDCHAT.as_bytes()).expect("memory");
        let gzip = gzip.finish().expect("memory");
        let zstd = zstd::encode_all(WILDCHAT.as_bytes(), 3).expect("memory");
        for compressed in [gzip, zstd] {
            let found = found_in(&compressed, EachRow::Conversation).expect("rows");
            assert_eq!(counts(&found), (4, vec![1, 1, 1, 1]));
        }
        let parquet = found_in(b"PAR1....", EachRow::Conversation).expect_err("a pipe");
        assert!(parquet.to_string().contains("pipe"), "{parquet}");
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn parquet_wants_its_feature() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.parquet");
        std::fs::write(&file, "PAR1....PAR1").expect("a file");
        let error = read(&file, EachRow::Conversation, 5).expect_err("no feature");
        assert!(
            format!("{error:#}").contains("--features parquet"),
            "{error:#}"
        );
    }

    /// A conversation of the property test: messages of user and assistant in turns.
    #[derive(Clone, Debug)]
    struct Talk {
        words: Vec<u8>,
        user: Option<u8>,
        minute: Option<i64>,
        shape: u8,
    }

    impl Talk {
        fn messages(&self) -> Vec<(&'static str, String)> {
            let roles = ["user", "assistant"].into_iter().cycle();
            let words = self.words.iter().map(u8::to_string);
            roles.zip(words).collect()
        }

        fn line(&self) -> String {
            let object = |(role, content): &(&str, String)| match self.shape {
                0 => json!({"role": role, "content": content}),
                1 => {
                    json!({"value": content, "from": if *role == "user" { "human" } else { "gpt" }})
                }
                _ => {
                    json!({"content": content, "role": role, "user": self.user, "created": self.minute.map(|m| m * 60)})
                }
            };
            let messages: Vec<Value> = self.messages().iter().map(object).collect();
            let time = self.minute.map(|minute| minute * 60_000_000);
            let time = time.map(moment_text);
            match self.shape {
                0 => json!({"messages": messages, "time": time, "user_id": self.user}),
                1 => json!({"timestamp": time, "conversations": messages, "hashed_ip": self.user}),
                _ => json!({"conversation": messages}),
            }
            .to_string()
        }
    }

    fn moment_text(micros: i64) -> String {
        jiff::Timestamp::from_microsecond(micros)
            .expect("a time")
            .to_string()
    }

    fn any_talk() -> impl Strategy<Value = Talk> {
        (
            prop::collection::vec(0..3_u8, 0..5),
            prop::option::of(0..3_u8),
            prop::option::weighted(0.8, 0..3000_i64),
            0..3_u8,
        )
            .prop_map(|(words, user, minute, shape)| Talk {
                words,
                user,
                minute,
                shape,
            })
    }

    proptest! {
        /// The plain reckoning keeps whole conversations and looks at every pair of turns.
        #[test]
        fn a_log_says_what_a_plain_reckoning_says(talks in prop::collection::vec(any_talk(), 1..30)) {
            let text: Vec<String> = talks.iter().map(Talk::line).collect();
            let found = found(&text.join("\n"));
            prop_assert_eq!(found.rows, talks.len() as u64);

            let mut plain = Vec::new();
            for talk in &talks {
                let messages = talk.messages();
                for end in (0..messages.len()).step_by(2) {
                    plain.push((talk.minute, messages[..=end].to_vec(), talk.user));
                }
            }
            plain.sort_by_key(|turn| turn.0);
            let mut repeats = [0_u64; 4];
            for (n, (minute, messages, _)) in plain.iter().enumerate() {
                let Some((before, ..)) = plain[..n].iter().rfind(|turn| turn.1 == *messages) else {
                    continue;
                };
                let gap = minute.zip(*before).map(|(minute, before)| minute - before);
                for (window, minutes) in [5, 60, 1440].into_iter().enumerate() {
                    repeats[window] += u64::from(gap.is_some_and(|gap| gap <= minutes));
                }
                repeats[3] += 1;
            }
            prop_assert_eq!(counts(&found), (plain.len() as u64, repeats.to_vec()));
        }

        /// However rows are ordered, the figures are the same.
        #[test]
        fn the_order_of_rows_does_not_matter(
            talks in prop::collection::vec(any_talk(), 1..20),
            rotation in 0..20_usize,
        ) {
            let mut lines: Vec<String> = talks.iter().map(Talk::line).collect();
            let before = found(&lines.join("\n")).repeats;
            let by = rotation % lines.len();
            lines.rotate_left(by);
            lines.reverse();
            prop_assert_eq!(found(&lines.join("\n")).repeats, before);
        }
    }

    #[test]
    fn a_turn_takes_32_bytes_and_its_text_none() {
        let mut turns = Turns::new(EachRow::Conversation);
        for row in 0..1000_u64 {
            let line = format!(r#"{{"prompt":"{row} {}"}}"#, "x".repeat(10_000));
            turns.read(row, serde_json::from_str(&line));
        }
        let all = Reckoning::of(&mut turns.turns, Apart::Models, 0).all;
        assert_eq!(all.calls, 1000);
        assert!(turns.turns.capacity() * size_of::<Turn>() <= 2 * 32 * 1024);
        assert!(turns.conversations.is_empty());
    }
}
