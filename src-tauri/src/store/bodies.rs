//! What was asked and answered, where a person wants that kept: handed over by calls, compressed
//! by the writer, found again by the call's id.

use std::io;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension as _, Row, TransactionBehavior, params};
use zstd::bulk::{Compressor, Decompressor};

use super::queries::{ReadError, Reader};
use super::{CallId, DedupLabel};
use crate::clock::WallTime;

/// Bytes of a request and of a response that are kept.
pub const MAX_BODY: usize = 1 << 20;

/// Bytes of bodies that may wait in memory; what comes then is not kept, and counted.
pub(super) const MAX_WAITING: usize = 64 << 20;

/// Bytes that are compressed and written at a time. Rows that come meanwhile wait as long: some
/// ten milliseconds.
const PORTION: usize = 4 << 20;

/// zstd's own default: JSON shrinks to a fifth at some hundred megabytes a second.
const LEVEL: i32 = 3;

/// What was asked and answered in one call, its credentials taken out.
#[derive(Clone, Debug)]
pub struct Body {
    /// The call's id.
    pub id: CallId,
    /// When it came.
    pub started: WallTime,
    /// Its request key, where it was reckoned: calls that shared the answer are found by it.
    pub key: Option<[u8; 32]>,
    /// The request's body.
    pub request: Bytes,
    /// Whether that is only its beginning.
    pub request_cut: bool,
    /// The answer's body, in pieces.
    pub response: Vec<Bytes>,
    /// Whether that is only its beginning.
    pub response_cut: bool,
}

impl Body {
    /// Cuts both at [`MAX_BODY`], so that what waits is bounded.
    pub(super) fn cut(&mut self) {
        self.request_cut |= cut_piece(&mut self.request, MAX_BODY);
        let mut room = MAX_BODY;
        for (index, piece) in self.response.iter_mut().enumerate() {
            if cut_piece(piece, room) {
                self.response.truncate(index + 1);
                self.response_cut = true;
                break;
            }
            room -= piece.len();
        }
    }

    /// Bytes that it holds.
    pub(super) fn len(&self) -> usize {
        self.request.len() + self.response.iter().map(Bytes::len).sum::<usize>()
    }
}

/// Whether something had to be cut off.
fn cut_piece(piece: &mut Bytes, room: usize) -> bool {
    let is_longer = piece.len() > room;
    if is_longer {
        // A copy: a slice would keep the whole of a large body in memory.
        *piece = Bytes::copy_from_slice(&piece[..room]);
    }
    is_longer
}

/// Compresses bodies into the database.
pub(super) struct BodyWriter {
    compressor: Compressor<'static>,
    /// The pieces of an answer, joined.
    joined: Vec<u8>,
}

impl BodyWriter {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            compressor: Compressor::new(LEVEL)?,
            joined: Vec::new(),
        })
    }

    /// Writes the first of `bodies`, as many as make a portion, and takes them out.
    pub(super) fn write(
        &mut self,
        connection: &mut Connection,
        bodies: &[Body],
    ) -> rusqlite::Result<()> {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut insert = transaction.prepare_cached(
                "INSERT OR REPLACE INTO bodies
                   (id, request_key, started_us, request, response, request_cut, response_cut)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?;
            for body in bodies {
                self.joined.clear();
                for piece in &body.response {
                    self.joined.extend_from_slice(piece);
                }
                let mut compressed = |bytes: &[u8]| {
                    let result = self.compressor.compress(bytes);
                    result.map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
                };
                insert.execute(params![
                    &*body.id.0.array_to_str(&mut [0; ulid::ULID_LEN]),
                    body.key.as_ref().map(<[u8; 32]>::as_slice),
                    body.started.0,
                    compressed(&body.request)?,
                    compressed(&self.joined)?,
                    body.request_cut,
                    body.response_cut,
                ])?;
            }
        }
        transaction.commit()
    }
}

