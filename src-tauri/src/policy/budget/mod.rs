//! Keeps what is spent under its caps: reserves a call's worst case, settles its real cost.
//!
//! A [`Ledger`] is plain data without a lock or a clock. Its owner keeps it behind a lock of its
//! own, so a check and the reservation that follows it are one step, and a thousand calls at once
//! cannot pass a cap that each of them alone would keep.
//!
//! A call belongs to the hour, the day and the month in which it was let through: there it is
//! held, and there its cost is entered, however long it runs. All sums follow from a journal of
//! costs and the reservations that are open, so a clock that is set back finds the earlier period
//! as it was left, and one that is set forward and back has spent nothing twice.

mod journal;
#[cfg(test)]
mod tests;
mod worst_case;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use jiff::tz::TimeZone;
use serde::{Serialize, Serializer};

use self::journal::{Journal, Scope};
use crate::clock::WallTime;
use crate::policy::calendar::Window;
use crate::policy::money::Nanodollars;
use crate::settings::{Budget, Period, SpendSettings, Unpriced};

pub use self::worst_case::{CacheWrites, Request};

/// How far back the costs that [`Ledger::restore`] wants must go: no period is longer.
pub const LOOK_BACK_MICROS: i64 = 32 * 86_400 * 1_000_000;

/// Whose call it is, as budgets tell calls apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model that was asked for.
    pub model: &'a str,
    /// The tool that called.
    pub tool: &'a str,
}

/// What a call may come to cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worst {
    /// Nothing that counts: a local provider, a subscription.
    Nothing,
    /// At most this.
    AtMost(Nanodollars),
    /// Nobody knows: its model is unpriced.
    Unknown,
}

impl Worst {
    /// What is reserved for it.
    fn held(self) -> Nanodollars {
        match self {
            Self::AtMost(amount) => amount.max(Nanodollars::ZERO),
            // Its cost is counted when it is known; until then it stands in nobody's way.
            Self::Nothing | Self::Unknown => Nanodollars::ZERO,
        }
    }
}

/// A reservation. It ends in [`Ledger::settle`] or [`Ledger::release`], nowhere else.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[must_use = "what is reserved stays so until it is settled or released"]
pub struct Hold(u64);

/// A place among those that wait. It ends in a [`Woken`] or in [`Ledger::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// What becomes of a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// It costs nothing that counts, and goes.
    Untouched,
    /// It goes, and its worst case is reserved.
    Reserved(Hold),
    /// It would fit, were it not for what others have reserved.
    Wait(Ticket),
    /// It does not fit.
    Refused(Refusal),
}

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The budget that it would pass, in words: `the day's budget for tool "aider"`.
    pub budget: String,
    /// Its cap.
    pub cap: Nanodollars,
    /// What is spent of it.
    pub spent: Nanodollars,
    /// What others have reserved of it.
    pub held: Nanodollars,
    /// What the call may come to cost; `None` if its model is unpriced, which is then the reason.
    /// If it is more than the cap, waiting for the next period does not help.
    pub worst: Option<Nanodollars>,
    /// When the budget begins anew.
    pub resets_at: WallTime,
    /// No other call was refused for it in this period, so this is news.
    pub first: bool,
}

/// What a person may want to know at once. Each comes once a period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alert {
    /// The budget, in words.
    pub budget: String,
    /// How far it is spent.
    pub level: Level,
    /// Its cap.
    pub cap: Nanodollars,
    /// What is spent of it.
    pub spent: Nanodollars,
    /// When it begins anew.
    pub resets_at: WallTime,
}

/// How far a budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Less than `warn_at` of it.
    Within,
    /// `warn_at` of it or more.
    Near,
    /// All of it.
    Spent,
}

/// One that waited, and what has become of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Woken {
    /// Its place, which is now free.
    pub ticket: Ticket,
    /// Its reservation, or why it has none.
    pub answer: Result<Hold, Refusal>,
}

/// What follows when something is settled or changed. Nearly always nothing.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "those that waited must be told"]
pub struct Aftermath {
    /// For those who watch.
    pub alerts: Vec<Alert>,
    /// For those who waited, in the order in which they came.
    pub woken: Vec<Woken>,
}

