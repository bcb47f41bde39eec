//! Prices rows that are on record, and the sums with them, once a model that had no price has one.
//!
//! Bit by bit on the writer's thread, so that it alone changes rows and sums.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use rusqlite::{OptionalExtension as _, Row, Transaction, params};

use super::Billing;
use super::rollup::{self, Group};
use super::spend::{ACCOUNT_COLUMNS, ACCOUNT_LEN, Account, Counted};
use crate::clock::WallTime;
use crate::policy::money::Nanodollars;
use crate::policy::price::Tokens;

/// Unpriced rows that one step looks at: some milliseconds, between which rows are committed.
const STEP: i64 = 250;

/// A call that is on record without a price.
#[derive(Clone, Copy, Debug)]
pub struct Unpriced<'a> {
    /// The provider's name in the settings.
    pub provider: &'a str,
    /// The model as the client spelled it.
    pub model: &'a str,
    /// When the call came: the time to price it by.
    pub at: WallTime,
    /// The tier of service that was asked for, where it has prices of its own.
    pub tier: Option<&'a str>,
    /// What it used.
    pub tokens: Tokens,
}

/// A call that has been given its price: what it adds to the bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Priced {
    /// The provider's name in the settings.
    pub provider: String,
    /// The model as the client spelled it.
    pub model: String,
    /// The tool that called.
    pub tool: String,
    /// When the call came.
    pub at: WallTime,
    /// What it comes to.
    pub cost: Nanodollars,
}

type PriceFn = dyn Fn(&Unpriced<'_>) -> Option<Nanodollars> + Send + Sync;
type PricedFn = dyn Fn(&Priced) + Send + Sync;

/// Says what a call comes to.
#[derive(Clone)]
pub(super) struct PriceOf {
    price: Arc<PriceFn>,
    priced: Arc<PricedFn>,
}

impl PriceOf {
    pub(super) fn new(
        price: impl Fn(&Unpriced<'_>) -> Option<Nanodollars> + Send + Sync + 'static,
        priced: impl Fn(&Priced) + Send + Sync + 'static,
    ) -> Self {
        Self {
            price: Arc::new(price),
            priced: Arc::new(priced),
        }
    }
}

impl fmt::Debug for PriceOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PriceOf(..)")
    }
}

/// A run through the rows without a price.
#[derive(Debug)]
pub(super) struct Repricing {
    price: PriceOf,
    round: Round,
    /// The last row that was looked at in this round.
    seq: i64,
}

/// Shared answers come first: what they saved is told by the tokens of the call that caused them,
/// which is found while it has no price itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    Shared,
    Own,
}

impl Repricing {
    pub(super) fn new(price: PriceOf) -> Self {
        Self {
            price,
            round: Round::Shared,
            seq: 0,
        }
    }

    /// Does a piece of it; says whether that was the last. If the transaction fails the same piece
    /// is to be done again: [`Self::done`] moves on.
    pub(super) fn step(&self, transaction: &Transaction<'_>) -> rusqlite::Result<Stepped> {
        let rows: Vec<PricedRow> = transaction
            .prepare_cached(&format!(
                "SELECT {ROW_COLUMNS}, {ACCOUNT_COLUMNS} FROM calls INDEXED BY calls_unpriced
                 WHERE pricing = 'unpriced' AND seq > ?1 ORDER BY seq LIMIT ?2"
            ))?
            .query_map([self.seq, STEP], PricedRow::read)?
            .collect::<rusqlite::Result<_>>()?;
        let mut stepped = Stepped {
            last: rows.last().map(|row| row.seq),
            priced: Vec::new(),
        };
        let mut changes = Changes::default();
        for row in rows {
            let account = match (self.round, row.upstream_call) {
                (Round::Shared, false) => self.shared(transaction, &row)?,
                (Round::Own, true) => self.own(&row),
                _ => None,
            };
            if let Some(account) = account {
                stepped.priced.extend(row.priced(&account));
                changes.make(transaction, row, account)?;
            }
        }
        changes.write(transaction)?;
        Ok(stepped)
    }

    /// A step is committed: tells what it added to the bill. Says whether all is done.
    pub(super) fn done(&mut self, stepped: Stepped) -> bool {
        stepped
            .priced
            .iter()
            .for_each(|call| (self.price.priced)(call));
        match (stepped.last, self.round) {
            (Some(last), _) => self.seq = last,
            (None, Round::Shared) => {
                self.round = Round::Own;
                self.seq = 0;
            }
            (None, Round::Own) => return true,
        }
        false
    }