/// How many of `bodies` make a portion: one at least.
pub(super) fn portion(bodies: &[Body]) -> usize {
    let mut bytes = 0;
    let fit = bodies.iter().take_while(|body| {
        let fits = bytes < PORTION;
        bytes += body.len();
        fits
    });
    fit.count()
}

/// What was asked and answered in a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptBody {
    /// The call that it is of: another one's where the answer was shared.
    pub id: String,
    /// When that call came.
    pub started: WallTime,
    /// What was asked.
    pub request: Vec<u8>,
    /// Whether that is only its beginning.
    pub request_cut: bool,
    /// What was answered, as it came: compressed and as an event stream too.
    pub response: Vec<u8>,
    /// Whether that is only its beginning.
    pub response_cut: bool,
}

const COLUMNS: &str = "bodies.id, bodies.started_us, request, request_cut, response, response_cut";

impl Reader {
    /// What was asked and answered in a call; for one that joined another or got a kept answer,
    /// that of the call that had made it. `None` if it was not kept, or has gone.
    ///
    /// # Errors
    /// If SQLite cannot read, or what it reads is no compressed body.
    pub fn body(&self, id: CallId) -> Result<Option<KeptBody>, ReadError> {
        // Both of one moment.
        let _moment = self.connection.unchecked_transaction()?;
        let id = id.to_string();
        let own = self
            .connection
            .prepare_cached(&format!("SELECT {COLUMNS} FROM bodies WHERE id = ?1"))?
            .query_row([&id], kept_body)
            .optional()?;
        if own.is_some() {
            return Ok(own);
        }
        let call = self
            .connection
            .prepare_cached(
                "SELECT request_key, started_us, coalesce(started_us + duration_us, ?2), dedup
                 FROM calls WHERE id = ?1 AND request_key IS NOT NULL",
            )?
            .query_row(params![id, i64::MAX], |row| {
                let (came, over): (i64, i64) = (row.get(1)?, row.get(2)?);
                let label: String = row.get(3)?;
                Ok((row.get::<_, Vec<u8>>(0)?, came, over, label))
            })
            .optional()?;
        let Some((key, came, over, label)) = call else {
            return Ok(None);
        };
        // The answer that it got, not that of an earlier attempt, which may have failed. It may
        // have come before the call that it joined, and been read more slowly.
        let is_its_leader = if label == DedupLabel::Joined.as_str() {
            "leader.started_us <= ?3 AND leader.started_us + leader.duration_us >= ?2"
        } else if label == DedupLabel::Cached.as_str() {
            "leader.started_us <= ?2 AND leader.started_us + leader.duration_us <= ?3
             AND leader.outcome IN ('completed', 'client_left')"
        } else {
            return Ok(None);
        };
        let shared = self
            .connection
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM bodies JOIN calls AS leader USING (id)
                 WHERE bodies.request_key = ?1 AND leader.dedup = 'miss' AND {is_its_leader}
                 ORDER BY bodies.id DESC LIMIT 1"
            ))?
            .query_row(params![key, came, over], kept_body)
            .optional()?;
        Ok(shared)
    }
}