/// A budget as the control room shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The budget, in words.
    pub budget: String,
    /// Its cap, in billionths of a dollar, as all amounts.
    pub cap: Nanodollars,
    /// What is spent in the present period.
    pub spent: Nanodollars,
    /// What open calls have reserved.
    pub held: Nanodollars,
    /// How far it is spent.
    pub level: Level,
    /// When the present period began, in milliseconds of the Unix time.
    #[serde(serialize_with = "as_millis")]
    pub since: WallTime,
    /// When the next begins.
    #[serde(serialize_with = "as_millis")]
    pub resets_at: WallTime,
}

fn as_millis<S: Serializer>(time: &WallTime, out: S) -> Result<S::Ok, S::Error> {
    time.unix_millis().serialize(out)
}

/// All budgets, what is spent of them, and who waits.
#[derive(Debug)]
pub struct Ledger {
    zone: TimeZone,
    unpriced: Unpriced,
    accounts: Vec<Account>,
    journal: Journal,
    holds: HashMap<u64, Held>,
    /// By their tickets, so in the order in which they came.
    waiting: BTreeMap<Ticket, Waiting>,
    /// The last hold or ticket given out.
    last_id: u64,
}

#[derive(Debug)]
struct Held {
    at: WallTime,
    scope: Arc<Scope>,
    worst: Nanodollars,
    /// Places of the accounts that it counts for.
    counts_for: Box<[usize]>,
}

#[derive(Debug)]
struct Waiting {
    scope: Arc<Scope>,
    worst: Nanodollars,
    counts_for: Box<[usize]>,
}

/// How a call fits into the budgets that count it.
enum Fit {
    Fits,
    /// It would, were it not for what others have reserved.
    Later,
    /// The place of the account that refuses it for longest.
    Never(usize),
}

impl Ledger {
    /// The budgets of these settings in a time zone, nothing spent of them yet.
    pub fn new(settings: &SpendSettings, zone: TimeZone) -> Self {
        Self {
            zone,
            unpriced: settings.unpriced,
            accounts: accounts(settings),
            journal: Journal::default(),
            holds: HashMap::new(),
            waiting: BTreeMap::new(),
            last_id: 0,
        }
    }

    /// Enters what was spent without a hold, above all before this process began: the cost of one call, or the sum of those
    /// of one provider, model and tool within a quarter of an hour of UTC (`at` any time in it).
    /// To be fed with the last [`LOOK_BACK_MICROS`] before the first call.
    pub fn restore(&mut self, at: WallTime, call: Call<'_>, cost: Nanodollars) {
        let scope = self.journal.scope(call);
        self.journal.add(at, &scope, cost);
        self.forget_periods();
    }

    /// Asks for leave to make a call. `now` is the time that the call is entered at, so it is the
    /// time to price it by and to record it under, or a restart would find it elsewhere.
    pub fn reserve(&mut self, call: Call<'_>, worst: Worst, now: WallTime) -> Answer {
        if worst == Worst::Nothing {
            return Answer::Untouched;
        }
        self.enter_periods(now);
        let counts_for = counts_for(&self.accounts, call);
        if let Some(refusal) = self.refuses(&counts_for, worst) {
            return Answer::Refused(refusal);
        }
        let amount = worst.held();
        match self.fit(&counts_for, amount) {
            Fit::Never(place) => Answer::Refused(self.accounts[place].refuse(Some(amount))),
            Fit::Later => {
                let ticket = Ticket(self.next_id());
                let scope = self.journal.scope(call);
                let waiting = Waiting {
                    scope,
                    worst: amount,
                    counts_for,
                };
                self.waiting.insert(ticket, waiting);
                Answer::Wait(ticket)
            }
            Fit::Fits => {
                let scope = self.journal.scope(call);
                Answer::Reserved(self.hold(scope, amount, counts_for, now))
            }
        }
    }

