//! Says where an hour, a day or a month begins and ends in a person's own time zone.
//!
//! Windows of one kind tile the time line: every instant lies in exactly one, whatever the clocks
//! do. A day has 23 or 25 hours where they change, and begins at its first instant where its
//! midnight does not exist. An hour that the clocks repeat is two hours.

use jiff::civil::Date;
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Span, Timestamp};

use crate::clock::WallTime;
use crate::settings::Period;

/// A stretch of time, its end not in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// The first instant.
    pub start: WallTime,
    /// The first instant after it.
    pub end: WallTime,
}

impl Window {
    /// The hour, day or month that `now` lies in.
    pub fn of(period: Period, now: WallTime, zone: &TimeZone) -> Self {
        let now = timestamp(now);
        match period {
            Period::Hour => hour(now, zone),
            Period::Day => {
                let day = zone.to_datetime(now).date();
                Self::between(first_instant(day, zone), first_instant_after(day, zone))
            }
            Period::Month => {
                let date = zone.to_datetime(now).date();
                let last = date.last_of_month();
                Self::between(
                    first_instant(date.first_of_month(), zone),
                    first_instant_after(last, zone),
                )
            }
        }
    }

    /// Whether `time` lies in it.
    pub fn contains(&self, time: WallTime) -> bool {
        self.start <= time && time < self.end
    }

    fn between(start: Option<Timestamp>, end: Option<Timestamp>) -> Self {
        Self {
            start: start.map_or(WallTime(i64::MIN), wall),
            end: end.map_or(WallTime(i64::MAX), wall),
        }
    }
}

/// From one full hour, or change of the clocks, to the next.
fn hour(now: Timestamp, zone: &TimeZone) -> Window {
    let local = zone.to_datetime(now);
    let since_full = Span::new()
        .minutes(local.minute())
        .seconds(local.second())
        .nanoseconds(local.subsec_nanosecond());
    let full = now.checked_sub(since_full).ok();
    let next = full.and_then(|full| full.checked_add(Span::new().hours(1)).ok());
    // `preceding` is strict, and a change at this very instant has taken place.
    let just_after = now.checked_add(Span::new().nanoseconds(1)).unwrap_or(now);
    let changed = zone
        .preceding(just_after)
        .next()
        .map(|change| change.timestamp());
    let changes = zone.following(now).next().map(|change| change.timestamp());
    Window::between(
        full.max(changed),
        match (next, changes) {
            (Some(next), Some(changes)) => Some(next.min(changes)),
            (next, _) => next,
        },
    )
}

/// `None` where the calendar ends.
fn first_instant(day: Date, zone: &TimeZone) -> Option<Timestamp> {
    let midnight = zone.to_ambiguous_timestamp(day.at(0, 0, 0, 0));
    let skipped = matches!(midnight.offset(), AmbiguousOffset::Gap { .. });
    // Of two midnights the earlier; where there is none, an instant after the change.
    let begun = midnight.compatible().ok()?;
    if !skipped {
        return Some(begun);
    }
    let just_after = begun.checked_add(Span::new().nanoseconds(1)).ok()?;
    zone.preceding(just_after)
        .next()
        .map(|change| change.timestamp())
}

fn first_instant_after(day: Date, zone: &TimeZone) -> Option<Timestamp> {
    first_instant(day.tomorrow().ok()?, zone)
}

/// The nearest time that the calendar knows.
fn timestamp(time: WallTime) -> Timestamp {
    Timestamp::from_microsecond(time.0).unwrap_or(if time.0 < 0 {
        Timestamp::MIN
    } else {
        Timestamp::MAX
    })
}

