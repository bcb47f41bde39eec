//! Limits calls in flight. A permit lives until the upstream's last byte.
//!
//! Callers beyond the limit wait in the order in which they came. A place is handed from the call
//! that ends straight to the one that has waited longest, so nobody can slip in between.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// One provider's permits and the queue for them. Clones share both.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

/// Leave to have one call in flight. Dropping it frees the place and wakes the next in order.
#[must_use = "dropping a permit gives it back"]
pub struct Permit {
    _place: Place,
}

/// A caller's place in the queue; becomes a [`Permit`] when its turn comes.
///
/// Dropping it leaves the queue. If its turn had come already, the permit goes to the next.
#[must_use = "dropping it leaves the queue"]
pub struct Waiting {
    /// `None` once the permit has been taken.
    place: Option<Place>,
}

/// Too many wait already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} calls are waiting already, and at most {limit} may")]
pub struct QueueFull {
    /// Callers in the queue; more than `limit` if that was lowered meanwhile.
    pub waiting: usize,
    /// How many may wait.
    pub limit: usize,
}

/// A pool as the control room shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
#[schema(as = PoolSnapshot)]
pub struct Snapshot {
    /// Permits out, extra ones not among them; more than `limit` for a while after a shrink.
    pub in_flight: usize,
    /// Permits out beyond the limit, for probes.
    pub extra: usize,
    /// Callers in the queue.
    pub waiting: usize,
    /// Permits there are.
    pub limit: usize,
}

struct Shared {
    // A std Mutex: a few instructions long, never held across an await, a wake or the end of a
    // waker, which may run code of a caller's that comes back here.
    state: Mutex<State>,
}

/// Between any two calls: nobody waits while `in_flight < limit`.
struct State {
    limit: usize,
    queue: usize,
    in_flight: usize,
    extra: usize,
    /// Who waits, by number, so the first is the one that came first. Whoever is granted a permit
    /// is taken out: a number that is not here has had its turn.
    waiting: BTreeMap<u64, Option<Waker>>,
    next_number: u64,
}

/// One caller's hold on the pool, however far it has come. Dropping it undoes exactly that.
struct Place {
    shared: Arc<Shared>,
    standing: Standing,
}

#[derive(Clone, Copy)]
enum Standing {
    /// In the queue, or granted a permit without having noticed yet.
    Queued { number: u64 },
    /// Holds one of the permits.
    Counted,
    /// Holds a permit beyond the limit.
    Extra,
}