    /// Why a call would be refused if it asked now; `None` if it would go or wait. Reserves
    /// nothing: for those that have a queue to wait in before they ask.
    pub fn refusal(&mut self, call: Call<'_>, worst: Worst, now: WallTime) -> Option<Refusal> {
        if worst == Worst::Nothing || self.accounts.is_empty() {
            return None;
        }
        self.enter_periods(now);
        let counts_for = counts_for(&self.accounts, call);
        self.refuses(&counts_for, worst)
    }

    /// Lets a call go that no budget is to hold back, and counts it all the same.
    pub fn admit(&mut self, call: Call<'_>, worst: Worst, now: WallTime) -> Option<Hold> {
        if worst == Worst::Nothing {
            return None;
        }
        self.enter_periods(now);
        let counts_for = counts_for(&self.accounts, call);
        let scope = self.journal.scope(call);
        Some(self.hold(scope, worst.held(), counts_for, now))
    }

    /// What all calls have cost in the hour, day or month around a time.
    pub fn spent_in(&self, period: Period, now: WallTime) -> Nanodollars {
        let window = Window::of(period, now, &self.zone);
        self.journal.spent(window, |_| true)
    }

    /// Ends a reservation with what the call cost, entered at the time it was reserved at.
    pub fn settle(&mut self, hold: Hold, cost: Nanodollars, now: WallTime) -> Aftermath {
        self.enter_periods(now);
        let Some(held) = self.holds.remove(&hold.0) else {
            return Aftermath::default(); // never: a hold is given up where it is settled
        };
        self.journal.add(held.at, &held.scope, cost);
        let mut alerts = Vec::new();
        for place in held.counts_for {
            let account = &mut self.accounts[place];
            if account.window.contains(held.at) {
                account.held = account.held.saturating_sub(held.worst);
                account.spent = account.spent.saturating_add(cost);
                alerts.extend(account.alert());
            }
        }
        Aftermath {
            alerts,
            woken: self.wake(now),
        }
    }

    /// Ends the reservation of a call that cost nothing: it never went out.
    pub fn release(&mut self, hold: Hold, now: WallTime) -> Aftermath {
        self.settle(hold, Nanodollars::ZERO, now)
    }

    /// Gives up a place: the caller left, or has waited long enough. Nothing happens if it was
    /// woken in the meantime; then the hold in its [`Woken`] is to be released.
    pub fn leave(&mut self, ticket: Ticket) {
        self.waiting.remove(&ticket);
    }

    /// What to refuse one with that has waited long enough: the budget that others have reserved.
    /// `None` if the ticket no longer waits.
    pub fn blocked_by(&mut self, ticket: Ticket, now: WallTime) -> Option<Refusal> {
        self.enter_periods(now);
        let waiting = self.waiting.get(&ticket)?;
        let worst = waiting.worst;
        let full = |&place: &usize| self.accounts[place].is_full_for(worst);
        let place = longest_of(
            &self.accounts,
            waiting.counts_for.iter().copied().filter(full),
        )?;
        Some(self.accounts[place].refuse(Some(worst)))
    }

    /// When the next period of a budget begins for which a call waits: [`Ledger::roll`] is due
    /// then. `None` while nobody waits.
    pub fn next_roll(&self) -> Option<WallTime> {
        let places = self
            .waiting
            .values()
            .flat_map(|waiting| &*waiting.counts_for);
        places.map(|&place| self.accounts[place].window.end).min()
    }

    /// Lets those go whom a new period has room for.
    pub fn roll(&mut self, now: WallTime) -> Aftermath {
        self.enter_periods(now);
        Aftermath {
            alerts: Vec::new(),
            woken: self.wake(now),
        }
    }

    /// Puts new settings in force. What is spent and reserved stays.
    pub fn configure(&mut self, settings: &SpendSettings, now: WallTime) -> Aftermath {
        self.unpriced = settings.unpriced;
        self.accounts = accounts(settings);
        for held in self.holds.values_mut() {
            held.counts_for = counts_for(&self.accounts, held.scope.call());
        }
        for waiting in self.waiting.values_mut() {
            waiting.counts_for = counts_for(&self.accounts, waiting.scope.call());
        }
        self.roll(now)
    }

    /// The machine has moved to another time zone.
    pub fn move_to(&mut self, zone: TimeZone, now: WallTime) -> Aftermath {
        self.zone = zone;
        self.forget_periods();
        self.roll(now)
    }

