//! What a row says of tokens and money, and the sums of that which reports are read from.
//!
//! Everything is whole: tokens, and nano-dollars. A sum that would not fit stays at the end of its
//! range, which no sum of real calls comes near.

use std::borrow::Cow;
use std::collections::BTreeMap;

use rusqlite::{OptionalExtension as _, Row, Statement, Transaction, params};
use serde::Serialize;
use utoipa::ToSchema;

use super::rollup::OTHER;
use super::{Billing, CallEnd, Money};
use crate::policy::money::Nanodollars;
use crate::policy::price::Tokens;
use crate::policy::usage::Basis;

/// More tokens than any call has. A provider that tells of more must not spoil the sums.
const MOST_TOKENS: u64 = 1_000_000_000_000;

/// Groups of one day, before what comes new counts as [`OTHER`].
const MAX_GROUPS: i64 = 1000;

/// Quarter-hours in a day.
pub(super) const QUARTERS_A_DAY: i64 = 96;

/// The word in the record for a call whose model has no price.
pub(crate) const UNPRICED: &str = "unpriced";
/// The word for one whose provider said what it cost.
const REPORTED: &str = "reported";

/// The word in the record for how far tokens can be relied on.
const fn basis_word(basis: Basis) -> &'static str {
    match basis {
        Basis::Reported => "reported",
        Basis::Doubtful => "doubtful",
        Basis::Estimated => "estimated",
    }
}

/// Tokens and money of one call, as its row has them. Money is in nano-dollars, billionths of a
/// dollar: whole numbers, which a double holds exactly up to nine million dollars.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Account {
    /// Fresh input: neither read from the provider's cache nor written to it. `null` is unknown,
    /// as in all of these; a shared answer's tokens are those of the call that caused it.
    pub input_tokens: Option<u64>,
    /// Input read from the provider's cache.
    pub cached_input_tokens: Option<u64>,
    /// Input written to the cache for five minutes.
    pub cache_write_5m_tokens: Option<u64>,
    /// Input written to the cache for an hour.
    pub cache_write_1h_tokens: Option<u64>,
    /// Output, reasoning included.
    pub output_tokens: Option<u64>,
    /// The part of the output that was reasoning.
    pub reasoning_tokens: Option<u64>,
    /// How far these can be relied on: `reported` by the provider, `doubtful` where its counts do
    /// not add up, `estimated` in part.
    #[schema(value_type = Option<String>)]
    pub usage_basis: Option<Cow<'static, str>>,
    /// What it adds to the bill; `null` while that is not known, or without a price.
    pub cost_nanos: Option<i64>,
    /// What it is worth by the list; the same as the cost where it is paid for by the token.
    pub list_nanos: Option<i64>,
    /// What a joined or kept answer would have cost.
    pub saved_nanos: Option<i64>,
    /// `unpriced`: its model has no price. `reported`: the provider said what it cost. `reserved`:
    /// it was interrupted, and the cost is what was held for it. `null`: by Traygate's prices, or
    /// there is nothing to price.
    #[schema(value_type = Option<String>)]
    pub pricing: Option<Cow<'static, str>>,
    /// The tier of service that was asked for, where it has prices of its own.
    #[schema(value_type = Option<String>)]
    pub service_tier: Option<Cow<'static, str>>,
}

/// The columns of an [`Account`], in their order.
pub(super) const ACCOUNT_COLUMNS: &str = "input_tokens, cached_input_tokens,
    cache_write_5m_tokens, cache_write_1h_tokens, output_tokens, reasoning_tokens, usage_basis,
    cost_nanos, list_nanos, saved_nanos, pricing, service_tier";
/// How many they are.
pub(super) const ACCOUNT_LEN: usize = 12;

