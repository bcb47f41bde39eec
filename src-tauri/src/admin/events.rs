//! `GET events`: what happens, as it happens.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::extract::State;
use axum::response::Sse;
use axum::response::sse::{Event as SseEvent, KeepAlive};
use futures_util::Stream;
use serde::Serialize;
use tokio::time::{Interval, MissedTickBehavior, interval};
use utoipa::ToSchema;

use super::state::RunningCall;
use crate::core::{Core, Phase};
use crate::events::{Change, Event, Subscription, Told};
use crate::store::CallId;
use crate::store::queries::CallRow;

/// Each call tells of its progress at most this often: four times a second.
const PROGRESS: Duration = Duration::from_millis(250);

/// Something that happened, as faces read it.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "event", content = "data", rename_all = "snake_case")]
#[schema(as = Event)]
pub enum FeedEvent {
    /// The state has changed: `GET state` says how.
    State(Change),
    /// A call has been identified and is under way.
    Opened(RunningCall),
    /// A call has come further.
    Progress(RunningCall),
    /// A call has ended.
    Finished(Box<CallRow>),
    /// Events were missed, since the reader was more than 1,000 behind: fetch the state again.
    Missed(Missed),
}

/// How many events were missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Missed {
    events: u64,
}

/// Everything that happens from now on, for one reader. While none exists nothing is built.
pub struct Feed {
    core: Weak<Core>,
    subscription: Subscription,
    ticks: Interval,
    /// How far each call was when it was last told of.
    told: HashMap<CallId, RunningCall>,
    progress: VecDeque<RunningCall>,
}

impl Feed {
    pub fn of(core: &Arc<Core>) -> Feed {
        let mut ticks = interval(PROGRESS);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Feed {
            core: Arc::downgrade(core),
            subscription: core.events.subscribe(),
            ticks,
            told: HashMap::new(),
            progress: VecDeque::new(),
        }
    }

    /// The next event; `None` when Traygate stops.
    pub async fn next(&mut self) -> Option<FeedEvent> {
        loop {
            if let Some(call) = self.progress.pop_front() {
                return Some(FeedEvent::Progress(call));
            }
            let calls = self.core.upgrade()?.open_calls.clone();
            tokio::select! {
                biased;
                () = calls.reached(Phase::Draining) => return None,
                told = self.subscription.next() => return Some(self.shown(told?)),
                _ = self.ticks.tick() => self.look()?,
            }
        }
    }

    fn shown(&mut self, told: Told) -> FeedEvent {
        match told {
            Told::Missed(events) => FeedEvent::Missed(Missed { events }),
            Told::Event(Event::State(change)) => FeedEvent::State(change),
            Told::Event(Event::Opened(call)) => {
                let core = self.core.upgrade();
                let now = core.map_or(call.began, |core| core.clock.now());
                let opened = RunningCall::of(&call, now);
                self.told.insert(call.start.id, opened.clone());
                FeedEvent::Opened(opened)
            }
            Told::Event(Event::Finished(end)) => {
                FeedEvent::Finished(Box::new(CallRow::from(&*end)))
            }
        }
    }

    /// Finds the calls that have come further since the last look.
    fn look(&mut self) -> Option<()> {
        let core = self.core.upgrade()?;
        let now = core.clock.now();
        let mut told = HashMap::with_capacity(self.told.len());
        for live in core.live.all() {
            let id = live.start.id;
            let call = RunningCall::of(&live, now);
            let before = self.told.get(&id);
            if !before.is_some_and(|before| call.is_as_far_as(before)) {
                self.progress.push_back(call.clone());
            }
            told.insert(id, call);
        }
        self.told = told;
        Some(())
    }
}

/// Server-Sent Events: `state`, `opened`, `progress` (at most four a second for each call),
/// `finished`, and `missed` for a reader that was too far behind. Fetch `state` after connecting.
#[utoipa::path(get, path = "/traygate/api/events", tag = "watching", responses(
    (status = 200, content_type = "text/event-stream", body = FeedEvent,
     description = "`event:` is the name, `data:` its `data` as JSON")))]
pub async fn get_events(
    State(core): State<Arc<Core>>,
) -> Sse<impl Stream<Item = Result<SseEvent, Infallible>>> {
    let events = futures_util::stream::unfold(Feed::of(&core), async |mut feed| {
        let event = feed.next().await?;
        Some((Ok(sse_event(&event)), feed))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}

fn sse_event(event: &FeedEvent) -> SseEvent {
    let written = match event {
        FeedEvent::State(change) => SseEvent::default().event("state").json_data(change),
        FeedEvent::Opened(call) => SseEvent::default().event("opened").json_data(call),
        FeedEvent::Progress(call) => SseEvent::default().event("progress").json_data(call),
        FeedEvent::Finished(call) => SseEvent::default().event("finished").json_data(call),
        FeedEvent::Missed(missed) => SseEvent::default().event("missed").json_data(missed),
    };
    // These types have no maps with keys that are not text, the only thing JSON refuses.
    written.unwrap_or_else(|_| SseEvent::default().event("missed"))
}
