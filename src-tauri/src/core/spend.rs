//! Prices, budgets and what tools spend, behind one handle: a check and the reservation that
//! follows it are one step under one lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use jiff::tz::TimeZone;
use tokio::sync::oneshot;
use tracing::warn;

use super::Core;
use crate::clock::WallTime;
use crate::events::{BudgetNews, Change, Event};
use crate::policy::budget::{
    Aftermath, Alert, Answer, Call, Hold, LOOK_BACK_MICROS, Ledger, Level, Refusal, Status, Ticket,
    Worst,
};
use crate::policy::money::Nanodollars;
use crate::policy::price::{self, Price, PriceData, Prices};
use crate::policy::runaway::{self, Runaway, Runaways};
use crate::settings::{Period, ProviderSettings, Settings};
use crate::store::queries::ReadError;

/// Models without a price that are remembered. Their names come from clients.
const MOST_UNPRICED: usize = 1000;

/// How long a call that waits for a budget sleeps at most before it looks at the clock: a person
/// may have set it.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(30);

/// What calls cost and how much they may.
pub struct Spend {
    // std RwLock: held to clone or swap one pointer.
    prices: RwLock<Arc<PricesInForce>>,
    // std Mutex: held for a few sums, never across an await. Sending to a call that waits only
    // schedules it.
    books: Mutex<Books>,
    // std Mutex: held for one look-up.
    unpriced: Mutex<BTreeMap<ModelOf, u64>>,
}

/// Read when they are first asked for: some megabytes and hundreds of patterns, which a start need
/// not wait for.
pub type PricesInForce = LazyLock<Prices, Box<dyn FnOnce() -> Prices + Send>>;

/// A provider's name and a model's.
type ModelOf = (Arc<str>, Arc<str>);

struct Books {
    ledger: Ledger,
    runaways: Runaways,
    /// Who waits for a budget. Each hears once.
    waiting: HashMap<Ticket, oneshot::Sender<Result<Granted, Refusal>>>,
}

/// A reservation, and the time at which it was made: the time to price the call by.
#[derive(Debug)]
#[must_use = "what is reserved stays so until it is settled"]
pub struct Granted {
    pub hold: Hold,
    pub at: WallTime,
}

/// What became of a call that asked for leave to spend.
pub enum Asked {
    /// It costs nothing that counts.
    Untouched,
    Granted(Granted),
    /// Only what others have reserved stands in its way.
    Wait(Waiting),
    Refused(Refusal),
}

/// A place among the calls that wait for a budget. Dropping it gives it up, and the reservation
/// too if that came in the meantime.
pub struct Waiting {
    core: Arc<Core>,
    ticket: Ticket,
    woken: oneshot::Receiver<Result<Granted, Refusal>>,
}

/// A model that was called and has no price.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpriced {
    pub provider: Arc<str>,
    /// As it was asked for.
    pub model: Arc<str>,
    /// Calls of this run.
    pub calls: u64,
}

/// What a provider is, as far as its prices go.
pub fn seller(provider: &ProviderSettings) -> price::Provider<'_> {
    price::Provider {
        name: &provider.name,
        kind: provider.kind,
        base_url: &provider.base_url,
        local: provider.local,
    }
}

impl Spend {
    /// Prices and budgets of these settings; nothing is spent yet. `list` reads the price list.
    pub fn new(
        settings: &Settings,
        list: impl FnOnce() -> Arc<PriceData> + Send + 'static,
    ) -> Spend {
        let own = settings.spend.prices.clone();
        let read: Box<dyn FnOnce() -> Prices + Send> = Box::new(move || Prices::new(list(), &own));
        Spend {
            prices: RwLock::new(Arc::new(LazyLock::new(read))),
            books: Mutex::new(Books {
                ledger: Ledger::new(&settings.spend, TimeZone::system()),
                runaways: Runaways::default(),
                waiting: HashMap::new(),
            }),
            unpriced: Mutex::default(),
        }
    }

    /// The prices in force.
    pub fn prices(&self) -> Arc<PricesInForce> {
        self.prices
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// What is known of the price of a provider's model.
    pub fn price(&self, provider: &ProviderSettings, model: &str) -> Price {
        self.prices().price(seller(provider), model)
    }

    /// What has a price now is not unpriced any more.
    fn put_prices(&self, prices: Prices, settings: &Settings) {
        let is_unpriced = |provider: &str, model: &str| {
            let provider = settings.provider(provider);
            provider.is_some_and(|provider| {
                matches!(prices.price(seller(provider), model), Price::Unpriced)
            })
        };
        let mut seen = self.unpriced.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|(provider, model), _| is_unpriced(provider, model));
        drop(seen);
        let prices: PricesInForce = LazyLock::new(Box::new(move || prices));
        *self.prices.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(prices);
    }