impl Pool {
    /// A pool of `limit` permits in which `queue` callers may wait.
    ///
    /// A limit of 0 lets nobody through until [`Pool::resize`].
    pub fn new(limit: usize, queue: usize) -> Pool {
        let state = State {
            limit,
            queue,
            in_flight: 0,
            extra: 0,
            waiting: BTreeMap::new(),
            next_number: 0,
        };
        Pool {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
            }),
        }
    }

    /// Changes the number of permits.
    ///
    /// More: those who have waited longest go at once. Fewer: calls in flight stay, and the next
    /// goes when their number has fallen below the new limit.
    pub fn resize(&self, limit: usize) {
        let granted: Vec<Waker> = {
            let mut state = self.shared.lock();
            state.limit = limit;
            std::iter::from_fn(|| state.grant_next())
                .flatten()
                .collect()
        };
        granted.into_iter().for_each(Waker::wake);
    }

    /// Changes how many may wait. Those who wait already stay.
    pub fn set_queue(&self, queue: usize) {
        self.shared.lock().queue = queue;
    }

    /// A permit, if one is free and nobody waits for it.
    pub fn try_enter(&self) -> Option<Permit> {
        let entered = self.shared.lock().enter_at_once();
        entered.then(|| self.permit(Standing::Counted))
    }

    /// A permit or a place in the queue, in the order of these calls: the place is taken now, not
    /// when the future is first polled.
    ///
    /// # Errors
    /// [`QueueFull`] if no permit is free and the queue is at its limit.
    pub fn enter(&self) -> Result<Waiting, QueueFull> {
        let standing = {
            let mut state = self.shared.lock();
            if state.enter_at_once() {
                Standing::Counted
            } else if state.waiting.len() < state.queue {
                let number = state.next_number;
                state.next_number += 1;
                state.waiting.insert(number, None);
                Standing::Queued { number }
            } else {
                return Err(QueueFull {
                    waiting: state.waiting.len(),
                    limit: state.queue,
                });
            }
        };
        Ok(Waiting {
            place: Some(self.place(standing)),
        })
    }

    /// A permit beyond the limit, for a probe: hung calls that hold all the others must not keep
    /// the provider from being tried.
    pub fn extra_permit(&self) -> Permit {
        self.shared.lock().extra += 1;
        self.permit(Standing::Extra)
    }

    /// How it stands now.
    pub fn snapshot(&self) -> Snapshot {
        let state = self.shared.lock();
        Snapshot {
            in_flight: state.in_flight,
            extra: state.extra,
            waiting: state.waiting.len(),
            limit: state.limit,
        }
    }

    fn place(&self, standing: Standing) -> Place {
        Place {
            shared: Arc::clone(&self.shared),
            standing,
        }
    }

    fn permit(&self, standing: Standing) -> Permit {
        Permit {
            _place: self.place(standing),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics between two changes that belong together, so what a panicking
        // thread leaves behind is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enter_at_once(&mut self) -> bool {
        let free = self.in_flight < self.limit;
        debug_assert!(!free || self.waiting.is_empty(), "nobody is passed over");
        self.in_flight += usize::from(free);
        free
    }

    /// Gives a free permit to the first in the queue, if there are both. The waker is `None` where
    /// the caller has not asked yet: it will find its number gone.
    fn grant_next(&mut self) -> Option<Option<Waker>> {
        if self.in_flight >= self.limit {
            return None;
        }
        let (_, waker) = self.waiting.pop_first()?;
        self.in_flight += 1;
        Some(waker)
    }

    /// Takes a permit back and passes it on.
    fn give_back(&mut self) -> Option<Waker> {
        self.in_flight -= 1;
        self.grant_next().flatten()
    }
}

impl Place {
    /// Whether the permit is there; if not, `waker` is kept for when it is.
    fn poll_granted(&mut self, waker: &Waker) -> bool {
        let Standing::Queued { number } = self.standing else {
            return true;
        };
        let mut state = self.shared.lock();
        let Some(kept) = state.waiting.get_mut(&number) else {
            drop(state);
            self.standing = Standing::Counted;
            return true;
        };
        let outdated = match kept {
            Some(kept) if kept.will_wake(waker) => None,
            kept => kept.replace(waker.clone()),
        };
        drop(state);
        drop(outdated);
        false
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let next = match self.standing {
            Standing::Counted => state.give_back(),
            Standing::Extra => {
                state.extra -= 1;
                None
            }
            Standing::Queued { number } => match state.waiting.remove(&number) {
                Some(own_waker) => {
                    drop(state);
                    drop(own_waker);
                    return;
                }
                // Granted after the last poll: nobody will use it, so it goes on.
                None => state.give_back(),
            },
        };
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
    }
}

impl Waiting {
    /// The permit, if it is there already, without a waker; else the place in the queue, kept.
    pub fn try_ready(mut self) -> Result<Permit, Waiting> {
        match self.poll_permit(Waker::noop()) {
            Poll::Ready(permit) => Ok(permit),
            Poll::Pending => Err(self),
        }
    }

    fn poll_permit(&mut self, waker: &Waker) -> Poll<Permit> {
        let granted = self
            .place
            .as_mut()
            .expect("polled again after it was ready")
            .poll_granted(waker);
        match self.place.take_if(|_| granted) {
            Some(place) => Poll::Ready(Permit { _place: place }),
            None => Poll::Pending,
        }
    }
}

impl Future for Waiting {
    type Output = Permit;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Permit> {
        self.poll_permit(context.waker())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Pool").field(&self.snapshot()).finish()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Permit").finish_non_exhaustive()
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Waiting").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use proptest::prelude::*;