impl Account {
    pub(super) fn of(end: &CallEnd) -> Self {
        let (usage, money) = (&end.usage, &end.money);
        let known = usage.unwrap_or_default();
        let tokens = |count: Option<u64>| count.map(|count| count.min(MOST_TOKENS));
        let nanos = |amount: Option<Nanodollars>| amount.map(|amount| amount.0);
        let pricing = match money {
            Money { unpriced: true, .. } => Some(UNPRICED),
            Money { reported: true, .. } => Some(REPORTED),
            _ => None,
        };
        Self {
            input_tokens: tokens(known.input),
            cached_input_tokens: tokens(known.cached_input),
            cache_write_5m_tokens: tokens(known.cache_write_5m),
            cache_write_1h_tokens: tokens(known.cache_write_1h),
            output_tokens: tokens(known.output),
            reasoning_tokens: tokens(known.reasoning),
            usage_basis: usage.as_ref().map(|usage| basis_word(usage.basis).into()),
            cost_nanos: nanos(money.cost),
            list_nanos: nanos(money.list),
            saved_nanos: nanos(money.saved),
            pricing: pricing.map(Cow::from),
            service_tier: money.tier.map(Cow::from),
        }
    }

    /// Reads a row of which [`ACCOUNT_COLUMNS`] begin at column `first`.
    pub(super) fn read(row: &Row<'_>, first: usize) -> rusqlite::Result<Self> {
        let tokens = |column: usize| -> rusqlite::Result<Option<u64>> {
            let count: Option<i64> = row.get(first + column)?;
            Ok(count.map(|count| u64::try_from(count).unwrap_or(0)))
        };
        let word = |column: usize| -> rusqlite::Result<Option<Cow<'static, str>>> {
            let word: Option<String> = row.get(first + column)?;
            Ok(word.map(Cow::from))
        };
        Ok(Self {
            input_tokens: tokens(0)?,
            cached_input_tokens: tokens(1)?,
            cache_write_5m_tokens: tokens(2)?,
            cache_write_1h_tokens: tokens(3)?,
            output_tokens: tokens(4)?,
            reasoning_tokens: tokens(5)?,
            usage_basis: word(6)?,
            cost_nanos: row.get(first + 7)?,
            list_nanos: row.get(first + 8)?,
            saved_nanos: row.get(first + 9)?,
            pricing: word(10)?,
            service_tier: word(11)?,
        })
    }

    /// Binds the values of [`ACCOUNT_COLUMNS`] from parameter `first` on.
    pub(super) fn bind(&self, statement: &mut Statement<'_>, first: usize) -> rusqlite::Result<()> {
        let tokens = [
            self.input_tokens,
            self.cached_input_tokens,
            self.cache_write_5m_tokens,
            self.cache_write_1h_tokens,
            self.output_tokens,
            self.reasoning_tokens,
        ];
        for (count, parameter) in tokens.into_iter().zip(first..) {
            let count = count.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
            statement.raw_bind_parameter(parameter, count)?;
        }
        statement.raw_bind_parameter(first + 6, self.usage_basis.as_deref())?;
        statement.raw_bind_parameter(first + 7, self.cost_nanos)?;
        statement.raw_bind_parameter(first + 8, self.list_nanos)?;
        statement.raw_bind_parameter(first + 9, self.saved_nanos)?;
        statement.raw_bind_parameter(first + 10, self.pricing.as_deref())?;
        statement.raw_bind_parameter(first + 11, self.service_tier.as_deref())
    }

    /// The tokens that a price is applied to; `None` where none are known.
    pub(super) fn tokens(&self) -> Option<Tokens> {
        let count = |count: Option<u64>| count.unwrap_or(0);
        self.usage_basis.as_ref().map(|_| Tokens {
            input: count(self.input_tokens),
            cached_input: count(self.cached_input_tokens),
            cache_write_5m: count(self.cache_write_5m_tokens),
            cache_write_1h: count(self.cache_write_1h_tokens),
            output: count(self.output_tokens),
            reasoning: count(self.reasoning_tokens),
        })
    }

    /// What it adds to the sums.
    pub(super) fn spend(&self, billing: &str) -> Spend {
        let tokens = |count: Option<u64>| {
            let count = count.unwrap_or(0).min(MOST_TOKENS);
            i64::try_from(count).unwrap_or(i64::MAX)
        };
        let list = self.list_nanos.unwrap_or(0);
        let is_unpriced = self.pricing.as_deref() == Some(UNPRICED) && self.cost_nanos.is_none();
        let is_estimated = self.usage_basis.as_deref() == Some(basis_word(Basis::Estimated));
        Spend {
            input: tokens(self.input_tokens),
            cached_input: tokens(self.cached_input_tokens),
            cache_write_5m: tokens(self.cache_write_5m_tokens),
            cache_write_1h: tokens(self.cache_write_1h_tokens),
            output: tokens(self.output_tokens),
            reasoning: tokens(self.reasoning_tokens),
            cost: self.cost_nanos.unwrap_or(0),
            list,
            plan: if billing == Billing::Plan.as_str() {
                list
            } else {
                0
            },
            saved: self.saved_nanos.unwrap_or(0),
            unpriced: i64::from(is_unpriced),
            estimated: i64::from(is_estimated),
        }
    }
}

