//! A call's bill: what is reserved for it before it goes upstream, and what it comes to in the end.

use std::fmt;
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use memchr::memmem;

use super::error::CallError;
use super::usage::Used;
use crate::clock::WallTime;
use crate::core::Core;
use crate::core::spend::{Asked, Granted, NotGranted, Waiting};
use crate::policy::budget::{self, CacheWrites, Hold, Refusal, Worst};
use crate::policy::fingerprint::RequestFacts;
use crate::policy::money::Nanodollars;
use crate::policy::price::{Price, Tokens};
use crate::policy::routing::{Dialect, Route};
use crate::policy::usage::Usage;
use crate::provider::Provider;
use crate::settings::Unpriced;
use crate::store::{Billing, Money};

/// What the answer of a shared call has cost, once that is known: what whoever shares it saves.
/// `None` in it: its model is unpriced. Empty for good where nothing is saved that counts: a
/// subscription's answer.
pub type Worth = Arc<OnceLock<Option<Nanodollars>>>;

/// A unit of money that a call of unknown cost is taken for: refused where nothing is left.
const A_TRIFLE: Worst = Worst::AtMost(Nanodollars(1));

/// What of a request's body bounds its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    bytes: u64,
    attachments: u64,
    refers_outside: bool,
    asks_for_cache: bool,
    tier: Option<Tier>,
}

/// A `service_tier` that a request names: `auto`, and those that have prices of their own in the
/// list. Any other is billed as none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    Auto,
    Default,
    Fast,
    Flex,
    Priority,
}

impl Tier {
    const ALL: [Tier; 5] = [
        Tier::Auto,
        Tier::Default,
        Tier::Fast,
        Tier::Flex,
        Tier::Priority,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Tier::Auto => "auto",
            Tier::Default => "default",
            Tier::Fast => "fast",
            Tier::Flex => "flex",
            Tier::Priority => "priority",
        }
    }

    /// The one after the key in `rest`, which begins behind it.
    fn after_key(rest: &[u8]) -> Option<Tier> {
        let value = rest.trim_ascii_start().strip_prefix(b":")?;
        let value = value.trim_ascii_start().strip_prefix(b"\"")?;
        Tier::ALL.into_iter().find(|tier| {
            let word = value.strip_prefix(tier.as_str().as_bytes());
            word.is_some_and(|rest| rest.starts_with(b"\""))
        })
    }
}

type Finder = memmem::Finder<'static>;

/// What is looked for in every body. Made once: making a finder takes longer than to look through a
/// small body with it.
struct Words {
    tier: Finder,
    base64: Finder,
    audio: Finder,
    file_id: Finder,
    cache: Finder,
    addresses: [Finder; 3],
}

static WORDS: LazyLock<Words> = LazyLock::new(|| {
    let word = |word: &'static str| Finder::new(word.as_bytes());
    Words {
        tier: word("\"service_tier\""),
        base64: word("base64"),
        audio: word("\"input_audio\""),
        file_id: word("\"file_id\""),
        cache: word("\"cache_control\""),
        addresses: ["\"url\"", "\"image_url\"", "\"file_url\""].map(word),
    }
});

impl Weight {
    /// Of a body as the provider reads it, decompressed.
    ///
    /// Keys are looked for with their quotes: within a text these are escaped, so that what a
    /// prompt quotes is not taken for one.
    pub fn of(body: &[u8]) -> Weight {
        let words = &*WORDS;
        let count = |word: &Finder| word.find_iter(body).count() as u64;
        let tier = words.tier.find(body);
        let tier = tier.and_then(|at| Tier::after_key(&body[at + words.tier.needle().len()..]));
        Weight {
            bytes: body.len() as u64,
            attachments: count(&words.base64) + count(&words.audio),
            refers_outside: words.file_id.find(body).is_some() || names_an_address(body),
            asks_for_cache: words.cache.find(body).is_some(),
            tier,
        }
    }
}

