//! Sends an answer piece by piece, at the pace and to the end its script wants.

use std::io;
use std::iter;

use axum::body::Bytes;
use futures_util::stream::{self, Stream};

use super::script::{Ending, Script};

/// An answer as a stream has it, each part ready to go on the wire.
#[derive(Debug, Default)]
pub struct Frames {
    /// What comes before any content, with it in one write.
    pub opening: String,
    /// One for each piece of content.
    pub pieces: Vec<String>,
    /// What ends the answer properly.
    pub closing: String,
    /// The dialect's error event.
    pub error: String,
}

/// What happens next on the wire.
enum Step {
    Send(Bytes),
    Gap,
    Break,
    Hang,
}

impl Frames {
    /// The body. It ends with an error where the connection is to be cut.
    pub fn paced(self, script: &Script) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        let (sent, last) = match script.ending {
            Ending::Proper => (self.pieces.len(), Step::Send(self.closing.into())),
            Ending::BreakAfter(pieces) => (pieces, Step::Break),
            Ending::ErrorAfter(pieces) => (pieces, Step::Send(self.error.into())),
            Ending::HangAfter(pieces) => (pieces, Step::Hang),
        };
        let pieces = self
            .pieces
            .into_iter()
            .take(sent)
            .enumerate()
            .flat_map(|(n, piece)| {
                let gap = (n > 0).then_some(Step::Gap);
                gap.into_iter().chain([Step::Send(piece.into())])
            });
        // A break shows only after a pause: what was written just before it would be lost.
        let pause = matches!(last, Step::Break).then_some(Step::Gap);
        let opening = iter::once(Step::Send(self.opening.into()));
        perform(
            opening.chain(pieces).chain(pause).chain([last]).collect(),
            script,
        )
    }
}

/// The first half of an answer that is not streamed, then the script's ending.
pub fn half_of(
    whole: &str,
    script: &Script,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let half = Bytes::copy_from_slice(&whole.as_bytes()[..whole.len() / 2]);
    let last = match script.ending {
        Ending::HangAfter(_) => Step::Hang,
        _ => Step::Break,
    };
    perform(vec![Step::Send(half), Step::Gap, last], script)
}

fn perform(
    steps: Vec<Step>,
    script: &Script,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let gap = script.gap;
    stream::unfold(steps.into_iter(), move |mut steps| async move {
        loop {
            match steps.next()? {
                Step::Send(bytes) if bytes.is_empty() => {}
                Step::Send(bytes) => return Some((Ok(bytes), steps)),
                Step::Gap if gap.is_zero() => tokio::task::yield_now().await,
                Step::Gap => tokio::time::sleep(gap).await,
                Step::Break => {
                    let cut = io::Error::new(io::ErrorKind::ConnectionAborted, "cut, as asked");
                    return Some((Err(cut), steps));
                }
                Step::Hang => std::future::pending().await,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::{FutureExt, StreamExt};

    use super::*;

    fn frames() -> Frames {
        Frames {
            opening: "<".to_owned(),
            pieces: ["a", "b", "c"].map(str::to_owned).to_vec(),
            closing: ">".to_owned(),
            error: "!".to_owned(),
        }
    }

    /// What is sent until nothing more comes, and what then: `.` the end, `x` a cut, `…` silence.
    async fn play(ending: Ending) -> String {
        let script = Script {
            gap: Duration::ZERO,
            ending,
            ..Script::default()
        };
        let mut stream = std::pin::pin!(frames().paced(&script));
        let mut seen = String::new();
        for _ in 0..32 {
            match stream.next().now_or_never() {
                Some(Some(Ok(bytes))) => seen.push_str(std::str::from_utf8(&bytes).expect("text")),
                Some(Some(Err(_))) => return seen + "x",
                Some(None) => return seen + ".",
                None => tokio::task::yield_now().await,
            }
        }
        seen + "…"
    }

    #[tokio::test]
    async fn each_ending() {
        assert_eq!(play(Ending::Proper).await, "<abc>.");
        assert_eq!(play(Ending::BreakAfter(2)).await, "<abx");
        assert_eq!(play(Ending::ErrorAfter(1)).await, "<a!.");
        assert_eq!(play(Ending::HangAfter(0)).await, "<…");
        assert_eq!(play(Ending::BreakAfter(9)).await, "<abcx");
    }

    #[tokio::test(start_paused = true)]
    async fn gaps_lie_between_pieces_only() {
        let script = Script {
            gap: Duration::from_secs(5),
            ..Script::default()
        };
        let started = crate::clock::Clock::Tokio.now();
        let sent = frames().paced(&script).count().await;
        assert_eq!(sent, 5);
        let took = crate::clock::Clock::Tokio.now().since(started);
        assert_eq!(took.as_secs(), 10);
    }
}