/// Sums over calls, or the difference between two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spend {
    pub(super) input: i64,
    pub(super) cached_input: i64,
    pub(super) cache_write_5m: i64,
    pub(super) cache_write_1h: i64,
    pub(super) output: i64,
    pub(super) reasoning: i64,
    /// Nano-dollars, as the next three.
    pub(super) cost: i64,
    pub(super) list: i64,
    /// The part of `list` that was on a subscription.
    pub(super) plan: i64,
    pub(super) saved: i64,
    /// Calls whose cost is not known, since their model has no price.
    pub(super) unpriced: i64,
    /// Calls whose tokens are estimated.
    pub(super) estimated: i64,
}

/// The columns of a [`Spend`], in their order; the same in every table of sums.
pub(super) const SPEND_COLUMNS: &str = "input_tokens, cached_input_tokens, cache_write_5m_tokens,
    cache_write_1h_tokens, output_tokens, reasoning_tokens, cost_nanos, list_nanos, plan_nanos,
    saved_nanos, unpriced, estimated";
/// How many they are.
pub(super) const SPEND_LEN: usize = 12;

impl Spend {
    fn values_mut(&mut self) -> [&mut i64; SPEND_LEN] {
        let Self {
            input,
            cached_input,
            cache_write_5m,
            cache_write_1h,
            output,
            reasoning,
            cost,
            list,
            plan,
            saved,
            unpriced,
            estimated,
        } = self;
        [
            input,
            cached_input,
            cache_write_5m,
            cache_write_1h,
            output,
            reasoning,
            cost,
            list,
            plan,
            saved,
            unpriced,
            estimated,
        ]
    }

    pub(super) fn values(mut self) -> [i64; SPEND_LEN] {
        self.values_mut().map(|value| *value)
    }

    pub(super) fn add(&mut self, other: Self) {
        for (value, more) in self.values_mut().into_iter().zip(other.values()) {
            *value = value.saturating_add(more);
        }
    }

    /// What has to be added to `before` to make this.
    pub(super) fn since(mut self, before: Self) -> Self {
        for (value, less) in self.values_mut().into_iter().zip(before.values()) {
            *value = value.saturating_sub(less);
        }
        self
    }

    /// Adds a row of which [`SPEND_COLUMNS`] begin at column `first`.
    pub(super) fn add_row(&mut self, row: &Row<'_>, first: usize) -> rusqlite::Result<()> {
        for (column, value) in self.values_mut().into_iter().enumerate() {
            *value = value.saturating_add(row.get(first + column)?);
        }
        Ok(())
    }
}

/// Calls, and what they used and cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) calls: i64,
    pub(super) spend: Spend,
}

impl Counted {
    pub(super) fn add(&mut self, other: Self) {
        self.calls = self.calls.saturating_add(other.calls);
        self.spend.add(other.spend);
    }

    /// Adds a row of which `calls` and [`SPEND_COLUMNS`] begin at column `first`.
    pub(super) fn add_row(&mut self, row: &Row<'_>, first: usize) -> rusqlite::Result<()> {
        self.calls = self.calls.saturating_add(row.get(first)?);
        self.spend.add_row(row, first + 1)
    }
}

/// Whose calls a day's sums are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Whose<'a> {
    day: i64,
    provider: Cow<'a, str>,
    model: Cow<'a, str>,
    tool: Cow<'a, str>,
}