fn kept_body(row: &Row<'_>) -> rusqlite::Result<KeptBody> {
    let decompressed = |column: usize| {
        let bytes = row.get_ref(column)?.as_blob()?;
        Decompressor::new()
            .and_then(|mut zstd| zstd.decompress(bytes, MAX_BODY))
            .map_err(|error| {
                rusqlite::Error::FromSqlConversionFailure(
                    column,
                    rusqlite::types::Type::Blob,
                    error.into(),
                )
            })
    };
    Ok(KeptBody {
        id: row.get(0)?,
        started: WallTime(row.get(1)?),
        request: decompressed(2)?,
        request_cut: row.get(3)?,
        response: decompressed(4)?,
        response_cut: row.get(5)?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use tempfile::TempDir;

    use super::super::tests::{LONG, end, open, start};
    use super::super::{CallEnd, CallStart, Outcome, Store};
    use super::*;

    /// 2026-09-21T14:13:20Z, in milliseconds.
    const BEGIN: i64 = 1_790_000_000_000;

    fn call(millis: i64, dedup: DedupLabel) -> CallStart {
        let started = WallTime((BEGIN + millis) * 1000);
        CallStart {
            id: CallId::new(started),
            started,
            dedup,
            tool: Arc::from("aider"),
            ..start()
        }
    }

    /// Came at `from`, was over at `to`.
    fn ended(from: i64, to: i64, dedup: DedupLabel, outcome: Outcome) -> CallEnd {
        CallEnd {
            outcome,
            duration: Duration::from_millis(u64::try_from(to - from).expect("a span")),
            ..end(call(from, dedup))
        }
    }

    fn body(call: &CallStart, answer: &str) -> Body {
        Body {
            id: call.id,
            started: call.started,
            key: call.key,
            request: Bytes::from_static(b"{\"model\":\"m\"}"),
            request_cut: false,
            response: answer
                .as_bytes()
                .chunks(3)
                .map(Bytes::copy_from_slice)
                .collect(),
            response_cut: false,
        }
    }

    fn read(folder: &Path, id: CallId) -> Option<KeptBody> {
        Reader::open(folder)
            .and_then(|reader| reader.body(id))
            .expect("a record")
    }

    fn answer(folder: &Path, id: CallId) -> Option<String> {
        read(folder, id).map(|body| String::from_utf8(body.response).expect("text"))
    }

    fn record(calls: &[(&CallEnd, Option<&str>)]) -> (TempDir, Store) {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        for (end, answer) in calls {
            store.finished((*end).clone());
            if let Some(answer) = answer {
                store.body(body(&end.start, answer));
            }
        }
        assert!(store.flush(LONG));
        (folder, store)
    }

    #[test]
    fn a_body_is_found_as_it_was() {
        let one = ended(0, 10, DedupLabel::Miss, Outcome::Completed);
        let (folder, store) = record(&[(&one, Some("data: héllo\n\n"))]);
        assert_eq!(
            read(folder.path(), one.start.id),
            Some(KeptBody {
                id: one.start.id.to_string(),
                started: one.start.started,
                request: b"{\"model\":\"m\"}".to_vec(),
                request_cut: false,
                response: "data: héllo\n\n".into(),
                response_cut: false,
            })
        );
        assert_eq!(read(folder.path(), call(5, DedupLabel::Off).id), None);
        store.close();
        assert!(read(folder.path(), one.start.id).is_some());
    }

    #[test]
    fn a_call_that_shared_an_answer_has_its_leaders() {
        let leader = ended(0, 100, DedupLabel::Miss, Outcome::Completed);
        let joined = ended(50, 100, DedupLabel::Joined, Outcome::Completed);
        let cached = ended(200, 201, DedupLabel::Cached, Outcome::Completed);
        let again = ended(300, 400, DedupLabel::Miss, Outcome::Completed);
        let cached_again = ended(500, 501, DedupLabel::Cached, Outcome::Completed);
        let (folder, _store) = record(&[
            (&leader, Some("first")),
            (&joined, None),
            (&cached, None),
            (&again, Some("second")),
            (&cached_again, None),
        ]);
        let answer = |end: &CallEnd| answer(folder.path(), end.start.id);
        assert_eq!(answer(&joined).as_deref(), Some("first"));
        assert_eq!(answer(&cached).as_deref(), Some("first"));
        assert_eq!(answer(&cached_again).as_deref(), Some("second"));
        let id = read(folder.path(), joined.start.id).map(|body| body.id);
        assert_eq!(id, Some(leader.start.id.to_string()), "and says so");
    }

    #[test]
    fn nobody_is_given_the_answer_of_an_earlier_attempt() {
        // Only failures are kept: what went well afterwards has no body.
        let failed = ended(0, 100, DedupLabel::Miss, Outcome::UpstreamError);
        let shared_it = ended(50, 100, DedupLabel::Joined, Outcome::UpstreamError);
        let well = ended(200, 300, DedupLabel::Miss, Outcome::Completed);
        let joined = ended(250, 300, DedupLabel::Joined, Outcome::Completed);
        let cached = ended(400, 401, DedupLabel::Cached, Outcome::Completed);
        let (folder, _store) = record(&[
            (&failed, Some("failed")),
            (&shared_it, None),
            (&well, None),
            (&joined, None),
            (&cached, None),
        ]);
        let answer = |end: &CallEnd| answer(folder.path(), end.start.id);
        assert_eq!(answer(&shared_it).as_deref(), Some("failed"));
        assert_eq!(answer(&well), None);
        assert_eq!(answer(&joined), None);
        assert_eq!(answer(&cached), None);
    }

    #[test]
    fn what_is_too_long_is_cut_and_says_so() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let long = call(0, DedupLabel::Off);
        store.body(Body {
            request: Bytes::from(vec![b'q'; MAX_BODY + 1]),
            response: vec![
                Bytes::from(vec![b'a'; MAX_BODY - 2]),
                Bytes::from_static(b"bcd"),
                Bytes::from_static(b"never"),
            ],
            ..body(&long, "")
        });
        let exact = call(1, DedupLabel::Off);
        store.body(Body {
            request: Bytes::from(vec![b'q'; MAX_BODY]),
            response: vec![Bytes::from(vec![b'a'; MAX_BODY])],
            ..body(&exact, "")
        });
        assert!(store.flush(LONG));
        let cut = read(folder.path(), long.id).expect("a body");
        assert!(cut.request_cut && cut.response_cut);
        assert_eq!(
            (cut.request.len(), cut.response.len()),
            (MAX_BODY, MAX_BODY)
        );
        assert!(cut.response.ends_with(b"aabc"));
        let whole = read(folder.path(), exact.id).expect("a body");
        assert!(!whole.request_cut && !whole.response_cut);
        assert_eq!(
            (whole.request.len(), whole.response.len()),
            (MAX_BODY, MAX_BODY)
        );
    }

    #[test]
    fn what_waits_is_bounded_and_counted() {
        let folder = TempDir::new().expect("a folder");
        let blocked = folder.path().join("file");
        fs::write(&blocked, "").expect("a file");
        let store = open(&blocked);
        let large = Bytes::from(vec![0; MAX_BODY]);
        for n in 0..70 {
            store.body(Body {
                request: large.clone(),
                ..body(&call(n, DedupLabel::Off), "")
            });
        }
        assert_eq!(store.health().dropped_bodies, 6);
        store.finished(ended(0, 1, DedupLabel::Off, Outcome::Completed));
        assert_eq!(store.health().dropped_rows, 0, "rows wait on");

        fs::remove_file(&blocked).expect("the file gone");
        assert!(store.flush(LONG));
        let kept: i64 = Connection::open(blocked.join(super::super::DATABASE_FILE))
            .and_then(|database| {
                database.query_row("SELECT count(*) FROM bodies", [], |row| row.get(0))
            })
            .expect("a count");
        assert_eq!(kept, 64);
        // There is room again.
        store.body(body(&call(99, DedupLabel::Off), "x"));
        assert!(store.flush(LONG));
        assert_eq!(store.health().dropped_bodies, 6);
    }

    #[test]
    fn the_end_of_the_program_keeps_what_waits() {
        let folder = TempDir::new().expect("a folder");
        let store = open(folder.path());
        let calls: Vec<CallStart> = (0..12).map(|n| call(n, DedupLabel::Off)).collect();
        for call in &calls {
            store.body(Body {
                request: Bytes::from(vec![b'q'; MAX_BODY]),
                ..body(call, "x")
            });
        }
        store.close();
        assert_eq!(store.health().dropped_bodies, 0);
        for call in &calls {
            assert!(read(folder.path(), call.id).is_some());
        }
        store.body(body(&calls[0], "x"));
        assert_eq!(store.health().dropped_bodies, 1);
    }
}
