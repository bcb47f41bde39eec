//! Makes one call at a time over a kept connection, times it and checks it.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use memchr::memmem;
use tokio::net::TcpStream;

use crate::calls::{
    Pace, Template, Workload, closing_events, json_answer, role_event, stamp_of, stamped_event,
    stream_answer,
};
use crate::chunks::monotonic_nanos;
use crate::wire::{Head, Wire, malformed};

const NUMBER_IN_TEMPLATE: &str = "################";

/// When the parts of one checked answer came.
#[derive(Debug)]
pub struct Timing {
    /// From the given start to the last byte.
    pub whole: Duration,
    /// Of a stream: from the given start to the first content event.
    pub first_content: Option<Duration>,
    /// Of a stream: between each content event and the next.
    pub gaps: Vec<Duration>,
}

/// A client with one connection.
pub struct Caller {
    wire: Wire,
    template: Template,
    pace: Pace,
    workload: Workload,
    /// A JSON answer before and after the call's number.
    around: (String, String),
    body: Vec<u8>,
}

impl Caller {
    /// Connects to `address`.
    pub async fn connect(address: SocketAddr, workload: Workload, pace: Pace) -> io::Result<Self> {
        let wire = Wire::new(TcpStream::connect(address).await?)?;
        let answer = json_answer(workload, NUMBER_IN_TEMPLATE);
        let around = answer
            .split_once(NUMBER_IN_TEMPLATE)
            .expect("answers hold the number");
        Ok(Self {
            wire,
            template: Template::new(address, workload, pace),
            pace,
            workload,
            around: (around.0.to_owned(), around.1.to_owned()),
            body: Vec::new(),
        })
    }

    /// Makes the call with `number`, timed from `start`.
    ///
    /// # Errors
    /// When the connection breaks, the status is not 200, or a byte of the
    /// answer is not what the provider says to this number.
    pub async fn call(&mut self, number: &str, start: Instant) -> io::Result<Timing> {
        self.wire.send(self.template.with(number)).await?;
        let head = self
            .wire
            .head()
            .await?
            .ok_or_else(|| malformed("closed before the answer"))?;
        if head.status() != 200 {
            return Err(self.refused(&head).await);
        }
        if self.workload.streams() {
            self.read_stream(&head, number, start).await
        } else {
            self.wire.read_body(head.body, &mut self.body).await?;
            let whole = start.elapsed();
            self.check_json(number)?;
            Ok(Timing {
                whole,
                first_content: None,
                gaps: Vec::new(),
            })
        }
    }

    /// Starts the call with `number` and returns at the head of its answer.
    pub async fn open_stream(&mut self, number: &str) -> io::Result<Head> {
        self.wire.send(self.template.with(number)).await?;
        let head = self
            .wire
            .head()
            .await?
            .ok_or_else(|| malformed("closed before the answer"))?;
        if head.status() != 200 {
            return Err(self.refused(&head).await);
        }
        Ok(head)
    }

    /// Reads the stream that `head` opened to its end.
    pub async fn read_stream(
        &mut self,
        head: &Head,
        number: &str,
        start: Instant,
    ) -> io::Result<Timing> {
        self.body.clear();
        let mut left = head.body;
        let mut seen_events = 0;
        let mut searched = 0;
        let mut arrivals = Vec::with_capacity(self.pace.events as usize);
        while let Some(range) = self.wire.piece(&mut left).await? {
            let now = Instant::now();
            self.body.extend_from_slice(self.wire.bytes(range));
            while let Some(end) = memmem::find(&self.body[searched..], b"\n\n") {
                searched += end + 2;
                // The first event carries the role, those after the content the end.
                if (1..=self.pace.events).contains(&seen_events) {
                    arrivals.push(now);
                }
                seen_events += 1;
            }
        }
        let whole = start.elapsed();
        if self.body != stream_answer(number, self.pace.events).as_bytes() {
            return Err(malformed("a stream that is not what the provider sent"));
        }
        let gaps = arrivals.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let first_content = arrivals.first().map(|first| *first - start);
        Ok(Timing {
            whole,
            first_content,
            gaps,
        })
    }

    /// Reads the stamped stream that `head` opened to its end; how long each content event was on
    /// its way.
    ///
    /// # Errors
    /// When the connection breaks, or a byte of the answer is not what the provider says to this
    /// number.
    pub async fn read_stamped(&mut self, head: &Head, number: &str) -> io::Result<Vec<Duration>> {
        self.body.clear();
        let mut left = head.body;
        let mut searched = 0;
        let mut expected = role_event(number);
        let mut transits = Vec::with_capacity(self.pace.events as usize);
        while let Some(range) = self.wire.piece(&mut left).await? {
            let now = monotonic_nanos();
            self.body.extend_from_slice(self.wire.bytes(range));
            while let Some(end) = memmem::find(&self.body[searched..], b"\n\n") {
                let event = &self.body[searched..searched + end];
                searched += end + 2;
                if let Some(sent) = stamp_of(event) {
                    transits.push(Duration::from_nanos(now.saturating_sub(sent)));
                    expected += &stamped_event(number, sent);
                }
            }
        }
        expected += &closing_events(number, false);
        if transits.len() != self.pace.events as usize || self.body != expected.as_bytes() {
            return Err(malformed("a stream that is not what the provider sent"));
        }
        Ok(transits)
    }

    fn check_json(&self, number: &str) -> io::Result<()> {
        let (before, after) = &self.around;
        let rest = self.body.strip_prefix(before.as_bytes());
        let rest = rest.and_then(|rest| rest.strip_prefix(number.as_bytes()));
        match rest {
            Some(rest) if rest == after.as_bytes() => Ok(()),
            _ => Err(malformed("an answer that is not what the provider sent")),
        }
    }

    async fn refused(&mut self, head: &Head) -> io::Error {
        let read = self.wire.read_body(head.body, &mut self.body).await;
        let text = match read {
            Ok(()) => String::from_utf8_lossy(&self.body[..self.body.len().min(300)]).into_owned(),
            Err(error) => error.to_string(),
        };
        io::Error::other(format!("{}: {text}", head.first_line))
    }
}
