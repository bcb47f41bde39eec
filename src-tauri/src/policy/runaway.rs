//! Notices a tool that suddenly spends several times its usual rate, for ten minutes on end.
//!
//! A runaway loop is not one dear call: it goes on. So the last ten minutes are looked at in two
//! halves, and both must be out of proportion. What is usual is what the tool spent in an hour of
//! use, on the mean of the last seven days on which it was used; a tool that has been used for
//! less than three hours has no usual rate yet, and one that costs little may well cost a little
//! more.

use std::collections::{HashMap, VecDeque};

use crate::clock::{Moment, WallTime};
use crate::policy::money::Nanodollars;

/// So many times the usual is out of proportion.
const SEVERAL: i64 = 5;

/// An hour's spend that is taken as usual for a tool that spends less: up to five times this, a
/// rate of five dollars an hour, nobody needs to be told.
const LITTLE: Nanodollars = Nanodollars(1_000_000_000);

/// Hours of use that make a rate usual.
const LEAST_HOURS: u32 = 3;

/// Days of use that are remembered.
const DAYS: usize = 7;

/// How far back [`Runaways::restore`] wants to be fed, at most: use may have paused for long.
pub const LOOK_BACK_MICROS: i64 = 90 * 24 * HOUR_MICROS;

/// Tools that are remembered. Names come from clients, who may make up any number.
const MOST_TOOLS: usize = 256;

const HALF_MINUTES: usize = 5;
const MINUTES: usize = 2 * HALF_MINUTES;
const HOUR_MICROS: i64 = 3_600 * 1_000_000;

/// A tool that runs away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runaway {
    /// Which.
    pub tool: String,
    /// What it spent in the last ten minutes.
    pub spent: Nanodollars,
    /// What it would usually spend in them, by the mean of its hours of use.
    pub usual: Nanodollars,
}

/// Watches what every tool spends.
#[derive(Debug, Default)]
pub struct Runaways {
    tools: HashMap<Box<str>, Tool>,
}

impl Runaways {
    /// Enters what a tool spent in an hour of UTC before this process began (`at` any time in
    /// it); to be fed in any order, with the last [`LOOK_BACK_MICROS`].
    pub fn restore(&mut self, tool: &str, at: WallTime, cost: Nanodollars) {
        self.tool(tool).past.add(hour(at), cost);
    }

    /// A call of a tool was settled. Tells when it runs away: once, until it has calmed down for
    /// five minutes.
    pub fn spent(
        &mut self,
        tool: &str,
        cost: Nanodollars,
        now: Moment,
        wall: WallTime,
    ) -> Option<Runaway> {
        if cost <= Nanodollars::ZERO {
            return None;
        }
        let watched = self.tool(tool);
        watched.pass(minute(now));
        watched.minutes[MINUTES - 1] = watched.minutes[MINUTES - 1].saturating_add(cost);
        // What it spends now must not make itself usual: hours count when they are over.
        let usual_hour = watched.past.usual_before(hour(wall) - 1);
        watched.past.add(hour(wall), cost);
        let usual_hour = usual_hour?;
        let much_in_half = share_of_hour(usual_hour.max(LITTLE), HALF_MINUTES).0 * SEVERAL;
        let halves = watched.halves();
        let out_of_proportion = halves.iter().all(|half| half.0 >= much_in_half);
        let is_news = out_of_proportion && !watched.told;
        // The later half alone decides that it is over.
        watched.told = out_of_proportion || watched.told && halves[1].0 >= much_in_half;
        is_news.then(|| Runaway {
            tool: tool.to_owned(),
            spent: halves[0].saturating_add(halves[1]),
            usual: share_of_hour(usual_hour, MINUTES),
        })
    }

    fn tool(&mut self, name: &str) -> &mut Tool {
        if self.tools.len() >= MOST_TOOLS && !self.tools.contains_key(name) {
            let idlest = self
                .tools
                .iter()
                .min_by_key(|(_, tool)| tool.past.last_day());
            if let Some(idlest) = idlest.map(|(name, _)| name.clone()) {
                self.tools.remove(&idlest);
            }
        }
        self.tools.entry(name.into()).or_default()
    }
}

/// The minutes' share of an hour's spend.
fn share_of_hour(hour: Nanodollars, minutes: usize) -> Nanodollars {
    Nanodollars(hour.0 / (60 / i64::try_from(minutes).unwrap_or(60)))
}

fn minute(now: Moment) -> u64 {
    now.since(Moment::default()).as_secs() / 60
}

/// Hours since 1970, of UTC: the calendar of the machine does not matter to a rate.
fn hour(wall: WallTime) -> i64 {
    wall.0.div_euclid(HOUR_MICROS)
}