fn wall(time: Timestamp) -> WallTime {
    WallTime(time.as_microsecond())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn zone(name: &str) -> TimeZone {
        TimeZone::get(name).expect("the machine knows its time zones")
    }

    fn at(text: &str) -> WallTime {
        wall(text.parse().expect("a timestamp"))
    }

    /// The length of the window around an instant, in minutes, and where it begins.
    fn window(period: Period, now: &str, name: &str) -> (i64, String) {
        let window = Window::of(period, at(now), &zone(name));
        assert!(window.contains(at(now)));
        let start = timestamp(window.start).to_zoned_datetime(zone(name));
        (
            (window.end.0 - window.start.0) / 60_000_000,
            start.strftime("%F %H:%M%:z").to_string(),
        )
    }

    #[test]
    fn a_day_is_as_long_as_the_clocks_make_it() {
        let berlin = |now| window(Period::Day, now, "Europe/Berlin");
        assert_eq!(
            berlin("2026-06-01T12:00:00Z"),
            (24 * 60, "2026-06-01 00:00+02:00".into())
        );
        assert_eq!(
            berlin("2026-03-29T12:00:00Z"),
            (23 * 60, "2026-03-29 00:00+01:00".into())
        );
        assert_eq!(
            berlin("2026-10-25T12:00:00Z"),
            (25 * 60, "2026-10-25 00:00+02:00".into())
        );
        assert_eq!(
            berlin("2026-10-24T22:00:00Z"),
            (25 * 60, "2026-10-25 00:00+02:00".into())
        );
        assert_eq!(
            berlin("2026-10-24T21:59:59Z"),
            (24 * 60, "2026-10-24 00:00+02:00".into())
        );
    }

    #[test]
    fn a_day_without_a_midnight_begins_at_its_first_instant() {
        // Cairo's clocks go from 00:00 to 01:00 on the last Friday of April.
        let cairo = |now| window(Period::Day, now, "Africa/Cairo");
        assert_eq!(
            cairo("2026-04-24T12:00:00Z"),
            (23 * 60, "2026-04-24 01:00+03:00".into())
        );
        assert_eq!(
            cairo("2026-04-23T12:00:00Z"),
            (24 * 60, "2026-04-23 00:00+02:00".into())
        );
        // Toronto's went from 23:30 to 00:30 once, so the day began half an hour in.
        let toronto = |now| window(Period::Day, now, "America/Toronto");
        assert_eq!(toronto("1919-03-31T04:31:00Z").1, "1919-03-31 00:30-04:00");
        // Havana has the midnight of that day twice; it begins with the first.
        let havana = |now| window(Period::Day, now, "America/Havana");
        assert_eq!(
            havana("2026-11-01T12:00:00Z"),
            (25 * 60, "2026-11-01 00:00-04:00".into())
        );
        // Apia left out the 30th of December 2011.
        let apia = |now| window(Period::Day, now, "Pacific/Apia");
        assert_eq!(
            apia("2011-12-30T09:00:00Z"),
            (24 * 60, "2011-12-29 00:00-10:00".into())
        );
        assert_eq!(
            apia("2011-12-30T10:00:00Z"),
            (24 * 60, "2011-12-31 00:00+14:00".into())
        );
    }

    #[test]
    fn a_repeated_hour_is_two() {
        let berlin = |now| window(Period::Hour, now, "Europe/Berlin");
        assert_eq!(
            berlin("2026-10-25T00:30:00Z"),
            (60, "2026-10-25 02:00+02:00".into())
        );
        assert_eq!(
            berlin("2026-10-25T01:30:00Z"),
            (60, "2026-10-25 02:00+01:00".into())
        );
        assert_eq!(
            berlin("2026-03-29T01:00:00Z"),
            (60, "2026-03-29 03:00+02:00".into())
        );
        let kathmandu = |now| window(Period::Hour, now, "Asia/Kathmandu");
        assert_eq!(
            kathmandu("2026-10-25T01:30:00Z"),
            (60, "2026-10-25 07:00+05:45".into())
        );
        // Toronto's clocks once changed half way through one.
        let toronto = |now| window(Period::Hour, now, "America/Toronto");
        assert_eq!(
            toronto("1919-03-31T04:10:00Z"),
            (30, "1919-03-30 23:00-05:00".into())
        );
        assert_eq!(
            toronto("1919-03-31T04:40:00Z"),
            (30, "1919-03-31 00:30-04:00".into())
        );
        // Lord Howe's change by half an hour.
        let lord_howe = |now| window(Period::Hour, now, "Australia/Lord_Howe");
        assert_eq!(
            lord_howe("2026-04-04T14:30:00Z"),
            (60, "2026-04-05 01:00+11:00".into())
        );
        assert_eq!(
            lord_howe("2026-04-04T15:10:00Z"),
            (30, "2026-04-05 01:30+10:30".into())
        );
        assert_eq!(
            lord_howe("2026-10-03T15:45:00Z"),
            (30, "2026-10-04 02:30+11:00".into())
        );
    }

    #[test]
    fn a_month_follows_the_calendar() {
        let berlin = |now| window(Period::Month, now, "Europe/Berlin");
        let days = |days: i64, hours: i64| (days * 24 + hours) * 60;
        assert_eq!(
            berlin("2026-03-05T00:00:00Z"),
            (days(31, -1), "2026-03-01 00:00+01:00".into())
        );
        assert_eq!(
            berlin("2026-10-05T00:00:00Z"),
            (days(31, 1), "2026-10-01 00:00+02:00".into())
        );
        assert_eq!(
            berlin("2028-02-29T22:59:59Z"),
            (days(29, 0), "2028-02-01 00:00+01:00".into())
        );
        assert_eq!(
            berlin("2026-12-31T23:30:00Z"),
            (days(31, 0), "2027-01-01 00:00+01:00".into())
        );
    }

    #[test]
    fn the_ends_of_time_are_no_panic() {
        for period in [Period::Hour, Period::Day, Period::Month] {
            for time in [i64::MIN, i64::MIN + 1, i64::MAX - 1, i64::MAX] {
                let window = Window::of(period, WallTime(time), &zone("Europe/Berlin"));
                assert!(window.start < window.end);
            }
        }
    }

    proptest! {
        #[test]
        fn windows_tile_the_time_line(
            // 1900 to 2100: Apia's skipped day, Toronto's half hour and all of today's rules.
            seconds in -2_208_988_800_i64..4_102_444_800,
            micros in 0_i64..1_000_000,
            name in prop::sample::select(vec![
                "UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/Toronto",
                "Africa/Cairo", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Apia",
                "America/Sao_Paulo", "Africa/Casablanca", "Asia/Tehran", "Antarctica/Troll",
            ]),
            period in prop::sample::select(vec![Period::Hour, Period::Day, Period::Month]),
        ) {
            let (zone, now) = (zone(name), WallTime(seconds * 1_000_000 + micros));
            let window = Window::of(period, now, &zone);
            prop_assert!(window.contains(now), "{:?} {:?}", window, now);
            let inside = [window.start, WallTime(window.end.0 - 1)];
            for time in inside {
                prop_assert_eq!(Window::of(period, time, &zone), window);
            }
            prop_assert_eq!(Window::of(period, window.end, &zone).start, window.end);
            let before = WallTime(window.start.0 - 1);
            prop_assert_eq!(Window::of(period, before, &zone).end, window.start);
        }
    }
}