/// Whether the body leaves it to the provider to fetch something. A tool's schema has keys of the
/// same names, whose values are objects.
fn names_an_address(body: &[u8]) -> bool {
    let addresses = WORDS.addresses.iter();
    addresses
        .flat_map(|key| {
            let found = key.find_iter(body);
            found.map(|at| at + key.needle().len())
        })
        .any(|at| {
            let value = body[at..].trim_ascii_start().strip_prefix(b":");
            value.is_some_and(|value| value.trim_ascii_start().starts_with(b"\"http"))
        })
}

/// One call's bill. Its row owns it, and settles it when it is dropped.
pub struct Bill {
    core: Arc<Core>,
    provider: Arc<Provider>,
    model: Option<Arc<str>>,
    tool: Arc<str>,
    billing: Billing,
    meter: Meter,
    price: Price,
    tier: Option<Tier>,
    worst: Worst,
    hold: Option<Hold>,
    /// The time to price it by.
    at: WallTime,
    worth: Worth,
}

/// How a route's cost is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meter {
    /// By the tokens that its answer tells.
    Tokens,
    /// It costs nothing.
    Nothing,
    /// Its answer tells nothing that is understood here.
    Unknown,
}

/// Whose call a bill is for, and what for.
pub struct Ordered<'a> {
    pub provider: &'a Arc<Provider>,
    pub model: Option<&'a Arc<str>>,
    pub tool: Arc<str>,
    pub billing: Billing,
    pub route: Route,
    pub dialect: Dialect,
    pub facts: &'a RequestFacts,
    /// `None` where the body was not read.
    pub weight: Option<Weight>,
    pub worth: Worth,
}

impl Bill {
    pub fn new(core: &Arc<Core>, ordered: Ordered<'_>) -> Bill {
        let at = core.clock.wall();
        let meter = match ordered.route {
            Route::Free => Meter::Nothing,
            Route::UnknownPost => Meter::Unknown,
            _ => Meter::Tokens,
        };
        let settings = &ordered.provider.settings;
        let price = match ordered.model {
            _ if settings.local => Price::Free,
            Some(model) if meter == Meter::Tokens => core.spend.price(settings, model),
            _ => Price::Unpriced,
        };
        let tier = ordered.weight.and_then(|weight| weight.tier);
        let worst = match (ordered.billing, meter) {
            (Billing::Plan | Billing::Free | Billing::Unmetered, _) | (_, Meter::Nothing) => {
                Worst::Nothing
            }
            (Billing::Metered, Meter::Unknown) => match core.world().settings.spend.unpriced {
                Unpriced::Allow => A_TRIFLE,
                Unpriced::Refuse => Worst::Unknown,
            },
            (Billing::Metered, Meter::Tokens) => worst_case(core, &ordered, &price, at),
        };
        Bill {
            core: core.clone(),
            provider: ordered.provider.clone(),
            model: ordered.model.cloned(),
            tool: ordered.tool,
            billing: ordered.billing,
            meter,
            price,
            tier,
            worst,
            hold: None,
            at,
            worth: ordered.worth,
        }
    }

