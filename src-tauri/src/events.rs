//! What happens, told to whoever watches: the tray, the window and the pages subscribe. Without a
//! subscriber nothing is built.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use utoipa::ToSchema;

use crate::call::live::LiveCall;
use crate::policy::breaker::State;
use crate::policy::money::Nanodollars;
use crate::store::CallEnd;

/// Events a subscriber may be behind before it has missed some and must fetch the state again.
pub const BACKLOG: usize = 1000;

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The state is another than before.
    State(Change),
    /// A call has been identified and is under way.
    Opened(Arc<LiveCall>),
    /// A call has ended.
    Finished(Arc<CallEnd>),
}

/// What of the state has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Change {
    /// A breaker opened, became half-open or closed.
    Breaker {
        /// Whose breaker.
        #[schema(value_type = String)]
        provider: Arc<str>,
        /// The model, where it is a model's own.
        #[schema(value_type = Option<String>)]
        model: Option<Arc<str>>,
        state: State,
    },
    /// Calls go through as usual, straight through, or not at all.
    Mode,
    /// Settings, providers or keys are others, or a file of settings was refused.
    Settings,
    /// How the record fares.
    Log,
    /// Kept answers have been forgotten.
    Dedup,
    /// A budget is nearly spent, is spent, or refuses a call: each once a period.
    Budget {
        /// The budget, in words: `the day's budget for tool "aider"`.
        name: String,
        kind: BudgetNews,
    },
    /// A tool has spent several times its usual rate for ten minutes.
    Runaway {
        tool: String,
        /// In the last ten minutes, in billionths of a dollar.
        #[serde(rename = "spent_nanos")]
        #[schema(value_type = i64)]
        spent: Nanodollars,
        /// What it usually spends in them.
        #[serde(rename = "usual_nanos")]
        #[schema(value_type = i64)]
        usual: Nanodollars,
    },
    /// A newer price list is in force, or could not be had.
    Prices,
}

/// What of a budget is worth telling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BudgetNews {
    /// The share of `warn_at` is spent.
    Near,
    /// All of it is spent.
    Spent,
    /// It refused a call.
    Refused,
}

/// Where events are published.
pub struct Events {
    sender: broadcast::Sender<Event>,
    // Asking the channel takes its lock, and every call asks twice.
    subscribers: Arc<AtomicUsize>,
}

impl Default for Events {
    fn default() -> Events {
        Events {
            sender: broadcast::Sender::new(BACKLOG),
            subscribers: Arc::default(),
        }
    }
}

impl Events {
    /// From now on, every event.
    pub fn subscribe(&self) -> Subscription {
        self.subscribers.fetch_add(1, Ordering::AcqRel);
        Subscription {
            receiver: self.sender.subscribe(),
            subscribers: self.subscribers.clone(),
        }
    }

    /// Whether anybody watches.
    pub fn are_watched(&self) -> bool {
        self.subscribers.load(Ordering::Acquire) > 0
    }

    /// Builds and tells an event, if anybody watches.
    pub fn tell(&self, event: impl FnOnce() -> Event) {
        if self.are_watched() {
            // Nobody receives it any more: nothing is lost.
            let _ = self.sender.send(event());
        }
    }

    /// Settings, providers or keys have changed.
    pub fn state_changed(&self) {
        self.tell(|| Event::State(Change::Settings));
    }
}

/// A subscriber's place.
pub struct Subscription {
    receiver: broadcast::Receiver<Event>,
    subscribers: Arc<AtomicUsize>,
}

/// What a subscriber gets next.
#[derive(Clone, Debug)]
pub enum Told {
    Event(Event),
    /// So many events were missed: the state must be fetched again.
    Missed(u64),
}

impl Subscription {
    /// The next event; `None` once there will be none.
    pub async fn next(&mut self) -> Option<Told> {
        match self.receiver.recv().await {
            Ok(event) => Some(Told::Event(event)),
            Err(RecvError::Lagged(missed)) => Some(Told::Missed(missed)),
            Err(RecvError::Closed) => None,
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.subscribers.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_built_unless_somebody_watches() {
        let events = Events::default();
        events.tell(|| panic!("nobody watches"));
        let subscription = events.subscribe();
        assert!(events.are_watched());
        drop(subscription);
        events.tell(|| panic!("nobody watches any more"));
    }

    #[tokio::test]
    async fn whoever_is_too_far_behind_is_told_so_and_goes_on() {
        let events = Events::default();
        let mut slow = events.subscribe();
        for _ in 0..BACKLOG {
            events.tell(|| Event::State(Change::Mode));
        }
        assert!(matches!(
            slow.next().await,
            Some(Told::Event(Event::State(Change::Mode)))
        ));
        // The channel keeps a power of two.
        for _ in 0..BACKLOG.next_power_of_two() + 4 {
            events.tell(|| Event::State(Change::Log));
        }
        assert!(matches!(slow.next().await, Some(Told::Missed(missed)) if missed > 0));
        assert!(matches!(
            slow.next().await,
            Some(Told::Event(Event::State(Change::Log)))
        ));
    }
}