    /// The account of a call that went upstream, priced.
    fn own(&self, row: &PricedRow) -> Option<Account> {
        let price = self.price(row, &row.account)?;
        let is_plan = row.group.billing == Billing::Plan.as_str();
        Some(Account {
            cost_nanos: if is_plan {
                row.account.cost_nanos
            } else {
                Some(price.0)
            },
            list_nanos: Some(price.0),
            pricing: None,
            ..row.account.clone()
        })
    }

    /// The account of one that shared an answer: it saved what that cost.
    fn shared(
        &self,
        transaction: &Transaction<'_>,
        row: &PricedRow,
    ) -> rusqlite::Result<Option<Account>> {
        let caused_by = transaction
            .prepare_cached(&format!(
                "SELECT {ACCOUNT_COLUMNS} FROM calls INDEXED BY calls_unpriced_shared
                 WHERE pricing = 'unpriced' AND upstream_call = 1 AND request_key IS NOT NULL
                   AND request_key = ?1 AND id < ?2
                 ORDER BY id DESC LIMIT 1"
            ))?
            .query_row(params![row.request_key, row.id], |row| {
                Account::read(row, 0)
            })
            .optional()?;
        let price = caused_by.and_then(|account| self.price(row, &account));
        Ok(price.map(|price| Account {
            saved_nanos: Some(price.0),
            pricing: None,
            ..row.account.clone()
        }))
    }

    /// What the call with this account comes to.
    fn price(&self, row: &PricedRow, account: &Account) -> Option<Nanodollars> {
        (self.price.price)(&Unpriced {
            provider: &row.group.provider,
            model: Some(row.group.model.as_ref()).filter(|model| !model.is_empty())?,
            at: row.started,
            tier: account.service_tier.as_deref(),
            tokens: account.tokens()?,
        })
    }
}

/// What became of a step.
#[derive(Clone, Debug)]
pub(super) struct Stepped {
    last: Option<i64>,
    priced: Vec<Priced>,
}

/// A row as far as its money goes.
struct PricedRow {
    seq: i64,
    id: String,
    started: WallTime,
    group: Group<'static>,
    upstream_call: bool,
    request_key: Option<Vec<u8>>,
    account: Account,
}

/// What [`PricedRow::read`] reads before [`ACCOUNT_COLUMNS`].
const ROW_COLUMNS: &str =
    "seq, id, started_us, provider, model, tool, billing, streaming, upstream_call, request_key";

impl PricedRow {
    /// What `account` adds to the bill; `None` if that is nothing.
    fn priced(&self, account: &Account) -> Option<Priced> {
        let (before, after) = (self.account.cost_nanos, account.cost_nanos?);
        let cost = after.saturating_sub(before.unwrap_or(0));
        (cost != 0).then(|| Priced {
            provider: self.group.provider.to_string(),
            model: self.group.model.to_string(),
            tool: self.group.tool.to_string(),
            at: self.started,
            cost: Nanodollars(cost),
        })
    }

    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let started = WallTime(row.get(2)?);
        Ok(Self {
            seq: row.get(0)?,
            id: row.get(1)?,
            started,
            group: Group {
                quarter: rollup::quarter_of(started),
                provider: row.get::<_, String>(3)?.into(),
                model: row.get::<_, Option<String>>(4)?.unwrap_or_default().into(),
                tool: row.get::<_, String>(5)?.into(),
                billing: row.get::<_, String>(6)?.into(),
                streaming: row.get(7)?,
            },
            upstream_call: row.get::<_, Option<bool>>(8)? == Some(true),
            request_key: row.get(9)?,
            account: Account::read(row, 10)?,
        })
    }
}

