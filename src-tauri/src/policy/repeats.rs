//! Reckons which calls repeat an earlier one, and how soon.
//!
//! A call repeats an earlier one if both have the same key. It repeats it *within* a window if the
//! latest earlier call with that key came at most so long before it. Of several calls with one
//! key, only the first is no repeat.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

/// The windows that people ask about, ascending; the last is all time.
pub const WINDOWS: [Window; 4] = [
    Window {
        name: "5m",
        within: Some(Duration::from_secs(300)),
    },
    Window {
        name: "1h",
        within: Some(Duration::from_secs(3600)),
    },
    Window {
        name: "24h",
        within: Some(Duration::from_secs(86_400)),
    },
    Window {
        name: "all",
        within: None,
    },
];

/// How long before a call the earlier one may have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its name in tables and JSON.
    pub name: &'static str,
    /// Its length; `None` is all time.
    pub within: Option<Duration>,
}

/// Half of a SHA-256: with a billion different calls the chance that any two share one is 10⁻²¹.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key([u8; 16]);

impl Key {
    /// The first half of a 32-byte hash; `None` of anything shorter than that half.
    pub fn of_hash(hash: &[u8]) -> Option<Self> {
        hash.first_chunk().copied().map(Self)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// Lower-case hex.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A conversation as far as it has come. The key of a turn is the hash of all of it: every
/// message up to and including the user's, in their order, each with its role and content.
///
/// The hash is a chain, so that a conversation whose messages come one by one costs 32 bytes and
/// not its text: `h₀` is 32 zero bytes, `hₙ = SHA-256(hₙ₋₁ ‖ role ‖ 0 ‖ content)`. A role holds
/// no zero byte, and `hₙ₋₁` has a fixed length, so two conversations have one key only if they are
/// the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conversation([u8; 32]);

impl Conversation {
    /// Adds a message.
    pub fn say(&mut self, role: &str, content: &str) {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for part in role.split('\0') {
            hash.update(part);
        }
        hash.update([0]);
        hash.update(content);
        self.0 = hash.finalize().into();
    }

    /// The key of the turn that its last message is.
    pub fn key(&self) -> Key {
        let [half @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = self.0;
        Key(half)
    }
}

/// One call, as far as repeats go: 32 bytes, so that four million take 128 MB.
///
/// Ordered by key, then time; the rest makes the order, and so every figure, one and the same
/// however the calls came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    key: Key,
    /// Unix microseconds, or [`Turn::UNTIMED`]. `Option` would make it a quarter larger.
    at: i64,
    /// Stands for who called; [`Turn::NOBODY`] is the same as nobody.
    pub caller: u32,
    /// Stands for the model.
    pub model: u32,
}

impl Turn {
    /// The caller where it is not known who that was.
    pub const NOBODY: u32 = 0;

    /// Before all times.
    const UNTIMED: i64 = i64::MIN;

    /// A call with this key at `at`, in Unix microseconds. One without a time counts only where
    /// time does not.
    pub fn new(key: Key, at: Option<i64>, caller: u32, model: u32) -> Self {
        Self {
            key,
            at: at.unwrap_or(Self::UNTIMED),
            caller,
            model,
        }
    }

    /// When it came, in Unix microseconds.
    pub fn at(&self) -> Option<i64> {
        (self.at != Self::UNTIMED).then_some(self.at)
    }

    /// Time since `earlier`, if both are known.
    fn since(&self, earlier: &Self) -> Option<Duration> {
        let micros = self.at()?.checked_sub(earlier.at()?)?;
        u64::try_from(micros).ok().map(Duration::from_micros)
    }
}

/// Counts over some calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The calls.
    pub calls: u64,
    /// Those of them whose time is known: the whole of which a window's repeats are a part.
    pub timed: u64,
    /// What repeats, for each of [`WINDOWS`].
    pub repeats: [Repeated; WINDOWS.len()],
}

/// How many calls repeat an earlier one within a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeated {
    /// The calls that do.
    pub calls: u64,
    /// Those of them whose latest earlier call came from the same caller.
    pub same_caller: u64,
}

impl Tally {
    fn add(&mut self, turn: &Turn, earlier: Option<&Turn>) {
        self.calls += 1;
        self.timed += u64::from(turn.at().is_some());
        let Some(earlier) = earlier else { return };
        let gap = turn.since(earlier);
        let same_caller = turn.caller == earlier.caller && turn.caller != Turn::NOBODY;
        for (window, repeated) in WINDOWS.iter().zip(&mut self.repeats) {
            let within = match window.within {
                None => true,
                Some(within) => gap.is_some_and(|gap| gap <= within),
            };
            if within {
                repeated.calls += 1;
                repeated.same_caller += u64::from(same_caller);
            }
        }
    }
}

/// A key that came more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Most {
    /// How many calls had it.
    pub calls: u64,
    /// The first of them; by time, where times are known.
    pub first: Turn,
    /// The last of them.
    pub last: Turn,
}