    fn call(&self) -> budget::Call<'_> {
        budget::Call {
            provider: self.provider.name(),
            model: self.model.as_deref().unwrap_or_default(),
            tool: &self.tool,
        }
    }

    /// What is held for it in the record until its cost is known.
    pub fn reserved(&self) -> Option<Nanodollars> {
        match self.worst {
            Worst::AtMost(most) if self.meter == Meter::Tokens && self.hold.is_some() => Some(most),
            _ => None,
        }
    }

    /// Whether a budget would refuse it as things stand: then it need not wait for anything else.
    ///
    /// # Errors
    /// [`CallError::BudgetExceeded`].
    pub fn check(&self) -> Result<(), CallError> {
        match self.core.budget_refusal(self.call(), self.worst) {
            Some(refusal) => Err(self.refused(refusal, None)),
            None => Ok(()),
        }
    }

    /// Reserves its worst case; gives a place to wait in where only what others have reserved
    /// stands in its way. Nothing happens if it is reserved already.
    ///
    /// # Errors
    /// [`CallError::BudgetExceeded`].
    pub fn reserve(&mut self) -> Result<Option<Waiting>, CallError> {
        if self.hold.is_some() {
            return Ok(None);
        }
        match self.core.reserve(self.call(), self.worst) {
            Asked::Untouched => Ok(None),
            Asked::Granted(granted) => {
                self.grant(granted);
                Ok(None)
            }
            Asked::Wait(waiting) => Ok(Some(waiting)),
            Asked::Refused(refusal) => Err(self.refused(refusal, None)),
        }
    }

    /// Takes what a place to wait in has come to, within `limit`.
    ///
    /// # Errors
    /// [`CallError::BudgetExceeded`].
    pub async fn wait(&mut self, waiting: Waiting, limit: Duration) -> Result<(), CallError> {
        match waiting.granted(limit).await {
            Ok(granted) => {
                self.grant(granted);
                Ok(())
            }
            Err(NotGranted { refusal, timed_out }) => {
                Err(self.refused(refusal, timed_out.then_some(limit)))
            }
        }
    }

    /// Lets it go whatever the budgets say: it is counted all the same.
    pub fn admit(&mut self) {
        if let Some(granted) = self.core.admit(self.call(), self.worst) {
            self.grant(granted);
        }
    }

    fn grant(&mut self, granted: Granted) {
        self.at = granted.at;
        self.hold = Some(granted.hold);
    }

    fn refused(&self, refusal: Refusal, waited: Option<Duration>) -> CallError {
        CallError::BudgetExceeded(Arc::new(BudgetExceeded {
            refusal,
            waited,
            provider: self.provider.name().clone(),
            model: self.model.clone(),
            tool: self.tool.clone(),
        }))
    }

    /// What it comes to. `answered`: the model that answered, as it names itself.
    pub fn settle(mut self, used: Used, answered: Option<&str>) -> Money {
        let money = self.money(used, answered);
        if let Some(hold) = self.hold.take() {
            let cost = money.cost.unwrap_or(Nanodollars::ZERO);
            self.core.settle_cost(hold, &self.tool, cost);
        }
        if money.unpriced
            && let Some(model) = &self.model
        {
            self.core.spend.saw_unpriced(self.provider.name(), model);
        }
        if self.billing != Billing::Plan && (money.cost.is_some() || money.unpriced) {
            // It is settled once.
            let _ = self.worth.set(money.cost);
        }
        money
    }

    fn money(&self, used: Used, answered: Option<&str>) -> Money {
        let (list, reported) = match used {
            Used::Nothing => (Some(Nanodollars::ZERO), false),
            _ if self.meter == Meter::Nothing => (Some(Nanodollars::ZERO), false),
            _ if self.meter == Meter::Unknown && !self.is_free() => (None, false),
            Used::Known(usage) => match usage.cost_nanos {
                Some(cost) => (Some(Nanodollars(cost)), true),
                None => (self.priced(&usage, answered), false),
            },
            Used::Unknown => (self.at_worst(), false),
        };
        match self.billing {
            Billing::Metered => Money {
                cost: list,
                list,
                unpriced: list.is_none(),
                reported,
                tier: self.tier_in_record(),
                ..Money::default()
            },
            Billing::Plan | Billing::Free => Money {
                cost: Some(Nanodollars::ZERO),
                list,
                tier: self.tier_in_record(),
                ..Money::default()
            },
            Billing::Unmetered => Money::default(),
        }
    }

    /// The tier that was asked for, where that decides the price: a price that is set later finds
    /// it on record.
    fn tier_in_record(&self) -> Option<&'static str> {
        let named = self.tier.filter(|tier| *tier != Tier::Auto)?.as_str();
        match &self.price {
            Price::Listed(model) => model.tiers().any(|tier| tier == named),
            Price::Unpriced => self.meter == Meter::Tokens,
            Price::Free | Price::Own { .. } => false,
        }
        .then_some(named)
    }

    fn is_free(&self) -> bool {
        matches!(self.price, Price::Free)
    }

    /// By our own prices; `None` if nobody knows them. Where the model that was asked for has
    /// none (a deployment's name, an alias), the one that answered may.
    fn priced(&self, usage: &Usage, answered: Option<&str>) -> Option<Nanodollars> {
        let tokens = tokens(usage);
        let cost = |price: &Price| {
            let tier = self.tier.map(Tier::as_str);
            Some(price.rates(self.at, tier)?.cost(&tokens))
        };
        cost(&self.price).or_else(|| {
            let answered = answered?;
            cost(&self.core.spend.price(&self.provider.settings, answered))
        })
    }

    /// Nobody can say what was used: what was held for it counts.
    fn at_worst(&self) -> Option<Nanodollars> {
        match self.worst {
            Worst::AtMost(most) => Some(most),
            Worst::Nothing if self.is_free() => Some(Nanodollars::ZERO),
            Worst::Nothing | Worst::Unknown => None,
        }
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        // Its row settles it; if that came to nothing, what was held is taken for spent.
        if let Some(hold) = self.hold.take() {
            let cost = self.at_worst().unwrap_or(Nanodollars::ZERO);
            self.core.settle_cost(hold, &self.tool, cost);
        }
    }
}