#[derive(Debug, Default)]
struct Tool {
    /// What each of the last ten minutes cost, the running one last.
    minutes: [Nanodollars; MINUTES],
    /// The number of that one.
    minute: u64,
    past: Past,
    told: bool,
}

impl Tool {
    /// Moves on to a minute; one that is past already counts as the running one.
    fn pass(&mut self, minute: u64) {
        let passed = minute.saturating_sub(self.minute);
        self.minute += passed;
        let passed = usize::try_from(passed).unwrap_or(MINUTES).min(MINUTES);
        self.minutes.rotate_left(passed);
        self.minutes[MINUTES - passed..].fill(Nanodollars::ZERO);
        if passed > HALF_MINUTES {
            self.told = false;
        }
    }

    fn halves(&self) -> [Nanodollars; 2] {
        let (earlier, later) = self.minutes.split_at(HALF_MINUTES);
        [earlier, later].map(|half| half.iter().copied().sum())
    }
}

/// The last days on which a tool was used, the latest last.
#[derive(Debug, Default)]
struct Past(VecDeque<Day>);

#[derive(Debug)]
struct Day {
    /// Days since 1970.
    day: i64,
    /// What each of its hours cost.
    hours: [Nanodollars; 24],
}

impl Past {
    fn add(&mut self, hour: i64, cost: Nanodollars) {
        if cost <= Nanodollars::ZERO {
            return;
        }
        let day = hour.div_euclid(24);
        let at = self.0.partition_point(|known| known.day < day);
        if self.0.get(at).is_none_or(|known| known.day != day) {
            let hours = [Nanodollars::ZERO; 24];
            self.0.insert(at, Day { day, hours });
        }
        let of_day = usize::try_from(hour.rem_euclid(24)).unwrap_or_default();
        let sum = &mut self.0[at].hours[of_day];
        *sum = sum.saturating_add(cost);
        if self.0.len() > DAYS {
            self.0.pop_front();
        }
    }

    /// The mean of its hours of use up to an hour, that one included; `None` for too few.
    fn usual_before(&self, last: i64) -> Option<Nanodollars> {
        let hours = self
            .0
            .iter()
            .flat_map(|day| (day.day * 24..).zip(day.hours));
        let used = hours.filter(|(hour, cost)| *hour <= last && *cost > Nanodollars::ZERO);
        let (count, sum) = used.fold((0_u32, Nanodollars::ZERO), |(count, sum), (_, cost)| {
            (count + 1, sum.saturating_add(cost))
        });
        (count >= LEAST_HOURS).then(|| Nanodollars(sum.0 / i64::from(count)))
    }