/// Changes of sums, gathered: many rows share a group.
#[derive(Default)]
struct Changes(BTreeMap<Group<'static>, Counted>);

impl Changes {
    /// Writes the row's new account, and notes what that does to its sums.
    fn make(
        &mut self,
        transaction: &Transaction<'_>,
        row: PricedRow,
        account: Account,
    ) -> rusqlite::Result<()> {
        let mut update = transaction.prepare_cached(&format!(
            "UPDATE calls SET ({ACCOUNT_COLUMNS}) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
             WHERE seq = ?"
        ))?;
        account.bind(&mut update, 1)?;
        update.raw_bind_parameter(ACCOUNT_LEN + 1, row.seq)?;
        update.raw_execute()?;
        let billing = &row.group.billing;
        let change = account.spend(billing).since(row.account.spend(billing));
        self.0.entry(row.group).or_default().spend.add(change);
        Ok(())
    }

    fn write(self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        for (group, change) in self.0 {
            rollup::amend(transaction, group, change, |_| {})?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;
    use rusqlite::Connection;
    use tempfile::TempDir;

    use super::super::rollup::tests::check_spend_against_rows;
    use super::super::tests::{LONG, database, end, open, start};
    use super::super::{CallEnd, CallId, CallStart, DedupLabel, Money, Store};
    use super::*;
    use crate::policy::usage::Usage;

    /// 2026-09-21T14:15:00Z, where a quarter-hour begins.
    const BEGIN: i64 = 1_790_000_100_000_000;

    /// A metered call of a model without a price.
    fn unpriced(minute: i64, model: &str, key: u8) -> CallEnd {
        let started = WallTime(BEGIN + minute * 60_000_000);
        CallEnd {
            usage: Some(Usage {
                input: Some(100),
                output: Some(10),
                ..Usage::default()
            }),
            money: Money {
                unpriced: true,
                ..Money::default()
            },
            ..end(CallStart {
                id: CallId::new(started),
                started,
                model: Some(Arc::from(model)),
                key: Some([key; 32]),
                ..start()
            })
        }
    }

    /// One that shared the answer of such a call.
    fn shared(minute: i64, model: &str, key: u8) -> CallEnd {
        let end = unpriced(minute, model, key);
        CallEnd {
            start: CallStart {
                dedup: DedupLabel::Joined,
                ..end.start
            },
            usage: None,
            money: Money {
                cost: Some(Nanodollars::ZERO),
                unpriced: true,
                ..Money::default()
            },
            sent: None,
            head: None,
            upstream_ended: None,
            ..end
        }
    }

    /// Two a token in, thirty a token out, for one model; in the fast tier twice that.
    fn price(call: &Unpriced<'_>) -> Option<Nanodollars> {
        let tokens = i64::try_from(call.tokens.input * 2 + call.tokens.output * 30).ok()?;
        let times = if call.tier == Some("priority") { 2 } else { 1 };
        (call.model == "priced").then_some(Nanodollars(tokens * times))
    }

    fn record(folder: &Path, ends: &[CallEnd]) -> Store {
        let store = open(folder);
        for end in ends {
            store.finished(end.clone());
        }
        assert!(store.flush(LONG));
        store
    }

    fn money(folder: &Path, end: &CallEnd) -> (Option<i64>, Option<i64>, Option<i64>, bool) {
        let connection = Connection::open(database(folder)).expect("a database");
        connection
            .query_row(
                "SELECT cost_nanos, list_nanos, saved_nanos, coalesce(pricing, '') FROM calls
                 WHERE id = ?1",
                [end.start.id.to_string()],
                |row| {
                    let pricing: String = row.get(3)?;
                    Ok((row.get(0)?, row.get(1)?, row.get(2)?, pricing == "unpriced"))
                },
            )
            .expect("a row")
    }

    #[test]
    fn what_had_no_price_gets_it_and_nothing_else_changes() {
        let folder = TempDir::new().expect("a folder");
        let own = unpriced(0, "priced", 1);
        let joined = shared(1, "priced", 1);
        let elsewhere = unpriced(2, "unknown", 2);
        let fast = CallEnd {
            money: Money {
                unpriced: true,
                tier: Some("priority"),
                ..Money::default()
            },
            ..unpriced(3, "priced", 3)
        };
        let reported = CallEnd {
            money: Money {
                cost: Some(Nanodollars(77)),
                list: Some(Nanodollars(77)),
                reported: true,
                ..Money::default()
            },
            ..unpriced(4, "priced", 4)
        };
        let priced = CallEnd {
            money: Money {
                reported: false,
                ..reported.money
            },
            ..unpriced(5, "priced", 5)
        };
        let silent = CallEnd {
            usage: None,
            ..unpriced(6, "priced", 6)
        };
        let all = [own, joined, elsewhere, fast, reported, priced, silent];
        let store = record(folder.path(), &all);
        check_spend_against_rows(folder.path());
        store.reprice(price, |_| {});
        assert!(store.flush(LONG));
        check_spend_against_rows(folder.path());
        let told: Vec<_> = all.iter().map(|end| money(folder.path(), end)).collect();
        assert_eq!(
            told,
            [
                (Some(500), Some(500), None, false),
                (Some(0), None, Some(500), false),
                (None, None, None, true),
                (Some(1000), Some(1000), None, false),
                (Some(77), Some(77), None, false),
                (Some(77), Some(77), None, false),
                (None, None, None, true),
            ]
        );
        // A second time there is nothing to do.
        store.reprice(price, |_| {});
        assert!(store.flush(LONG));
        check_spend_against_rows(folder.path());
    }

    #[test]
    fn it_goes_on_through_many_steps_while_calls_are_recorded() {
        let folder = TempDir::new().expect("a folder");
        let many: Vec<CallEnd> = (0..STEP * 3 + 7)
            .map(|n| match n % 3 {
                0 => unpriced(n % 90, "priced", 1),
                1 => unpriced(n % 90, "unknown", 2),
                _ => shared(n % 90 + 1, "priced", 1),
            })
            .collect();
        let store = record(folder.path(), &many);
        store.reprice(price, |_| {});
        for n in 0..50 {
            store.finished(unpriced(n, "unknown", 9));
        }
        assert!(store.flush(LONG));
        check_spend_against_rows(folder.path());
        for end in &many {
            let is_known = end.start.model.as_deref() == Some("priced");
            let (cost, _, saved, is_unpriced) = money(folder.path(), end);
            assert_eq!(is_unpriced, !is_known);
            let worth = if end.sent.is_some() { cost } else { saved };
            assert_eq!(worth, is_known.then_some(500));
        }
    }

    #[test]
    fn later_prices_take_the_place_of_earlier_ones_under_way() {
        let folder = TempDir::new().expect("a folder");
        let many: Vec<CallEnd> = (0..STEP * 2).map(|n| unpriced(n, "priced", 1)).collect();
        let store = record(folder.path(), &many);
        let asked = Arc::new(AtomicUsize::new(0));
        let none = Arc::clone(&asked);
        store.reprice(
            move |_| {
                none.fetch_add(1, Ordering::Relaxed);
                None
            },
            |_| {},
        );
        store.reprice(price, |_| {});
        assert!(store.flush(LONG));
        let priced = many
            .iter()
            .filter(|end| money(folder.path(), end).0 == Some(500));
        assert_eq!(priced.count(), many.len());
    }

    #[test]
    fn sums_of_days_that_were_put_together_are_found() {
        let folder = TempDir::new().expect("a folder");
        let ends: Vec<CallEnd> = (0..40).map(|n| unpriced(n, "priced", 1)).collect();
        record(folder.path(), &ends).close();
        let mut connection = Connection::open(database(folder.path())).expect("a database");
        let transaction = connection.transaction().expect("a transaction");
        let day = rollup::quarter_of(WallTime(BEGIN)).div_euclid(96) * 96;
        rollup::put_together(&transaction, day, day + 96).expect("sums");
        transaction.commit().expect("a commit");
        let store = open(folder.path());
        store.reprice(price, |_| {});
        assert!(store.flush(LONG));
        let sums = |table: &str| -> (i64, i64, i64) {
            let sql = format!("SELECT count(*), sum(cost_nanos), sum(unpriced) FROM {table}");
            connection
                .query_row(&sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
                .expect("sums")
        };
        assert_eq!(sums("rollups"), (1, 40 * 500, 0));
        assert_eq!(sums("spend_by_day"), (1, 40 * 500, 0));
        assert_eq!(sums("spend_by_quarter").1, 40 * 500);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn sums_stay_those_of_the_rows(
            calls in prop::collection::vec((0..200_i64, 0..2_usize, 0..3_u8, any::<bool>()), 1..80),
        ) {
            let folder = TempDir::new().expect("a folder");
            let ends: Vec<CallEnd> = calls
                .into_iter()
                .map(|(minute, model, key, is_shared)| {
                    let model = ["priced", "unknown"][model];
                    if is_shared {
                        shared(minute, model, key)
                    } else {
                        unpriced(minute, model, key)
                    }
                })
                .collect();
            let store = record(folder.path(), &ends);
            store.reprice(price, |_| {});
            prop_assert!(store.flush(LONG));
            check_spend_against_rows(folder.path());
        }
    }
}
