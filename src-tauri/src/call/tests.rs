//! The guards of a shared call: whatever ends it (an early error, a panic, its task dropped),
//! permit, key and rows are given back, and its followers are told.

use std::pin::Pin;

use http_body::Body as _;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::answer::Head;
use super::*;
use crate::keys::Keys;
use crate::policy::fingerprint::RequestKey;
use crate::settings::{DedupMode, Overrides, Settings};
use crate::store::Store;
use crate::store::pages::CallsQuery;
use crate::store::queries::{CallRow, Reader as Record};
use http::StatusCode;

/// How far a call has come when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reached {
    Nothing,
    Leave,
    Sent,
    Content,
}

/// What ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Panic,
    Dropped,
    Error,
}

pub(super) struct Bench {
    pub(super) core: Arc<Core>,
    provider: Arc<Provider>,
    folder: TempDir,
}

/// Whoever reads; every answer here has readers of one kind only.
const ID: CallId = CallId(ulid::Ulid::nil());

const SHARING: Sharing = Sharing {
    key: RequestKey([7; 32]),
    mode: DedupMode::Full,
    take_kept: true,
    window: Duration::from_secs(300),
};

impl Bench {
    pub(super) fn new() -> Bench {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let settings = "[limits]\nconcurrency = 1\n";
        let settings = Settings::parse(settings, &Overrides::default()).expect("settings");
        let store = Store::open(folder.path(), Clock::Boot).expect("a store");
        let core = Arc::new(Core::new(settings, store, Keys::empty(), Clock::Boot));
        let provider = core.world().provider("openai").expect("shipped").clone();
        Bench {
            core,
            provider,
            folder,
        }
    }

    pub(super) fn row(&self) -> Row {
        let request = Request::post("/v1/chat/completions").body(());
        let (parts, ()) = request.expect("a request").into_parts();
        let mut row = new_row(&self.core, &parts);
        row.identify(|start| start.provider = self.provider.name().clone());
        row
    }

    /// A leader's task that comes as far as `reached`, says so by waiting, and then ends.
    fn lead(&self, writer: Writer, flight: Option<Flight>, reached: Reached, end: End) -> Led {
        let (core, provider) = (self.core.clone(), self.provider.clone());
        let mut row = self.row();
        row.open(DedupLabel::Miss, Some(writer.answer().clone()));
        let (at_it, is_at_it) = tokio::sync::oneshot::channel();
        let (go_on, may_go_on) = tokio::sync::oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let mut shared = SharedCall {
                copy: None,
                meter: None,
                row,
                writer,
                _flight: flight,
                linger: Linger::new(Duration::from_secs(2)),
                secrets: Secrets::of(&provider, &http::HeaderMap::new(), None),
                sharing: Some(SHARING),
                provider,
                route: Route::ChatCompletions,
                dialect: Dialect::OpenAi,
                core,
            };
            let mut leave = None;
            if reached >= Reached::Leave {
                leave = shared.leave(None).await.ok();
                assert!(leave.is_some());
            }
            if reached >= Reached::Sent {
                assert!(shared.writer.sending(shared.core.clock.now()));
                shared.row.sent_upstream(shared.core.clock.now());
            }
            if reached >= Reached::Content {
                shared.row.status(StatusCode::OK);
                shared.writer.prepare_head(Head {
                    status: StatusCode::OK,
                    headers: http::HeaderMap::new(),
                    length: None,
                });
                shared.writer.append(bytes::Bytes::from_static(b"half"));
                shared.writer.content(shared.clock().now());
            }
            let _ = at_it.send(());
            let _ = may_go_on.await;
            match end {
                End::Panic => panic!("on purpose, with every guard in hand"),
                End::Dropped => std::future::pending().await,
                End::Error => {
                    let provider = shared.provider.name().clone();
                    let reason = "on purpose".to_owned();
                    let error = match reached {
                        Reached::Content => CallError::UpstreamBroke { provider, reason },
                        _ => CallError::UpstreamUnreachable { provider, reason },
                    };
                    shared.fail(Failure::from(error), leave);
                }
            }
        });
        Led {
            task,
            is_at_it,
            go_on,
        }
    }

    pub(super) async fn rows(&self) -> Vec<CallRow> {
        let none_left = self.core.open_calls.none_left();
        let in_time = tokio::time::timeout(Duration::from_secs(30), none_left).await;
        assert!(in_time.is_ok(), "a call keeps its row");
        assert!(self.core.store.flush(Duration::from_secs(30)));
        let record = Record::open(self.folder.path()).expect("a record");
        record.calls(&CallsQuery::default()).expect("rows").calls
    }
}

struct Led {
    task: JoinHandle<()>,
    is_at_it: tokio::sync::oneshot::Receiver<()>,
    go_on: tokio::sync::oneshot::Sender<()>,
}

impl Led {
    /// Lets it come to its end.
    async fn end(self, end: End) {
        self.is_at_it.await.expect("it comes so far");
        if end == End::Dropped {
            self.task.abort();
        }
        let _ = self.go_on.send(());
        let ended = self.task.await;
        match end {
            End::Panic => assert!(ended.unwrap_err().is_panic()),
            End::Dropped => assert!(ended.unwrap_err().is_cancelled()),
            End::Error => ended.expect("it fails in order"),
        }
    }
}