impl Most {
    /// The key.
    pub fn key(&self) -> Key {
        self.last.key
    }
}

/// By what calls are counted apart, besides all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apart {
    /// By model.
    Models,
    /// By model and by caller: only where there are few callers.
    ModelsAndCallers,
}

/// What was reckoned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reckoning {
    /// Over all calls.
    pub all: Tally,
    /// By [`Turn::caller`], if asked for.
    pub by_caller: HashMap<u32, Tally>,
    /// By [`Turn::model`].
    pub by_model: HashMap<u32, Tally>,
    /// Times of the first and the last call that has one, in Unix microseconds.
    pub span: Option<(i64, i64)>,
    /// The most repeated keys, most first.
    pub most: Vec<Most>,
}

impl Reckoning {
    /// Reckons over `turns`, which it sorts in place: no memory besides theirs and the answer's.
    pub fn of(turns: &mut [Turn], apart: Apart, most: usize) -> Self {
        turns.sort_unstable();
        let mut reckoning = Self::default();
        for same in turns.chunk_by(|a, b| a.key == b.key) {
            let mut earlier = None;
            for turn in same {
                reckoning.count(turn, earlier, apart);
                earlier = Some(turn);
            }
            if let [first, .., last] = same {
                reckoning.rank(
                    Most {
                        calls: u64::try_from(same.len()).unwrap_or(u64::MAX),
                        first: *first,
                        last: *last,
                    },
                    most,
                );
            }
        }
        reckoning
    }

    fn count(&mut self, turn: &Turn, earlier: Option<&Turn>, apart: Apart) {
        self.all.add(turn, earlier);
        let model = self.by_model.entry(turn.model).or_default();
        model.add(turn, earlier);
        if apart == Apart::ModelsAndCallers {
            let caller = self.by_caller.entry(turn.caller).or_default();
            caller.add(turn, earlier);
        }
        if let Some(at) = turn.at() {
            let (first, last) = self.span.get_or_insert((at, at));
            *first = at.min(*first);
            *last = at.max(*last);
        }
    }