    /// Counts how often it was woken.
    #[derive(Default)]
    struct Bell(AtomicUsize);

    impl Bell {
        fn rings(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn poll(waiting: &mut Waiting, waker: &Waker) -> Option<Permit> {
        match Pin::new(waiting).poll(&mut Context::from_waker(waker)) {
            Poll::Ready(permit) => Some(permit),
            Poll::Pending => None,
        }
    }

    fn standing(pool: &Pool) -> (usize, usize) {
        let snapshot = pool.snapshot();
        (snapshot.in_flight, snapshot.waiting)
    }

    #[test]
    fn permits_then_the_queue_then_no_more() {
        let pool = Pool::new(2, 1);
        let first = pool.try_enter().expect("free");
        let second = pool.enter().expect("free").try_ready().expect("at once");
        assert!(pool.try_enter().is_none());
        let third = pool.enter().expect("room to wait");
        assert_eq!(
            pool.enter().expect_err("full"),
            QueueFull {
                waiting: 1,
                limit: 1
            }
        );
        assert_eq!(standing(&pool), (2, 1));

        let third = third.try_ready().expect_err("still waits");
        drop(first);
        let third = third.try_ready().expect("its turn");
        drop((second, third));
        assert_eq!(standing(&pool), (0, 0));
    }

    #[test]
    fn nobody_slips_past_a_granted_caller_who_has_not_looked_yet() {
        let pool = Pool::new(1, 10);
        let holder = pool.try_enter().expect("free");
        let next = pool.enter().expect("room");
        drop(holder);
        assert!(pool.try_enter().is_none(), "the place is the next one's");
        assert_eq!(standing(&pool), (1, 0));
        drop(next);
        assert!(pool.try_enter().is_some());
    }

    #[test]
    fn a_permit_granted_to_one_who_leaves_goes_to_the_next() {
        let pool = Pool::new(1, 10);
        let holder = pool.try_enter().expect("free");
        let bells = [Arc::new(Bell::default()), Arc::new(Bell::default())];
        let wakers = bells.clone().map(Waker::from);
        let mut leaver = pool.enter().expect("room");
        let mut stayer = pool.enter().expect("room");
        assert!(poll(&mut leaver, &wakers[0]).is_none());
        assert!(poll(&mut stayer, &wakers[1]).is_none());

        drop(holder);
        assert_eq!((bells[0].rings(), bells[1].rings()), (1, 0));
        drop(leaver);
        assert_eq!(bells[1].rings(), 1, "no wake-up is lost");
        assert!(poll(&mut stayer, &wakers[1]).is_some());
        assert_eq!(standing(&pool), (0, 0));
    }

    #[test]
    fn the_last_waker_counts() {
        let pool = Pool::new(1, 10);
        let holder = pool.try_enter().expect("free");
        let (old, new) = (Arc::new(Bell::default()), Arc::new(Bell::default()));
        let mut waiting = pool.enter().expect("room");
        assert!(poll(&mut waiting, &Waker::from(Arc::clone(&old))).is_none());
        assert!(poll(&mut waiting, &Waker::from(Arc::clone(&new))).is_none());
        assert_eq!(Arc::strong_count(&old), 1, "the old waker is let go");
        drop(holder);
        assert_eq!((old.rings(), new.rings()), (0, 1));
    }

    #[test]
    fn more_permits_wake_as_many_as_fit() {
        let pool = Pool::new(0, 10);
        let waiting: Vec<Waiting> = (0..5).map(|_| pool.enter().expect("room")).collect();
        pool.resize(3);
        assert_eq!(standing(&pool), (3, 2));
        let ready = waiting.into_iter().map(Waiting::try_ready);
        let (went, wait): (Vec<_>, Vec<_>) = ready.partition(Result::is_ok);
        assert_eq!((went.len(), wait.len()), (3, 2));
    }

    #[test]
    fn fewer_permits_drop_nothing_and_hold_new_ones_back() {
        let pool = Pool::new(4, 10);
        let mut permits: Vec<Permit> = (0..4).map(|_| pool.try_enter().expect("free")).collect();
        let waiting = pool.enter().expect("room");
        pool.resize(2);
        assert_eq!(standing(&pool), (4, 1));
        permits.pop();
        permits.pop();
        let waiting = waiting.try_ready().expect_err("two are as many as may be");
        permits.pop();
        assert!(waiting.try_ready().is_ok());
    }

    #[test]
    fn a_shorter_queue_sends_nobody_away() {
        let pool = Pool::new(0, 3);
        let waiting: Vec<Waiting> = (0..3).map(|_| pool.enter().expect("room")).collect();
        pool.set_queue(1);
        assert_eq!(
            pool.enter().expect_err("full"),
            QueueFull {
                waiting: 3,
                limit: 1
            }
        );
        pool.resize(3);
        assert!(
            waiting
                .into_iter()
                .all(|waiting| waiting.try_ready().is_ok())
        );
    }

    #[test]
    fn a_probes_permit_is_beyond_the_limit() {
        let pool = Pool::new(1, 10);
        let hung = pool.try_enter().expect("free");
        let waiting = pool.enter().expect("room");
        let probe = pool.extra_permit();
        assert_eq!((standing(&pool), pool.snapshot().extra), ((1, 1), 1));
        drop(probe);
        assert_eq!((standing(&pool), pool.snapshot().extra), ((1, 1), 0));
        let waiting = waiting
            .try_ready()
            .expect_err("it was never a permit of the pool");
        drop(hung);
        assert!(waiting.try_ready().is_ok());
    }

    #[test]
    fn a_hundred_thousand_dead_callers_are_no_burden() {
        let pool = Pool::new(1, usize::MAX);
        let holder = pool.try_enter().expect("free");
        let dead: Vec<Waiting> = (0..100_000).map(|_| pool.enter().expect("room")).collect();
        let last = pool.enter().expect("room");
        // Granted first, then dropped in the order that hands the permit down the whole line.
        drop(holder);
        drop(dead);
        assert!(last.try_ready().is_ok());
        assert_eq!(standing(&pool), (0, 0));
    }

    #[test]
    fn a_panic_gives_the_permit_back() {
        let pool = Pool::new(1, 10);
        let inside = pool.clone();
        let thread = std::thread::spawn(move || {
            let _permit = inside.try_enter().expect("free");
            // Not `panic!`: nothing is to be printed into the test's output.
            std::panic::resume_unwind(Box::new("a handler panics"));
        });
        assert!(thread.join().is_err());
        assert_eq!(standing(&pool), (0, 0));
    }

    /// A waker whose end drops another caller's place, as the end of a task may.
    #[test]
    fn a_waker_may_come_back_to_the_pool_when_it_ends() {
        struct Holds(#[expect(dead_code, reason = "held to be dropped")] Mutex<Option<Waiting>>);
        impl Wake for Holds {
            fn wake(self: Arc<Self>) {}
        }
        let pool = Pool::new(0, 10);
        let holds = |waiting| Waker::from(Arc::new(Holds(Mutex::new(Some(waiting)))));
        let mut outer = pool.enter().expect("room");
        assert!(poll(&mut outer, &holds(pool.enter().expect("room"))).is_none());
        assert!(poll(&mut outer, &holds(pool.enter().expect("room"))).is_none());
        assert_eq!(
            standing(&pool),
            (0, 2),
            "the replaced one took its place along"
        );
        drop(outer);
        assert_eq!(standing(&pool), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn calls_go_in_the_order_they_came() {
        let pool = Pool::new(2, 100);
        let began = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = tokio::task::JoinSet::new();
        for call in 0..50_u64 {
            let waiting = pool.enter().expect("room");
            let began = Arc::clone(&began);
            tasks.spawn(async move {
                // The order of the first polls is not the order of arrival.
                tokio::time::sleep(Duration::from_millis((call * 37) % 50)).await;
                let _permit = waiting.await;
                began.lock().expect("whole").push(call);
                tokio::time::sleep(Duration::from_secs(1)).await;
            });
        }
        tasks.join_all().await;
        let began = began.lock().expect("whole");
        assert_eq!(began.len(), 50);
        // Two go at once, in either order; beyond that the order is that of arrival.
        for (turn, calls) in (0..).zip(began.chunks(2)) {
            let mut calls = calls.to_vec();
            calls.sort_unstable();
            assert_eq!(calls, [2 * turn, 2 * turn + 1]);
        }
        assert_eq!(standing(&pool), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_gives_up_leaves_the_line_to_the_others() {
        let pool = Pool::new(1, 100);
        let holder = pool.try_enter().expect("free");
        let impatient = pool.enter().expect("room");
        let patient = pool.enter().expect("room");
        tokio::time::timeout(Duration::from_secs(60), impatient)
            .await
            .expect_err("nothing is free for a minute");
        assert_eq!(standing(&pool), (1, 1));
        let (permit, ()) = tokio::join!(patient, async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(holder);
        });
        assert_eq!(standing(&pool), (1, 0));
        drop(permit);
        assert_eq!(standing(&pool), (0, 0));
    }

    #[derive(Clone, Debug)]
    enum Act {
        Enter,
        TryEnter,
        Extra,
        Poll(prop::sample::Index),
        Leave(prop::sample::Index),
        End(prop::sample::Index),
        Resize(usize),
        SetQueue(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            8 => Just(Act::Enter),
            2 => Just(Act::TryEnter),
            1 => Just(Act::Extra),
            6 => index().prop_map(Act::Poll),
            3 => index().prop_map(Act::Leave),
            6 => index().prop_map(Act::End),
            1 => (0..6_usize).prop_map(Act::Resize),
            1 => (0..8_usize).prop_map(Act::SetQueue),
        ]
    }

    /// What a caller of the model holds.
    struct Caller {
        id: usize,
        waiting: Waiting,
        bell: Arc<Bell>,
        polled: bool,
    }

    proptest! {
        /// Against a model that is a line of numbers and a count.
        #[test]
        fn it_behaves_as_the_naive_model(acts in prop::collection::vec(act(), 1..200)) {
            let (mut limit, mut queue) = (2, 4);
            let pool = Pool::new(limit, queue);
            let mut line: VecDeque<usize> = VecDeque::new();
            let mut in_flight = 0;
            let mut callers: Vec<Caller> = Vec::new();
            let mut permits: Vec<(Permit, bool)> = Vec::new();

            for (id, act) in acts.into_iter().enumerate() {
                match act {
                    Act::Enter => {
                        let at_once = in_flight < limit && line.is_empty();
                        match pool.enter() {
                            Ok(waiting) => {
                                prop_assert!(at_once || line.len() < queue);
                                if at_once { in_flight += 1 } else { line.push_back(id) }
                                let bell = Arc::default();
                                callers.push(Caller { id, waiting, bell, polled: false });
                            }
                            Err(full) => {
                                prop_assert!(!at_once && line.len() >= queue);
                                let waiting = line.len();
                                prop_assert_eq!(full, QueueFull { waiting, limit: queue });
                            }
                        }
                    }
                    Act::TryEnter => {
                        let permit = pool.try_enter();
                        prop_assert_eq!(permit.is_some(), in_flight < limit && line.is_empty());
                        in_flight += usize::from(permit.is_some());
                        permits.extend(permit.map(|permit| (permit, true)));
                    }
                    Act::Extra => permits.push((pool.extra_permit(), false)),
                    Act::Poll(index) if !callers.is_empty() => {
                        let at = index.index(callers.len());
                        let caller = &mut callers[at];
                        let waker = Waker::from(Arc::clone(&caller.bell));
                        let permit = poll(&mut caller.waiting, &waker);
                        caller.polled = true;
                        prop_assert_eq!(permit.is_none(), line.contains(&caller.id));
                        if let Some(permit) = permit {
                            permits.push((permit, true));
                            callers.remove(at);
                        }
                    }
                    Act::Leave(index) if !callers.is_empty() => {
                        let caller = callers.remove(index.index(callers.len()));
                        match line.iter().position(|id| *id == caller.id) {
                            Some(place) => drop(line.remove(place)),
                            None => in_flight -= 1,
                        }
                        drop(caller);
                    }
                    Act::End(index) if !permits.is_empty() => {
                        let (permit, counted) = permits.swap_remove(index.index(permits.len()));
                        in_flight -= usize::from(counted);
                        drop(permit);
                    }
                    Act::Poll(_) | Act::Leave(_) | Act::End(_) => {}
                    Act::Resize(to) => { limit = to; pool.resize(to) }
                    Act::SetQueue(to) => { queue = to; pool.set_queue(to) }
                }
                while in_flight < limit && line.pop_front().is_some() {
                    in_flight += 1;
                }
                let extra = permits.iter().filter(|(_, counted)| !counted).count();
                prop_assert_eq!(
                    pool.snapshot(),
                    Snapshot { in_flight, extra, waiting: line.len(), limit }
                );
                for caller in &callers {
                    let woken = caller.polled && !line.contains(&caller.id);
                    let rings = caller.bell.rings();
                    prop_assert_eq!(rings, usize::from(woken), "caller {}", caller.id);
                }
            }

            drop((callers, permits));
            prop_assert_eq!((pool.snapshot().in_flight, pool.snapshot().waiting), (0, 0));
        }
    }

    /// Small and repeatable: which call does what must not depend on the machine.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: u64) -> u64 {
            // SplitMix64.
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ (z >> 31)) % sides
        }
    }

    /// Counts calls inside, and the most there ever were.
    #[derive(Default)]
    struct Gauge {
        inside: AtomicUsize,
        most: AtomicUsize,
    }

    impl Gauge {
        async fn stay(&self, turns: u64) {
            let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(inside, Ordering::SeqCst);
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Callers that come, wait, give up at any moment and end, on threads of their own.
    async fn storm(pool: &Pool, gauge: &Arc<Gauge>, calls: u64, resized: bool) -> u64 {
        let mut tasks = tokio::task::JoinSet::new();
        for seed in 0..8_u64 {
            let (pool, gauge) = (pool.clone(), Arc::clone(gauge));
            tasks.spawn(async move {
                let mut dice = Dice(seed);
                let mut served = 0;
                for _ in 0..calls / 8 {
                    if resized && dice.roll(16) == 0 {
                        pool.resize(dice.roll(8) as usize + 1);
                    }
                    let Ok(mut waiting) = pool.enter() else {
                        tokio::task::yield_now().await;
                        continue;
                    };
                    match dice.roll(4) {
                        0 => drop(waiting),
                        1 => {
                            // Leaves after a poll, whatever it said, perhaps just as it is woken.
                            let first = std::future::poll_fn(|context| {
                                Poll::Ready(Pin::new(&mut waiting).poll(context).is_ready())
                            });
                            if !first.await && dice.roll(2) == 0 {
                                tokio::task::yield_now().await;
                            }
                        }
                        _ => {
                            let permit = waiting.await;
                            gauge.stay(dice.roll(3)).await;
                            drop(permit);
                            served += 1;
                        }
                    }
                }
                served
            });
        }
        tasks.join_all().await.into_iter().sum()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_storm_leaks_nothing_and_never_exceeds_the_limit() {
        let pool = Pool::new(3, 4);
        let gauge = Arc::new(Gauge::default());
        let served = storm(&pool, &gauge, 40_000, false).await;
        assert!(served > 1_000, "calls got through: {served}");
        assert!(gauge.most.load(Ordering::SeqCst) <= 3);
        assert_eq!(standing(&pool), (0, 0));

        storm(&pool, &gauge, 40_000, true).await;
        assert_eq!(standing(&pool), (0, 0), "resized in mid-load");

        // Settled after the last shrink, the limit holds again.
        pool.resize(2);
        gauge.most.store(0, Ordering::SeqCst);
        storm(&pool, &gauge, 10_000, false).await;
        assert!(gauge.most.load(Ordering::SeqCst) <= 2);
        assert_eq!(standing(&pool), (0, 0));
    }
}