/// Tokens as prices take them.
pub fn tokens(usage: &Usage) -> Tokens {
    let count = |tokens: Option<u64>| tokens.unwrap_or(0);
    Tokens {
        input: count(usage.input),
        cached_input: count(usage.cached_input),
        cache_write_5m: count(usage.cache_write_5m),
        cache_write_1h: count(usage.cache_write_1h),
        output: count(usage.output),
        reasoning: count(usage.reasoning),
    }
}

fn worst_case(core: &Core, ordered: &Ordered<'_>, price: &Price, at: WallTime) -> Worst {
    let Some(weight) = ordered.weight else {
        return match price {
            Price::Free => Worst::Nothing,
            _ => Worst::Unknown,
        };
    };
    let facts = ordered.facts;
    let request = budget::Request {
        body_bytes: weight.bytes,
        attachments: weight.attachments,
        refers_outside: weight.refers_outside || facts.server_state,
        max_output: match ordered.route {
            Route::Embeddings | Route::OllamaEmbed => Some(0),
            _ => facts.max_output,
        },
        choices: facts.outputs(),
        cache_writes: match ordered.dialect {
            // Anthropic's dialect writes only when asked.
            Dialect::Anthropic if !weight.asks_for_cache => CacheWrites::None,
            Dialect::Anthropic => CacheWrites::Long,
            Dialect::OpenAi | Dialect::Ollama if weight.asks_for_cache => CacheWrites::Long,
            Dialect::OpenAi | Dialect::Ollama => CacheWrites::Short,
        },
        service_tier: weight.tier.map(Tier::as_str),
    };
    let bound = core.world().settings.spend.output_bound_tokens;
    request.worst_case(price, bound, at)
}

/// A budget refuses a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetExceeded {
    pub refusal: Refusal,
    /// It waited so long for what others had reserved.
    pub waited: Option<Duration>,
    pub provider: Arc<str>,
    pub model: Option<Arc<str>>,
    /// Whose call was refused: another tool's may have budget left.
    pub tool: Arc<str>,
}

impl BudgetExceeded {
    /// The same for programs. Amounts are billionths of a dollar.
    pub fn as_json(&self) -> serde_json::Value {
        let refusal = &self.refusal;
        serde_json::json!({
            "name": refusal.budget,
            "cap_nanos": refusal.cap,
            "spent_nanos": refusal.spent,
            "held_nanos": refusal.held,
            "worst_case_nanos": refusal.worst,
            "resets_at": Timestamp::from_microsecond(refusal.resets_at.0)
                .ok()
                .map(|at| at.to_string()),
        })
    }
}