    /// Keeps the `room` highest; of equal ones those with the lower key, which come first.
    fn rank(&mut self, new: Most, room: usize) {
        let place = self.most.partition_point(|most| most.calls >= new.calls);
        if place < room {
            self.most.truncate(room - 1);
            self.most.insert(place, new);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: i64 = 1_000_000;

    fn key(n: u8) -> Key {
        Key([n; 16])
    }

    fn turn(n: u8, seconds: i64, caller: u32) -> Turn {
        Turn::new(key(n), Some(seconds * SECOND), caller, 0)
    }

    fn repeats(turns: &mut [Turn]) -> [(u64, u64); 4] {
        let reckoning = Reckoning::of(turns, Apart::Models, 3);
        reckoning.all.repeats.map(|r| (r.calls, r.same_caller))
    }

    #[test]
    fn a_turn_is_small() {
        assert_eq!(size_of::<Turn>(), 32);
    }

    #[test]
    fn a_window_includes_its_edge_and_looks_at_the_latest_earlier_call() {
        let at_the_edge = &mut [turn(1, 0, 7), turn(1, 300, 7)];
        assert_eq!(repeats(at_the_edge), [(1, 1); 4]);
        let past_it = &mut [turn(1, 0, 7), turn(1, 301, 7)];
        assert_eq!(repeats(past_it), [(0, 0), (1, 1), (1, 1), (1, 1)]);
        // An hour after the first, but a minute after the second, which was somebody else.
        let chain = &mut [turn(1, 0, 7), turn(1, 3540, 8), turn(1, 3600, 7)];
        assert_eq!(repeats(chain), [(1, 0), (2, 0), (2, 0), (2, 0)]);
        let strangers = &mut [turn(1, 0, 7), turn(2, 1, 7)];
        assert_eq!(repeats(strangers), [(0, 0); 4]);
    }

    #[test]
    fn calls_without_a_time_count_for_all_time_only() {
        let untimed = Turn::new(key(1), None, 7, 0);
        let turns = &mut [untimed, turn(1, 5, 7), untimed];
        assert_eq!(repeats(turns), [(0, 0), (0, 0), (0, 0), (2, 2)]);
        let all = Reckoning::of(turns, Apart::Models, 0).all;
        assert_eq!((all.calls, all.timed), (3, 1));
    }

    #[test]
    fn times_at_the_ends_of_the_calendar_do_no_harm() {
        let ends = [i64::MIN + 1, i64::MAX].map(|at| Turn::new(key(1), Some(at), 7, 0));
        assert_eq!(repeats(&mut ends.clone()), [(0, 0), (0, 0), (0, 0), (1, 1)]);
    }

    #[test]
    fn the_most_repeated_come_first_and_once_only_not_at_all() {
        let turns = &mut [
            turn(4, 1, 0),
            turn(2, 9, 1),
            turn(2, 3, 2),
            turn(3, 1, 0),
            turn(3, 2, 0),
            turn(1, 1, 0),
            turn(1, 2, 0),
            turn(1, 3, 0),
        ];
        let most = Reckoning::of(turns, Apart::Models, 2).most;
        let seen: Vec<_> = most.iter().map(|most| (most.key(), most.calls)).collect();
        assert_eq!(seen, [(key(1), 3), (key(2), 2)]);
        let second = &most[1];
        assert_eq!((second.first.caller, second.last.caller), (2, 1));
        assert_eq!(Reckoning::of(turns, Apart::Models, 9).most.len(), 3);
        assert!(Reckoning::of(turns, Apart::Models, 0).most.is_empty());
    }

    #[test]
    fn the_key_is_of_the_whole_conversation() {
        let said = |messages: &[(&str, &str)]| {
            let mut conversation = Conversation::default();
            for (role, content) in messages {
                conversation.say(role, content);
            }
            conversation.key()
        };
        let hi = said(&[("user", "hi")]);
        assert_eq!(hi, said(&[("user", "hi")]));
        let different = [
            said(&[]),
            said(&[("user", "hi"), ("user", "")]),
            said(&[("user", "h"), ("user", "i")]),
            said(&[("system", "hi")]),
            said(&[("use", "r\0hi")]),
            said(&[("system", "x"), ("user", "hi")]),
            said(&[("user", "hi"), ("assistant", "hello"), ("user", "hi")]),
            said(&[("user", "hi"), ("assistant", "hey"), ("user", "hi")]),
        ];
        for (n, key) in different.iter().enumerate() {
            assert_ne!(*key, hi);
            assert!(!different[..n].contains(key), "{n}");
        }
        // Once written down it stays: figures of two versions can be compared.
        assert_eq!(hi.to_string(), "9974a2ca235cb22c125cf42fc5ea3bab");
    }

    /// The definition, word for word, at the cost of looking at every pair.
    fn plainly(turns: &[Turn]) -> Tally {
        let mut tally = Tally::default();
        let mut order: Vec<Turn> = turns.to_vec();
        order.sort_by_key(|turn| (turn.at(), turn.caller, turn.model));
        for (n, turn) in order.iter().enumerate() {
            tally.calls += 1;
            tally.timed += u64::from(turn.at().is_some());
            let latest = order[..n].iter().rev().find(|other| other.key == turn.key);
            let Some(latest) = latest else { continue };
            for (window, repeated) in WINDOWS.iter().zip(&mut tally.repeats) {
                let repeats = match (window.within, turn.at(), latest.at()) {
                    (None, ..) => true,
                    (Some(within), Some(at), Some(before)) => {
                        i128::from(at) - i128::from(before)
                            <= i128::try_from(within.as_micros()).expect("a window")
                    }
                    _ => false,
                };
                if repeats {
                    repeated.calls += 1;
                    let known = turn.caller != Turn::NOBODY;
                    repeated.same_caller += u64::from(known && latest.caller == turn.caller);
                }
            }
        }
        tally
    }

    fn any_turn() -> impl Strategy<Value = Turn> {
        let at = prop_oneof![
            1 => Just(None),
            // Around the windows' edges.
            8 => (0..300_i64).prop_map(|n| Some(n * 300 * SECOND)),
            2 => (0..90_000 * SECOND).prop_map(Some),
        ];
        (0..6_u8, at, 0..3_u32, 0..3_u32)
            .prop_map(|(n, at, caller, model)| Turn::new(key(n), at, caller, model))
    }

    proptest! {
        #[test]
        fn it_equals_the_plain_reckoning_in_whatever_order_calls_come(
            turns in prop::collection::vec(any_turn(), 0..80).prop_shuffle(),
        ) {
            let reckoning = Reckoning::of(&mut turns.clone(), Apart::ModelsAndCallers, 4);
            prop_assert_eq!(reckoning.all, plainly(&turns));
            for tallies in [&reckoning.by_model, &reckoning.by_caller] {
                let calls: u64 = tallies.values().map(|tally| tally.calls).sum();
                let longest: u64 = tallies.values().map(|tally| tally.repeats[3].calls).sum();
                prop_assert_eq!(calls, reckoning.all.calls);
                prop_assert_eq!(longest, reckoning.all.repeats[3].calls);
            }
            let mut counts: HashMap<Key, u64> = HashMap::new();
            for turn in &turns {
                *counts.entry(turn.key).or_default() += 1;
            }
            let mut counts: Vec<u64> = counts.into_values().filter(|count| *count > 1).collect();
            counts.sort_unstable_by(|a, b| b.cmp(a));
            counts.truncate(4);
            let most: Vec<u64> = reckoning.most.iter().map(|most| most.calls).collect();
            prop_assert_eq!(most, counts);
            for window in reckoning.all.repeats.windows(2) {
                prop_assert!(window[0].calls <= window[1].calls);
            }
        }
    }
}