/// Changes on their way into the tables that reports are read from.
#[derive(Debug, Default)]
pub(super) struct Reported<'a> {
    quarters: BTreeMap<i64, Counted>,
    days: BTreeMap<Whose<'a>, Counted>,
}

impl<'a> Reported<'a> {
    pub(super) fn add(
        &mut self,
        quarter: i64,
        provider: Cow<'a, str>,
        model: Cow<'a, str>,
        tool: Cow<'a, str>,
        more: Counted,
    ) {
        self.quarters.entry(quarter).or_default().add(more);
        let whose = Whose {
            day: quarter.div_euclid(QUARTERS_A_DAY),
            provider,
            model,
            tool,
        };
        self.days.entry(whose).or_default().add(more);
    }

    pub(super) fn write(self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        for (quarter, more) in self.quarters {
            add_to_quarter(transaction, quarter, more)?;
        }
        for (whose, more) in self.days {
            add_to_day(transaction, whose, more)?;
        }
        Ok(())
    }
}

// Added here and not by SQL, which makes a float of a sum that does not fit.

fn add_to_quarter(
    transaction: &Transaction<'_>,
    quarter: i64,
    more: Counted,
) -> rusqlite::Result<()> {
    let on_record = transaction
        .prepare_cached(&format!(
            "SELECT calls, {SPEND_COLUMNS} FROM spend_by_quarter WHERE quarter = ?1"
        ))?
        .query_row([quarter], read_counted)
        .optional()?;
    let mut sums = on_record.unwrap_or_default();
    sums.add(more);
    let mut save = transaction.prepare_cached(&format!(
        "INSERT OR REPLACE INTO spend_by_quarter (quarter, calls, {SPEND_COLUMNS})
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    ))?;
    save.raw_bind_parameter(1, quarter)?;
    bind_counted(&mut save, 2, sums)?;
    save.raw_execute().map(drop)
}

fn add_to_day(
    transaction: &Transaction<'_>,
    whose: Whose<'_>,
    more: Counted,
) -> rusqlite::Result<()> {
    let load = |whose: &Whose<'_>| {
        transaction
            .prepare_cached(&format!(
                "SELECT calls, {SPEND_COLUMNS} FROM spend_by_day
                 WHERE day = ?1 AND provider = ?2 AND model = ?3 AND tool = ?4"
            ))?
            .query_row(
                params![whose.day, whose.provider, whose.model, whose.tool],
                read_counted,
            )
            .optional()
    };
    let (whose, mut sums) = match load(&whose)? {
        Some(sums) => (whose, sums),
        None => {
            let groups: i64 = transaction
                .prepare_cached("SELECT count(*) FROM spend_by_day WHERE day = ?1")?
                .query_row([whose.day], |row| row.get(0))?;
            if groups < MAX_GROUPS {
                (whose, Counted::default())
            } else {
                let whose = Whose {
                    model: OTHER.into(),
                    tool: OTHER.into(),
                    ..whose
                };
                let sums = load(&whose)?.unwrap_or_default();
                (whose, sums)
            }
        }
    };
    sums.add(more);
    let mut save = transaction.prepare_cached(&format!(
        "INSERT OR REPLACE INTO spend_by_day (day, provider, model, tool, calls, {SPEND_COLUMNS})
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    ))?;
    save.raw_bind_parameter(1, whose.day)?;
    save.raw_bind_parameter(2, &whose.provider)?;
    save.raw_bind_parameter(3, &whose.model)?;
    save.raw_bind_parameter(4, &whose.tool)?;
    bind_counted(&mut save, 5, sums)?;
    save.raw_execute().map(drop)
}

fn read_counted(row: &Row<'_>) -> rusqlite::Result<Counted> {
    let mut sums = Counted::default();
    sums.add_row(row, 0).map(|()| sums)
}

fn bind_counted(save: &mut Statement<'_>, first: usize, sums: Counted) -> rusqlite::Result<()> {
    save.raw_bind_parameter(first, sums.calls)?;
    for (value, column) in sums.spend.values().into_iter().zip(first + 1..) {
        save.raw_bind_parameter(column, value)?;
    }
    Ok(())
}