impl fmt::Display for BudgetExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refusal = &self.refusal;
        let Refusal {
            budget,
            cap,
            spent,
            held,
            ..
        } = refusal;
        let resets = local_time(refusal.resets_at);
        let Some(worst) = refusal.worst else {
            let model = self.model.as_deref().unwrap_or("its model");
            return write!(
                f,
                "nobody knows what {model} costs at {provider}, and {budget} (cap {cap}, spent {spent}, held {held}, begins anew {resets}) lets no unpriced call go (spend.unpriced = \"refuse\"); set its price as a [[price]]",
                provider = self.provider
            );
        };
        write!(
            f,
            "{budget} is {cap}: {spent} is spent and {held} is held for calls under way; this call may cost up to {worst}"
        )?;
        if let Some(waited) = self.waited {
            let seconds = waited.as_secs_f64();
            write!(
                f,
                ", and no room came within {seconds} s (limits.queue_secs)"
            )?;
        }
        if worst > *cap {
            return write!(
                f,
                ", which is more than the whole budget. Let it ask for less (max_tokens), or raise the [[budget]]'s usd"
            );
        }
        write!(
            f,
            ". The budget begins anew {resets}; until then raise the [[budget]]'s usd, or let the call ask for less (max_tokens)"
        )
    }
}