    fn last_day(&self) -> i64 {
        self.0.back().map_or(i64::MIN, |day| day.day)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// 2026-10-20 00:00 UTC.
    const TUESDAY: i64 = 1_792_454_400 * 1_000_000;

    fn cents(cents: i64) -> Nanodollars {
        Nanodollars(cents * 10_000_000)
    }

    /// A clock whose two readings go on together.
    struct Watch {
        runaways: Runaways,
        seconds: u64,
    }

    impl Watch {
        /// A tool that has spent so many cents in each of the given hours before Tuesday.
        fn used(hours: &[(i64, i64)]) -> Self {
            let mut runaways = Runaways::default();
            for (hours_ago, spent) in hours {
                let at = WallTime(TUESDAY - hours_ago * HOUR_MICROS);
                runaways.restore("aider", at, cents(*spent));
            }
            Self {
                runaways,
                seconds: 0,
            }
        }

        fn spend(&mut self, amount: i64) -> Option<Runaway> {
            let now = Moment::at(Duration::from_secs(1_000_000_020 + self.seconds));
            let micros = i64::try_from(self.seconds).unwrap() * 1_000_000;
            let wall = WallTime(TUESDAY + micros);
            self.runaways.spent("aider", cents(amount), now, wall)
        }

        /// Spends so much each minute; tells the minutes in which it was called a runaway.
        fn minutes(&mut self, count: u64, amount: i64) -> Vec<u64> {
            (0..count)
                .filter(|_| {
                    let told = self.spend(amount).is_some();
                    self.seconds += 60;
                    told
                })
                .collect()
        }
    }

    /// $2.40 an hour, on three days: five times as much is a dollar in five minutes.
    const USUAL: &[(i64, i64)] = &[(1, 240), (2, 180), (3, 300), (30, 240), (200, 240)];

    #[test]
    fn several_times_the_usual_for_ten_minutes_is_told_once() {
        let mut watch = Watch::used(USUAL);
        // 20 cents a minute make a dollar in each half only when the tenth minute has begun.
        assert_eq!(watch.minutes(9, 20), [0; 0]);
        assert_eq!(
            watch.spend(20),
            Some(Runaway {
                tool: "aider".to_owned(),
                spent: cents(200),
                usual: cents(40),
            })
        );
        assert_eq!(watch.minutes(120, 20), [0; 0]);
    }

    #[test]
    fn it_is_told_again_once_it_has_calmed_down() {
        let mut watch = Watch::used(USUAL);
        assert_eq!(watch.minutes(30, 50).len(), 1);
        assert_eq!(watch.minutes(10, 1), [0; 0]);
        assert_eq!(watch.minutes(30, 50).len(), 1);
        // What it spent has become a part of the usual, so it takes more after a pause.
        watch.seconds += 3_600;
        assert_eq!(watch.minutes(30, 50), [0; 0]);
        watch.seconds += 3_600;
        assert_eq!(watch.minutes(30, 1_000).len(), 1);
        // A pause is calm enough, however wildly it goes on.
        let mut watch = Watch::used(USUAL);
        assert_eq!(watch.minutes(20, 200).len(), 1);
        watch.seconds += 6 * 60;
        assert_eq!(watch.minutes(20, 200).len(), 1);
    }

    #[test]
    fn one_dear_call_or_a_busy_hour_is_no_runaway() {
        let mut watch = Watch::used(USUAL);
        assert_eq!(watch.spend(10_000), None);
        watch.seconds += 60;
        assert_eq!(watch.minutes(4, 1), [0; 0]);
        assert_eq!(watch.minutes(60, 1), [0; 0]);
        // Four times the usual.
        assert_eq!(Watch::used(USUAL).minutes(120, 16), [0; 0]);
    }

    #[test]
    fn a_first_use_is_no_alarm() {
        assert_eq!(Watch::used(&[]).minutes(50, 100), [0; 0]);
        assert_eq!(Watch::used(&[(1, 240), (2, 240)]).minutes(50, 100), [0; 0]);
        assert_eq!(
            Watch::used(&[(1, 240), (2, 240), (3, 240)])
                .minutes(50, 100)
                .len(),
            1
        );
    }

    #[test]
    fn a_cheap_tool_may_cost_a_little_more() {
        let cheap = &[(1, 1), (2, 1), (3, 1)];
        assert_eq!(Watch::used(cheap).minutes(60, 8), [0; 0]);
        assert_eq!(Watch::used(cheap).minutes(60, 9), [9]);
    }

    #[test]
    fn a_runaway_over_the_hour_does_not_become_usual_at_once() {
        let mut watch = Watch::used(USUAL);
        watch.seconds = 3_600 - 5 * 60;
        assert_eq!(watch.minutes(30, 20).len(), 1);
    }

    #[test]
    fn only_the_last_seven_days_of_use_count() {
        // Dear weeks ago, cheap on the last seven days of use.
        let mut hours = vec![(24 * 60, 100_000), (24 * 61, 100_000)];
        hours.extend((0..7).map(|day| (24 * day * 3 + 1, 100)));
        hours.reverse();
        assert_eq!(Watch::used(&hours).minutes(20, 20).len(), 1);
        hours.reverse();
        assert_eq!(Watch::used(&hours).minutes(20, 20).len(), 1);
    }

    #[test]
    fn a_clock_that_stands_or_steps_back_does_no_harm() {
        let mut watch = Watch::used(USUAL);
        for _ in 0..1_000 {
            assert_eq!(watch.spend(100), None, "it has not gone on for ten minutes");
        }
        watch.seconds += 600;
        watch.minutes(3, 20);
        let before = WallTime(TUESDAY - 400 * 24 * HOUR_MICROS);
        let early = Moment::at(Duration::from_secs(1));
        assert_eq!(watch.runaways.spent("aider", cents(1), early, before), None);
        assert_eq!(
            watch
                .runaways
                .spent("aider", cents(1), early, WallTime(i64::MIN)),
            None
        );
    }

    #[test]
    fn tools_are_bounded_and_the_idlest_goes_first() {
        let mut runaways = Runaways::default();
        for number in 0..MOST_TOOLS + 5 {
            let at = WallTime(TUESDAY + i64::try_from(number).unwrap() * 24 * HOUR_MICROS);
            runaways.restore(&format!("tool-{number}"), at, cents(1));
        }
        assert_eq!(runaways.tools.len(), MOST_TOOLS);
        assert!(!runaways.tools.contains_key("tool-4"));
        assert!(runaways.tools.contains_key("tool-5"));
    }
}
