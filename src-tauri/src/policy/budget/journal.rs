//! Remembers what was spent when, by whom and on what, so that any budget can be reckoned anew.
//!
//! Sums are kept by the quarter of an hour. The offsets of all time zones in use are whole
//! quarters, so every local hour, day and month is made of whole quarters too, whatever zone the
//! machine comes to be in.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::Call;
use crate::clock::WallTime;
use crate::policy::calendar::Window;
use crate::policy::money::Nanodollars;

const QUARTER_MICROS: i64 = 900 * 1_000_000;

/// Sums that are remembered: a month of twenty busy tools, around the clock, is 60,000.
const MOST_SUMS: usize = 200_000;

/// Whose call it is, as budgets tell calls apart.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Scope {
    pub(super) provider: Box<str>,
    pub(super) model: Box<str>,
    pub(super) tool: Box<str>,
}

impl Scope {
    pub(super) fn call(&self) -> Call<'_> {
        Call {
            provider: &self.provider,
            model: &self.model,
            tool: &self.tool,
        }
    }
}

/// What was spent, by the quarter of an hour.
#[derive(Debug, Default)]
pub(super) struct Journal {
    quarters: BTreeMap<i64, HashMap<Arc<Scope>, Nanodollars>>,
    sums: usize,
    scopes: HashSet<Arc<Scope>>,
}

impl Journal {
    /// The one copy of a scope.
    pub(super) fn scope(&mut self, call: Call<'_>) -> Arc<Scope> {
        let scope = Scope {
            provider: call.provider.into(),
            model: call.model.into(),
            tool: call.tool.into(),
        };
        if let Some(known) = self.scopes.get(&scope) {
            return Arc::clone(known);
        }
        if self.scopes.len() >= MOST_SUMS {
            self.scopes.retain(|scope| Arc::strong_count(scope) > 1);
        }
        let scope = Arc::new(scope);
        self.scopes.insert(Arc::clone(&scope));
        scope
    }

    /// Adds what was spent at a time.
    pub(super) fn add(&mut self, at: WallTime, scope: &Arc<Scope>, cost: Nanodollars) {
        if cost == Nanodollars::ZERO {
            return;
        }
        let quarter = at.0.div_euclid(QUARTER_MICROS);
        let sums = self.quarters.entry(quarter).or_default();
        let sum = sums.entry(Arc::clone(scope)).or_insert_with(|| {
            self.sums += 1;
            Nanodollars::ZERO
        });
        *sum = sum.saturating_add(cost);
        while self.sums > MOST_SUMS && self.quarters.len() > 1 {
            let oldest = self.quarters.pop_first();
            self.sums -= oldest.map_or(0, |(_, sums)| sums.len());
        }
    }

    /// What was spent in a window by the calls that are meant.
    pub(super) fn spent(&self, window: Window, meant: impl Fn(Call<'_>) -> bool) -> Nanodollars {
        let first = window.start.0.div_euclid(QUARTER_MICROS);
        let last = (window.end.0 - 1).div_euclid(QUARTER_MICROS);
        self.quarters
            .range(first..=last)
            .flat_map(|(_, sums)| sums)
            .filter(|(scope, _)| meant(scope.call()))
            .map(|(_, sum)| *sum)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(tool: &str) -> Call<'_> {
        Call {
            provider: "openai",
            model: "gpt-5",
            tool,
        }
    }

    #[test]
    fn it_forgets_the_oldest_first_and_keeps_its_size() {
        let mut journal = Journal::default();
        let scopes: Vec<_> = (0..1_000)
            .map(|number| journal.scope(call(&format!("tool-{number}"))))
            .collect();
        for quarter in 0..300 {
            for scope in &scopes {
                journal.add(WallTime(quarter * QUARTER_MICROS), scope, Nanodollars(1));
            }
        }
        assert_eq!(journal.sums, MOST_SUMS);
        let all = Window {
            start: WallTime(i64::MIN),
            end: WallTime(i64::MAX),
        };
        assert_eq!(journal.spent(all, |_| true), Nanodollars(200_000));
        assert_eq!(
            journal.spent(all, |call| call.tool == "tool-7"),
            Nanodollars(200)
        );
        let early = Window {
            end: WallTime(100 * QUARTER_MICROS),
            ..all
        };
        assert_eq!(journal.spent(early, |_| true), Nanodollars::ZERO);
    }

    #[test]
    fn a_scope_that_nothing_was_spent_on_is_let_go() {
        let mut journal = Journal::default();
        for number in 0..MOST_SUMS + 10 {
            journal.scope(call(&number.to_string()));
        }
        assert_eq!(journal.scopes.len(), 10);
    }
}