/// A time by the machine's own calendar.
fn local_time(time: WallTime) -> String {
    match Timestamp::from_microsecond(time.0) {
        Ok(at) => TimeZone::system()
            .to_datetime(at)
            .strftime("on %F at %H:%M")
            .to_string(),
        Err(_) => "never".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use super::*;
    use crate::clock::Clock;
    use crate::keys::Keys;
    use crate::settings::{Overrides, Settings};
    use crate::store::Store;

    /// A call of at most 100 tokens at a dollar each, before a budget of $1000.
    fn bill(core: &Arc<Core>, model: &str) -> Bill {
        let world = core.world();
        let model = Arc::from(model);
        let facts = RequestFacts {
            max_output: Some(100),
            ..RequestFacts::default()
        };
        let ordered = Ordered {
            provider: world.provider("openai").expect("shipped"),
            model: Some(&model),
            tool: "aider".into(),
            billing: Billing::Metered,
            route: Route::ChatCompletions,
            dialect: Dialect::OpenAi,
            facts: &facts,
            weight: Some(Weight::of(b"{}")),
            worth: Worth::default(),
        };
        Bill::new(core, ordered)
    }

    fn core() -> (Arc<Core>, tempfile::TempDir) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let text = "[[price]]\nmodel = \"m\"\ninput = 0\noutput = 1000000\n\
                    [[budget]]\nper = \"month\"\nusd = 1000\n";
        let settings = Settings::parse(text, &Overrides::default()).expect("settings");
        let store = Store::open(folder.path(), Clock::Tokio).expect("a folder of its own");
        let core = Core::new(settings, store, Keys::empty(), Clock::Tokio);
        (Arc::new(core), folder)
    }

    /// Spent and held of the budget, in dollars.
    fn stands(core: &Core) -> (i64, i64) {
        let budget = &core.spend.budgets(core.clock.wall())[0];
        (
            budget.spent.0 / 1_000_000_000,
            budget.held.0 / 1_000_000_000,
        )
    }

    #[tokio::test]
    async fn a_bill_that_a_panic_takes_along_is_paid_at_worst() {
        let (core, _folder) = core();
        let mut unwound = bill(&core, "m");
        assert!(unwound.reserve().expect("room").is_none());
        assert_eq!(stands(&core), (0, 100));
        let panicked = std::panic::catch_unwind(AssertUnwindSafe(move || {
            let _bill = unwound;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(stands(&core), (100, 0));
    }

    #[tokio::test]
    async fn what_nobody_can_say_is_taken_for_the_worst_and_nothing_is_nothing() {
        let (core, _folder) = core();
        let paid = |model: &str, used| {
            let mut bill = bill(&core, model);
            assert!(bill.reserve().expect("room").is_none());
            bill.settle(used, None)
        };
        let money = paid("m", Used::Unknown);
        assert_eq!(money.cost, Some(Nanodollars(100_000_000_000)));
        assert_eq!(stands(&core), (100, 0));
        let money = paid("m", Used::Nothing);
        assert_eq!(
            (money.cost, money.unpriced),
            (Some(Nanodollars::ZERO), false)
        );
        let money = paid("nobody-knows-it", Used::Unknown);
        assert_eq!((money.cost, money.unpriced), (None, true));
        assert_eq!(stands(&core), (100, 0));
    }

    #[test]
    fn what_bounds_a_bodys_cost() {
        let of = |body: &str| {
            let weight = Weight::of(body.as_bytes());
            (
                weight.attachments,
                weight.refers_outside,
                weight.asks_for_cache,
                weight.tier,
            )
        };
        assert_eq!(
            of(r#"{"model":"m","messages":[]}"#),
            (0, false, false, None)
        );
        assert_eq!(
            of(
                r#"{"content":[{"image_url":{"url":"data:image/png;base64,AA"}},{"type":"base64"}]}"#
            ),
            (2, false, false, None)
        );
        assert_eq!(
            of(r#"{"image_url":{"url": "https://example.com/cat.png"}}"#),
            (0, true, false, None)
        );
        assert_eq!(
            of(r#"{"tools":[{"$schema":"https://json-schema.org","url":{"type":"string"}}]}"#),
            (0, false, false, None)
        );
        // What a prompt speaks of is no part of the request.
        assert_eq!(
            of(
                r#"{"content":"\"file_id\" \"cache_control\" \"service_tier\":\"flex\" see https://example.com"}"#
            ),
            (0, false, false, None)
        );
        assert_eq!(
            of(r#"{"cache_control":{"type":"ephemeral"},"service_tier" : "flex"}"#),
            (0, false, true, Some(Tier::Flex))
        );
        assert_eq!(of(r#"{"service_tier":"default"}"#).3, Some(Tier::Default));
        assert_eq!(of(r#"{"service_tier":"scale"}"#).3, None);
        assert_eq!(of(r#"{"service_tier":"flexible"}"#).3, None);
    }

    fn exceeded(worst: Option<i64>, waited: Option<Duration>) -> String {
        BudgetExceeded {
            refusal: Refusal {
                budget: "the day's budget".to_owned(),
                cap: Nanodollars(5_000_000_000),
                spent: Nanodollars(4_900_000_000),
                held: Nanodollars(50_000_000),
                worst: worst.map(Nanodollars),
                resets_at: WallTime(0),
                first: true,
            },
            waited,
            provider: "openai".into(),
            model: Some("gpt-5".into()),
            tool: "aider".into(),
        }
        .to_string()
    }

    #[test]
    fn a_refusal_says_what_is_spent_and_what_to_do() {
        let told = exceeded(Some(200_000_000), None);
        assert!(
            told.starts_with(
                "the day's budget is $5.00: $4.90 is spent and $0.05 is held for calls under way; \
                 this call may cost up to $0.20. The budget begins anew on "
            ),
            "{told}"
        );
        let told = exceeded(Some(6_000_000_000), None);
        assert!(told.contains("more than the whole budget"), "{told}");
        let told = exceeded(Some(200_000_000), Some(Duration::from_secs(60)));
        assert!(told.contains("within 60 s (limits.queue_secs)"), "{told}");
        let told = exceeded(None, None);
        assert!(told.starts_with("nobody knows what gpt-5 costs at openai"));
        assert!(told.contains("[[price]]"));
    }
}