    /// Where every budget stands, in the order of the settings.
    pub fn status(&mut self, now: WallTime) -> Vec<Status> {
        self.enter_periods(now);
        self.accounts.iter().map(Account::status).collect()
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn hold(
        &mut self,
        scope: Arc<Scope>,
        worst: Nanodollars,
        counts_for: Box<[usize]>,
        at: WallTime,
    ) -> Hold {
        for &place in &counts_for {
            let account = &mut self.accounts[place];
            account.held = account.held.saturating_add(worst);
        }
        let id = self.next_id();
        let held = Held {
            at,
            scope,
            worst,
            counts_for,
        };
        self.holds.insert(id, held);
        Hold(id)
    }

    /// Whether what is spent refuses a call, or that nobody knows what it costs.
    fn refuses(&mut self, counts_for: &[usize], worst: Worst) -> Option<Refusal> {
        if worst == Worst::Unknown && self.unpriced == Unpriced::Refuse {
            let place = longest_of(&self.accounts, counts_for.iter().copied())?;
            return Some(self.accounts[place].refuse(None));
        }
        let amount = worst.held();
        match self.fit(counts_for, amount) {
            Fit::Never(place) => Some(self.accounts[place].refuse(Some(amount))),
            Fit::Fits | Fit::Later => None,
        }
    }

    fn fit(&self, counts_for: &[usize], worst: Nanodollars) -> Fit {
        let never = |&place: &usize| self.accounts[place].room_beside(worst) < Nanodollars::ZERO;
        let passed = counts_for.iter().copied().filter(never);
        if let Some(place) = longest_of(&self.accounts, passed) {
            return Fit::Never(place);
        }
        if counts_for
            .iter()
            .any(|&place| self.accounts[place].is_full_for(worst))
        {
            Fit::Later
        } else {
            Fit::Fits
        }
    }

    /// Asks again for those that wait, in their order. One that does not fit yet keeps its place
    /// and stands in nobody's way.
    fn wake(&mut self, now: WallTime) -> Vec<Woken> {
        let mut woken = Vec::new();
        let mut next = self.waiting.first_key_value().map(|(ticket, _)| *ticket);
        while let Some(ticket) = next {
            let behind = (Bound::Excluded(ticket), Bound::Unbounded);
            next = self.waiting.range(behind).next().map(|(ticket, _)| *ticket);
            let waiting = &self.waiting[&ticket];
            match self.fit(&waiting.counts_for, waiting.worst) {
                Fit::Later => {}
                Fit::Never(place) => {
                    let worst = waiting.worst;
                    self.waiting.remove(&ticket);
                    let answer = Err(self.accounts[place].refuse(Some(worst)));
                    woken.push(Woken { ticket, answer });
                }
                Fit::Fits => {
                    if let Some(goes) = self.waiting.remove(&ticket) {
                        let answer = Ok(self.hold(goes.scope, goes.worst, goes.counts_for, now));
                        woken.push(Woken { ticket, answer });
                    }
                }
            }
        }
        woken
    }

    /// Makes sure that every account is in the period of this time.
    fn enter_periods(&mut self, now: WallTime) {
        for (place, account) in self.accounts.iter_mut().enumerate() {
            if account.window.contains(now) {
                continue;
            }
            let window = Window::of(account.budget.per, now, &self.zone);
            let counted =
                |held: &&Held| window.contains(held.at) && held.counts_for.contains(&place);
            let held = self.holds.values().filter(counted);
            account.held = held.map(|held| held.worst).sum();
            let budget = &account.budget;
            account.spent = self.journal.spent(window, |call| counts(budget, call));
            account.window = window;
            // What it had reached before was told then.
            account.told = account.level();
            account.has_refused = false;
        }
    }

    /// All sums are to be taken anew.
    fn forget_periods(&mut self) {
        for account in &mut self.accounts {
            account.window = NO_WINDOW;
        }
    }
}

/// Contains nothing.
const NO_WINDOW: Window = Window {
    start: WallTime(i64::MAX),
    end: WallTime(i64::MAX),
};

/// One budget in its present period.
#[derive(Debug)]
struct Account {
    budget: Budget,
    /// What is spent when it is nearly spent.
    near: Nanodollars,
    window: Window,
    spent: Nanodollars,
    held: Nanodollars,
    told: Level,
    has_refused: bool,
}

impl Account {
    /// What a cap leaves beside a worst case for those who have reserved; negative if the two do
    /// not go together at all.
    fn room_beside(&self, worst: Nanodollars) -> Nanodollars {
        let needed = self.spent.saturating_add(worst);
        self.budget.cap.saturating_sub(needed)
    }

