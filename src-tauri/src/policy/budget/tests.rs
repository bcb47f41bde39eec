//! The ledger against a naive one, and against the clocks.

use std::sync::Mutex;

use proptest::prelude::*;

use super::*;
use crate::settings::Pattern;

const MINUTE: i64 = 60 * 1_000_000;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

/// 2026-10-24 12:00 UTC, the day before Berlin's clocks go back.
const SATURDAY: i64 = 1_792_843_200 * 1_000_000;

fn wall(micros: i64) -> WallTime {
    WallTime(SATURDAY + micros)
}

fn berlin() -> TimeZone {
    TimeZone::get("Europe/Berlin").expect("the machine knows its time zones")
}

fn dollars(text: &str) -> Nanodollars {
    Nanodollars::from_decimal(text).expect("an amount")
}

fn at_most(text: &str) -> Worst {
    Worst::AtMost(dollars(text))
}

fn budget(per: Period, cap: &str) -> Budget {
    Budget {
        per,
        cap: dollars(cap),
        provider: None,
        tool: None,
        model: None,
    }
}

fn settings(budgets: Vec<Budget>) -> SpendSettings {
    SpendSettings {
        unpriced: Unpriced::Allow,
        warn_at: 0.8,
        output_bound_tokens: 8192,
        refresh_prices: false,
        prices: Vec::new(),
        budgets,
    }
}

fn ledger(budgets: Vec<Budget>) -> Ledger {
    Ledger::new(&settings(budgets), berlin())
}

const AIDER: Call<'static> = Call {
    provider: "openai",
    model: "gpt-5",
    tool: "aider",
};

fn reserved(answer: Answer) -> Hold {
    match answer {
        Answer::Reserved(hold) => hold,
        other => panic!("not reserved: {other:?}"),
    }
}

fn waits(answer: Answer) -> Ticket {
    match answer {
        Answer::Wait(ticket) => ticket,
        other => panic!("does not wait: {other:?}"),
    }
}

