//! Calls that arrive at a fixed rate, timed from when they should have started.
//!
//! A closed loop waits for a stalled server and so hides the stall; here calls
//! keep arriving and those that had to wait say so.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::task::JoinSet;

use crate::alarm::Alarm;
use crate::caller::Caller;
use crate::calls::{Numbers, STANDARD_PACE, Workload};
use crate::command_line::Bench;
use crate::processes::Served;
use crate::samples::Samples;

const CONNECTIONS: usize = 128;
const LOWEST_RATE: f64 = 1000.0;
const HIGHEST_RATE: f64 = 120_000.0;
const RISE: f64 = 1.3;
/// Rates in a row that must fail before the first of them counts as past the knee.
const FAILURES: usize = 3;
const HALVINGS: usize = 3;
/// A step is run again before it counts as past the knee: noise only ever adds.
const TRIES: usize = 3;
/// How far above its floor p99 may be.
pub const ALLOWANCE_MS: f64 = 2.0;

/// One rate, held for a while.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Calls a second that were due.
    pub offered: f64,
    /// Calls a second that were answered.
    pub achieved: f64,
    /// Milliseconds from the scheduled start to the last byte.
    pub p50_ms: f64,
    /// As `p50_ms`.
    pub p99_ms: f64,
    /// Whether p99 was near its floor and the rate was kept up.
    pub held: bool,
}

/// The rates tried, lowest first, and the highest that held.
#[derive(Clone, Debug)]
pub struct Knee {
    /// Every rate tried, the best try of each.
    pub steps: Vec<Step>,
    /// Calls a second.
    pub rate: f64,
}

/// Raises the rate until p99 leaves its floor, then closes in on the knee.
///
/// A rate that does not hold is believed only if the next higher ones do not
/// either: a bad spell of a shared machine is no knee.
pub async fn find_knee(bench: &Bench, served: &Served, hold: Duration) -> anyhow::Result<Knee> {
    let name = served.target.name();
    let taken_before = bench.numbers.taken();
    let pool = Pool::connect(bench, served)
        .await
        .with_context(|| format!("open loop through {name}"))?;
    let mut search = Search {
        pool,
        hold,
        floor: f64::INFINITY,
        steps: Vec::new(),
    };
    search
        .rise_and_close_in()
        .await
        .with_context(|| format!("open loop through {name}"))?;
    served.add_made(bench.numbers.taken() - taken_before);
    let mut steps = search.steps;
    steps.sort_by(|one, other| one.offered.total_cmp(&other.offered));
    let held = steps.iter().rfind(|step| step.held);
    Ok(Knee {
        rate: held.map_or(0.0, |step| step.offered),
        steps,
    })
}

struct Search {
    pool: Pool,
    hold: Duration,
    /// The lowest p99 of any step, milliseconds.
    floor: f64,
    steps: Vec<Step>,
}

impl Search {
    async fn rise_and_close_in(&mut self) -> io::Result<()> {
        let mut rate = LOWEST_RATE;
        let mut good = 0.0;
        let mut failed = Vec::new();
        while rate < HIGHEST_RATE && failed.len() < FAILURES {
            if self.holds(rate).await? {
                good = rate;
                failed.clear();
            } else {
                failed.push(rate);
            }
            rate *= RISE;
        }
        let mut bad = failed.first().copied().unwrap_or(HIGHEST_RATE);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(good, bad);
            if self.holds(middle).await? {
                good = middle;
            } else {
                bad = middle;
            }
        }
        Ok(())
    }

    async fn holds(&mut self, rate: f64) -> io::Result<bool> {
        let mut best: Option<Step> = None;
        for _ in 0..TRIES {
            let mut step = hold_rate(&self.pool, rate, self.hold).await?;
            self.floor = self.floor.min(step.p99_ms);
            step.held = step.p99_ms <= self.floor + ALLOWANCE_MS && step.achieved >= 0.98 * rate;
            if best.is_none_or(|best| step.p99_ms < best.p99_ms) {
                best = Some(step);
            }
            if step.held {
                break;
            }
        }
        self.steps.extend(best);
        Ok(best.is_some_and(|step| step.held))
    }
}

/// Connections that are idle, and calls that are due and found none.
struct Pool {
    idle: Rc<RefCell<Vec<Caller>>>,
    due: Rc<RefCell<VecDeque<Instant>>>,
    numbers: Rc<Numbers>,
    alarm: Alarm,
}

impl Pool {
    async fn connect(bench: &Bench, served: &Served) -> io::Result<Self> {
        let mut idle = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            let address = served.address(Workload::Chat);
            let mut caller = Caller::connect(address, Workload::Chat, STANDARD_PACE).await?;
            caller.call(&bench.numbers.next(), Instant::now()).await?;
            idle.push(caller);
        }
        Ok(Self {
            idle: Rc::new(RefCell::new(idle)),
            due: Rc::default(),
            numbers: bench.numbers.clone(),
            alarm: Alarm::new()?,
        })
    }
}

async fn hold_rate(pool: &Pool, rate: f64, hold: Duration) -> io::Result<Step> {
    let planned = (rate * hold.as_secs_f64()).ceil() as u32;
    let samples = Rc::new(RefCell::new(Samples::default()));
    let mut running = JoinSet::new();
    let start = Instant::now();
    for index in 0..planned {
        let scheduled = start + Duration::from_secs_f64(f64::from(index) / rate);
        // Even without a wait the connections must get their turn.
        if scheduled <= Instant::now() {
            tokio::task::yield_now().await;
        } else {
            pool.alarm.until(scheduled).await?;
        }
        let Some(caller) = pool.idle.borrow_mut().pop() else {
            pool.due.borrow_mut().push_back(scheduled);
            continue;
        };
        let (idle, due) = (Rc::clone(&pool.idle), Rc::clone(&pool.due));
        let (numbers, samples) = (Rc::clone(&pool.numbers), Rc::clone(&samples));
        running.spawn_local(async move {
            let mut caller = caller;
            let mut scheduled = scheduled;
            loop {
                let timing = caller.call(&numbers.next(), scheduled).await?;
                samples.borrow_mut().push(timing.whole);
                // Bound first: the borrow must be over before the next await.
                let next = due.borrow_mut().pop_front();
                match next {
                    Some(waiting) => scheduled = waiting,
                    None => break,
                }
            }
            idle.borrow_mut().push(caller);
            io::Result::Ok(())
        });
        while let Some(ended) = running.try_join_next() {
            ended.map_err(io::Error::other)??;
        }
    }
    for ended in running.join_all().await {
        ended?;
    }
    let elapsed = start.elapsed();
    let mut samples = samples.borrow_mut();
    Ok(Step {
        offered: rate,
        achieved: f64::from(planned) / elapsed.as_secs_f64(),
        p50_ms: samples.percentile_ms(50.0).unwrap_or(0.0),
        p99_ms: samples.percentile_ms(99.0).unwrap_or(0.0),
        held: false,
    })
}