    /// Where every budget stands.
    pub fn budgets(&self, now: WallTime) -> Vec<Status> {
        self.books().ledger.status(now)
    }

    /// What all calls have cost today, by the machine's own calendar.
    pub fn spent_today(&self, now: WallTime) -> Nanodollars {
        self.books().ledger.spent_in(Period::Day, now)
    }

    /// The models of this run that have no price.
    pub fn unpriced(&self) -> Vec<Unpriced> {
        let seen = self.unpriced.lock().unwrap_or_else(PoisonError::into_inner);
        let told = seen.iter().map(|((provider, model), calls)| Unpriced {
            provider: provider.clone(),
            model: model.clone(),
            calls: *calls,
        });
        told.collect()
    }

    /// A call of a model that nobody knows the price of was made.
    pub fn saw_unpriced(&self, provider: &Arc<str>, model: &Arc<str>) {
        let mut seen = self.unpriced.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (provider.clone(), model.clone());
        if seen.len() < MOST_UNPRICED || seen.contains_key(&key) {
            *seen.entry(key).or_default() += 1;
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // A panic in here leaves sums that a settings change or a restart takes anew; to refuse
        // every call from then on would be worse.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// Tells those that waited. One that has left meanwhile gives back what it was given.
    fn wake(&mut self, aftermath: Aftermath, now: WallTime) -> Vec<Alert> {
        let mut alerts = aftermath.alerts;
        let mut woken = VecDeque::from(aftermath.woken);
        while let Some(one) = woken.pop_front() {
            let answer = one.answer.map(|hold| Granted { hold, at: now });
            let told = match self.waiting.remove(&one.ticket) {
                Some(waiting) => waiting.send(answer),
                None => Err(answer),
            };
            if let Err(Ok(unheard)) = told {
                let after = self.ledger.release(unheard.hold, now);
                alerts.extend(after.alerts);
                woken.extend(after.woken);
            }
        }
        alerts
    }
}

impl Core {
    /// Why a budget would refuse a call if it asked now.
    pub fn budget_refusal(&self, call: Call<'_>, worst: Worst) -> Option<Refusal> {
        let now = self.clock.wall();
        let refusal = self.spend.books().ledger.refusal(call, worst, now);
        refusal.inspect(|refusal| self.tell_refusal(refusal))
    }

    /// Asks for leave to make a call that costs at most this.
    pub fn reserve(self: &Arc<Core>, call: Call<'_>, worst: Worst) -> Asked {
        let now = self.clock.wall();
        let mut books = self.spend.books();
        match books.ledger.reserve(call, worst, now) {
            Answer::Untouched => Asked::Untouched,
            Answer::Reserved(hold) => Asked::Granted(Granted { hold, at: now }),
            Answer::Wait(ticket) => {
                let (tell, woken) = oneshot::channel();
                books.waiting.insert(ticket, tell);
                Asked::Wait(Waiting {
                    core: self.clone(),
                    ticket,
                    woken,
                })
            }
            Answer::Refused(refusal) => {
                drop(books);
                self.tell_refusal(&refusal);
                Asked::Refused(refusal)
            }
        }
    }

    /// Lets a call go whatever the budgets say, and counts it.
    pub fn admit(&self, call: Call<'_>, worst: Worst) -> Option<Granted> {
        let now = self.clock.wall();
        let hold = self.spend.books().ledger.admit(call, worst, now)?;
        Some(Granted { hold, at: now })
    }

    /// Ends a reservation with what the call cost.
    pub fn settle_cost(&self, hold: Hold, tool: &str, cost: Nanodollars) {
        let (now, wall) = (self.clock.now(), self.clock.wall());
        let (alerts, runaway) = {
            let mut books = self.spend.books();
            let after = books.ledger.settle(hold, cost, wall);
            let alerts = books.wake(after, wall);
            (alerts, books.runaways.spent(tool, cost, now, wall))
        };
        self.tell_alerts(&alerts);
        if let Some(runaway) = runaway {
            self.tell_runaway(&runaway);
        }
    }

    /// Puts the settings' prices and budgets in force. What is spent and reserved stays.
    pub fn configure_spend(&self, settings: &Settings) {
        let data = self.spend.prices().data().clone();
        self.spend
            .put_prices(Prices::new(data, &settings.spend.prices), settings);
        let now = self.clock.wall();
        let alerts = {
            let mut books = self.spend.books();
            let after = books.ledger.configure(&settings.spend, now);
            books.wake(after, now)
        };
        self.tell_alerts(&alerts);
    }

    /// Takes up what was spent before this run, from the record. Before the first call.
    pub fn restore_spend(&self) {
        match self.read_spent() {
            Ok(()) => self.reprice(),
            // There is no record yet.
            Err(ReadError::Missing { .. }) => {}
            Err(error) => {
                warn!(%error, "what was spent before this start cannot be read: budgets begin anew");
            }
        }
    }

    fn read_spent(&self) -> Result<(), ReadError> {
        let now = self.clock.wall().0;
        let since = |look_back| WallTime(now.saturating_sub(look_back));
        let (spent, by_tool) = self.store.read(|reader| {
            let spent = reader.spent_since(since(LOOK_BACK_MICROS))?;
            let by_tool = reader.spent_by_tool_since(since(runaway::LOOK_BACK_MICROS))?;
            Ok((spent, by_tool))
        })?;
        let mut books = self.spend.books();
        for sum in &spent {
            let call = Call {
                provider: &sum.provider,
                model: &sum.model,
                tool: &sum.tool,
            };
            books.ledger.restore(sum.at, call, sum.cost);
        }
        for sum in &by_tool {
            books.runaways.restore(&sum.tool, sum.at, sum.cost);
        }
        Ok(())
    }

    /// Prices the calls on record that had no price, by the prices in force now.
    pub fn reprice(&self) {
        let (prices, world) = (self.spend.prices(), self.world());
        let spend = self.spend.clone();
        self.store.reprice(
            move |call| {
                let provider = world.settings.provider(call.provider)?;
                let price = prices.price(seller(provider), call.model);
                Some(price.rates(call.at, call.tier)?.cost(&call.tokens))
            },
            // Budgets hear of it too: it was spent, though nobody knew how much.
            move |priced| {
                let call = Call {
                    provider: &priced.provider,
                    model: &priced.model,
                    tool: &priced.tool,
                };
                spend.books().ledger.restore(priced.at, call, priced.cost);
            },
        );
    }

    /// Puts another price list in force.
    pub fn put_price_data(&self, data: Arc<PriceData>) {
        let world = self.world();
        let prices = Prices::new(data, &world.settings.spend.prices);
        self.spend.put_prices(prices, &world.settings);
    }

    /// Lets those go that a new period has room for, if one has begun. Tells what one that waits
    /// no longer is refused for; `None` if it has been woken.
    fn roll_budgets(&self, waits_no_longer: Option<Ticket>) -> Option<Refusal> {
        let now = self.clock.wall();
        let (alerts, blocked) = {
            let mut books = self.spend.books();
            let after = books.ledger.roll(now);
            let alerts = books.wake(after, now);
            // At the same time: in a later period it might find nothing in its way and not have
            // been woken either.
            let ledger = &mut books.ledger;
            let blocked = waits_no_longer.and_then(|ticket| ledger.blocked_by(ticket, now));
            (alerts, blocked)
        };
        self.tell_alerts(&alerts);
        blocked
    }

    fn tell_alerts(&self, alerts: &[Alert]) {
        for alert in alerts {
            let kind = match alert.level {
                Level::Within => continue,
                Level::Near => BudgetNews::Near,
                Level::Spent => BudgetNews::Spent,
            };
            warn!(budget = %alert.budget, cap = %alert.cap, spent = %alert.spent, ?kind, "budget");
            self.events.tell(|| {
                Event::State(Change::Budget {
                    name: alert.budget.clone(),
                    kind,
                })
            });
        }
    }

    fn tell_refusal(&self, refusal: &Refusal) {
        if !refusal.first {
            return;
        }
        warn!(budget = %refusal.budget, cap = %refusal.cap, spent = %refusal.spent, "a budget refuses calls");
        self.events.tell(|| {
            Event::State(Change::Budget {
                name: refusal.budget.clone(),
                kind: BudgetNews::Refused,
            })
        });
    }

    fn tell_runaway(&self, runaway: &Runaway) {
        warn!(tool = %runaway.tool, spent = %runaway.spent, usual = %runaway.usual, "a tool spends several times its usual rate");
        self.events.tell(|| {
            Event::State(Change::Runaway {
                tool: runaway.tool.clone(),
                spent: runaway.spent,
                usual: runaway.usual,
            })
        });
    }
}

/// Why a call that waited for a budget goes no further.
pub struct NotGranted {
    pub refusal: Refusal,
    /// It has waited as long as it may.
    pub timed_out: bool,
}

impl Waiting {
    /// Waits for its turn, at most `limit`.
    ///
    /// # Errors
    /// [`NotGranted`].
    pub async fn granted(mut self, limit: Duration) -> Result<Granted, NotGranted> {
        let began = self.core.clock.now();
        loop {
            let waited = self.core.clock.now().since(began);
            let pause = self.until_roll().min(limit.saturating_sub(waited));
            tokio::select! {
                biased;
                told = &mut self.woken => return told_of(told),
                () = tokio::time::sleep(pause) => {}
            }
            let is_over = self.core.clock.now().since(began) >= limit;
            let blocked = self.core.roll_budgets(is_over.then_some(self.ticket));
            if !is_over {
                continue;
            }
            return match blocked {
                Some(refusal) => {
                    self.core.tell_refusal(&refusal);
                    Err(NotGranted {
                        refusal,
                        timed_out: true,
                    })
                }
                // It was woken just now.
                None => told_of((&mut self.woken).await),
            };
        }
    }

    /// Until a period ends for which somebody waits, or the clock is worth a look.
    fn until_roll(&self) -> Duration {
        let due = self.core.spend.books().ledger.next_roll();
        let left = due.map_or(i64::MAX, |due| {
            due.0.saturating_sub(self.core.clock.wall().0).max(0)
        });
        Duration::from_micros(left.unsigned_abs()).min(LOOK_AT_CLOCK)
    }
}

fn told_of(
    told: Result<Result<Granted, Refusal>, oneshot::error::RecvError>,
) -> Result<Granted, NotGranted> {
    match told {
        Ok(answer) => answer.map_err(|refusal| NotGranted {
            refusal,
            timed_out: false,
        }),
        Err(_) => unreachable!("the books tell everybody whose place is not given up"),
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let now = self.core.clock.wall();
        let alerts = {
            let mut books = self.core.spend.books();
            books.ledger.leave(self.ticket);
            books.waiting.remove(&self.ticket);
            // Under the lock that tells are sent under: what came is here, and nothing more will.
            match self.woken.try_recv() {
                Ok(Ok(unheard)) => {
                    let after = books.ledger.release(unheard.hold, now);
                    books.wake(after, now)
                }
                _ => Vec::new(),
            }
        };
        self.core.tell_alerts(&alerts);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use tempfile::TempDir;

    use super::*;
    use crate::clock::Clock;
    use crate::events::Told;
    use crate::keys::Keys;
    use crate::settings::Overrides;
    use crate::store::Store;

    const WORST: Worst = Worst::AtMost(Nanodollars(1_000_000_000));

    fn call(tool: &str) -> Call<'_> {
        Call {
            provider: "openai",
            model: "m",
            tool,
        }
    }

    /// A core with a budget of one worst case.
    fn core() -> (Arc<Core>, TempDir) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let text = "[[budget]]\nper = \"month\"\nusd = 1.5\n";
        let settings = Settings::parse(text, &Overrides::default()).expect("settings");
        let store = Store::open(folder.path(), Clock::Tokio).expect("a folder of its own");
        let core = Core::new(settings, store, Keys::empty(), Clock::Tokio);
        (Arc::new(core), folder)
    }

    fn granted(core: &Arc<Core>) -> Granted {
        match core.reserve(call("aider"), WORST) {
            Asked::Granted(granted) => granted,
            _ => panic!("there is room"),
        }
    }

    fn waiting(core: &Arc<Core>) -> Waiting {
        match core.reserve(call("aider"), WORST) {
            Asked::Wait(waiting) => waiting,
            _ => panic!("another holds it"),
        }
    }

    fn held(core: &Core) -> i64 {
        core.spend.budgets(core.clock.wall())[0].held.0
    }

    #[tokio::test(start_paused = true)]
    async fn a_tool_that_runs_away_is_named_once() {
        let (core, _folder) = core();
        let raised = "[[budget]]\nper = \"month\"\nusd = 1000\n";
        let settings = Settings::parse(raised, &Overrides::default()).expect("settings");
        core.configure_spend(&settings);
        let wall = core.clock.wall().0;
        for hours in [1, 2, 3] {
            let at = WallTime(wall - hours * 3_600_000_000);
            let mut books = core.spend.books();
            books
                .runaways
                .restore("aider", at, Nanodollars(1_000_000_000));
        }
        let mut events = core.events.subscribe();
        for _ in 0..15 {
            for tool in ["aider", "first-day"] {
                let granted = core.admit(call(tool), WORST).expect("it is counted");
                core.settle_cost(granted.hold, tool, Nanodollars(1_000_000_000));
            }
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        core.events.tell(|| Event::State(Change::Mode));
        let mut named = Vec::new();
        loop {
            match events.next().await {
                Some(Told::Event(Event::State(Change::Runaway { tool, .. }))) => named.push(tool),
                Some(Told::Event(Event::State(Change::Mode))) => break,
                _ => {}
            }
        }
        assert_eq!(named, ["aider"]);
    }

    /// A wake-up that comes to one that leaves at the same time is not lost to those behind.
    #[tokio::test]
    async fn what_came_to_one_who_left_goes_to_the_next() {
        let (core, _folder) = core();
        let first = granted(&core);
        let (leaves, stays) = (waiting(&core), waiting(&core));
        core.settle_cost(first.hold, "aider", Nanodollars::ZERO);
        assert_eq!(held(&core), 1_000_000_000, "the one that leaves has it");
        drop(leaves);
        let next = stays.granted(Duration::from_secs(5)).await;
        let next = next.unwrap_or_else(|_| panic!("it is its turn"));
        core.settle_cost(next.hold, "aider", Nanodollars::ZERO);
        assert_eq!(held(&core), 0);
    }

    #[tokio::test]
    async fn one_who_leaves_before_its_turn_leaves_nothing_behind() {
        let (core, _folder) = core();
        let first = granted(&core);
        drop(waiting(&core));
        assert!(core.spend.books().waiting.is_empty());
        core.settle_cost(first.hold, "aider", Nanodollars::ZERO);
        assert_eq!(held(&core), 0);
        let again = granted(&core);
        core.settle_cost(again.hold, "aider", Nanodollars::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_hour_lets_one_go_that_waits_and_counts_it_there() {
        static STEP: AtomicI64 = AtomicI64::new(0);
        let folder = tempfile::tempdir().expect("a scratch folder");
        let clock = Clock::Stepped(&STEP);
        let text = "[[budget]]\nper = \"hour\"\nusd = 1.5\n";
        let settings = Settings::parse(text, &Overrides::default()).expect("settings");
        let store = Store::open(folder.path(), clock).expect("a folder of its own");
        let core = Arc::new(Core::new(settings, store, Keys::empty(), clock));
        let first = granted(&core);
        let waits = waiting(&core);
        STEP.store(3_600_000_000, Ordering::Relaxed);
        // Whoever looks at the budgets first must not keep it from being woken.
        assert_eq!(held(&core), 0, "that of the hour before is not this one's");
        let next = waits.granted(Duration::from_secs(5)).await;
        let next = next.unwrap_or_else(|_| panic!("the hour is new"));
        assert_eq!(held(&core), 1_000_000_000);
        core.settle_cost(first.hold, "aider", Nanodollars(900_000_000));
        core.settle_cost(next.hold, "aider", Nanodollars(200_000_000));
        let budget = &core.spend.budgets(clock.wall())[0];
        assert_eq!((budget.spent.0, budget.held.0), (200_000_000, 0));
    }

    /// Leaving and waking at the same time, on two threads, a thousand times.
    #[tokio::test]
    async fn no_reservation_is_lost_between_leaving_and_waking() {
        let (core, _folder) = core();
        for _ in 0..1000 {
            let first = granted(&core);
            let leaves = waiting(&core);
            let leaving = std::thread::spawn(move || drop(leaves));
            core.settle_cost(first.hold, "aider", Nanodollars::ZERO);
            leaving.join().expect("no panic");
            assert_eq!(held(&core), 0);
            assert!(core.spend.books().waiting.is_empty());
        }
    }
}