/// Reads a response to its end; true if that is in order.
async fn read_whole(response: &mut Response<ClientBody>) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    loop {
        let body = Pin::new(response.body_mut());
        let mut body = body;
        match std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            Some(Ok(frame)) => bytes.extend_from_slice(&frame.into_data().unwrap_or_default()),
            Some(Err(_)) => return (bytes, false),
            None => return (bytes, true),
        }
    }
}

#[tokio::test]
async fn however_a_call_ends_nothing_leaks_and_everybody_is_told() {
    use Reached::{Content, Leave, Nothing, Sent};
    for end in [End::Panic, End::Dropped, End::Error] {
        for reached in [Nothing, Leave, Sent, Content] {
            let bench = Bench::new();
            let name = format!("{end:?} at {reached:?}");
            let Role::Leader(writer, reader, flight) =
                bench.core.dedup.enter(&SHARING, ID, bench.core.clock.now())
            else {
                panic!("nobody else is there");
            };
            let Role::Follower(follower) =
                bench.core.dedup.enter(&SHARING, ID, bench.core.clock.now())
            else {
                panic!("it can be joined");
            };
            let led = bench.lead(writer, flight, reached, end);
            let follower = tokio::spawn({
                let (mut row, provider) = (bench.row(), bench.provider.clone());
                row.open(DedupLabel::Joined, Some(follower.answer().clone()));
                async move {
                    let mut response = follow(
                        follower.head().await,
                        follower,
                        row,
                        &provider,
                        Dialect::OpenAi,
                    );
                    let (body, in_order) = read_whole(&mut response).await;
                    (response.status(), body, in_order)
                }
            });
            led.end(end).await;

            let (status, body, in_order) = follower.await.expect("an answer");
            if reached == Content {
                assert_eq!(
                    (status, &*body, in_order),
                    (StatusCode::OK, &b"half"[..], false),
                    "{name}"
                );
            } else {
                let expected = match end {
                    End::Error => "upstream_unreachable",
                    End::Panic | End::Dropped => "internal_error",
                };
                assert!(String::from_utf8_lossy(&body).contains(expected), "{name}");
                assert!(status.is_server_error() && in_order, "{name}");
            }
            let leader = reader.head().await;
            assert_eq!(leader.is_ok(), reached == Content, "{name}");
            drop(reader);

            // The key, the permit and the pass are back.
            assert_eq!(bench.core.dedup.in_flight(), 0, "{name}");
            let pool = bench.provider.state.pool.snapshot();
            assert_eq!((pool.in_flight, pool.waiting), (0, 0), "{name}");
            assert!(
                bench
                    .provider
                    .state
                    .refusal(None, bench.core.clock.now())
                    .is_none()
            );

            let rows = bench.rows().await;
            assert_eq!(rows.len(), 2, "{name}");
            let by = |dedup: &str| {
                let row = rows.iter().find(|row| row.dedup == dedup).expect("a row");
                (row.outcome.clone().unwrap_or_default(), row.upstream_call)
            };
            let (of_leader, of_follower) = match (end, reached) {
                (End::Error, Content) => ("broken_stream", "broken_stream"),
                (End::Error, _) => ("upstream_error", "upstream_error"),
                (End::Panic, _) => ("internal_error", "internal_error"),
                // Its task was taken from under it: nobody is to blame for that.
                (End::Dropped, _) => ("client_left", "internal_error"),
            };
            assert_eq!(
                by("miss"),
                (of_leader.to_owned(), Some(reached >= Sent)),
                "{name}"
            );
            assert_eq!(
                by("joined"),
                (of_follower.to_owned(), Some(false)),
                "{name}"
            );
        }
    }
}

/// A follower's own fault is nobody else's.
#[tokio::test]
async fn a_follower_that_panics_leaves_its_place_alone() {
    let bench = Bench::new();
    let now = bench.core.clock.now();
    let Role::Leader(writer, reader, flight) = bench.core.dedup.enter(&SHARING, ID, now) else {
        panic!("nobody else is there");
    };
    let Role::Follower(follower) = bench.core.dedup.enter(&SHARING, ID, now) else {
        panic!("it can be joined");
    };
    writer.prepare_head(Head {
        status: StatusCode::OK,
        headers: http::HeaderMap::new(),
        length: None,
    });
    let mut row = bench.row();
    row.open(DedupLabel::Joined, Some(follower.answer().clone()));
    let provider = bench.provider.clone();
    let panicked = tokio::spawn(async move {
        let _response = follow(
            follower.head().await,
            follower,
            row,
            &provider,
            Dialect::OpenAi,
        );
        panic!("on purpose, with a place and a row in hand");
    });
    assert!(panicked.await.unwrap_err().is_panic());
    writer.append(bytes::Bytes::from_static(b"x"));
    assert!(reader.head().await.is_ok());
    let row = &bench.rows().await[0];
    assert_eq!(row.outcome.as_deref(), Some("internal_error"));
    drop((writer, flight));
    assert_eq!(bench.core.dedup.in_flight(), 0);
}