fn refused(answer: Answer) -> Refusal {
    match answer {
        Answer::Refused(refusal) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Nobody is told or woken.
fn quiet(aftermath: Aftermath) {
    assert_eq!(aftermath, Aftermath::default());
}

/// Makes a call that costs so much.
fn spend(ledger: &mut Ledger, call: Call<'_>, cost: &str, now: WallTime) -> Aftermath {
    let hold = reserved(ledger.reserve(call, at_most(cost), now));
    ledger.settle(hold, dollars(cost), now)
}

#[test]
fn a_call_is_refused_only_for_what_is_spent_and_its_own_worst_case() {
    let mut ledger = ledger(vec![budget(Period::Day, "1.00")]);
    quiet(spend(&mut ledger, AIDER, "0.70", wall(0)));
    let hold = reserved(ledger.reserve(AIDER, at_most("0.20"), wall(0)));
    // Beside the other's reservation it does not fit, without it it would.
    let ticket = waits(ledger.reserve(AIDER, at_most("0.30"), wall(0)));
    let refusal = refused(ledger.reserve(AIDER, at_most("0.300000001"), wall(0)));
    assert_eq!(
        refusal,
        Refusal {
            budget: "the day's budget".to_owned(),
            cap: dollars("1.00"),
            spent: dollars("0.70"),
            held: dollars("0.20"),
            worst: Some(dollars("0.300000001")),
            resets_at: wall(10 * HOUR),
            first: true,
        }
    );
    assert!(!refused(ledger.reserve(AIDER, at_most("0.31"), wall(0))).first);
    // One behind it that fits goes at once.
    let small = reserved(ledger.reserve(AIDER, at_most("0.10"), wall(0)));
    quiet(ledger.release(small, wall(0)));
    let mut aftermath = ledger.release(hold, wall(0));
    let woken = aftermath.woken.pop().expect("it is woken");
    assert_eq!(woken.ticket, ticket);
    let last = ledger.settle(woken.answer.expect("it fits"), dollars("0.30"), wall(0));
    let levels: Vec<Level> = last.alerts.iter().map(|alert| alert.level).collect();
    assert_eq!(levels, [Level::Spent]);
}

#[test]
fn one_that_waits_is_refused_as_soon_as_it_cannot_fit() {
    let mut ledger = ledger(vec![budget(Period::Day, "1.00")]);
    let hold = reserved(ledger.reserve(AIDER, at_most("0.90"), wall(0)));
    let large = waits(ledger.reserve(AIDER, at_most("0.50"), wall(0)));
    let small = waits(ledger.reserve(AIDER, at_most("0.20"), wall(0)));
    let gone = waits(ledger.reserve(AIDER, at_most("0.15"), wall(0)));
    assert_eq!(
        ledger
            .blocked_by(large, wall(0))
            .map(|refusal| refusal.held),
        Some(dollars("0.90"))
    );
    ledger.leave(gone);
    assert_eq!(ledger.blocked_by(gone, wall(0)), None);
    let aftermath = ledger.settle(hold, dollars("0.60"), wall(0));
    let tickets: Vec<Ticket> = aftermath.woken.iter().map(|woken| woken.ticket).collect();
    assert_eq!(tickets, [large, small]);
    let answers: Vec<bool> = aftermath
        .woken
        .iter()
        .map(|woken| woken.answer.is_ok())
        .collect();
    assert_eq!(answers, [false, true]);
    assert_eq!(ledger.next_roll(), None);
}

#[test]
fn a_new_period_lets_those_go_who_wait() {
    let mut ledger = ledger(vec![budget(Period::Hour, "1.00")]);
    let _hold = reserved(ledger.reserve(AIDER, at_most("1.00"), wall(0)));
    let ticket = waits(ledger.reserve(AIDER, at_most("1.00"), wall(5 * MINUTE)));
    assert_eq!(ledger.next_roll(), Some(wall(HOUR)));
    quiet(ledger.roll(wall(HOUR - 1)));
    let aftermath = ledger.roll(wall(HOUR));
    assert_eq!(aftermath.woken[0].ticket, ticket);
    assert!(aftermath.woken[0].answer.is_ok());
    assert_eq!(ledger.status(wall(HOUR))[0].held, dollars("1.00"));
}

#[test]
fn budgets_hold_for_whom_they_name() {
    let mut ledger = ledger(vec![
        budget(Period::Day, "10.00"),
        Budget {
            tool: Some(Pattern::new("aid*")),
            ..budget(Period::Hour, "1.00")
        },
        Budget {
            provider: Some(Pattern::new("anthropic")),
            model: Some(Pattern::new("*opus*")),
            ..budget(Period::Month, "2.00")
        },
    ]);
    quiet(spend(&mut ledger, AIDER, "0.50", wall(0)));
    let opus = Call {
        provider: "anthropic",
        model: "claude-opus-5",
        tool: "codex",
    };
    quiet(spend(&mut ledger, opus, "1.50", wall(0)));
    assert_eq!(
        refused(ledger.reserve(AIDER, at_most("0.51"), wall(0))).budget,
        "the hour's budget for tool \"aid*\""
    );
    let both = Call {
        tool: "aider",
        ..opus
    };
    // Of two that refuse, the one that does so for longer is named.
    let refusal = refused(ledger.reserve(both, at_most("0.51"), wall(0)));
    assert_eq!(
        refusal.budget,
        "the month's budget for provider \"anthropic\" and model \"*opus*\""
    );
    assert_eq!(refusal.resets_at, wall(7 * DAY + 11 * HOUR)); // an hour more that month
    let spent: Vec<String> = ledger
        .status(wall(0))
        .iter()
        .map(|status| status.spent.to_string())
        .collect();
    assert_eq!(spent, ["$2.00", "$0.50", "$1.50"]);
}

#[test]
fn what_costs_nothing_goes_on_and_what_nobody_prices_as_is_set() {
    let mut settings = settings(vec![Budget {
        provider: Some(Pattern::new("openai")),
        ..budget(Period::Day, "1.00")
    }]);
    let mut ledger = Ledger::new(&settings, berlin());
    let _spent = spend(&mut ledger, AIDER, "1.00", wall(0));
    assert_eq!(
        ledger.reserve(AIDER, Worst::Nothing, wall(0)),
        Answer::Untouched
    );
    let unpriced = reserved(ledger.reserve(AIDER, Worst::Unknown, wall(0)));
    // The provider told its cost after all: it counts.
    quiet(ledger.settle(unpriced, dollars("0.25"), wall(0)));
    assert_eq!(ledger.status(wall(0))[0].spent, dollars("1.25"));

    settings.unpriced = Unpriced::Refuse;
    quiet(ledger.configure(&settings, wall(0)));
    let refusal = refused(ledger.reserve(AIDER, Worst::Unknown, wall(0)));
    assert_eq!(refusal.worst, None);
    let elsewhere = Call {
        provider: "mistral",
        ..AIDER
    };
    let hold = reserved(ledger.reserve(elsewhere, Worst::Unknown, wall(0)));
    quiet(ledger.release(hold, wall(0)));
}

#[test]
fn each_level_is_told_once_a_period() {
    let mut ledger = ledger(vec![budget(Period::Day, "1.00")]);
    quiet(spend(&mut ledger, AIDER, "0.79", wall(0)));
    let near = spend(&mut ledger, AIDER, "0.01", wall(0));
    assert_eq!(near.alerts.len(), 1);
    assert_eq!(near.alerts[0].level, Level::Near);
    assert_eq!(near.alerts[0].spent, dollars("0.80"));
    quiet(spend(&mut ledger, AIDER, "0.01", wall(0)));
    assert_eq!(
        spend(&mut ledger, AIDER, "0.19", wall(0)).alerts[0].level,
        Level::Spent
    );
    // Sunday, and back: what was told stays told.
    quiet(spend(&mut ledger, AIDER, "0.10", wall(DAY)));
    assert_eq!(ledger.status(wall(0))[0].level, Level::Spent);
    let hold = reserved(ledger.reserve(AIDER, Worst::Unknown, wall(0)));
    quiet(ledger.settle(hold, dollars("0.10"), wall(0)));
    assert_eq!(
        spend(&mut ledger, AIDER, "0.70", wall(DAY)).alerts[0].level,
        Level::Near
    );
}

#[test]
fn what_was_spent_before_a_restart_counts_and_is_not_told_again() {
    let mut ledger = ledger(vec![
        budget(Period::Day, "1.00"),
        budget(Period::Month, "9.00"),
    ]);
    ledger.restore(wall(-30 * MINUTE), AIDER, dollars("0.85"));
    ledger.restore(wall(-15 * HOUR), AIDER, dollars("7.00")); // yesterday
    ledger.restore(wall(-31 * DAY), AIDER, dollars("50.00"));
    let refusal = refused(ledger.reserve(AIDER, at_most("0.16"), wall(0)));
    assert_eq!(
        (refusal.spent, refusal.cap),
        (dollars("0.85"), dollars("1.00"))
    );
    quiet(spend(&mut ledger, AIDER, "0.05", wall(0)));
    let spent: Vec<Nanodollars> = ledger
        .status(wall(0))
        .iter()
        .map(|status| status.spent)
        .collect();
    assert_eq!(spent, [dollars("0.90"), dollars("7.90")]);
}

#[test]
fn a_clock_that_steps_neither_forgets_nor_counts_twice() {
    let mut ledger = ledger(vec![budget(Period::Day, "1.00")]);
    let spent = |ledger: &mut Ledger, now| ledger.status(wall(now))[0].spent.to_string();
    quiet(spend(&mut ledger, AIDER, "0.60", wall(0)));
    let over_midnight = reserved(ledger.reserve(AIDER, at_most("0.30"), wall(0)));
    assert_eq!(spent(&mut ledger, 3 * DAY), "$0.00");
    quiet(spend(&mut ledger, AIDER, "0.20", wall(3 * DAY)));
    // It was let through on Saturday, and counts there.
    quiet(ledger.settle(over_midnight, dollars("0.15"), wall(3 * DAY)));
    assert_eq!(spent(&mut ledger, 3 * DAY), "$0.20");
    assert_eq!(spent(&mut ledger, 0), "$0.75");
    assert!(matches!(
        ledger.reserve(AIDER, at_most("0.26"), wall(MINUTE)),
        Answer::Refused(_)
    ));
    assert_eq!(spent(&mut ledger, -DAY), "$0.00");
    assert_eq!(spent(&mut ledger, 3 * DAY), "$0.20");
    // A clock at the end of time is no reason to forget, nor to fall over.
    assert_eq!(
        ledger.status(WallTime(i64::MAX))[0].spent,
        Nanodollars::ZERO
    );
    assert_eq!(
        ledger.status(WallTime(i64::MIN))[0].spent,
        Nanodollars::ZERO
    );
    assert_eq!(spent(&mut ledger, 0), "$0.75");
}

#[test]
fn a_day_of_25_hours_is_one_day_and_another_zone_another() {
    let mut ledger = ledger(vec![
        budget(Period::Day, "1.00"),
        budget(Period::Hour, "1.00"),
    ]);
    let sunday = 10 * HOUR; // midnight in Berlin
    quiet(spend(&mut ledger, AIDER, "0.30", wall(sunday)));
    quiet(spend(
        &mut ledger,
        AIDER,
        "0.30",
        wall(sunday + 25 * HOUR - 1),
    ));
    let day = ledger.status(wall(sunday + 24 * HOUR)).swap_remove(0);
    assert_eq!(day.spent, dollars("0.60"));
    assert_eq!(
        (day.since, day.resets_at),
        (wall(sunday), wall(sunday + 25 * HOUR))
    );
    // In Kathmandu Sunday had begun before, and ended before.
    let kathmandu = TimeZone::get("Asia/Kathmandu").expect("a time zone");
    quiet(ledger.move_to(kathmandu, wall(sunday)));
    let day = ledger.status(wall(sunday)).swap_remove(0);
    assert_eq!(day.spent, dollars("0.30"));
    assert_eq!(day.since, wall(6 * HOUR + 15 * MINUTE));
}

#[test]
fn a_thousand_calls_at_once_cannot_pass_the_cap() {
    let ledger = Mutex::new(ledger(vec![
        budget(Period::Day, "1.00"),
        Budget {
            tool: Some(Pattern::new("tool-0")),
            ..budget(Period::Hour, "0.40")
        },
    ]));
    let lock = || ledger.lock().expect("nobody panics");
    let _spent = spend(&mut lock(), AIDER, "0.95", wall(0));
    let went = Mutex::new(Vec::new());
    let waiting = Mutex::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (lock, went, waiting) = (&lock, &went, &waiting);
            scope.spawn(move || {
                let tool = format!("tool-{}", thread % 2);
                for _ in 0..125 {
                    let call = Call {
                        tool: &tool,
                        ..AIDER
                    };
                    match lock().reserve(call, at_most("0.01"), wall(0)) {
                        Answer::Reserved(hold) => went.lock().expect("no panic").push(hold),
                        Answer::Wait(_) => *waiting.lock().expect("no panic") += 1,
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    let mut went = went.into_inner().expect("no panic");
    assert_eq!(went.len(), 5);
    assert_eq!(waiting.into_inner().expect("no panic"), 995);
    // Each costs half of its worst case; those that wait follow until it is spent.
    let mut calls = 0;
    while let Some(hold) = went.pop() {
        calls += 1;
        let aftermath = lock().settle(hold, dollars("0.005"), wall(0));
        went.extend(
            aftermath
                .woken
                .into_iter()
                .filter_map(|woken| woken.answer.ok()),
        );
    }
    let status = lock().status(wall(0)).swap_remove(0);
    assert_eq!(calls, 9, "after nine a tenth could pass the cap");
    assert_eq!(
        (status.spent, status.held),
        (dollars("0.995"), Nanodollars::ZERO)
    );
}

/// What a person or a call does.
#[derive(Clone, Debug)]
enum Act {
    Reserve(usize, Worst),
    /// Settle one of the open calls at a share of its worst case.
    Settle(prop::sample::Index, i64),
    Leave(prop::sample::Index),
    /// The clock goes on, or is set back.
    Pass(i64),
    Roll,
    Move(&'static str),
}

const TOOLS: [&str; 3] = ["aider", "codex", "zed"];
const MODELS: [&str; 2] = ["gpt-5", "claude-opus-5"];

fn call(number: usize) -> Call<'static> {
    let model = number % MODELS.len();
    Call {
        provider: ["openai", "anthropic"][model],
        model: MODELS[model],
        tool: TOOLS[number % TOOLS.len()],
    }
}

fn act() -> impl Strategy<Value = Act> {
    let worst = prop_oneof![
        8 => (0_i64..400).prop_map(|cents| Worst::AtMost(Nanodollars(cents * 10_000_000))),
        1 => Just(Worst::Nothing),
        1 => Just(Worst::Unknown),
    ];
    prop_oneof![
        6 => (0_usize..6, worst).prop_map(|(call, worst)| Act::Reserve(call, worst)),
        5 => (any::<prop::sample::Index>(), 0_i64..=100)
            .prop_map(|(index, share)| Act::Settle(index, share)),
        1 => any::<prop::sample::Index>().prop_map(Act::Leave),
        2 => prop_oneof![0..HOUR, -2 * HOUR..0, -2 * DAY..4 * DAY].prop_map(Act::Pass),
        1 => Just(Act::Roll),
        1 => prop::sample::select(vec!["Europe/Berlin", "Asia/Kathmandu", "UTC"])
            .prop_map(Act::Move),
    ]
}

fn some_budgets() -> impl Strategy<Value = Vec<Budget>> {
    let pattern = |names: &'static [&'static str]| {
        prop::option::of(prop::sample::select(names).prop_map(Pattern::new))
    };
    let period = prop::sample::select(vec![Period::Hour, Period::Day, Period::Month]);
    let budget = (period, 0_i64..800, pattern(&TOOLS), pattern(&["gpt*", "*"])).prop_map(
        |(per, cents, tool, model)| Budget {
            per,
            cap: Nanodollars(cents * 10_000_000),
            provider: None,
            tool,
            model,
        },
    );
    prop::collection::vec(budget, 0..4)
}

/// One call that was let through, as a list of all of them knows it.
struct Entry {
    at: WallTime,
    call: Call<'static>,
    worst: Nanodollars,
    cost: Option<Nanodollars>,
}

/// Reckons everything anew from the list of all calls, each time.
struct Naive {
    budgets: Vec<Budget>,
    zone: TimeZone,
    entries: Vec<Entry>,
}

#[derive(Debug, PartialEq)]
enum Naively {
    Goes,
    Waits,
    Refused,
}

impl Naive {
    fn sums(&self, budget: &Budget, now: WallTime) -> (i64, i64) {
        let window = Window::of(budget.per, now, &self.zone);
        let names = |pattern: &Option<Pattern>, name: &str| {
            pattern.as_ref().is_none_or(|pattern| pattern.matches(name))
        };
        let counted = self.entries.iter().filter(|entry| {
            window.contains(entry.at)
                && names(&budget.tool, entry.call.tool)
                && names(&budget.model, entry.call.model)
        });
        counted.fold((0, 0), |(spent, held), entry| match entry.cost {
            Some(cost) => (spent + cost.0, held),
            None => (spent, held + entry.worst.0),
        })
    }

    fn judge(&self, call: Call<'_>, worst: Nanodollars, now: WallTime) -> Naively {
        let mut verdict = Naively::Goes;
        for budget in &self.budgets {
            let counts = budget
                .tool
                .as_ref()
                .is_none_or(|tool| tool.matches(call.tool))
                && budget
                    .model
                    .as_ref()
                    .is_none_or(|model| model.matches(call.model));
            let (spent, held) = self.sums(budget, now);
            if counts && spent + worst.0 > budget.cap.0 {
                return Naively::Refused;
            }
            if counts && spent + held + worst.0 > budget.cap.0 {
                verdict = Naively::Waits;
            }
        }
        verdict
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn it_behaves_as_a_naive_ledger(
        budgets in some_budgets(),
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let mut ledger = ledger(budgets.clone());
        let mut naive = Naive { budgets, zone: berlin(), entries: Vec::new() };
        let mut now = wall(0);
        let mut open: Vec<(Hold, usize)> = Vec::new();
        let mut waiting: Vec<(Ticket, Call<'static>, Nanodollars)> = Vec::new();
        let mut moved = false;

        for act in &acts {
            let mut woken = Vec::new();
            match act {
                Act::Pass(micros) => now = WallTime(now.0 + micros),
                Act::Reserve(number, worst) => {
                    let call = call(*number);
                    let answer = ledger.reserve(call, *worst, now);
                    let amount = match worst {
                        Worst::Nothing => {
                            prop_assert_eq!(answer, Answer::Untouched);
                            continue;
                        }
                        Worst::AtMost(amount) => *amount,
                        Worst::Unknown => Nanodollars::ZERO,
                    };
                    let expected = naive.judge(call, amount, now);
                    match answer {
                        Answer::Reserved(hold) => {
                            prop_assert_eq!(expected, Naively::Goes);
                            open.push((hold, naive.entries.len()));
                            naive.entries.push(Entry { at: now, call, worst: amount, cost: None });
                        }
                        Answer::Wait(ticket) => {
                            prop_assert_eq!(expected, Naively::Waits);
                            waiting.push((ticket, call, amount));
                        }
                        Answer::Refused(refusal) => {
                            prop_assert_eq!(expected, Naively::Refused);
                            prop_assert!(
                                refusal.spent.saturating_add(amount) > refusal.cap,
                                "{:?}", refusal
                            );
                        }
                        Answer::Untouched => prop_assert!(false, "a call that costs was untouched"),
                    }
                    continue;
                }
                Act::Settle(index, share) if !open.is_empty() => {
                    let (hold, entry) = open.swap_remove(index.index(open.len()));
                    let worst = naive.entries[entry].worst;
                    let cost = Nanodollars(worst.0 / 100 * share);
                    naive.entries[entry].cost = Some(cost);
                    woken = ledger.settle(hold, cost, now).woken;
                }
                Act::Leave(index) if !waiting.is_empty() => {
                    let (ticket, ..) = waiting.remove(index.index(waiting.len()));
                    ledger.leave(ticket);
                }
                Act::Settle(..) | Act::Leave(_) => continue,
                Act::Roll => woken = ledger.roll(now).woken,
                Act::Move(name) => {
                    moved = true;
                    naive.zone = TimeZone::get(name).expect("a time zone");
                    woken = ledger.move_to(naive.zone.clone(), now).woken;
                }
            }
            // Whoever was woken was right to be, in the order of coming; whoever was not, not.
            let mut woken = woken.into_iter().peekable();
            let asked = !matches!(act, Act::Pass(_) | Act::Leave(_));
            let mut still = Vec::new();
            for (ticket, call, worst) in waiting.drain(..) {
                let answer = woken.next_if(|woken| woken.ticket == ticket);
                if !asked {
                    prop_assert!(answer.is_none());
                    still.push((ticket, call, worst));
                    continue;
                }
                match (naive.judge(call, worst, now), answer.map(|woken| woken.answer)) {
                    (Naively::Goes, Some(Ok(hold))) => {
                        open.push((hold, naive.entries.len()));
                        naive.entries.push(Entry { at: now, call, worst, cost: None });
                    }
                    (Naively::Waits, None) => still.push((ticket, call, worst)),
                    (Naively::Refused, Some(Err(_))) => {}
                    (expected, answer) => prop_assert!(false, "{:?}, not {:?}", expected, answer),
                }
            }
            prop_assert!(woken.next().is_none());
            waiting = still;

            for (status, budget) in ledger.status(now).iter().zip(&naive.budgets) {
                let sums = (status.spent.0, status.held.0);
                prop_assert_eq!(sums, naive.sums(budget, now));
                // A day of another zone is made of two that were each within the cap.
                if !moved {
                    prop_assert!(sums.0 + sums.1 <= budget.cap.0, "{:?}", status);
                }
            }
        }
        // Nothing leaks: once all have ended, nothing is held and, time aside, nobody waits long.
        while let Some((hold, entry)) = open.pop() {
            naive.entries[entry].cost = Some(Nanodollars::ZERO);
            let woken = ledger.release(hold, now).woken;
            for woken in woken {
                let at = waiting.iter().position(|(ticket, ..)| *ticket == woken.ticket);
                let (_, call, worst) = waiting.remove(at.expect("it waited"));
                if let Ok(hold) = woken.answer {
                    open.push((hold, naive.entries.len()));
                    naive.entries.push(Entry { at: now, call, worst, cost: None });
                }
            }
        }
        let _last = ledger.roll(now);
        prop_assert!(ledger.status(now).iter().all(|status| status.held.0 >= 0));
        prop_assert!(ledger.holds.values().all(|held| held.at == now));
    }
}

#[test]
fn asking_first_reserves_nothing_and_says_what_reserving_would() {
    let mut ledger = ledger(vec![budget(Period::Day, "1.00")]);
    assert_eq!(ledger.refusal(AIDER, at_most("1.00"), wall(0)), None);
    let hold = reserved(ledger.reserve(AIDER, at_most("1.00"), wall(0)));
    // It would wait.
    assert_eq!(ledger.refusal(AIDER, at_most("1.00"), wall(0)), None);
    quiet(ledger.settle(hold, dollars("0.10"), wall(0)));
    let told = ledger.refusal(AIDER, at_most("0.95"), wall(0));
    let told = told.expect("it does not fit");
    assert!(told.first);
    let again = refused(ledger.reserve(AIDER, at_most("0.95"), wall(0)));
    assert!(!again.first, "it was told");
    assert_eq!((told.spent, told.worst), (again.spent, again.worst));
    assert_eq!(ledger.refusal(AIDER, Worst::Nothing, wall(0)), None);
}

#[test]
fn what_no_budget_holds_back_is_counted() {
    let mut ledger = ledger(vec![budget(Period::Day, "1.00")]);
    let hold = ledger
        .admit(AIDER, at_most("5.00"), wall(0))
        .expect("it counts");
    assert_eq!(ledger.status(wall(0))[0].held, dollars("5.00"));
    let _alerts = ledger.settle(hold, dollars("3.00"), wall(0));
    assert_eq!(ledger.status(wall(0))[0].spent, dollars("3.00"));
    assert_eq!(ledger.spent_in(Period::Day, wall(0)), dollars("3.00"));
    assert_eq!(ledger.spent_in(Period::Day, wall(DAY)), Nanodollars::ZERO);
    assert_eq!(ledger.admit(AIDER, Worst::Nothing, wall(0)), None);
}