    /// Whether what others have reserved leaves no room for a worst case.
    fn is_full_for(&self, worst: Nanodollars) -> bool {
        self.room_beside(worst) < self.held
    }

    fn level(&self) -> Level {
        if self.spent >= self.budget.cap {
            Level::Spent
        } else if self.spent >= self.near {
            Level::Near
        } else {
            Level::Within
        }
    }

    /// What has become worth telling.
    fn alert(&mut self) -> Option<Alert> {
        let level = self.level();
        if level <= self.told {
            return None;
        }
        self.told = level;
        Some(Alert {
            budget: InWords(&self.budget).to_string(),
            level,
            cap: self.budget.cap,
            spent: self.spent,
            resets_at: self.window.end,
        })
    }

    fn refuse(&mut self, worst: Option<Nanodollars>) -> Refusal {
        let first = !std::mem::replace(&mut self.has_refused, true);
        Refusal {
            first,
            budget: InWords(&self.budget).to_string(),
            cap: self.budget.cap,
            spent: self.spent,
            held: self.held,
            worst,
            resets_at: self.window.end,
        }
    }

    fn status(&self) -> Status {
        Status {
            budget: InWords(&self.budget).to_string(),
            cap: self.budget.cap,
            spent: self.spent,
            held: self.held,
            level: self.level(),
            since: self.window.start,
            resets_at: self.window.end,
        }
    }
}

fn accounts(settings: &SpendSettings) -> Vec<Account> {
    // A share, not an amount: the one float near money, and gone before it meets any.
    let share = (settings.warn_at.clamp(0.0, 1.0) * 1_000_000.0).round() as u32;
    let account = |budget: &Budget| Account {
        near: budget.cap.millionths(share),
        budget: budget.clone(),
        window: NO_WINDOW,
        spent: Nanodollars::ZERO,
        held: Nanodollars::ZERO,
        told: Level::Within,
        has_refused: false,
    };
    settings.budgets.iter().map(account).collect()
}

/// Whether a budget counts a call.
fn counts(budget: &Budget, call: Call<'_>) -> bool {
    [
        (&budget.provider, call.provider),
        (&budget.model, call.model),
        (&budget.tool, call.tool),
    ]
    .into_iter()
    .all(|(pattern, name)| pattern.as_ref().is_none_or(|pattern| pattern.matches(name)))
}

fn counts_for(accounts: &[Account], call: Call<'_>) -> Box<[usize]> {
    let counting = accounts.iter().enumerate();
    counting
        .filter(|(_, account)| counts(&account.budget, call))
        .map(|(place, _)| place)
        .collect()
}

/// Of several accounts the one whose period ends last: before that, trying again is no use.
fn longest_of(accounts: &[Account], places: impl Iterator<Item = usize>) -> Option<usize> {
    places.max_by_key(|&place| accounts[place].window.end)
}

/// `the day's budget for provider "openai" and tool "aider"`.
struct InWords<'a>(&'a Budget);

impl fmt::Display for InWords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.per {
            Period::Hour => "the hour's budget",
            Period::Day => "the day's budget",
            Period::Month => "the month's budget",
        })?;
        let narrowed = [
            ("provider", &self.0.provider),
            ("model", &self.0.model),
            ("tool", &self.0.tool),
        ];
        let mut joint = " for";
        for (what, pattern) in narrowed {
            if let Some(pattern) = pattern {
                write!(f, "{joint} {what} \"{pattern}\"")?;
                joint = " and";
            }
        }
        Ok(())
    }
}
